"""Who decides: named policies, a schedule, a function, a learned policy; what they see; counterfactuals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.grower import Decision, Grower
from esper.kasmina import MorphogeneticModel
from esper.kasmina.hosts import CNNHost
from esper.leyline import EsperError, SeedStage, blueprint_ids, blueprint_index
from esper.simic.sensors import GrowthProbe
from esper.tamiyo import AlwaysWait, RecurrentPolicy
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import BASE, QUOTE, SLOT
from esper.tamiyo.inputs import SENSORS
from grower_helpers import SmallCNN, accuracy, attach, batches, digits, make, same, train_epoch


def played(number: int = 8, width: int = 4, **options: Any) -> Grower:
    model = make(lambda: SmallCNN(width))
    grower = attach(model, **options)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for _ in range(number):
        train_epoch(model, optimizer)
        grower.step(accuracy(model))
    return grower


def told(grower: Grower) -> list[str]:
    return [f"{result.epoch} {change}" for result in grower.history for change in result.changes]


def test_a_schedule_is_kept_and_unmeasured_seeds_become_permanent_by_the_clock() -> None:
    grower = played(4, policy=[(1, "layer2", "conv_light"), (2, "layer1", "norm")])
    assert told(grower) == [
        "1 conv_light in layer2 germinated",
        "2 norm in layer1 germinated",
        "2 conv_light in layer2 fossilized, unmeasured",
        "3 norm in layer1 fossilized, unmeasured",
    ]
    assert grower.reports()["layer1"].metrics.contribution is None


def test_growth_by_hand_is_never_made_permanent_by_the_clock() -> None:
    model = make()
    grower = attach(model)
    grower.germinate("layer1", "norm")
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
    for _ in range(3):
        train_epoch(model, optimizer)
        grower.step(0.5)
    assert grower.reports()["layer1"].stage is SeedStage.HOLDING
    assert grower.history[0].changes == ("norm in layer1 germinated",)


def test_a_function_decides() -> None:
    def policy(grower: Grower) -> Any:
        if grower.epoch == 1:
            return Decision("germinate", "layer1", "depthwise")
        if grower.epoch == 3:
            return "prune", "layer1"
        return None

    grower = attach_with_evaluate(policy, epochs=5)
    changes = told(grower)
    assert changes[0] == "2 depthwise in layer1 germinated"
    assert "4 depthwise in layer1 pruned" in changes
    with pytest.raises(EsperError, match=r"FOSSILIZE is not possible in slot 'layer2' now; allowed: no slot"):
        played(1, policy=lambda g: ("fossilize", "layer2"))
    with pytest.raises(EsperError, match="op is 'grow'; allowed: wait, germinate, prune, fossilize, advance"):
        played(1, policy=lambda g: ("grow", "layer2"))


def attach_with_evaluate(policy: Any, epochs: int, **options: Any) -> Grower:
    model = make(lambda: SmallCNN(4))
    grower = attach(model, policy=policy, evaluate=lambda: accuracy(model), **options)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for _ in range(epochs):
        train_epoch(model, optimizer)
        grower.step()
    return grower


def test_evaluate_measures_what_each_seed_contributes() -> None:
    grower = attach_with_evaluate([(1, "layer1", "conv_light")], epochs=3)
    result = grower.history[1]
    model = grower.model
    assert result.contributions.keys() == {"layer1"}
    assert grower.reports()["layer1"].metrics.contribution is not None
    assert grower.reports()["layer1"].stage is SeedStage.FOSSILIZED
    with grower.without("layer1"):
        without = accuracy(model)
    assert math.isclose(grower.history[-1].metric, accuracy(model))
    assert 0.0 <= without <= 1.0


def test_counterfactuals_change_nothing_in_training() -> None:
    def run(*, counted: bool) -> dict[str, torch.Tensor]:
        model = make(lambda: SmallCNN(4))

        def evaluate() -> float:
            torch.rand(3)
            model.eval()
            return accuracy(model)

        grower = attach(model, evaluate=evaluate if counted else None)
        grower.germinate("layer1", "conv_light")
        optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
        for _ in range(3):
            train_epoch(model, optimizer)
            grower.step(0.5)
            torch.rand(1)
        return {**model.state_dict(), "generator": torch.get_rng_state()}

    assert same(run(counted=True), run(counted=False))


def test_the_heuristic_grows_where_it_would_help() -> None:
    class Blind(nn.Module):
        """1×1 kernels: no layer of it sees a neighbouring pixel."""

        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
            self.layer2 = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
            self.layer3 = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer3(self.layer2(self.layer1(x))).flatten(1))

    def best(policy: str | None) -> tuple[float, Grower]:
        model = make(Blind)
        grower = attach(
            model,
            slots=["layer1", "layer2", "layer3"],
            policy=policy,
            epochs=16,
            evaluate=lambda: accuracy(model),
        )
        optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
        for _ in range(16):
            for x, y in batches(8):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            grower.step()
        return max(result.metric for result in grower.history), grower

    static, _ = best(None)
    grown, grower = best("heuristic")
    assert any("germinated" in change for change in told(grower))
    assert grown > static + 0.05


@pytest.mark.parametrize("policy", ["periodic", "plateau"])
def test_rules_grow(policy: str) -> None:
    grower = played(8, policy=policy, epochs=8)
    assert [c for c in told(grower) if "conv_light in layer2 germinated" in c]
    assert grower.reports()["layer2"].stage is SeedStage.FOSSILIZED


def test_a_learned_policy_plays_and_resumes() -> None:
    shipped = esper.tamiyo.shipped.shipped_policies()
    if not shipped:
        pytest.skip("no policy ships")
    grower = played(3, policy=shipped[0], epochs=8, blueprints=["conv_light", "norm"])
    assert isinstance(grower.policy, RecurrentPolicy)
    state = grower.state_dict()
    assert state["hidden"] is not None
    again = attach(make(lambda: SmallCNN(4)), policy=shipped[0], epochs=8, blueprints=["conv_light", "norm"])
    again.load_state_dict(state)
    assert same(again.state_dict(), state)


class Spy(AlwaysWait):
    def act(self, obs: Any, hidden: Any, masks: Any, *, deterministic: bool = False) -> Any:
        self.seen = obs
        return super().act(obs, hidden, masks, deterministic=deterministic)


def test_what_is_not_told_is_observed_as_unknown() -> None:
    spy = Spy()
    played(3, policy=spy)
    column = first_columns(BASE)
    unknown = (
        "progress",
        "steps_left",
        "val_accuracy",
        "val_loss",
        "train_loss",
        "loss_slope_last",
        "val_noise",
    )
    for name in unknown:
        assert spy.seen.base[0, column[name] : column[name] + 2].tolist() == [0.0, 0.0], name
    rate = spy.seen.base[0, column["learning_rate"] : column["learning_rate"] + 2].tolist()
    assert rate == pytest.approx([math.log(2.0) / 2.3, 1.0])
    told_more = Spy()
    grower = played(3, policy=told_more, epochs=12, classes=10)
    seen = told_more.seen.base[0]
    assert seen[column["progress"]] == 0.25
    assert seen[column["accuracy_slope_last"] + 1] == 1.0
    assert seen[column["val_accuracy"] + 1] == 1.0
    steps = grower._optimizers.steps // 3
    assert steps > 1
    assert seen[column["steps_left"]].item() == pytest.approx(math.log1p(9 * steps) / 8)


def test_a_users_model_is_quoted_what_it_would_cost() -> None:
    spy = Spy()
    grower = played(2, policy=spy, epochs=4, blueprints=["conv_light", "norm"])
    quotes, column = spy.seen.quotes, first_columns(QUOTE)
    offered = quotes[..., column["offered"]] > 0
    names = blueprint_ids()
    assert {names[i] for i in offered.any(1)[0].nonzero().flatten().tolist()} == {"conv_light", "norm"}
    light, norm = (quotes[0, :, blueprint_index(name)] for name in ("conv_light", "norm"))
    assert (light[:, column["price"]] > norm[:, column["price"]]).all()
    assert light[:, column["mixes_space"]].eq(1).all()
    assert norm[:, column["mixes_space"]].eq(0).all()
    with torch.device("meta"):
        bank = next(iter(grower.body)).build_bank("conv_light", 1)
    share = sum(p.numel() for p in bank.parameters()) / grower.body.host_params
    assert light[0, column["params"]] == pytest.approx(math.log(share) / 3, abs=1e-5)


def test_a_loss_counts_as_the_probability_of_the_right_answer() -> None:
    spy = Spy()
    model = make()
    grower = attach(model, policy=spy, metric="loss", classes=10)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.01))
    train_epoch(model, optimizer)
    grower.step(0.5)
    column = first_columns(BASE)
    relative = (math.exp(-0.5) - 0.1) / 0.9
    assert math.isclose(spy.seen.base[0, column["val_accuracy"]], relative, rel_tol=1e-6)
    assert math.isclose(spy.seen.base[0, column["val_loss"]], math.log1p(0.5 / math.log(10)), rel_tol=1e-6)
    assert spy.seen.base[0, column["learning_rate"]] == 0.0
    with pytest.raises(EsperError, match="a loss must be 0 or more"):
        grower.step(-1.0)


def test_sensors_equal_those_of_the_population() -> None:
    """The same network as a population of one and as a user's module, on the same batch."""
    population = MorphogeneticModel(CNNHost(1, blocks=2, base=4, channels=1, size=8), ["r0c0", "r1c0"])
    x, y = digits()
    x, y = x[:32].contiguous(memory_format=torch.channels_last), y[:32]
    probe = GrowthProbe()
    population.losses(x, y, probe=probe).total().backward()
    host = torch.cat([p.grad.flatten() for p in population.host.parameters()])
    theirs = probe.read(population, torch.linalg.vector_norm(host).view(1)).named()

    class User(nn.Module):
        def __init__(self, host: CNNHost) -> None:
            super().__init__()
            self.host = host
            self.slots = nn.ModuleList([nn.Identity(), nn.Identity()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from esper.kasmina.layers import Lanes, Mode

            lanes = Lanes(1, Mode.TRAIN)
            for index, slot_id in enumerate(population.slot_after):
                x = self.host.segment(index, x, lanes)
                if slot_id is not None:
                    x = self.slots[["r0c0", "r1c0"].index(slot_id)](x)
            return self.host.segment(len(population.slot_after), x, lanes)[0]

    population.zero_grad()
    model = User(population.host)
    grower = esper.attach(model, ["slots.0", "slots.1"], x, policy=None)
    nn.functional.cross_entropy(model(x), y).backward()
    ours = grower._sensing.read({}, grower.body.host_params, loss_scale=1.0).sensors
    for name in SENSORS:
        torch.testing.assert_close(torch.tensor([ours[name]]), theirs[name], rtol=1e-4, atol=1e-6)


def test_sensors_are_measured_on_the_last_batch_and_reach_the_policy() -> None:
    spy = Spy()
    model = make()
    grower = attach(model, policy=spy)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05))
    column = first_columns(SLOT)
    for epoch in range(3):
        train_epoch(model, optimizer)
        watched = grower._sensing._watched["r0c0"].features
        with torch.no_grad():
            assert watched.shape == (32, 8, 8, 8)
        assert len(grower._sensing._hooks) == len(list(model.parameters()))
        grower.step(0.5)
        assert not grower._sensing._hooks, epoch
        for name in ("boundary_norm_relative", "growth_score", "feature_rank", "tap_ratio"):
            assert (spy.seen.slots[0, :, column[name] + 1] == 1.0).all()


def test_a_gradient_scaler_does_not_change_what_is_sensed() -> None:
    def sensed(scale: float) -> dict[str, list[float]]:
        model = make()
        grower = attach(model)
        x, y = digits()
        (nn.functional.cross_entropy(model(x[:32]), y[:32]) * scale).backward()
        return grower._sensing.read({}, grower.body.host_params, loss_scale=scale).sensors

    plain, scaled = sensed(1.0), sensed(1024.0)
    for name in SENSORS:
        torch.testing.assert_close(torch.tensor(plain[name]), torch.tensor(scaled[name]), rtol=1e-4, atol=0)

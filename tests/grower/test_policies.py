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
from grower_helpers import SmallCNN, TiedLM, accuracy, attach, batches, digits, make, same, train_epoch


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


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (
            [(1, "layer1", "norm"), (2, "layer2", "conv_light")],
            {"blueprints": ["norm"]},
            r"blueprint is not offered; allowed: norm; .* attach with blueprints=\['norm', 'conv_light'\]",
        ),
        ([(1, "layer1", "mlp")], {}, "blueprint is not offered; allowed: attention, .*residual$"),
        ([(1, "layer9", "norm")], {}, "slot 'layer9' is unknown"),
        ([(99, "layer1", "norm")], {"epochs": 5}, "after each of the first 4 epochs"),
        ([(5, "layer1", "norm")], {"epochs": 5}, "after each of the first 4 epochs"),
        (
            [(4, "layer2", "norm"), (4, "layer1", "norm")],
            {"epochs": 5},
            r"\(4, 'layer1', 'norm'\), whose turn comes in epoch 5, is too late",
        ),
        ([(0, "layer1", "norm")], {}, "epoch is 0, must be a whole number from 1 up"),
        ([("1", "layer1", "norm")], {}, "epoch is '1', must be a whole number from 1 up"),
    ],
)
def test_a_schedule_that_cannot_happen_is_refused(schedule, options, words) -> None:
    model = make()
    with pytest.raises(EsperError, match=words):
        attach(model, policy=schedule, **options)
    attach(model, policy=[(4, "layer1", "norm"), (3, "layer2", "norm")], epochs=5)


def test_a_schedule_names_what_mixes_tokens_in_blueprints() -> None:
    model, tokens, schedule = make(TiedLM), torch.arange(12).view(2, 6), [(1, "block1", "attention")]
    with pytest.raises(
        EsperError, match=r"not offered; allowed: .* attach with blueprints=\[.*'attention'\]"
    ):
        esper.attach(model, ["block1"], tokens, policy=schedule)
    grower = esper.attach(model, ["block1"], tokens, policy=schedule, blueprints=["attention"])
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
    model(tokens).sum().backward()
    optimizer.step()
    assert grower.step(0.5).changes == ("attention in block1 germinated",)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (3, "policy is 3; allowed: auto, heuristic, .* a schedule, a function of the grower, None"),
        ("", "policy '' is unknown; allowed: auto, heuristic, "),
        ([3], r"schedule: 3 is not \(epoch, slot, blueprint\)"),
    ],
)
def test_what_is_no_policy_is_refused(policy, words) -> None:
    with pytest.raises(EsperError, match=words):
        attach(make(), policy=policy)


def test_slots_of_an_optimizer_are_a_list() -> None:
    with pytest.raises(EsperError, match=r"slots is 'layer1', must be a list of names, such as \['layer1'\]"):
        attach(make()).param_groups(slots="layer1")


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


def play_epoch(grower: Grower, optimizer: Any) -> None:
    train_epoch(grower.model, optimizer)
    grower.step(accuracy(grower.model))


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (("grow", "layer2"), EsperError, "op is 'grow'"),
        (("fossilize", "layer2"), EsperError, "FOSSILIZE is not possible"),
        (("germinate", "layer2", "conv"), EsperError, "blueprint is 'conv'"),
        ("prune", EsperError, r"the policy returned 'prune'; allowed: \(op, slot\)"),
        (("prune",), EsperError, r"the policy returned \('prune',\); allowed: \(op, slot\)"),
        (KeyError("mine"), KeyError, "mine"),
    ],
)
def test_an_epoch_with_a_bad_decision_can_be_stepped_again(bad, error, words) -> None:
    """It then equals one in which the decision was good at once."""
    decisions = {1: ("germinate", "layer1", "norm"), 3: None}

    def run(*, errs: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        answers: list[Any] = []

        def policy(grower: Grower) -> Any:
            answer = answers.pop() if answers else decisions.get(grower.epoch)
            if isinstance(answer, Exception):
                raise answer
            return answer

        model = make(lambda: SmallCNN(4))
        grower = attach(model, policy=policy, evaluate=lambda: accuracy(model))
        optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
        for epoch in range(4):
            train_epoch(model, optimizer)
            if errs and epoch in (1, 3):
                answers.append(bad)
                with pytest.raises(error, match=words):
                    grower.step()
                assert grower.epoch == epoch
            grower.step()
        return grower.state_dict()

    state = run(errs=True)
    assert [entry["epoch"] for entry in state["history"]] == [1, 2, 3, 4]
    assert state["tracker"]["epochs"] == 4
    assert state["structure"]["seeds"]["layer1"]["metrics"]["contribution_velocity"] is not None
    assert same(state, run(errs=False))


def test_a_schedule_does_not_lose_an_entry_whose_seed_cannot_be_built(monkeypatch) -> None:
    model = make(lambda: SmallCNN(4))
    grower = attach(model, policy=[(1, "layer1", "norm")])
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    with monkeypatch.context() as broken:
        broken.setattr(torch.random, "fork_rng", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            play_epoch(grower, optimizer)
    assert grower.epoch == 0
    play_epoch(grower, optimizer)
    assert told(grower) == ["1 norm in layer1 germinated"]


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


def test_the_clock_makes_the_seeds_of_a_learned_policy_permanent_when_they_are_measured() -> None:
    model, asked = make(lambda: SmallCNN(4)), 0

    def evaluate() -> float:
        nonlocal asked
        asked += 1
        return accuracy(model)

    grower = attach(model, policy="digits_impaired-1", epochs=12, evaluate=evaluate)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    for _ in range(12):
        train_epoch(model, optimizer)
        grower.step(0.1)
    planted = sum("germinated" in change for change in told(grower))
    assert planted == sum("fossilized" in change for change in told(grower)) > 0
    measured = [slot for result in grower.history for slot in result.contributions]
    assert len(measured) == len(set(measured)) == planted
    assert planted < asked <= 2 * planted


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


def test_prices_and_the_kind_of_budget_are_observed_as_told() -> None:
    column = first_columns(BASE)
    names = ("size_price", "waste_price", "flops_budget")
    shown = []
    for options in ({}, {"size_price": 0.0, "waste_price": 0.02, "flops_budget": True}):
        spy = Spy()
        played(1, policy=spy, classes=10, **options)
        shown.append([spy.seen.base[0, column[name]].item() for name in names])
    over_chance = [math.log1p(1000 * price / 0.9) / 7 for price in (0.05, 0.01, 0.02)]
    assert shown[0] == pytest.approx([*over_chance[:2], 0.0])
    assert shown[1] == pytest.approx([0.0, over_chance[2], 1.0])
    with pytest.raises(EsperError, match="objective: size_price is -1"):
        attach(make(), size_price=-1)


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


def test_losses_too_large_to_be_observed_are_refused_before_anything_is_counted() -> None:
    """As the mean squared error of targets that were not normalised."""
    model, scale = make(), 1.0
    grower = attach(model, policy="heuristic", metric="loss", evaluate=lambda: 19_000 / scale)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.01))
    train_epoch(model, optimizer)
    for metric in (None, 19_000, 20.5):
        with pytest.raises(
            EsperError, match="divide it by a constant, such as the loss of the untrained model"
        ):
            grower.step(metric)
    assert grower.epoch == 0
    scale = 19_000
    assert grower.step().metric == 1.0


def test_a_loss_that_explodes_in_one_epoch_leaves_seeds_unmeasured() -> None:
    model = make()
    losses: list[float] = []
    grower = attach(model, metric="loss", evaluate=lambda: losses.pop(0))
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.01))

    def contribution(full: float, without: float) -> float | None:
        losses[:] = [full, without]
        train_epoch(model, optimizer)
        return grower.step().contributions.get("layer1")

    assert contribution(0.6, 0.0) is None
    grower.germinate("layer1", "norm")
    assert contribution(0.5, 0.7) == pytest.approx(100 * (math.exp(-0.5) - math.exp(-0.7)))
    assert contribution(1e9, 1e8) is None, "both are beyond what can be observed"
    assert contribution(0.4, math.nan) == pytest.approx(100 * math.exp(-0.4)), "it diverges without the seed"
    assert contribution(0.4, 0.6) == pytest.approx(100 * (math.exp(-0.4) - math.exp(-0.6)))
    state = grower.state_dict()
    for broken in (math.inf, math.nan):
        with pytest.raises(EsperError, match=f"metric is {broken}; the training has diverged"):
            contribution(broken, 0.5)
    assert same(grower.state_dict(), state)


def test_accuracy_without_a_seed_that_was_pruned_after_it_was_measured() -> None:
    def policy(grower: Grower) -> Any:
        return {0: ("germinate", "layer1", "conv_light"), 2: ("prune", "layer1")}.get(grower.epoch)

    grower = attach_with_evaluate(policy, epochs=2)
    with grower.without("layer1"):
        assert grower.committed_accuracy() == pytest.approx(100 * accuracy(grower.model))
    grower = attach_with_evaluate(policy, epochs=3)
    assert grower.history[-1].changes[0] == "conv_light in layer1 pruned"
    assert grower.committed_accuracy() == pytest.approx(100 * accuracy(grower.model))
    assert grower.committed_accuracy() != grower.accuracies[-1]
    again = attach(make(lambda: SmallCNN(4)), policy=policy)
    again.load_state_dict(grower.state_dict())
    assert again.committed_accuracy() is None, "it was not measured, and there is no evaluate"
    grower = attach_with_evaluate(policy, epochs=4)
    assert grower.committed_accuracy() == grower.accuracies[-1], "measured since"


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


def test_by_itself_the_general_policy_decides_on_images_and_rules_on_the_rest() -> None:
    assert told(played(4, epochs=8, policy="auto")) == told(played(4, epochs=8, policy="general")) != []
    for model, slot, example in (
        (torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU()), "0", torch.zeros(2, 4)),
        (torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Linear(6, 9)), "1", torch.zeros(2, 5).long()),
    ):
        chosen = esper.attach(model, [slot], example, epochs=8).policy
        assert type(chosen).__name__ == "Heuristic"

"""Optimizers and schedulers follow growth: survivors keep their state bit for bit, newborns start fresh with
the right rate, pruned ones leave nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from esper.grower import Grower
from esper.leyline import EsperError
from grower_helpers import OPTIMIZERS, SCHEDULERS, SmallCNN, accuracy, attach, make, same, train_epoch


class OwnOptimizer:
    """Follows the API without inheriting from torch."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups, self.state = groups, {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state.setdefault(p, {"steps": 0})["steps"] += 1
                    p -= group["lr"] * p.grad

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def live(model: nn.Module) -> set[int]:
    return {id(p) for p in model.parameters()}


def state_of(optimizer: Any) -> dict[Tensor, Any]:
    return {p: copy.deepcopy(dict(s)) for p, s in optimizer.state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_growth(name: str) -> None:
    model = make()
    grower = attach(model)
    optimizer = OPTIMIZERS[name](grower.param_groups(lr=0.01))
    train_epoch(model, optimizer)
    before = state_of(optimizer)
    grower.germinate("layer1", "conv_light")
    newborn = list(grower.body.slot("r0c0").banks.parameters())
    assert all(same(dict(optimizer.state[p]), before[p]) for p in before)
    started = [copy.deepcopy(p) for p in newborn]
    train_epoch(model, optimizer)
    assert all(p in optimizer.state for p in newborn)
    assert not all(torch.equal(p, old) for p, old in zip(newborn, started, strict=True))
    before = state_of(optimizer)
    grower.prune("layer1")
    kept = [p for p in before if id(p) in live(model)]
    assert set(optimizer.state) == set(kept)
    assert all(same(dict(optimizer.state[p]), before[p]) for p in kept)
    train_epoch(model, optimizer)
    grower.step(accuracy(model))


def test_a_newborn_learns_as_if_it_had_been_in_the_optimizer_from_the_start() -> None:
    def run(*, late: bool) -> dict[str, Tensor]:
        model = make()
        grower = attach(model)
        if not late:
            grower.germinate("layer1", "conv_light")
        optimizer = torch.optim.AdamW(grower.param_groups(lr=0.01))
        if late:
            grower.germinate("layer1", "conv_light")
        for _ in range(2):
            train_epoch(model, optimizer)
        return model.state_dict()

    assert same(run(late=True), run(late=False))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_gives_newborns_the_right_rate(name: str) -> None:
    model, plain = make(), make()
    grower = attach(model)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05, momentum=0.9))
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    scheduler, other = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    for epoch in range(3):
        train_epoch(model, optimizer, scheduler=scheduler)
        train_epoch(plain, reference, scheduler=other)
        grower.step(accuracy(model))
        rates = {group["lr"] for group in optimizer.param_groups}
        assert rates == {reference.param_groups[0]["lr"]}
        if epoch == 0:
            grower.germinate("layer2", "conv_light")
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    assert len(scheduler.get_last_lr()) == 3


def test_a_plateau_scheduler_reduces_the_rate_of_seeds_too() -> None:
    model = make()
    grower = attach(model)
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.05))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    grower.germinate("layer2", "norm")
    for _ in range(3):
        train_epoch(model, optimizer)
        scheduler.step(1.0)
    rates = {round(group["lr"], 12) for group in optimizer.param_groups}
    assert len(rates) == 1
    assert rates.pop() < 0.05


def test_two_optimizers_share_the_model_and_the_slots() -> None:
    model = make()
    grower = attach(model)
    matrices = [model.head.weight]
    rest = [p for p in model.parameters() if p is not model.head.weight]
    muon = torch.optim.Muon(matrices, lr=0.01)
    adam = torch.optim.AdamW(grower.param_groups(rest, lr=0.01))
    train_epoch(model, muon, adam)
    grower.germinate("layer1", "conv_light")
    train_epoch(model, muon, adam)
    grower.step(accuracy(model))
    assert len(adam.param_groups[1]["params"]) == 4
    split = attach(make())
    first = torch.optim.SGD(split.param_groups(slots=["layer1"], lr=0.1))
    second = torch.optim.AdamW(split.param_groups(host=[], slots=["layer2"], lr=0.01))
    split.germinate("layer2", "norm")
    train_epoch(split.model, first, second)
    split.step(0.5)
    assert len(second.state) == 3


def test_groups_of_the_users_own_keep_their_options() -> None:
    model = make()
    grower = attach(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = grower.param_groups(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, weight_decay=0.0
    )
    optimizer = torch.optim.AdamW(groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0, 0.0, 0.0]
    assert [g.get("esper_slot") for g in optimizer.param_groups] == [None, None, "layer1", "layer2"]


def test_an_optimizer_that_does_not_inherit_from_torch_can_be_tracked() -> None:
    model = make()
    grower = attach(model)
    optimizer = OwnOptimizer(grower.param_groups(lr=0.05))
    grower.track(optimizer)
    grower.germinate("layer1", "norm")
    train_epoch(model, optimizer)
    grower.step(accuracy(model))
    assert len(optimizer.param_groups[1]["params"]) == 3
    grower.prune("layer1")
    assert {id(p) for p in optimizer.state} <= live(model)
    with pytest.raises(EsperError, match="has no group of a slot"):
        grower.track(OwnOptimizer([{"params": [], "lr": 0.1}]))


def test_clipping_reaches_seeds() -> None:
    model = make()
    grower = attach(model)
    grower.germinate("layer1", "conv_light")
    assert {id(p) for p in grower.body.parameters()} <= live(model)


def train_together(models: list[nn.Module], optimizer: Any) -> None:
    train_epoch(lambda x: sum(model(x) for model in models), optimizer)


def seeds_of(grower: Grower) -> set[int]:
    return {id(p) for p in grower.body.parameters()}


def test_models_with_slots_of_the_same_name_share_an_optimizer() -> None:
    models = [make(seed=0), make(lambda: SmallCNN(6), seed=1)]
    first, second = growers = [attach(model) for model in models]
    groups = first.param_groups(lr=0.1) + second.param_groups(lr=0.05)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_together(models, optimizer)
    for grower in growers:
        grower.germinate("layer1", "conv_light")
    newborn = {p: p.detach().clone() for grower in growers for p in grower.body.parameters()}
    for _ in range(2):
        train_together(models, optimizer)
        first.step(accuracy(models[0]))
        second.step(accuracy(models[1]))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not any(torch.equal(p, old) for p, old in newborn.items())
    of_slots = [{id(p) for p in optimizer.param_groups[i]["params"]} for i in (1, 4)]
    assert of_slots == [seeds_of(first), seeds_of(second)]
    second.prune("layer1")
    first.germinate("layer2", "norm")
    train_together(models, optimizer)
    assert {id(p) for p in optimizer.state} == live(models[0]) | live(models[1])
    assert [len(group["params"]) for group in optimizer.param_groups[4:]] == [0, 0]


def test_copies_of_groups_are_recognised_unless_two_models_could_own_them() -> None:
    models = [make(seed=0), make(seed=1)]
    growers = [attach(model) for model in models]
    copies = [[{**group, "lr": 0.05} for group in grower.param_groups(lr=0.1)] for grower in growers]
    own = torch.optim.SGD(copies[0])
    train_epoch(models[0], own)
    growers[0].germinate("layer1", "norm")
    assert {id(p) for p in own.param_groups[1]["params"]} == seeds_of(growers[0])
    growers[0].prune("layer1")
    assert not own.param_groups[1]["params"]
    shared = torch.optim.SGD([{**group} for grower in growers for group in grower.param_groups(lr=0.1)])
    with pytest.raises(
        EsperError, match="trains 2 models that have a slot 'layer1', and its groups are copies"
    ):
        train_together(models, shared)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_without_the_slots_groups_is_named(make_optimizer: Any) -> None:
    model = make()
    grower = attach(model)
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    train_epoch(model, optimizer)
    with pytest.raises(EsperError, match=f"{make_optimizer.__name__} trains this model but has no groups"):
        grower.step(0.5)


def test_groups_that_are_added_to_a_running_optimizer_are_followed() -> None:
    model = make()
    grower = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_epoch(model, optimizer)
    with pytest.raises(EsperError, match="the optimizer SGD trains this model but has no groups"):
        grower.step(0.5)
    for group in grower.param_groups(host=[], lr=0.01):
        optimizer.add_param_group(group)
    grower.germinate("layer1", "norm")
    train_epoch(model, optimizer)
    grower.step(accuracy(model))
    assert {id(p) for p in optimizer.state} == live(model)


def test_an_optimizer_that_is_replaced_by_a_bare_one_is_named() -> None:
    model = make()
    grower = attach(model)
    optimizer: Any = torch.optim.SGD(grower.param_groups(lr=0.1))
    train_epoch(model, optimizer)
    grower.step(accuracy(model))
    grower.release(optimizer)
    bare = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_epoch(model, bare)
    with pytest.raises(EsperError, match="the optimizer AdamW trains this model but has no groups"):
        grower.step(0.5)


def test_a_released_optimizer_makes_room_for_another() -> None:
    model = make()
    grower = attach(model)
    old = torch.optim.SGD(grower.param_groups(lr=0.1), momentum=0.9)
    train_epoch(model, old)
    new = torch.optim.AdamW(grower.param_groups(lr=0.01))
    with pytest.raises(EsperError, match=r"call grower.release\(old\)"):
        train_epoch(model, new)
    grower.release(old)
    grower.germinate("layer1", "norm")
    train_epoch(model, new)
    grower.step(accuracy(model))
    assert {id(p) for p in new.state} == live(model)
    with pytest.raises(EsperError, match="slot 'layer1' has a group in two optimizers, the second is SGD"):
        old.step()
    grower.release(new)
    grower.prune("layer1")
    train_epoch(model, old)
    grower.step(accuracy(model))
    assert {id(p) for p in old.state} == live(model)
    with pytest.raises(EsperError, match="release: SGD has no group of a slot of this model"):
        grower.release(torch.optim.SGD(model.parameters(), lr=0.1))


def test_slots_left_out_twice_or_in_muon_are_named() -> None:
    model = make()
    grower = attach(model)
    optimizer = torch.optim.SGD(grower.param_groups(slots=["layer1"], lr=0.1))
    train_epoch(model, optimizer)
    with pytest.raises(EsperError, match="no optimizer has a group for slots layer2"):
        grower.step(0.5)
    other = attach(make())
    first = torch.optim.SGD(other.param_groups(lr=0.1))
    second = torch.optim.SGD(other.param_groups(lr=0.1))
    train_epoch(other.model, first)
    with pytest.raises(EsperError, match="slot 'layer1' has a group in two optimizers"):
        train_epoch(other.model, second)
    other = attach(make())
    groups = other.param_groups(lr=0.1) + other.param_groups(host=[], slots=["layer2"], lr=0.01)
    with pytest.raises(EsperError, match="slot 'layer2' has 2 groups in one SGD"):
        train_epoch(other.model, torch.optim.SGD(groups))
    muon = attach(make(Matrices), slots=["body"])
    optimizer = torch.optim.Muon(muon.param_groups(host=[muon.model.body.weight], lr=0.1))
    optimizer.step()
    with pytest.raises(EsperError, match="takes matrices only"):
        muon.germinate("body", "mlp_small")


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


def test_a_frozen_host_still_grows() -> None:
    model = make(lambda: SmallCNN(8).to(memory_format=torch.channels_last))
    model.requires_grad_(False)
    grower = attach(model)
    grower.germinate("layer1", "conv_light")
    optimizer = torch.optim.SGD(grower.param_groups(lr=0.1))
    weights = {n: p.clone() for n, p in model.named_parameters()}
    train_epoch(model, optimizer)
    train_epoch(model, optimizer)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, weights[n])]
    assert moved
    assert all(name.startswith("_esper.") for name in moved)


def states(grower: Grower, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "grower": grower.state_dict(),
            "model": grower.model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
    )


def test_optimizer_state_is_loaded_again_after_the_structure() -> None:
    model = make()
    grower = attach(model)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.01))
    train_epoch(model, optimizer)
    grower.germinate("layer1", "conv_light")
    train_epoch(model, optimizer)
    saved = states(grower, optimizer)
    # Growth after a load uses the groups that load_state_dict has made.
    optimizer.load_state_dict(saved["optimizer"])
    grower.germinate("layer2", "norm")
    train_epoch(model, optimizer)
    assert len(optimizer.param_groups[2]["params"]) == 3
    assert set(map(id, optimizer.state)) == live(model)
    fresh = make(seed=3)
    again = attach(fresh)
    other = torch.optim.AdamW(again.param_groups(lr=0.01))
    again.load_state_dict(saved["grower"])
    fresh.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert same(states(again, other), saved)


def test_a_run_with_two_optimizers_is_resumed_before_its_first_seed() -> None:
    def build(seed: int) -> tuple[Grower, list[torch.optim.Optimizer]]:
        model = make(seed=seed)
        host = torch.optim.SGD(list(model.parameters()), lr=0.05, momentum=0.9)
        grower = attach(model)
        return grower, [host, torch.optim.AdamW(grower.param_groups(host=[], lr=0.01))]

    def go_on(grower: Grower, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
        for _ in range(2):
            train_epoch(grower.model, *optimizers)
            grower.step(accuracy(grower.model))
            if grower.epoch == 2:
                grower.germinate("layer1", "conv_light")
        train_epoch(grower.model, *optimizers)
        return grower.model.state_dict()

    grower, optimizers = build(seed=0)
    train_epoch(grower.model, *optimizers)
    grower.step(accuracy(grower.model))
    parts = [grower, grower.model, *optimizers]
    saved = copy.deepcopy([part.state_dict() for part in parts])
    again, others = build(seed=3)
    for part, state in zip([again, again.model, *others], saved, strict=True):
        part.load_state_dict(state)
    assert same(go_on(again, others), go_on(grower, optimizers))
    assert {id(p) for p in others[1].state} == seeds_of(again)
    assert {id(p) for p in optimizers[1].state} == seeds_of(grower)

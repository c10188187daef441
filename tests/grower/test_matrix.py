"""Pairs of what users combine: every value of every factor meets every value of every other factor in at
least one run (a pairwise covering design), and each run has to hold everything at once."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import esper
from grower_helpers import BATCH, OPTIMIZERS, SCHEDULERS, TiedLM, digits, make, same

FACTORS: dict[str, tuple[str, ...]] = {
    "optimizer": ("SGD", "AdamW foreach", "AdamW fused", "Adagrad", "Adafactor", "Lion"),
    "scheduler": ("none", "LambdaLR", "OneCycleLR", "CosineAnnealingWarmRestarts", "SequentialLR"),
    "precision": ("float32", "bfloat16 autocast", "float16 scaler"),
    "compile": ("no", "before attach", "after attach"),
    "checkpointing": ("no", "non-reentrant", "reentrant"),
    "model": ("cnn", "tied weights"),
    "ema": ("no", "yes"),
    "memory": ("contiguous", "channels_last"),
}
Case = dict[str, str]


def pairs_of(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(combinations(sorted(case.items()), 2))


def covering_design() -> list[Case]:
    """Greedy: start from a pair that is not covered, then choose the value that covers most; ties go to the
    first value, which is the cheapest."""
    wanted = {
        ((a, x), (b, y)) for a, b in combinations(sorted(FACTORS), 2) for x in FACTORS[a] for y in FACTORS[b]
    }
    cases: list[Case] = []
    while wanted:
        case: Case = dict(min(wanted))
        for factor, values in FACTORS.items():
            if factor not in case:
                case[factor] = max(values, key=lambda v: len(pairs_of({**case, factor: v}) & wanted))
        cases.append(case)
        wanted -= pairs_of(case)
    return cases


CASES = covering_design()
COMPILED = [case for case in CASES if case["compile"] != "no"]
SLOW = COMPILED[2:]
"""Compiling takes seconds: two compiled cases are in the fast suite, all are in the slow one."""


class Checkpointed(nn.Module):
    """The user's model, its slots inside checkpoints."""

    def __init__(self, model: nn.Module, kind: str, slots: list[str]) -> None:
        super().__init__()
        self.model, self.kind, self.slots = model, kind, slots
        for name in slots:
            block = model.get_submodule(name)
            self._wrap(block)

    def _wrap(self, block: nn.Module) -> None:
        block.use_reentrant = self.kind == "reentrant"
        base = type(block)

        class Block(base):  # type: ignore[misc, valid-type]
            def __call__(self, x: Tensor) -> Tensor:
                if not self.training or not x.requires_grad:
                    return super().__call__(x)
                return checkpoint(super().__call__, x, use_reentrant=self.use_reentrant)

        block.__class__ = Block

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def data_of(kind: str) -> list[tuple[Tensor, Tensor]]:
    if kind == "cnn":
        x, y = digits()
        return [(x[i : i + BATCH], y[i : i + BATCH]) for i in (0, BATCH)]
    tokens = (torch.arange(4 * 13).view(4, 13) * 7) % 20
    return [(tokens[:, :-1], tokens[:, 1:])] * 2


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
    ids=lambda case: ", ".join(case.values()),
)
def test_everything_at_once(case: Case) -> None:
    torch._dynamo.reset()
    model = make() if case["model"] == "cnn" else make(TiedLM)
    slots = ["layer1", "layer2"] if case["model"] == "cnn" else ["block1", "block2"]
    blueprint = "conv_light" if case["model"] == "cnn" else "mlp_small"
    data = data_of(case["model"])
    if case["memory"] == "channels_last" and case["model"] == "cnn":
        model = model.to(memory_format=torch.channels_last)
        data = [(x.to(memory_format=torch.channels_last), y) for x, y in data]
    if case["checkpointing"] != "no":
        model = Checkpointed(model, case["checkpointing"], slots)
        slots = [f"model.{name}" for name in slots]
    runs: Any = model
    if case["compile"] == "before attach":
        runs = torch.compile(model, backend="aot_eager")
    grower = esper.attach(runs, slots, data[0][0], policy=None)
    if case["compile"] == "after attach":
        runs = torch.compile(model, backend="aot_eager")
    optimizer = OPTIMIZERS[case["optimizer"]](grower.param_groups(lr=0.01))
    scheduler = None if case["scheduler"] == "none" else SCHEDULERS[case["scheduler"]](optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if case["ema"] == "yes" else None
    scaler = torch.amp.GradScaler("cpu", enabled=case["precision"] == "float16 scaler")
    half = torch.float16 if case["precision"] == "float16 scaler" else torch.bfloat16

    def epoch() -> None:
        model.train()
        for x, y in data:
            with torch.autocast("cpu", half, enabled=case["precision"] != "float32"):
                out = runs(x)
            loss = F.cross_entropy(out.flatten(0, -2).float(), y.flatten())
            assert torch.isfinite(loss)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.isfinite(norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                average.update_parameters(model)
        grower.step(0.5, loss_scale=scaler.get_scale())

    def output() -> Tensor:
        with torch.no_grad():
            return model.eval()(data[0][0])

    epoch()
    before, survivors = output(), {p: {k: _copy(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    grower.germinate(slots[1], blueprint)
    assert torch.equal(output(), before)
    assert all(same(dict(optimizer.state[p]), state) for p, state in survivors.items())
    epoch()
    newborn = list(grower.body.slot("r0c1").parameters())
    assert newborn
    assert all(p in optimizer.state for p in newborn)
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    assert not torch.equal(output(), before)
    grown = output()
    with grower.without(slots[1]):
        assert not torch.equal(output(), grown)
    if case["compile"] != "no":
        with torch.no_grad():
            assert torch.allclose(runs.eval()(data[0][0]), grown, atol=1e-6)
    if average is not None:
        assert list(average.module.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            assert torch.isfinite(average.eval()(data[0][0])).all()
        averaged = [p for n, p in average.module.named_parameters() if "_esper" in n]
        assert any(not torch.equal(p, q) for p, q in zip(averaged, newborn, strict=True))
    grower.prune(slots[1])
    epoch()
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    if average is not None:
        assert not [n for n, _ in average.module.named_parameters() if "_esper" in n]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_the_design_covers_all_pairs() -> None:
    covered = set().union(*map(pairs_of, CASES))
    for a, b in combinations(sorted(FACTORS), 2):
        for x in FACTORS[a]:
            for y in FACTORS[b]:
                assert ((a, x), (b, y)) in covered

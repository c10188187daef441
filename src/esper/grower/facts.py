"""Facts of a user's model, its slots and the seeds that could grow there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.grower.body import Body
from esper.grower.places import ESPER, Shape, run_example, undisturbed
from esper.kasmina.facts import relative_widths, seed_tables
from esper.leyline.facts import HostFacts

TRAINING = 3
"""FLOPs of a training step in forward passes: the gradients of weights and of inputs cost one each."""


def model_facts(
    model: nn.Module, body: Body, example: Any, *, classes: int | None, val_samples: int | None
) -> HostFacts:
    """Facts of an attached model; `example` None: unknown, as where a saved model was loaded.

    FLOPs are three times those of the example's forward pass, per sample. Exact counts of training would need
    the user's loss: they are lower by the gradient of the data, which nobody needs, and where layers are
    frozen. What is not known is NaN."""
    slots = list(body)
    journey = _Journey(math.nan, {}, {}) if example is None else _travel(model, body, example)
    inputs = math.nan if example is None else _input_positions(example, slots[0].place.shape)
    seed_params, seed_flops, traits = seed_tables(slots)
    here = [math.nan if slot.positions is None else math.prod(slot.positions) for slot in slots]
    return HostFacts(
        classes=classes,
        val_samples=val_samples,
        params=body.host_params,
        flops=TRAINING * journey.flops,
        depth=np.array(body.slot_depths),
        width=relative_widths(slots),
        resolution=np.array([positions / inputs for positions in here]),
        params_before=_shares(body, journey.params_before, body.host_params),
        flops_before=_shares(body, journey.flops_before, journey.flops),
        seed_params=seed_params,
        seed_flops=seed_flops,
        traits=traits,
    )


def _shares(body: Body, before: Mapping[str, float], whole: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([before.get(slot.slot_id, math.nan) / (whole or math.nan) for slot in body])


@dataclass(frozen=True, slots=True)
class _Journey:
    """The example's way through the host: forward FLOPs per sample, and FLOPs and parameters before each
    slot."""

    flops: float
    flops_before: dict[str, float]
    params_before: dict[str, float]


def _travel(model: nn.Module, body: Body, example: Any) -> _Journey:
    """Run the example once, without seeds, and note what was used before each slot. Parameters count as used
    when the module that owns them begins, and those of all modules inside when a module ends: some layers use
    the weights of others without calling them."""
    used: set[nn.Parameter] = set()
    flops: dict[str, float] = {}
    params: dict[str, float] = {}
    samples: list[int] = []
    counter = FlopCounterMode(display=False)
    places = {slot.slot_id: slot.place for slot in body}

    def begin(module: nn.Module, args: Any) -> None:  # noqa: ARG001
        used.update(module.parameters(recurse=False))

    def end(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        used.update(module.parameters())

    def arrive(slot_id: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        samples.append(len(places[slot_id].take(output)))
        flops[slot_id] = counter.get_total_flops()
        params[slot_id] = sum(p.numel() for p in used)

    with ExitStack() as hooks:  # undone in reverse order
        for name, module in model.named_modules():
            if name and name.split(".")[0] != ESPER:
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end).remove)
        hooks.callback(model.register_forward_pre_hook(begin).remove)
        for slot in body:
            hook = model.get_submodule(slot.name).register_forward_hook(partial(arrive, slot.slot_id))
            hooks.callback(hook.remove)
        hooks.enter_context(body.muted(body.slot_config.slot_ids))
        hooks.enter_context(undisturbed(model))
        # The fused attention kernel of the CPU is not counted by torch.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            run_example(model.eval(), example)
    per_sample = {slot_id: total / samples[0] for slot_id, total in flops.items()}
    return _Journey(counter.get_total_flops() / samples[0], per_sample, params)


def _input_positions(example: Any, shape: Shape) -> float:
    """Positions of one sample of the model's input: pixels, time steps or tokens; NaN where there is no
    tensor with a batch."""
    tensors = [t for t in _leaves(example) if t.dim() >= 2]
    if not tensors:
        return math.nan
    sizes = tensors[0].shape
    if len(sizes) == 2:
        return 1.0 if tensors[0].is_floating_point() else float(sizes[1])
    if len(sizes) == 3:
        return float(sizes[1] if shape == "BTD" else sizes[2])
    return float(math.prod(sizes[2:]))


def _leaves(example: Any) -> list[Tensor]:
    if isinstance(example, Tensor):
        return [example]
    values = example.values() if isinstance(example, Mapping) else example
    return [value for value in values if isinstance(value, Tensor)]

"""Growth under DistributedDataParallel: the first rank measures and decides, all ranks grow alike.

DDP forbids new parameters after it has wrapped a model, so its wrapper is the one object that growth
renews."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from esper.grower.body import Body
from esper.leyline import EsperError

T = TypeVar("T")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    return not is_distributed() or dist.get_rank() == 0


def from_first_rank(compute: Callable[[], T]) -> T:
    """What the first rank computes, on every rank. All compute, because there may be collectives in it. If
    the first rank refuses, all do: one that raised alone would leave the others waiting."""
    if not is_distributed():
        return compute()
    try:
        result: T | EsperError = compute()
    except EsperError as error:
        result = error
    box = [result]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], EsperError):
        raise box[0]
    return box[0]


def check_equal(body: Body) -> None:
    """Seeds that were trained outside DDP's reducer differ between ranks."""
    if not is_distributed() or not any(len(slot.banks) for slot in body):
        return
    sums: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(sums, body.checksum())
    if any(other != sums[0] for other in sums):
        raise EsperError(
            "the weights of seeds differ between ranks, because DDP does not know them; renew the wrapper "
            "after each step: ddp = grower.rewrap(ddp)"
        )


def rewrap(ddp: DistributedDataParallel, model: nn.Module) -> DistributedDataParallel:
    if not isinstance(ddp, DistributedDataParallel):
        raise EsperError(f"rewrap: got a {type(ddp).__name__}, must be a DistributedDataParallel")
    if ddp.module is not model:
        raise EsperError("rewrap: this DDP wraps another model than the one that was attached")
    known = {id(p) for p in ddp._module_parameters}
    learning = [p for p in model.parameters() if p.requires_grad]
    if known == {id(p) for p in learning}:
        return ddp
    renewed = DistributedDataParallel(
        model,
        device_ids=ddp.device_ids,
        output_device=ddp.output_device,
        dim=ddp.dim,
        broadcast_buffers=ddp.broadcast_buffers,
        process_group=ddp.process_group,
        bucket_cap_mb=ddp.bucket_bytes_cap / 2**20,
        find_unused_parameters=ddp.find_unused_parameters,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        static_graph=ddp.static_graph,
    )
    for hook, state in ddp._comm_hooks:
        renewed.register_comm_hook(state, hook)
    renewed.training = ddp.training
    return renewed

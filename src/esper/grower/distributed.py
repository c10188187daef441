"""Growth under DistributedDataParallel: the first rank measures and decides, all ranks grow alike.

DDP forbids new parameters after it has wrapped a model, so its wrapper is the one object that growth
renews."""

from __future__ import annotations

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


def from_first_rank(value: T) -> T:
    """The first rank's value, on every rank."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_equal(body: Body) -> None:
    """Seeds that were trained outside DDP's reducer differ between ranks."""
    if not is_distributed() or not any(len(slot.banks) for slot in body):
        return
    mine = body.checksum()
    if from_first_rank(mine) != mine:
        raise EsperError(
            f"rank {dist.get_rank()}: the weights of seeds differ from those of rank 0, because DDP does not "
            "know them; renew the wrapper after each step: ddp = grower.rewrap(ddp)"
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

"""One rank of a DDP training that grows. Ranks see different data and different metrics; the test compares
what they end with."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import esper
from esper.leyline import EsperError
from grower_helpers import SmallCNN, accuracy, digits


def main(rank: int, directory: Path, *, renew: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    x, y = digits()
    model = SmallCNN(4)
    grower = esper.attach(
        model,
        ["layer1", "layer2"],
        x[:2],
        # Only the first rank's decision may count: what others would do cannot even be carried out.
        policy=lambda g: (
            ("germinate", "layer2", "conv_light")
            if g.epoch == 1 and rank == 0
            else ("prune", "layer2")
            if g.epoch == 4 and rank == 0
            else None
        ),
        evaluate=lambda: accuracy(model) / (1 + rank),
    )
    ddp = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    wrappers = {id(ddp)}
    kept = [ddp]
    for epoch in range(6):
        for rows in torch.arange(rank * 128, rank * 128 + 128).split(32):
            F.cross_entropy(ddp(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        try:
            grower.step()
        except EsperError as error:
            (directory / f"error{rank}").write_text(str(error))
            break
        if renew:
            ddp = grower.rewrap(ddp)
            kept.append(ddp)
            wrappers.add(id(ddp))
        if epoch == 2 and rank == 0 and grower.reports():
            (directory / "grew").touch()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    history = [(r.op, r.metric, r.changes) for r in grower.history]
    torch.save({"weights": weights, "history": history, "wrappers": len(wrappers)}, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), renew=sys.argv[3] == "renew")

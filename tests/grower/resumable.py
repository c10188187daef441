"""A plain training loop that saves after every epoch and goes on where it stopped. Run as a script by the
tests that kill it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import esper
from grower_helpers import SmallCNN, accuracy, digits

EPOCHS = 6
POLICIES: dict[str, Any] = {
    "schedule": [(1, "layer2", "conv_light"), (3, "layer1", "norm")],
    "periodic": "periodic",
}


def loop(directory: Path, *, policy: str = "schedule", stop: int = EPOCHS) -> dict[str, Any]:
    """Train to epoch `stop`; returns everything there is to compare."""
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    x, y = digits()
    model = SmallCNN(4)
    grower = esper.attach(
        model,
        ["layer1", "layer2"],
        x[:2],
        policy=POLICIES[policy],
        epochs=EPOCHS,
        evaluate=lambda: accuracy(model),
    )
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * 4)
    parts = {"grower": grower, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    if (directory / "last.pt").exists():
        saved = torch.load(directory / "last.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["generator"])
    while grower.epoch < stop:
        for rows in torch.randperm(len(x))[:128].split(32):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        grower.step()
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"generator": torch.get_rng_state()}, directory / "new.pt")
        os.replace(directory / "new.pt", directory / "last.pt")
    return torch.load(directory / "last.pt", weights_only=True)


if __name__ == "__main__":
    loop(Path(sys.argv[1]))

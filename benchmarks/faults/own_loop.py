"""A user's own training loop with `esper.attach`: it records the run, saves its state and the grown model
after every epoch, and goes on where it stopped. Run as a script by tests that kill it.

    python benchmarks/faults/own_loop.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.runtime.data import load_dataset
from esper.simic.ranks import fingerprint

EPOCHS = 6
STATE, GROWN, RUN = "last.pt", "grown", "run"
POLICIES: dict[str, Any] = {
    "schedule": [(1, "layer2", "conv_light"), (3, "layer1", "norm")],
    "periodic": "periodic",
}


class SmallCNN(nn.Module):
    """Two blocks with batch norm on 8×8 digits."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def digits(count: int = 256) -> tuple[Tensor, Tensor]:
    data = load_dataset("digits")
    x = (data.train_x[:count].float() / data.scale - data.mean[0]) / data.std[0]
    return x.contiguous(), data.train_y[:count]


def save(state: dict[str, Any], directory: Path) -> None:
    torch.save(state, directory / "new.pt")
    os.replace(directory / "new.pt", directory / STATE)


def loop(directory: Path, *, policy: str = "schedule", stop: int = EPOCHS) -> dict[str, Any]:
    """Train to epoch `stop` and return the state that was saved last. Prints the epoch and the digest of the
    weights after each `grower.save`."""
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    x, y = digits()
    model = SmallCNN()

    def accuracy() -> float:
        with torch.no_grad():
            share = (model.eval()(x).argmax(1) == y).float().mean().item()
        model.train()
        return share

    grower = esper.attach(
        model,
        ["layer1", "layer2"],
        x[:2],
        policy=POLICIES[policy],
        epochs=EPOCHS,
        evaluate=accuracy,
        record=directory / RUN,
    )
    optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * 4)
    parts = {"grower": grower, "model": model, "optimizer": optimizer, "scheduler": scheduler}

    def state() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()} | {"random": torch.get_rng_state()}

    if (directory / STATE).exists():
        saved = torch.load(directory / STATE, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
    else:
        save(state(), directory)
    while grower.epoch < stop:
        for rows in torch.randperm(len(x))[:128].split(32):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        grower.step()
        grower.save(directory / GROWN)
        print(f"saved {grower.epoch} {fingerprint(model.state_dict())}", flush=True)
        save(state(), directory)
    return torch.load(directory / STATE, weights_only=True)


if __name__ == "__main__":
    loop(Path(sys.argv[1]))

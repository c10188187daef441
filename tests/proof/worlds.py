"""Small worlds and untrained policies for the tests of comparisons."""

from __future__ import annotations

from pathlib import Path

import torch

from esper.tamiyo import RecurrentPolicy, TamiyoNetwork
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM, schema

SMALL = "episode_length=8,steps_per_epoch=2,val_size=48,batch_size=16,population=8"
SHIFT, IMPAIRED = f"digits_shift:{SMALL}", f"digits_impaired:{SMALL}"


def policy(seed: int = 0) -> RecurrentPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = TamiyoNetwork(
            base_dim=BASE_DIM, slot_dim=SLOT_DIM, quote_dim=QUOTE_DIM, hidden=16, memory_horizon=8
        )
        for parameter in network.parameters():  # far from uniform, so that what it sees makes a difference
            torch.nn.init.normal_(parameter, std=0.5)
    return RecurrentPolicy(network, feature_schema=schema())


def policy_file(path: Path, seed: int = 0) -> str:
    policy(seed).save(path)
    return str(path)

"""Small worlds and untrained policies for the tests of comparisons."""

from __future__ import annotations

from pathlib import Path

import torch

from esper.leyline import EpisodeOutcome
from esper.proof.episodes import Played
from esper.tamiyo import RecurrentPolicy, TamiyoNetwork
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM, schema

SMALL = "episode_length=8,steps_per_epoch=2,val_size=48,batch_size=16,population=8"
SHIFT, IMPAIRED = f"digits_shift:{SMALL}", f"digits_impaired:{SMALL}"

TINY = "worlds_small:steps_per_epoch=5,batch_size=8,val_size=32,final_val_size=32,budget_steps=50"
FIRST = 20051
"""This world and the next have the digits, which are in the package."""


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


def played(network: int, objective: float, *, flops: int = 100) -> Played:
    """An episode in which nothing grew."""
    outcome = EpisodeOutcome(
        env_id=network,
        task="worlds_small:0",
        episode_idx=0,
        epochs=4,
        final_accuracy=100 * objective,
        committed_accuracy=100 * objective,
        objective=objective,
        total_reward=0.0,
        host_params=50,
        added_params=0,
        germinated=0,
        fossilized=0,
        pruned=0,
        rollbacks=0,
    )
    return Played(
        network=network,
        outcome=outcome,
        test_accuracy=100 * objective,
        flops=flops,
        condition=None,
        decisions=(),
        fossils=(),
    )

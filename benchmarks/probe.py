"""Do the sensors show what is wrong with a network? A linear probe predicts the crippled blocks of
`digits_shift` from observations.

Networks that never grow are observed once. Ridge regression on the policy's features predicts, for each
block, whether it is crippled. It is fitted on some episodes and evaluated on others. `python -m
benchmarks.probe`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.play import make_env, play, show
from esper.runtime.tasks import draw_condition, get_task_spec
from esper.tamiyo import AlwaysWait

ENVS = 64
RIDGE = 10.0
HELD_OUT = 4
"""Every fourth episode is held out for evaluation."""
Array = npt.NDArray[np.float64]


def collect(epochs: Sequence[int], episodes: int) -> tuple[dict[int, Array], npt.NDArray[np.bool_]]:
    """Features [N, F] at each of these epochs, and which blocks are crippled [N, blocks], in order of
    episodes."""
    task = get_task_spec("digits_shift")
    env = make_env(task, range(ENVS))
    features: dict[int, list[Array]] = {epoch: [] for epoch in epochs}

    def keep(seen, obs, _step) -> None:  # type: ignore[no-untyped-def]
        if seen.epoch in features:
            features[seen.epoch].append(torch.cat([obs.base, obs.slots.flatten(1)], 1).double().numpy())

    crippled = []
    for episode in range(episodes):
        play(env, AlwaysWait(), episode=episode, epochs=max(epochs), watch=keep)
        crippled += [draw_condition(task, 0, episode, i).crippled for i in range(ENVS)]
    return {epoch: np.concatenate(parts) for epoch, parts in features.items()}, np.array(crippled)


def probe(
    features: Array, labels: npt.NDArray[np.bool_], *, held_out: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Predictions of a linear classifier for the held-out rows; it is fitted on the others."""
    known = features[~held_out]
    scaled = (features - known.mean(0)) / (known.std(0) + 1e-6)
    x = np.concatenate([scaled, np.ones((len(scaled), 1))], 1)
    fit, target = x[~held_out], np.where(labels[~held_out], 1.0, -1.0)
    weights = np.linalg.solve(fit.T @ fit + RIDGE * np.eye(x.shape[1]), fit.T @ target)
    return x[held_out] @ weights > 0


def accuracies(features: Array, crippled: npt.NDArray[np.bool_]) -> list[tuple[npt.NDArray[np.bool_], float]]:
    """For each block: which held-out predictions are correct, and the share of the larger class."""
    held_out = np.arange(len(features)) // ENVS % HELD_OUT == HELD_OUT - 1
    results = []
    for labels in crippled.T:
        actual = labels[held_out]
        results.append(
            (probe(features, labels, held_out=held_out) == actual, max(actual.mean(), 1 - actual.mean()))
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 3], help="epochs at which to observe")
    parser.add_argument("--episodes", type=int, default=64, help=f"episodes of {ENVS} networks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    features, crippled = collect(options.epochs, options.episodes)
    print(f"{len(crippled)} networks, a quarter of them held out\n")
    print("| epoch | block | right | larger class |\n|---|---|---|---|")
    for epoch, block in product(options.epochs, range(crippled.shape[1])):
        right, majority = accuracies(features[epoch], crippled)[block]
        print(
            f"| {epoch} | {block} | {show(right.astype(float).tolist())} % | {100 * majority:.1f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()

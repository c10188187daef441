"""Lower precision of the networks' forward passes, as the config asks for it."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import EsperError
from esper.simic import train_ppo_vectorized
from esper.simic.training import vectorized
from esper.simic.training.parallel_env_state import EnvGroup
from run_helpers import SMALL, assert_same_run, train


def test_bf16_trains_populations_and_differs_from_full_precision() -> None:
    full, half = (train_ppo_vectorized(**{**SMALL, "amp": amp})[1] for amp in ("off", "bf16"))
    assert len(half) == SMALL["rounds"]
    assert full != half


def test_fp16_scales_the_loss_of_a_single_network_and_resumes_with_its_scale(tmp_path, monkeypatch) -> None:
    scales = []
    begin = EnvGroup.begin_epoch

    def look(group):
        scales.append((group.scaler.is_enabled(), group.scaler.get_scale()))
        begin(group)

    monkeypatch.setattr(EnvGroup, "begin_epoch", look)
    small = {"amp": "fp16", "population": 1, "envs": 2, "task": "digits_baseline"}
    _, history = train(tmp_path / "straight", **small)
    assert len(history) == SMALL["rounds"]
    assert all(enabled and scale > 1 for enabled, scale in scales)
    stops = iter([False] * 11 + [True] + [False] * 99)
    monkeypatch.setattr(vectorized, "stop_requested", lambda: next(stops))
    train(tmp_path / "cut", **small)
    train(tmp_path / "cut", **small, resume="auto")
    assert_same_run(tmp_path / "straight", tmp_path / "cut")


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    from env_helpers import make_env, small_task
    from esper.simic.training.batch_ops import process_train_batch

    env = make_env(small_task("digits_baseline"), 1, population=1)
    env.begin_round(0)
    (group,) = env.groups
    group.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = [p.clone() for p in group.model.parameters()]
    (batch,) = next(iter(env.train))
    process_train_batch(group, batch.x * 1e6, batch.y, env.criterion)
    assert group.scaler.get_scale() == 2.0**126
    assert all(torch.equal(a, b) for a, b in zip(before, group.model.parameters(), strict=True))


def test_fp16_needs_a_population_of_one() -> None:
    with pytest.raises(EsperError, match="fp16 with population 64 of task"):
        train_ppo_vectorized(**{**SMALL, "amp": "fp16", "population": None})

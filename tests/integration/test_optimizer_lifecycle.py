"""Optimizers through growth in real runs: they hold exactly what lives, and what was pruned leaves nothing
behind."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import COOLDOWN_STAGES
from esper.nissa import TelemetryHub
from esper.simic import train_ppo_vectorized
from esper.simic.training import vectorized
from memory_output import MemoryOutput
from run_helpers import SMALL


class Watch(MemoryOutput):
    """Looks at every population when a step was recorded."""

    wants_step_events = True

    def __init__(self) -> None:
        super().__init__(wants_step_events=True)
        self.env = None
        self.looks = 0
        self.stages: set[str] = set()

    def emit(self, seq, event):
        if event.event_type != "last_action" or event.env_id != 0:
            return
        self.looks += 1
        for group in self.env.groups:
            for member in group.envs:
                self.check(group, member)

    def check(self, group, member) -> None:
        reports = member.model.reports()
        self.stages |= {report.stage.name for report in reports.values()}
        present = {slot for slot, report in reports.items() if report.stage not in COOLDOWN_STAGES}
        state = group.optimizer.row_state(member.row)
        assert {name.split(".")[0] for name in state} - {"rates", "host"} == present
        assert all(torch.isfinite(tensor).all() for tensor in state.values())
        counted = sum(reports[slot].metrics.params for slot in present)
        assert counted == group.model.seed_params(member.row)


@pytest.fixture
def watch(monkeypatch):
    output = Watch()
    hub = TelemetryHub([output])
    build = vectorized.build_env

    def remember(*args):
        output.env = build(*args)
        return output.env

    monkeypatch.setattr(vectorized, "get_hub", lambda: hub)
    monkeypatch.setattr(vectorized, "build_env", remember)
    return output


@pytest.mark.parametrize("task", ["digits_impaired", "digits_shift"])
def test_optimizers_hold_exactly_the_live_seeds_at_every_step(watch, task) -> None:
    train_ppo_vectorized(**{**SMALL, "task": task, "policy": "random", "episode_length": 16, "envs": 8})
    assert watch.looks == SMALL["rounds"] * 16
    assert {"TRAINING", "BLENDING", "EMBARGOED"} <= watch.stages, "a run in which much happens"


def test_a_round_begins_with_optimizers_that_remember_nothing(watch, monkeypatch) -> None:
    clean = []
    begin = vectorized.VectorEnv.begin_round

    def look(env, episode):
        begin(env, episode)
        for group in env.groups:
            for member in group.envs:
                state = group.optimizer.row_state(member.row)
                clean.append(
                    all((t == 0).all() for name, t in state.items() if not name.startswith("rates."))
                )
                assert not member.model.reports()

    monkeypatch.setattr(vectorized.VectorEnv, "begin_round", look)
    train_ppo_vectorized(**{**SMALL, "policy": "random"})
    assert clean == [True] * SMALL["rounds"] * SMALL["envs"]

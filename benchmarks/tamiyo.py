"""Rows `tamiyo.*`: the cost of a decision relative to its epoch, and how it grows with envs and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness import Row, interleave
from benchmarks.play import make_env, play
from esper.leyline import LifecycleOp, ReportArray, TrainingSignals
from esper.runtime.tasks import get_task_spec
from esper.simic.training.vector_env import Observation, VectorEnv
from esper.tamiyo import RandomValid, RecurrentPolicy, TamiyoNetwork
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM, batch_obs_to_features
from esper.tamiyo.inputs import Setting, stack_inputs
from esper.tamiyo.masks import build_slot_states, compute_action_masks

ENVS = 64
WARM = 8
"""Epochs of random growth before anything is timed: slots in every stage."""


def _repeated(setting: Setting, place: npt.NDArray[np.intp]) -> Setting:
    """The same setting with these slots."""
    facts = setting.facts
    arrays = {f.name: getattr(facts, f.name) for f in fields(facts)}
    picked = {name: a[place] for name, a in arrays.items() if isinstance(a, np.ndarray)}
    return replace(setting, facts=replace(facts, **picked))


class Decider:
    """Masks, features and one call of the network, for an observation repeated to any number of envs and
    slots."""

    def __init__(self, env: VectorEnv, seen: Observation, envs: int, slots: int) -> None:
        pick = np.arange(envs) % len(seen.signals)
        place = np.arange(slots) % seen.table.shape[1]
        self.signals: list[TrainingSignals] = [seen.signals[i] for i in pick]
        self.table: ReportArray = np.ascontiguousarray(seen.table[pick][:, place])
        self.sensors = {
            name: np.ascontiguousarray(values[pick][:, place]) for name, values in seen.sensors.items()
        }
        self.setting = _repeated(env.envs[0].setting, place)
        self.prices = [env.task.objective] * envs
        self.rates = [env.envs[i].learning_rate for i in pick]
        self.rules = env.rules
        torch.manual_seed(0)
        self.policy = RecurrentPolicy(TamiyoNetwork(BASE_DIM, SLOT_DIM, QUOTE_DIM))
        self.hidden = self.policy.initial_hidden(envs)
        self.uniforms = torch.rand(envs, 8)
        self.ops, self.success = [LifecycleOp.WAIT] * envs, [True] * envs

    def __call__(self) -> None:
        masks = compute_action_masks(
            build_slot_states(self.table),
            self.setting.offered,
            epochs_left=self.rules.max_epochs - WARM,
            epochs_needed=self.setting.epochs_needed,
        )
        obs = batch_obs_to_features(
            stack_inputs(
                self.signals,
                self.table,
                self.sensors,
                setting=self.setting,
                prices=self.prices,
                learning_rate=self.rates,
                last_op=self.ops,
                last_success=self.success,
            )
        )
        self.policy.act(obs, self.hidden, masks, uniforms=self.uniforms)


def epoch(env: VectorEnv, number: int) -> None:
    env.train_epoch(number)
    env.validate(number)


def rows() -> Iterator[Row]:
    task = get_task_spec("digits_impaired")
    env = make_env(task, range(ENVS), rows=task.population)
    seen: list[Observation] = []
    play(env, RandomValid(0, range(ENVS)), epochs=WARM, watch=lambda now, _obs, _step: seen.append(now))
    decide = partial(Decider, env, seen[-1])
    slots = len(task.slots)
    # Networks that never grow have the cheapest epochs: the share is largest there.
    still = make_env(task, range(ENVS), rows=task.population)
    still.begin_round(0)
    share, ours, _ = interleave(decide(ENVS, slots), partial(epoch, still, 1), rounds=9)
    yield Row("tamiyo.decide_ms", ours * 1e3)
    yield Row("tamiyo.decide_share", share, 0.05)
    yield Row("tamiyo.growth_in_envs", interleave(decide(4 * ENVS, slots), decide(ENVS, slots))[0], 3)
    yield Row("tamiyo.growth_in_slots", interleave(decide(ENVS, 50), decide(ENVS, 10))[0], 5)

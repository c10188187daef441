"""Rules of others as policies: a plain function decides for one network at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from esper.leyline import (
    OP_GERMINATE,
    ActionMasks,
    EsperError,
    PolicyObservation,
    PolicyStep,
    blueprint_index,
)
from esper.proof.controls import OFFERED
from esper.proof.episodes import Maker
from esper.runtime.tasks import TaskSpec
from esper.tamiyo.columns import Feature, first_columns
from esper.tamiyo.features import BASE, QUOTE, SLOT
from esper.tamiyo.scripted import ScriptedPolicy, as_step, germinate, keep_ripe, waiting

Pair = tuple[str, str]
"""A slot and a blueprint."""
Rule = Callable[[dict[str, Any], list[Pair]], Pair | None]


def load_rule(text: str) -> Rule:
    """The function that `package.module:function` names."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise EsperError(f"rule {text!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EsperError(f"rule {text!r}: cannot import {module_name}: {error}") from error
    rule = getattr(module, name, None)
    if not callable(rule):
        raise EsperError(f"rule {text!r}: {module_name} has no function {name}")
    return rule  # type: ignore[no-any-return]


def _named(prefix: str, table: Sequence[Feature], values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """[..., columns] as one array [...] for each feature, NaN where it is unmeasured."""
    named: dict[str, Any] = {}
    for feature in table:
        column = first_columns(table)[feature.name]
        value = values[..., column].astype(np.float64)
        if feature.optional:
            value = np.where(values[..., column + 1] > 0, value, np.nan)
        named[f"{prefix}.{feature.name}"] = value if value.ndim else float(value)
    return named


class RulePolicy(ScriptedPolicy):
    """Asks a rule once per epoch for each network. Where it waits, seeds advance and become permanent as soon
    as their gates open."""

    def __init__(self, name: str, rule: Rule, task: TaskSpec, networks: Sequence[int]) -> None:
        self.name, self.rule, self.task, self.networks = name, rule, task, tuple(networks)
        self.begin(len(self.networks))

    def begin(self, num_envs: int) -> None:
        if num_envs != len(self.networks):
            raise EsperError(f"{num_envs} envs, this policy was made for {len(self.networks)}")
        self._epoch = 0
        self._memories: list[dict[str, Any]] = [{} for _ in self.networks]

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "memories": self._memories}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._memories = state["epoch"], state["memories"]

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        self._epoch += 1
        task, actions = self.task, waiting(len(masks.op))
        legal, in_time = masks.slot_by_op.cpu().numpy(), masks.tempo.cpu().numpy()
        for env in range(len(self.networks)):
            if not obs.exists[env].any():  # its episode is over
                continue
            pairs = _legal_pairs(task, obs, legal, env) if in_time[env, task.tempo] else []
            answer = self._ask(env, obs, pairs)
            if answer is None:
                keep_ripe(actions[env], legal[env])
                continue
            slot, blueprint = answer
            germinate(actions[env], task.slots.index(slot), blueprint_index(blueprint), tempo=task.tempo)
        return as_step(actions)

    def _ask(self, env: int, obs: PolicyObservation, pairs: list[Pair]) -> Pair | None:
        """The rule's answer, which is legal."""
        where = (
            f"rule {self.name!r} in world {self.task.name}, network {self.networks[env]}, epoch {self._epoch}"
        )
        try:
            answer = self.rule(self._observation(env, obs), list(pairs))
        except Exception as error:  # the code of somebody else may raise anything
            raise EsperError(f"{where} raised {type(error).__name__}: {error}") from error
        if answer is None:
            return None
        pair = tuple(answer) if isinstance(answer, (tuple, list)) else answer
        if pair not in pairs:
            raise EsperError(
                f"{where} answered {answer!r}; allowed: None or one of {pairs}"
                if pairs
                else f"{where} answered {answer!r}; allowed: None, because nothing can be planted now"
            )
        return pair  # type: ignore[return-value]

    def _observation(self, env: int, obs: PolicyObservation) -> dict[str, Any]:
        task = self.task
        offers = [blueprint_index(name) for name in task.blueprints]
        return {
            "epoch": self._epoch,
            "slots": list(task.slots),
            "blueprints": list(task.blueprints),
            "memory": self._memories[env],
            **_named("network", BASE, obs.base[env].cpu().numpy()),
            **_named("slot", SLOT, obs.slots[env].cpu().numpy()),
            **_named("quote", QUOTE, obs.quotes[env][:, offers].cpu().numpy()),
        }


def _legal_pairs(task: TaskSpec, obs: PolicyObservation, legal: np.ndarray[Any, Any], env: int) -> list[Pair]:
    offered = obs.quotes[env, ..., OFFERED].cpu().numpy() > 0  # [S, B]
    return [
        (slot, blueprint)
        for index, slot in enumerate(task.slots)
        for blueprint in task.blueprints
        if legal[env, OP_GERMINATE, index] and offered[index, blueprint_index(blueprint)]
    ]


def rule_maker(name: str, rule: Rule, task: TaskSpec) -> Maker:
    """Makes the policy of a rule in one world."""
    return lambda networks: RulePolicy(name, rule, task, networks)

"""Who decides, and what they see: Tamiyo's policies, features and masks for one network.

A policy is given by name, file, schedule, function or object. Whatever it is, it acts on the observation that
policies are trained with, and its action takes the same way through decoding and preflight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from esper.grower.body import Body
from esper.kasmina.blueprints import blueprint_names
from esper.leyline import (
    BLUEPRINT_ID_TO_INDEX,
    BLUEPRINT_IDS,
    TEMPO_EPOCHS,
    BlueprintAction,
    BlueprintError,
    EsperError,
    GerminationStyle,
    LifecycleOp,
    ObjectiveConfig,
    PolicyObservation,
    PolicyProtocol,
    PolicyStep,
    TempoAction,
    TrainingSignals,
    allowed,
    stack_reports,
)
from esper.simic.training.action_execution import ActionRules
from esper.tamiyo.features import batch_obs_to_features, stack_inputs
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.masks import ActionMasks, blueprint_mask, build_slot_states, compute_action_masks
from esper.tamiyo.rules import Periodic, Plateau
from esper.tamiyo.scripted import (
    BLUEPRINT_HEAD,
    OP_HEAD,
    SLOT_HEAD,
    STYLE_HEAD,
    TEMPO_HEAD,
    FixedSchedule,
    Planting,
    ScriptedPolicy,
    as_step,
    waiting,
)
from esper.tamiyo.shipped import load_policy, shipped_policies

if TYPE_CHECKING:
    from esper.grower.grower import Grower

NAMED = ("heuristic", "periodic", "plateau")
NO_HORIZON = 2**31
"""Last epoch where none was told: it is never too late to germinate."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a user's own policy may return: an operation on a slot. Nothing to do is None."""

    op: str
    slot: str
    blueprint: str | None = None


PolicyLike = str | Path | PolicyProtocol | Callable[["Grower"], Any] | Iterable[tuple[int, str, str]] | None
"""A name, a policy file or run, a policy, a function of the grower, a schedule of (epoch, slot, blueprint),
or None: grow by hand."""


class UserPolicy(ScriptedPolicy):
    """A user's function as a policy. It is asked once per epoch; its answer is checked by the masks."""

    def __init__(self, function: Callable[[Grower], Any]) -> None:
        self.function = function
        self.grower: Grower | None = None

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        assert self.grower is not None, "set by the grower"
        answer = self.function(self.grower)
        actions = waiting(1)
        if answer is not None:
            decision = answer if isinstance(answer, Decision) else Decision(*answer)
            actions[0] = encode(decision, self.grower.body, masks)
        return as_step(actions)


def encode(decision: Decision, body: Body, masks: ActionMasks) -> Tensor:
    """A decision as indices of all heads; one that is not possible now is an error."""
    names = [op.name.lower() for op in LifecycleOp if op is not LifecycleOp.SET_ALPHA_TARGET]
    if str(decision.op).lower() not in names:
        raise EsperError(f"decision: op is {decision.op!r}; {allowed(names)}")
    op = LifecycleOp[decision.op.upper()]
    action = waiting(1)[0]
    if op is LifecycleOp.WAIT:
        return action
    slot = body.slot_config.index_for_slot_id(body.slot_id(decision.slot))
    if not masks.slot_by_op[0, op, slot]:
        possible = [body.names[i] for i in masks.slot_by_op[0, op].nonzero().flatten().tolist()]
        raise EsperError(
            f"decision: {op.name} is not possible in slot {decision.slot!r} now; "
            f"{allowed(possible or ['no slot'])}"
        )
    action[SLOT_HEAD], action[OP_HEAD] = slot, int(op)
    if op is LifecycleOp.GERMINATE:
        index = BLUEPRINT_ID_TO_INDEX.get(str(decision.blueprint))
        if index is None or not masks.blueprint[0, index]:
            offered = [BLUEPRINT_IDS[i] for i in masks.blueprint[0].nonzero().flatten().tolist()]
            raise BlueprintError(f"decision: blueprint is {decision.blueprint!r}; {allowed(offered)}")
        action[BLUEPRINT_HEAD], action[TEMPO_HEAD] = index, int(TempoAction.INSTANT)
        action[STYLE_HEAD] = int(GerminationStyle.SIGMOID_ADD)
    return action


def make_policy(policy: PolicyLike, body: Body, epochs: int | None) -> PolicyProtocol | None:
    """The policy that `attach` was given, for one network."""
    if policy is None:
        return None
    if policy == "heuristic":
        return Heuristic(None, 1)
    if policy == "periodic":
        if epochs is None:
            raise EsperError("policy 'periodic' grows at parts of the horizon; attach with epochs=…")
        return Periodic(1)
    if policy == "plateau":
        return Plateau(1)
    if isinstance(policy, (str, Path)):
        if not Path(policy).exists() and str(policy) not in shipped_policies():
            options = [*NAMED, *shipped_policies(), "the path of a policy file or run", "a schedule", "None"]
            raise EsperError(f"policy {str(policy)!r} is unknown; {allowed(options)}")
        return load_policy(policy)
    if hasattr(policy, "act"):
        return cast("PolicyProtocol", policy)
    if callable(policy):
        return UserPolicy(policy)
    return FixedSchedule([_plantings(policy, body)])


def _plantings(schedule: Iterable[tuple[int, str, str]], body: Body) -> list[Planting]:
    plantings = []
    for entry in schedule:
        try:
            epoch, slot, blueprint = entry
        except (TypeError, ValueError):
            raise EsperError(f"schedule: {entry!r} is not (epoch, slot, blueprint)") from None
        index = body.slot_config.index_for_slot_id(body.slot_id(slot))
        plantings.append(Planting(epoch, index, blueprint))
    return plantings


def offered_blueprints(body: Body, names: Sequence[str] | None) -> tuple[str, ...]:
    """Blueprints that policies may germinate in any of the slots.

    By default all that act on each token alone, or on images. Those that mix tokens are causal: in a model
    that is not, they would see half of each sequence, so they have to be asked for."""
    topologies = {slot.place.topology for slot in body}
    known = set.intersection(*(set(blueprint_names(t)) for t in topologies)) - {"noop"}
    if names is None:
        chosen = sorted(known if topologies == {"cnn"} else known & set(blueprint_names("mlp")))
    else:
        chosen = list(names)
    for name in chosen:
        if name not in known:
            raise BlueprintError(f"blueprint {name!r} cannot grow in these slots; {allowed(sorted(known))}")
        for slot in body:
            with torch.device("meta"):
                slot.build_bank(name, 1)  # some need a number of channels that divides well
    return tuple(chosen)


def epochs_needed(body: Body, *, incubates: bool) -> tuple[int, ...]:
    """By tempo: epochs from a germination to the tick that makes the seed permanent."""
    epochs = [planting_epochs(tempo, incubates=incubates) for tempo in TEMPO_EPOCHS]
    return tuple(body.pacing.epochs_to_permanence(tempo) for tempo in epochs)


def planting_epochs(tempo_epochs: int, *, incubates: bool) -> int:
    """The tempo at which a seed is planted: a graft, unless the user's loop trains incubating seeds."""
    if not incubates:
        return 0
    return tempo_epochs or TEMPO_EPOCHS[TempoAction.FAST]


def make_rules(body: Body, blueprints: Sequence[str], epochs: int | None, seed: int) -> ActionRules:
    return ActionRules(
        slot_config=body.slot_config,
        blueprints=frozenset(BlueprintAction[name.upper()] for name in blueprints),
        blueprint_mask=blueprint_mask(blueprints),
        objective=ObjectiveConfig(),
        root_seed=seed,
        max_epochs=epochs or NO_HORIZON,
        epochs_needed=epochs_needed(body, incubates=False),
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy decides on."""

    observation: PolicyObservation
    masks: ActionMasks


def observe(
    body: Body,
    rules: ActionRules,
    signals: TrainingSignals,
    sensors: Mapping[str, Sequence[float]],
    *,
    last_op: int,
    last_success: bool,
) -> Seen:
    """Features and masks of the network as it is now."""
    table = stack_reports([body.reports()], body.slot_config)
    inputs = stack_inputs(
        [signals],
        table,
        {name: np.array([values]) for name, values in sensors.items()},
        depths=body.slot_depths,
        last_op=[last_op],
        last_success=[last_success],
    )
    masks = compute_action_masks(
        build_slot_states(table),
        rules.blueprint_mask,
        epochs_left=rules.max_epochs - signals.epoch,
        epochs_needed=rules.epochs_needed,
        max_seeds=rules.max_seeds,
    )
    return Seen(batch_obs_to_features(inputs), masks)


def horizon(epochs: int | None) -> int:
    """The tracker's horizon. An unknown one is NaN, so that every share of it is observed as unknown."""
    return cast("int", math.nan) if epochs is None else epochs


WAIT: list[int] = waiting(1)[0].tolist()


@dataclass(frozen=True, slots=True)
class Decided:
    """The part of a decision that is recorded."""

    op_probs: list[float]
    legal: list[bool]
    considered: Mapping[str, Any]
    """Further fields that explain it; empty if nothing is recorded."""


def offered_names(body: Body) -> set[str]:
    """Blueprints that can be planted by hand."""
    return set.intersection(*(set(blueprint_names(slot.place.topology)) for slot in body)) - {"noop"}

"""Who decides, and what they see: Tamiyo's policies, features and masks for one network.

A policy is given by name, file, schedule, function or object. Whatever it is, it acts on the observation that
policies are trained with, and its action takes the same way through decoding and preflight."""

from __future__ import annotations

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
    TEMPO_EPOCHS,
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
    blueprint_id,
    blueprint_index,
    check_number,
    stack_reports,
)
from esper.simic.training.action_execution import ActionRules
from esper.tamiyo.features import batch_obs_to_features
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.inputs import Setting, stack_inputs
from esper.tamiyo.masks import ActionMasks, blueprint_mask, build_slot_states, compute_action_masks
from esper.tamiyo.policy import RecurrentPolicy
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
from esper.tamiyo.shipped import GENERAL, load_policy, shipped_policies, shipped_policy, tuned_thresholds

if TYPE_CHECKING:
    from esper.grower.grower import Grower
    from esper.leyline.facts import HostFacts

AUTO = "auto"
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
            actions[0] = encode(_as_decision(answer), self.grower.body, masks)
        return as_step(actions)


def _as_decision(answer: Any) -> Decision:
    if isinstance(answer, Decision):
        return answer
    if not isinstance(answer, (tuple, list)) or len(answer) not in (2, 3):
        options = ["(op, slot)", '("germinate", slot, blueprint)', "a Decision", "None"]
        raise EsperError(f"decision: the policy returned {answer!r}; {allowed(options)}")
    return Decision(*answer)


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
        offered = [blueprint_id(i) for i in masks.blueprint[0].nonzero().flatten().tolist()]
        if decision.blueprint not in offered:
            raise BlueprintError(f"decision: blueprint is {decision.blueprint!r}; {allowed(offered)}")
        action[BLUEPRINT_HEAD] = blueprint_index(decision.blueprint)
        action[TEMPO_HEAD] = int(TempoAction.INSTANT)
        action[STYLE_HEAD] = int(GerminationStyle.SIGMOID_ADD)
    return action


def choose(policy: PolicyLike, *, images: bool) -> PolicyLike:
    """What "auto" means: the learned policy where it is shown to be of use, else rules."""
    if policy == AUTO:
        return GENERAL if images else "heuristic"
    return policy


def make_policy(
    policy: PolicyLike, body: Body, epochs: int | None, offered: Sequence[str]
) -> PolicyProtocol | None:
    """The policy that `attach` was given, for one network. `offered` are the blueprints that it may plant."""
    if policy is None:
        return None
    if policy == "heuristic":
        return Heuristic(tuned_thresholds(), 1)
    if policy == "periodic":
        if epochs is None:
            raise EsperError("policy 'periodic' grows at parts of the horizon; attach with epochs=…")
        return Periodic(1)
    if policy == "plateau":
        return Plateau(1)
    if isinstance(policy, (str, Path)):
        is_known = str(policy) and (Path(policy).exists() or shipped_policy(str(policy)) is not None)
        if not is_known:
            raise EsperError(f"policy {str(policy)!r} is unknown; {_policy_forms()}")
        return load_policy(policy)
    if hasattr(policy, "act"):
        return cast("PolicyProtocol", policy)
    if callable(policy):
        return UserPolicy(policy)
    if not isinstance(policy, Iterable):
        raise EsperError(f"policy is {policy!r}; {_policy_forms()}")
    return FixedSchedule([_plantings(policy, body, epochs, offered)])


def is_learned(policy: PolicyLike) -> bool:
    """Learned policies leave it to the clock to make seeds permanent, as tasks on digits and worlds do. Rules
    and schedules do it themselves."""
    if isinstance(policy, (str, Path)):
        return str(policy) not in NAMED
    return isinstance(policy, RecurrentPolicy)


def _policy_forms() -> str:
    forms = ["the path of a policy file or run", "a schedule", "a function of the grower", "None"]
    return allowed([AUTO, *NAMED, *shipped_policies(), *forms])


def _plantings(
    schedule: Iterable[tuple[int, str, str]], body: Body, epochs: int | None, offered: Sequence[str]
) -> list[Planting]:
    """The entries of a schedule. Each must be able to happen: its slot exists, its blueprint is offered, and
    there is time."""
    plantings = []
    for entry in schedule:
        try:
            epoch, slot, blueprint = entry
        except (TypeError, ValueError):
            raise EsperError(f"schedule: {entry!r} is not (epoch, slot, blueprint)") from None
        check_number(f"schedule: {entry!r}", "epoch", epoch, low=1, integer=True)
        index = body.slot_config.index_for_slot_id(body.slot_id(slot))
        if blueprint not in offered:
            advice = ""
            if blueprint in growable_names(body):
                advice = f"; to offer it too, attach with blueprints={[*offered, blueprint]}"
            raise BlueprintError(f"schedule: {entry!r}: blueprint is not offered; {allowed(offered)}{advice}")
        plantings.append(Planting(epoch, index, blueprint))
    if epochs is not None:
        _check_time(plantings, body, epochs)
    return plantings


def _check_time(plantings: Sequence[Planting], body: Body, epochs: int) -> None:
    """One seed is planted per epoch, and it needs time to become permanent."""
    last = epochs - epochs_needed(body, incubates=False)[TempoAction.INSTANT]
    first_free = 1
    for planting in sorted(plantings, key=lambda planting: planting.epoch):
        epoch = max(planting.epoch, first_free)
        if epoch > last:
            entry = (planting.epoch, body.names[planting.slot], planting.blueprint)
            turn = "" if epoch == planting.epoch else f", whose turn comes in epoch {epoch},"
            raise EsperError(
                f"schedule: {entry!r}{turn} is too late to become permanent; with epochs={epochs}, one seed "
                f"can be planted after each of the first {last} epochs"
            )
        first_free = epoch + 1


def kind_of(policy: PolicyProtocol | None) -> str:
    """What a state says about the policy that it belongs to."""
    if policy is None:
        return "None"
    return _KINDS.get(type(policy), type(policy).__name__)


_KINDS: dict[type[Any], str] = {
    Heuristic: "'heuristic'",
    Periodic: "'periodic'",
    Plateau: "'plateau'",
    FixedSchedule: "a schedule",
    UserPolicy: "a function",
    RecurrentPolicy: "a learned policy",
}


def load_policy_state(policy: PolicyProtocol, state: Mapping[str, Any]) -> None:
    try:
        policy.load_state(state)
    except (LookupError, TypeError, ValueError) as error:
        raise EsperError(
            f"grower state: the policy ({kind_of(policy)}) cannot go on from it ({type(error).__name__}: "
            f"{error}); attach with the policy of the run"
        ) from error


def offered_blueprints(body: Body, names: Sequence[str] | None) -> tuple[str, ...]:
    """Blueprints that policies may germinate in any of the slots.

    By default all that act on each token alone, or on images. Those that mix tokens are causal: in a model
    that is not, they would see half of each sequence, so they have to be asked for."""
    if names is None:
        images = {slot.place.topology for slot in body} == {"cnn"}
        return tuple(name for name in growable_names(body) if images or name in blueprint_names("mlp"))
    for name in names:
        if any(name not in blueprint_names(slot.place.topology) or name == "noop" for slot in body):
            raise BlueprintError(
                f"blueprint {name!r} cannot grow in these slots; {allowed(growable_names(body))}"
            )
        refusal = _refusal(body, name)
        if refusal is not None:
            raise refusal
    return tuple(names)


def _refusal(body: Body, name: str) -> BlueprintError | None:
    """Why a blueprint cannot grow in some slot: it may need other channels, or images of height 1."""
    try:
        with torch.device("meta"):
            for slot in body:
                slot.build_bank(name, 1)
    except BlueprintError as error:
        return error
    return None


def growable_names(body: Body) -> list[str]:
    """Blueprints that can be planted in every slot."""
    known = set.intersection(*(set(blueprint_names(slot.place.topology)) for slot in body)) - {"noop"}
    return sorted(name for name in known if _refusal(body, name) is None)


def epochs_needed(body: Body, *, incubates: bool) -> tuple[int, ...]:
    """By tempo: epochs from a germination to the tick that makes the seed permanent."""
    epochs = [planting_epochs(tempo, incubates=incubates) for tempo in TEMPO_EPOCHS]
    return tuple(body.pacing.epochs_to_permanence(tempo) for tempo in epochs)


def planting_epochs(tempo_epochs: int, *, incubates: bool) -> int:
    """The tempo at which a seed is planted: a graft, unless the user's loop trains incubating seeds."""
    if not incubates:
        return 0
    return tempo_epochs or TEMPO_EPOCHS[TempoAction.FAST]


def make_rules(
    body: Body, blueprints: Sequence[str], epochs: int | None, seed: int, prices: ObjectiveConfig
) -> ActionRules:
    return ActionRules(
        slot_config=body.slot_config,
        blueprints=frozenset(blueprint_index(name) for name in blueprints),
        blueprint_mask=blueprint_mask(blueprints),
        objective=prices,
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
    facts: HostFacts,
    flops_budget: bool,
    learning_rate: float,
    last_op: int,
    last_success: bool,
) -> Seen:
    """Features and masks of the network as it is now."""
    table = stack_reports([body.reports()], body.slot_config)
    inputs = stack_inputs(
        [signals],
        table,
        {name: np.array([values]) for name, values in sensors.items()},
        setting=Setting(facts, rules.blueprint_mask, rules.epochs_needed, flops_budget),
        prices=[rules.objective],
        learning_rate=[learning_rate],
        last_op=[last_op],
        last_success=[last_success],
    )
    masks = compute_action_masks(
        build_slot_states(table),
        rules.blueprint_mask,
        epochs_left=rules.max_epochs - signals.time.epoch,
        epochs_needed=rules.epochs_needed,
        max_seeds=rules.max_seeds,
    )
    return Seen(batch_obs_to_features(inputs), masks)


WAIT: list[int] = waiting(1)[0].tolist()


@dataclass(frozen=True, slots=True)
class Decided:
    """The part of a decision that is recorded."""

    op_probs: list[float]
    legal: list[bool]
    considered: Mapping[str, Any]
    """Further fields that explain it; empty if nothing is recorded."""

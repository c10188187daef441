"""The contribution family: what growth does to accuracy, and what it costs. A mode is a list of named
terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from esper.leyline import LIVE_STAGES, LifecycleOp, RewardMode, SeedStage, objective
from esper.simic.rewards.escrow import roll_windows, unproven_points
from esper.simic.rewards.shaping import potential, staying_seeds
from esper.simic.rewards.telemetry import RewardComponentsTelemetry
from esper.simic.rewards.terms import (
    Step,
    compute_rent_and_shock_inputs,
    compute_scaffold_hindsight_credit,
    rent_per_epoch,
)

Term = Callable[[Step], float]


def compute_reward(step: Step) -> RewardComponentsTelemetry:
    """One step's reward under the config's mode."""
    return RewardComponentsTelemetry({name: term(step) for name, term in MODES[step.config.mode].items()})


# -- J and Φ -------------------------------------------------------------------------------------------------


def _objective(step: Step) -> float:
    """J at the last epoch, without rollbacks: each was paid when it happened."""
    now = step.after
    if not step.inputs.is_last:
        return 0.0
    return objective(
        step.objective,
        committed_accuracy=now.committed_accuracy / 100.0,
        added_params=now.committed_params,
        host_params=now.host_params,
        wasted_seeds=now.germinated - now.fossilized,
        rollbacks=0,
    )


def _potential(step: Step, unproven: float = 0.0) -> float:
    """γΦ(s′) − Φ(s); Φ is 0 where a segment begins and where the episode ends."""
    config = step.config
    level = 0.0
    if not step.inputs.is_last:
        level = config.potential_weight * potential(
            step.after, step.objective, live_share=config.live_share, unproven=unproven
        )
    return step.change("potential", level, step.gamma)


def _escrow(step: Step) -> float:
    memory = step.memory
    memory.windows = roll_windows(memory.windows, step.after, step.config.escrow_window)
    return _potential(step, unproven_points(memory.windows))


# -- terms of the ablations ----------------------------------------------------------------------------------


def _progress(step: Step) -> float:
    """The change of the committed accuracy."""
    return step.change(
        "progress", step.config.progress_weight * step.after.committed_accuracy / 100.0, step.gamma
    )


def _contribution(step: Step) -> float:
    """The change of what live seeds contribute: what was paid for a seed is paid back when it goes, and when
    it becomes permanent, where `progress` takes over."""
    now = step.after
    points = sum(now.contributions.get(r.slot_id, 0.0) for r in staying_seeds(now))
    return step.change("contribution", step.config.contribution_weight * points / 100.0, step.gamma)


def _rent(step: Step) -> float:
    return -rent_per_epoch(step, step.config.rent.rent_weight)


def _alpha_shock(step: Step) -> float:
    rent = step.config.rent
    shock = compute_rent_and_shock_inputs(step.inputs.before, step.after, rent).shock
    return -min(rent.shock_coef * shock, rent.max_shock)


def _occupancy(step: Step) -> float:
    """Seeds beyond the free ones, permanent or not."""
    seeds = sum(
        r.stage in LIVE_STAGES or r.stage is SeedStage.FOSSILIZED for r in step.after.reports.values()
    )
    return -step.config.occupancy_cost * max(seeds - step.config.free_slots, 0) / step.inputs.max_epochs


def _intervention(step: Step) -> float:
    """What an executed action costs. Making a seed permanent is free: a price paid now, for what J pays
    later, could make holding the better choice."""
    config = step.config
    return -{
        LifecycleOp.GERMINATE: config.germinate_cost,
        LifecycleOp.PRUNE: config.prune_cost,
        LifecycleOp.SET_ALPHA_TARGET: config.set_alpha_target_cost,
    }.get(step.inputs.outcome.effective_op, 0.0)


def _fossilize(step: Step) -> float:
    """A bonus for making a seed permanent that contributes, a loss for one that does harm; nothing if it was
    refused."""
    points = step.acted(LifecycleOp.FOSSILIZE)
    return 0.0 if points is None else step.config.fossilize_bonus * math.tanh(points)


def _fossilize_in_part(step: Step) -> float:
    """The same, but a part of it will drip: the rest of the episode pays that in equal shares."""
    inputs = step.inputs
    if inputs.outcome.effective_op is not LifecycleOp.FOSSILIZE or inputs.is_last:
        return _fossilize(step)
    dripping = step.config.drip_fraction
    seed_id = step.after.reports[inputs.outcome.spec.slot_id].seed_id
    step.memory.drips[seed_id] = dripping * step.config.fossilize_bonus / (inputs.max_epochs - inputs.epoch)
    return (1.0 - dripping) * _fossilize(step)


def _drip(step: Step) -> float:
    """This epoch's shares, by what each fossil contributes now."""
    now, drips = step.after, step.memory.drips
    slots = {r.seed_id: slot for slot, r in now.reports.items() if r.stage is SeedStage.FOSSILIZED}
    step.memory.drips = {seed_id: share for seed_id, share in drips.items() if seed_id in slots}
    return sum(
        share * math.tanh(now.contributions[slots[seed_id]]) for seed_id, share in step.memory.drips.items()
    )


def _prune(step: Step) -> float:
    """A bonus for removing a seed that does harm, a loss for one that contributes; nothing for one not yet
    measured."""
    points = step.acted(LifecycleOp.PRUNE) or 0.0
    return math.tanh(-points) * (step.config.prune_penalty if points > 0.0 else step.config.prune_bonus)


def _hindsight(step: Step) -> float:
    """A seed made permanent pays for the strongest help it had from others, so that a scaffold is worth its
    waste."""
    now, epoch, memory = step.after, step.inputs.epoch, step.memory
    present = {r.seed_id: r for r in now.reports.values()}
    memory.boosts = {seed_id: boost for seed_id, boost in memory.boosts.items() if seed_id in present}
    for seed_id, report in present.items():
        # Without company nothing was measured this epoch, and the report repeats an old figure.
        measured = report.slot_id in now.contributions and len(now.contributions) > 1
        boost = report.metrics.boost_received or 0.0
        old, since = memory.boosts.get(seed_id, (0.0, epoch))
        if measured and boost > 0.0 and boost >= old * step.gamma ** (epoch - since):
            memory.boosts[seed_id] = [boost, epoch]
    points = step.acted(LifecycleOp.FOSSILIZE)
    if points is None:
        return 0.0
    boost, since = memory.boosts.pop(now.reports[step.inputs.outcome.spec.slot_id].seed_id, (0.0, epoch))
    return compute_scaffold_hindsight_credit(
        boost, points, delay=int(epoch - since), weight=step.config.hindsight_weight, gamma=step.gamma
    )


_BASIC: Mapping[str, Term] = MappingProxyType(
    {
        "progress": _progress,
        "contribution": _contribution,
        "rent": _rent,
        "alpha_shock": _alpha_shock,
        "occupancy": _occupancy,
        "intervention": _intervention,
        "fossilize": _fossilize,
        "prune": _prune,
        "hindsight": _hindsight,
    }
)

MODES: Mapping[RewardMode, Mapping[str, Term]] = MappingProxyType(
    {
        RewardMode.SPARSE: {"objective": _objective},
        RewardMode.SHAPED: {"objective": _objective, "potential": _potential},
        RewardMode.ESCROW: {"objective": _objective, "potential": _escrow},
        RewardMode.SIMPLIFIED: {
            "progress": _progress,
            "intervention": _intervention,
            "fossilize": _fossilize,
        },
        RewardMode.BASIC: _BASIC,
        # What drips comes before what begins to drip: a fossil's first share is paid in the next epoch.
        RewardMode.BASIC_PLUS: {"drip": _drip, **_BASIC, "fossilize": _fossilize_in_part},
        RewardMode.MINIMAL: {"objective": _objective, "intervention": _intervention},
    }
)

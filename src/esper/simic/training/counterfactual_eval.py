"""Validation of every coalition of blended seeds, for all envs of a group in one fused pass, and the
contribution of each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina.coalitions import Coalition, blended_slots, evaluate_coalitions
from esper.kasmina.optim import Criterion
from esper.leyline import SeedStage, stream_seed
from esper.simic.attribution import CoalitionTable, open_coalitions, required_coalitions
from esper.simic.training.batch_ops import to_host
from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState

if TYPE_CHECKING:
    from esper.runtime.data import Batch

Wanted = Mapping[int, Sequence[Coalition]]


@dataclass(slots=True)
class ValidationTally:
    """Sums over the validation set, one entry per (row, coalition), on the device."""

    rows: list[int]
    coalitions: list[Coalition]
    loss_sum: Tensor  # [entries], summed over samples
    correct: Tensor  # [entries]
    samples: int
    targets: int
    """Number of targets that `correct` counts among: samples, or tokens of text."""


def fossilized_slots(env: ParallelEnvState) -> frozenset[str]:
    return frozenset(
        slot_id for slot_id, report in env.model.reports().items() if report.stage is SeedStage.FOSSILIZED
    )


@dataclass(frozen=True, slots=True)
class Validation:
    """The validation set that all envs share, and how networks are scored on it."""

    batches: Sequence[Batch]
    criterion: Criterion
    root_seed: int

    def measure(self, groups: Sequence[EnvGroup], epoch: int) -> None:
        """Evaluate every coalition of every env of these groups."""
        tallies = [self._tally(group, plan_coalitions(group, self.root_seed, epoch)) for group in groups]
        finish_validation(groups, tallies)

    def _tally(self, group: EnvGroup, coalitions: Wanted) -> ValidationTally:
        tally = None
        for batch in self.batches:
            # A batch for one network: images have no lane axis of their own, everything else a leading one.
            x = batch.x if group.model.layout.image else batch.x[0]
            tally = process_fused_val_batch(
                group,
                x.to(group.device),
                batch.y[0].to(group.device),
                self.criterion,
                coalitions=coalitions,
                tally=tally,
            )
        assert tally is not None, "a validation set has at least one batch"
        return tally


def plan_coalitions(group: EnvGroup, root_seed: int, epoch: int) -> dict[int, list[Coalition]]:
    """The coalitions to evaluate for each env's row."""
    return {env.row: wanted_coalitions(env, root_seed, epoch) for env in group.active}


def wanted_coalitions(env: ParallelEnvState, root_seed: int, epoch: int) -> list[Coalition]:
    """The coalitions of one env: enough for every attribution of its seeds, or for decisions about those that
    are open, as its task says. Above four seeds their orders are sampled, from the env's own stream."""
    if env.counterfactuals == "open":
        return open_coalitions(blended_slots(env.model.model, env.row), fossilized_slots(env))
    seed = stream_seed(root_seed, "sampling", env.episode_idx, env.world, epoch)
    return required_coalitions(
        blended_slots(env.model.model, env.row), fossilized_slots(env), torch.Generator().manual_seed(seed)
    )


def process_fused_val_batch(
    group: EnvGroup,
    inputs: Tensor,
    targets: Tensor,
    criterion: Criterion,
    *,
    coalitions: Wanted,
    tally: ValidationTally | None = None,
) -> ValidationTally:
    """Add one validation batch `[B, …]`, which all envs share, to the tally; None starts a new one."""
    group.await_transfer()
    with group.on_stream(), torch.no_grad(), group.autocast():
        if group.stream is not None:
            inputs.record_stream(group.stream)
            targets.record_stream(group.stream)
        evaluated = evaluate_coalitions(group.model, inputs, coalitions, shared_input=True)
        repeated = targets.unsqueeze(0).expand(len(evaluated.rows), *targets.shape)
        # Weighted by its number of samples, so that a short last batch counts in proportion.
        loss_sum = criterion(evaluated.outputs, repeated) * targets.shape[0]
        correct = (evaluated.outputs.argmax(-1) == repeated).flatten(1).sum(1)
        if tally is None:
            return ValidationTally(
                evaluated.rows, evaluated.coalitions, loss_sum, correct, targets.shape[0], targets.numel()
            )
        tally.loss_sum = tally.loss_sum + loss_sum
        tally.correct = tally.correct + correct
        tally.samples += targets.shape[0]
        tally.targets += targets.numel()
        return tally


def finish_validation(groups: Sequence[EnvGroup], tallies: Sequence[ValidationTally]) -> None:
    """Synchronize each stream once and transfer once, then store every env's table and every seed's
    contribution."""
    for group in groups:
        group.synchronize()
    numbers = to_host([torch.stack([t.loss_sum, t.correct.to(t.loss_sum.dtype)]) for t in tallies])
    for group, tally, (loss_sum, correct) in zip(groups, tallies, numbers, strict=True):
        by_row: dict[int, dict[Coalition, tuple[float, float]]] = {env.row: {} for env in group.active}
        for row, coalition, loss, hits in zip(tally.rows, tally.coalitions, loss_sum, correct, strict=True):
            by_row[row][coalition] = (loss / tally.samples, 100.0 * hits / tally.targets)
        for env in group.active:
            _record(env, CoalitionTable(by_row[env.row], fossilized_slots(env)), tally.targets)


def _record(env: ParallelEnvState, table: CoalitionTable, total: int) -> None:
    env.coalitions = table
    env.val_loss, accuracy = table.full
    env.val_total = total
    env.val_correct = round(accuracy * total / 100.0)
    slots = sorted(table.slots)
    env.model.model.record_epoch(env.row, accuracy, contributions=table.contributions())
    if len(slots) < 2:
        return
    for slot in slots:
        seed = env.model.model.seed_in(slot, env.row)
        if seed is not None and table.has_pairs(slot):
            seed.update_metrics(
                interaction_sum=table.interaction_sum(slot), boost_received=table.boost_received(slot)
            )

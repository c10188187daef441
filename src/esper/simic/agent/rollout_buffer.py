"""Observations, actions and rewards of one rollout: tensors [E, T, …], written one column (all envs, one
step) at a time.

Shapes: E envs, T steps, S slots, B blueprints, H hidden size. The rows of an env form segments. A segment
starts where `reset` is set. It ends at a terminal row or at a truncated row. `bootstrap` of a truncated row
is the value of the next state, unless invalid rows follow: then the episode goes on after them. An invalid
row holds no decision and enters no loss and no statistic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper._archive import load_tensors
from esper.leyline import (
    HEAD_ENUMS,
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    NUM_HEADS,
    ActionMasks,
    EsperError,
    PolicyObservation,
    PolicyStep,
)
from esper.tamiyo.network import NUM_OPS, Hidden
from esper.tamiyo.policy import has_choice

_MASK_NAMES = tuple(f.name for f in fields(ActionMasks))
_OBS_NAMES = tuple(f.name for f in fields(PolicyObservation))
_PARTS = ("obs", "masks", "hidden")
_CHOICES = {
    name: len(enum) for name, enum in zip(HEAD_NAMES, HEAD_ENUMS, strict=True) if enum and name in _MASK_NAMES
}


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """A finished rollout, or some of its env rows."""

    obs: PolicyObservation  # [E, T, …]
    masks: ActionMasks  # [E, T, …]
    hidden: Hidden  # [E, H], before the first step
    reset: Tensor  # [E, T]
    epsilon: Tensor  # [E, T]
    actions: Tensor  # [E, T, 8]
    behaviour_head_log_probs: Tensor  # [E, T, 8]
    behaviour_log_prob: Tensor  # [E, T]
    value: Tensor  # [E, T]
    reward: Tensor  # [E, T]
    terminal: Tensor  # [E, T]
    truncated: Tensor  # [E, T]
    bootstrap: Tensor  # [E, T]
    valid: Tensor  # [E, T]
    choice: Tensor  # [E, T]

    def rows(self, envs: Tensor) -> RolloutBatch:
        return RolloutBatch.of({name: part[envs] for name, part in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as the buffer names its columns."""
        return {
            **{name: getattr(self.obs, name) for name in _OBS_NAMES},
            **{f"mask.{name}": getattr(self.masks, name) for name in _MASK_NAMES},
            "hidden.h": self.hidden[0],
            "hidden.c": self.hidden[1],
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in _PARTS},
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> RolloutBatch:
        """From tensors by name; the others are ignored."""
        return cls(
            obs=PolicyObservation(*(tensors[name] for name in _OBS_NAMES)),
            masks=ActionMasks(*(tensors[f"mask.{name}"] for name in _MASK_NAMES)),
            hidden=(tensors["hidden.h"], tensors["hidden.c"]),
            **{f.name: tensors[f.name] for f in fields(cls) if f.name not in _PARTS},
        )


class RolloutBuffer:
    """Preallocated columns and a cursor that all envs share."""

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        num_slots: int,
        *,
        num_blueprints: int,
        base_dim: int,
        slot_dim: int,
        quote_dim: int,
        hidden: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_envs, num_steps, num_slots, num_blueprints) < 1:
            raise EsperError(
                f"buffer of {num_envs} envs, {num_steps} steps, {num_slots} slots and {num_blueprints} "
                "blueprints; each must be at least 1"
            )
        self.num_envs, self.num_steps = num_envs, num_steps
        self.num_slots, self.num_blueprints = num_slots, num_blueprints
        slots = num_slots
        mask_shapes = {name: (choices,) for name, choices in _CHOICES.items()} | {
            "slot_by_op": (NUM_OPS, slots),
            "blueprint": (num_blueprints,),
        }
        floats, flags = torch.float32, torch.bool
        columns: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "base": ((base_dim,), floats),
            "slots": ((slots, slot_dim), floats),
            "quotes": ((slots, num_blueprints, quote_dim), floats),
            "blueprints": ((slots,), torch.int64),
            "exists": ((slots,), flags),
            "family": ((), torch.int64),
            **{f"mask.{name}": (mask_shapes[name], flags) for name in _MASK_NAMES},
            "actions": ((NUM_HEADS,), torch.int64),
            "behaviour_head_log_probs": ((NUM_HEADS,), floats),
            **dict.fromkeys(("behaviour_log_prob", "value", "reward", "bootstrap", "epsilon"), ((), floats)),
            **dict.fromkeys(("terminal", "truncated", "reset", "valid", "choice"), ((), flags)),
        }
        self.columns = {
            name: torch.zeros((num_envs, num_steps, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in columns.items()
        }
        self.hidden = (
            torch.zeros(num_envs, hidden, device=device),
            torch.zeros(num_envs, hidden, device=device),
        )
        self.length = 0
        self._wait = torch.tensor(IRRELEVANT_VALUES, device=device)

    def begin(self, hidden: Hidden) -> None:
        """Start a new rollout. `hidden` is the input of the first step, before its reset is applied."""
        self.length = 0
        for own, given in zip(self.hidden, hidden, strict=True):
            own.copy_(given)

    def add(
        self,
        obs: PolicyObservation,
        masks: ActionMasks,
        step: PolicyStep,
        *,
        reward: Tensor,
        terminal: Tensor,
        reset: Tensor,
        epsilon: float,
        valid: Tensor | None = None,
    ) -> None:
        """Write one column. `reset` [E]: the hidden state was zeroed before this step. `valid` [E] is False
        for an env that was rolled back in this epoch, and for one whose episode is over: WAIT is recorded,
        the reward counts in totals only, and the next valid step must be a reset."""
        t = self.length
        if t == self.num_steps:
            raise EsperError(f"the rollout is full: {self.num_steps} steps; call update before adding more")
        valid = torch.ones_like(terminal) if valid is None else valid
        if t:
            unreset = valid & ~self.columns["valid"][:, t - 1] & ~reset
            if unreset.any():
                env = unreset.nonzero()[0, 0].item()
                raise EsperError(f"env {env}: step {t} follows an invalid step and must be a reset")
        parts = {name: getattr(obs, name) for name in _OBS_NAMES} | {
            f"mask.{name}": getattr(masks, name) for name in _MASK_NAMES
        }
        parts |= {
            "actions": torch.where(valid[:, None], step.actions, self._wait),
            "behaviour_head_log_probs": step.head_log_probs,
            "behaviour_log_prob": step.log_prob,
            "value": step.value,
            "reward": reward,
            "bootstrap": torch.zeros_like(reward),
            "terminal": terminal,
            "reset": reset,
            "truncated": torch.zeros_like(terminal),
            "valid": valid,
            "choice": valid & has_choice(masks),
            "epsilon": torch.full_like(reward, epsilon),
        }
        for name, part in parts.items():
            if part.is_floating_point() and name != "reward":
                # A row without a decision may come from a diverged network, and 0 · NaN is NaN.
                part = part.masked_fill(~valid.view(-1, *[1] * (part.dim() - 1)), 0.0)
            self.columns[name][:, t] = part
        self.length = t + 1

    def add_penalty(self, env: int, amount: float) -> bool:
        """Add `amount` (negative) to the env's last decision, which ends its segment: the memory is lost, but
        the episode goes on from the restored network.

        Returns False and changes nothing if this episode has no decision in this rollout; the penalty is then
        part of the outcome only."""
        decisions = self.columns["valid"][env, : self.length].nonzero()
        if not len(decisions):
            return False
        t = int(decisions[-1, 0])
        if t + 1 == self.length:
            belongs_to_earlier_episode = self.columns["terminal"][env, t]
        else:
            # After a rollback the next row is invalid without a reset; a new episode begins with a reset.
            belongs_to_earlier_episode = self.columns["reset"][env, t + 1]
        if belongs_to_earlier_episode:
            return False
        self.columns["reward"][env, t] += amount
        self.columns["truncated"][env, t] = True
        return True

    def truncate(self, targets: Sequence[tuple[int, int]], bootstrap: Tensor) -> None:
        """Mark (env, step) rows as truncated; `bootstrap` holds the value of the state after each."""
        if len(targets) != len(bootstrap):
            raise EsperError(f"{len(targets)} truncated rows but {len(bootstrap)} bootstrap values")
        if targets:
            rows = tuple(torch.tensor(targets).T)
            if self.columns["terminal"][rows].any():
                raise EsperError(f"rows {targets} (env, step): a terminal row cannot be truncated")
            self.columns["truncated"][rows] = True
            self.columns["bootstrap"][rows] = bootstrap.to(self.columns["bootstrap"])

    def total_rewards(self) -> Tensor:
        """[E]: sum of all rewards so far, including penalties and invalid rows."""
        return self.columns["reward"][:, : self.length].sum(dim=1)

    def finish(self) -> RolloutBatch:
        """The rollout so far. Every segment must be closed and every number finite."""
        if not self.length:
            raise EsperError("the rollout is empty; record at least one step before the update")
        data = {name: column[:, : self.length] for name, column in self.columns.items()}
        for name in ("reward", "value", "bootstrap"):
            broken = ~data[name].isfinite()
            if broken.any():
                env, t = broken.nonzero()[0].tolist()
                raise EsperError(
                    f"env {env}, step {t}: {name} is {data[name][env, t].item()}, must be finite"
                )
        ends = torch.ones_like(data["reset"])
        ends[:, :-1] = data["reset"][:, 1:] | ~data["valid"][:, 1:]
        unclosed = ends & data["valid"] & ~data["terminal"] & ~data["truncated"]
        if unclosed.any():
            env, t = unclosed.nonzero()[0].tolist()
            raise EsperError(
                f"env {env}: the segment that ends at step {t} is neither terminal nor truncated"
            )
        return RolloutBatch.of({**data, "hidden.h": self.hidden[0], "hidden.c": self.hidden[1]})

    def state_tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint within a rollout; empty between rollouts."""
        if not self.length:
            return {}
        return {**self.columns, "hidden.h": self.hidden[0], "hidden.c": self.hidden[1]}

    def load_state_tensors(self, length: int, stored: Mapping[str, Tensor]) -> None:
        self.length = length
        load_tensors("buffer", self.state_tensors(), stored)

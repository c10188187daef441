"""Rewards of a run: the registry of reward modes, the two families, and the engine that applies one of them
with one γ and remembers what each env needs between steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from esper._files import decode
from esper.leyline import (
    EsperError,
    LossRewardConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFamily,
    RewardMode,
    StructureError,
    allowed,
    check_number,
)
from esper.leyline.errors import unknown_name
from esper.simic.contracts import RewardInputs
from esper.simic.rewards.terms import LOSS_DISCOUNT, LOSS_TERMS, TERMS, EnvMemory, Step, Term

OwnTerm = Callable[[RewardInputs], float]
"""A user's term: the amount that one step pays, in units of J."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class RewardComponentsTelemetry(dict[str, float]):
    """Named amounts in the order of their mode's terms. The reward is their sum by construction."""

    @property
    def total(self) -> float:
        return sum(self.values())


def _mode(*names: str) -> dict[str, Term]:
    return {name: TERMS[name] for name in names}


_BASIC = _mode(
    "progress",
    "contribution",
    "rent",
    "alpha_shock",
    "occupancy",
    "intervention",
    "fossilize",
    "prune",
    "hindsight",
)
MODES: dict[str, Mapping[str, Term]] = {
    RewardMode.SPARSE: _mode("objective"),
    RewardMode.SHAPED: _mode("objective", "potential"),
    RewardMode.ESCROW: {"objective": TERMS["objective"], "potential": TERMS["escrow"]},
    RewardMode.SIMPLIFIED: _mode("progress", "intervention", "fossilize"),
    RewardMode.BASIC: _BASIC,
    # `drip` comes before the term that defers: a fossil's first share is paid in the next epoch.
    RewardMode.BASIC_PLUS: {"drip": TERMS["drip"], **_BASIC, "fossilize": TERMS["fossilize_in_part"]},
    RewardMode.MINIMAL: _mode("objective", "intervention"),
}
"""Every reward mode by name: its terms by the name of their component."""


def register_reward(name: str, terms: Sequence[str | OwnTerm]) -> None:
    """Make a reward mode available by name: `reward.mode` accepts it from then on.

    Each term is the name of a built-in term (docs/rewards.md lists them) or a function of `RewardInputs` that
    returns a finite number; its component is named after the function. The reward is the sum of the terms."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise EsperError(f"reward name {name!r}; allowed: lower-case letters, digits and _")
    if name in MODES:
        raise EsperError(f"reward {name!r} is already registered; choose another name")
    if isinstance(terms, str) or not isinstance(terms, Sequence) or not terms:
        raise EsperError(f"reward {name!r}: terms are {terms!r}, must be a list of one or more terms")
    chosen: dict[str, Term] = {}
    for term in terms:
        key, function = _resolve(name, term)
        if key in chosen:
            raise EsperError(f"reward {name!r}: two terms are called {key!r}")
        chosen[key] = function
    MODES[name] = chosen


def _resolve(reward: str, term: object) -> tuple[str, Term]:
    """A term by name, or a user's function with its own name."""
    if isinstance(term, str):
        if term not in TERMS:
            raise unknown_name(f"reward {reward!r}: term", term, TERMS)
        return term, TERMS[term]
    key = getattr(term, "__name__", "")
    if not callable(term) or not _NAME.fullmatch(key):
        raise EsperError(
            f"reward {reward!r}: term {term!r} must be the name of a built-in term, or a function whose name "
            "consists of lower-case letters, digits and _"
        )
    if key in TERMS or key == "rollback":
        raise EsperError(f"reward {reward!r}: a built-in term is called {key!r}; rename the function")
    return key, partial(_own_amount, reward, key, term)


def _own_amount(reward: str, key: str, function: OwnTerm, step: Step) -> float:
    amount = function(step.inputs)
    # numpy's and torch's scalars become floats here; anything else is refused.
    try:
        value = float(amount)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        inputs = step.inputs
        raise EsperError(
            f"reward {reward!r}: term {key!r} returned {amount!r} for env {inputs.env_idx} in epoch "
            f"{inputs.epoch}, must be a finite number"
        )
    return value


def check_reward_mode(name: str, field: str = "reward.mode") -> None:
    """Raise unless this reward mode is built in or registered. `field` is the setting that names it."""
    if name not in MODES:
        raise unknown_name(f"config: {field}", name, MODES)


def prices_size(mode: str) -> bool:
    """Whether the mode charges the task's price of size: only terms that follow J do."""
    return not {"objective", "potential", "escrow"}.isdisjoint(MODES[mode])


def compute_reward(step: Step) -> RewardComponentsTelemetry:
    """One step's reward under the config's mode."""
    return RewardComponentsTelemetry({name: term(step) for name, term in MODES[step.config.mode].items()})


def compute_loss_reward(step: Step) -> RewardComponentsTelemetry:
    """One step's reward in the loss family, for tasks where accuracy says little."""
    return RewardComponentsTelemetry({name: term(step) for name, term in LOSS_TERMS.items()})


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a checkpoint stores of a `RewardEngine`."""

    family: str
    mode: str
    envs: list[EnvMemory]


class RewardEngine:
    """Computes the reward of each step. `ActionRules` takes the engine as `reward` and its `rollback` as
    `rollback_reward`. `gamma` is the agent's."""

    def __init__(
        self,
        config: RewardConfig,
        objective: ObjectiveConfig,
        *,
        gamma: float,
        num_envs: int,
        first_env: int = 0,
        family: RewardFamily = RewardFamily.CONTRIBUTION,
        loss: LossRewardConfig | None = None,
    ) -> None:
        """For the envs `first_env` … `first_env + num_envs − 1`."""
        if not isinstance(family, RewardFamily):
            raise EsperError(f"rewards: family is {family!r}; {allowed(RewardFamily)}")
        check_reward_mode(config.mode)
        if not 0.0 < gamma <= 1.0:
            raise EsperError(f"rewards: gamma is {gamma!r}, must lie in (0, 1]")
        check_number("rewards", "num_envs", num_envs, low=1, integer=True)
        self.config, self.objective, self.gamma, self.family = config, objective, gamma, family
        self.loss = loss or LossRewardConfig()
        self._compute = compute_reward if family is RewardFamily.CONTRIBUTION else compute_loss_reward
        self.envs = range(first_env, first_env + num_envs)
        self._memories = {env_idx: EnvMemory() for env_idx in self.envs}

    def begin_episode(self, env_idx: int) -> None:
        """Forget the env's last episode."""
        self._memory(env_idx)
        self._memories[env_idx] = EnvMemory()

    def begin_round(self) -> None:
        """Forget the last episode of every env."""
        for env_idx in self.envs:
            self.begin_episode(env_idx)

    def __call__(self, inputs: RewardInputs) -> RewardComponentsTelemetry:
        """The reward of one step."""
        memory = self._memory(inputs.env_idx)
        where = f"env {inputs.env_idx}, epoch {inputs.epoch}"
        if not memory.epoch < inputs.epoch <= inputs.max_epochs:
            raise EsperError(
                f"{where}: expected an epoch from {memory.epoch + 1} to {inputs.max_epochs}; "
                "call begin_episode before a new episode"
            )
        if memory.open is (inputs.before is None):
            raise EsperError(
                f"{where}: a segment {'begins' if memory.open else 'continues'} here, which does not fit the "
                "steps so far; call rollback where one happens and begin_episode before a new episode"
            )
        memory.epoch, memory.open = inputs.epoch, True
        return self._compute(Step(inputs, memory, self.config, self.loss, self.objective, self.gamma))

    def rollback(self, env_idx: int) -> RewardComponentsTelemetry:
        """Amounts that a rollback adds to the env's last stored step, which becomes the end of its segment:
        the price of the rollback, and the change of every paid level back to 0."""
        memory = self._memory(env_idx)
        discount = self.gamma if self.family is RewardFamily.CONTRIBUTION else LOSS_DISCOUNT
        back = {name: -discount * level for name, level in memory.levels.items()}
        # Fossils survive a rollback, and so do their drips; `drip` drops the others.
        self._memories[env_idx] = EnvMemory(epoch=memory.epoch, drips=memory.drips)
        return RewardComponentsTelemetry(rollback=-self.objective.rollback_price, **back)

    def state(self) -> dict[str, Any]:
        """Family, mode and each env's memory as plain values."""
        return asdict(EngineState(str(self.family), self.config.mode, list(self._memories.values())))

    def load_state(self, state: object) -> None:
        """The inverse of `state`, decoded strictly."""
        stored = decode(EngineState, state, "rewards", complete=True)
        for name, ours in (("family", str(self.family)), ("mode", self.config.mode)):
            theirs = getattr(stored, name)
            if theirs != ours:
                raise StructureError(f"rewards: {name} is {theirs!r} in the state and {ours!r} here")
        if len(stored.envs) != len(self._memories):
            raise StructureError(f"rewards: state of {len(stored.envs)} envs, here are {len(self._memories)}")
        self._memories = dict(zip(self.envs, stored.envs, strict=True))

    def _memory(self, env_idx: int) -> EnvMemory:
        if env_idx not in self._memories:
            raise EsperError(f"rewards: env {env_idx} is unknown; allowed: {self.envs[0]} to {self.envs[-1]}")
        return self._memories[env_idx]

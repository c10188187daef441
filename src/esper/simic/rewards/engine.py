"""The reward of a run: one family and mode, one γ, and what each env remembers between steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from esper.leyline import (
    EsperError,
    LossRewardConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFamily,
    StructureError,
    allowed,
    check_number,
)
from esper.simic.contracts import RewardInputs
from esper.simic.rewards.contribution import compute_reward
from esper.simic.rewards.loss import LEVEL_DISCOUNT, compute_loss_reward
from esper.simic.rewards.telemetry import RewardComponentsTelemetry
from esper.simic.rewards.terms import EnvMemory, Step


class RewardEngine:
    """Plug it into `ActionRules`: itself as `reward`, its `rollback` as `rollback_reward`. γ is the
    agent's."""

    def __init__(
        self,
        config: RewardConfig,
        objective: ObjectiveConfig,
        *,
        gamma: float,
        num_envs: int,
        family: RewardFamily = RewardFamily.CONTRIBUTION,
        loss: LossRewardConfig | None = None,
    ) -> None:
        if not isinstance(family, RewardFamily):
            raise EsperError(f"rewards: family is {family!r}; {allowed(RewardFamily)}")
        if not 0.0 < gamma <= 1.0:
            raise EsperError(f"rewards: gamma is {gamma!r}, must lie in (0, 1]")
        check_number("rewards", "num_envs", num_envs, low=1, integer=True)
        self.config, self.objective, self.gamma, self.family = config, objective, gamma, family
        self.loss = loss or LossRewardConfig()
        self._compute = compute_reward if family is RewardFamily.CONTRIBUTION else compute_loss_reward
        self._memories = [EnvMemory() for _ in range(num_envs)]

    def begin_episode(self, env_idx: int) -> None:
        """Forget the env's last episode."""
        self._memory(env_idx)
        self._memories[env_idx] = EnvMemory()

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
        """What a rollback adds to the env's last stored row, which it makes the end of its segment: its
        price, and back to 0 every level whose changes were paid."""
        memory = self._memory(env_idx)
        discount = self.gamma if self.family is RewardFamily.CONTRIBUTION else LEVEL_DISCOUNT
        back = {name: -discount * level for name, level in memory.levels.items()}
        # Fossils outlive a rollback, and so do their drips; those that do not are dropped when they are
        # missed.
        self._memories[env_idx] = EnvMemory(epoch=memory.epoch, drips=memory.drips)
        return RewardComponentsTelemetry(rollback=-self.objective.rollback_price, **back)

    def state(self) -> dict[str, Any]:
        """Plain values: the memories, and whose they are."""
        return {
            "family": self.family.value,
            "mode": self.config.mode.value,
            "envs": [asdict(m) for m in self._memories],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`, strict."""
        own = self.state()
        if not isinstance(state, dict) or state.keys() != own.keys():
            raise StructureError(f"rewards: state is {state!r}, must have the fields {', '.join(own)}")
        for name in ("family", "mode"):
            if state[name] != own[name]:
                raise StructureError(
                    f"rewards: {name} is {state[name]!r} in the state and {own[name]!r} here"
                )
        if len(state["envs"]) != len(self._memories):
            raise StructureError(
                f"rewards: state of {len(state['envs'])} envs, here are {len(self._memories)}"
            )
        self._memories = [EnvMemory.from_state(memory) for memory in state["envs"]]

    def _memory(self, env_idx: int) -> EnvMemory:
        if not 0 <= env_idx < len(self._memories):
            raise EsperError(f"rewards: env {env_idx} is unknown; allowed: 0 to {len(self._memories) - 1}")
        return self._memories[env_idx]

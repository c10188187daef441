"""The PPO agent: acts for a batch of envs, trains on its stored rollout, and can be saved and restored
exactly.

Shapes: E envs, T steps, S slots. Given the same random seed, weights and rollouts, every update is
bit-identical: the minibatch order comes from a stream named by the number of the update."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from esper._archive import read_archive, require_equal, write_archive
from esper._files import check_version, decode
from esper.leyline import (
    HEAD_NAMES,
    ActionMasks,
    EsperError,
    PolicyObservation,
    PolicyStep,
    StructureError,
    stream_seed,
)
from esper.simic.agent.adam_state import adam_tensors, load_adam
from esper.simic.agent.normalization import MeanStdState, PopArt
from esper.simic.agent.ppo_metrics import PPOUpdateMetrics
from esper.simic.agent.ppo_update import (
    LoopResult,
    NonFiniteUpdateError,
    PPOConfig,
    explained_by_family,
    fit_critic,
    gae,
    masked_mean,
    normalize_by_family,
    optimize,
    scale_by_family,
    subtract_twin_baseline,
)
from esper.simic.agent.rollout_buffer import RolloutBatch, RolloutBuffer
from esper.tamiyo.network import Hidden
from esper.tamiyo.policy import RecurrentPolicy

__all__ = ["LESSON_SEQUENCES", "NonFiniteUpdateError", "PPOAgent", "PPOConfig"]

KIND = "agent"
VERSION = 3
"""Of the agent's state. Version 1 has one statistic of returns, version 2 no optimizer of the value head."""
LESSON_SEQUENCES = 8
"""Number of sequences in each minibatch of `teach`."""
MAX_SKIPPED_STEPS = 3
"""Number of non-finite steps that ends the training; an update without one resets the count."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHeader:
    """The JSON part of an agent's state; numbers of envs, steps, slots and blueprints are those of its
    rollout buffer."""

    kind: Literal["agent"]
    version: int
    schema: dict[str, Any]
    config: PPOConfig
    seed: int
    num_envs: Size
    num_steps: Size
    num_slots: Size
    num_blueprints: Size
    twins: Size
    buffer_length: Count
    updates: Count
    imitations: Count
    skipped_steps: Count
    popart: list[MeanStdState]


class PPOAgent:
    """One policy, its optimizer, its rollout buffer and its schedules.

    A rollout: `begin_rollout`, then for each step `act` and `record`, `buffer.add_penalty` and
    `buffer.truncate` where due, then `update`."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        config: PPOConfig,
        *,
        num_envs: int,
        num_steps: int,
        num_slots: int,
        num_blueprints: int,
        seed: int,
        twins: int = 1,
    ) -> None:
        """`twins`: number of consecutive envs that share initial weights, data and condition, so that only
        their actions differ."""
        if num_envs % twins:
            raise EsperError(f"PPOAgent: {num_envs} envs are no multiple of {twins} twins")
        self.policy, self.config, self.seed, self.twins = policy, config, seed, twins
        network = policy.network
        network.bf16 = config.bf16
        policy.explore_parameters = not config.explore_ops_only
        sizes = network.architecture
        self.buffer = RolloutBuffer(
            num_envs,
            num_steps,
            num_slots,
            num_blueprints=num_blueprints,
            base_dim=sizes["base_dim"],
            slot_dim=sizes["slot_dim"],
            quote_dim=sizes["quote_dim"],
            hidden=sizes["hidden"],
            device=policy.device,
        )
        self.optimizer = torch.optim.Adam(network.parameters(), lr=config.lr, eps=1e-5, fused=True)
        critic = [*network.value_tower.parameters(), *network.value_out.parameters()]
        self.critic_optimizer = torch.optim.Adam(critic, lr=config.critic_lr, eps=1e-5, fused=True)
        """Idle unless the config gives the value head steps of its own."""
        self.popart = PopArt(
            network.value_out, network.value_mean, network.value_scale, decay=config.popart_decay
        )
        self.updates = 0
        self.imitations = 0
        """Updates that imitated; the schedules wait for those that do not."""
        self.skipped_steps = 0

    @property
    def epsilon(self) -> float:
        return self.config.annealed("epsilon", self.updates - self.imitations)

    @property
    def entropy_coef(self) -> float:
        return self.config.annealed("entropy_coef", self.updates - self.imitations)

    @property
    def learning_rate(self) -> float:
        return self.config.annealed("lr", self.updates - self.imitations)

    def initial_hidden(self) -> Hidden:
        return self.policy.initial_hidden(self.buffer.num_envs)

    def begin_rollout(self, hidden: Hidden) -> None:
        """`hidden`: the state that the first `act` of the rollout receives."""
        self.buffer.begin(hidden)

    def act(
        self,
        obs: PolicyObservation,
        hidden: Hidden | None,
        masks: ActionMasks,
        *,
        uniforms: Tensor | None = None,
        deterministic: bool = False,
        reset: Tensor | None = None,
        given: Tensor | None = None,
    ) -> PolicyStep:
        """As RecurrentPolicy.act, at the exploration rate of the schedule."""
        return self.policy.act(
            obs,
            hidden,
            masks,
            uniforms=uniforms,
            deterministic=deterministic,
            reset=reset,
            epsilon=self.epsilon,
            given=given,
        )

    def record(
        self,
        obs: PolicyObservation,
        masks: ActionMasks,
        step: PolicyStep,
        *,
        reward: Tensor,
        terminal: Tensor,
        reset: Tensor,
        valid: Tensor | None = None,
    ) -> None:
        """Store a sampled step with its reward; see RolloutBuffer.add."""
        self.buffer.add(
            obs, masks, step, reward=reward, terminal=terminal, reset=reset, epsilon=self.epsilon, valid=valid
        )

    def update(self, *, imitate: bool = False) -> PPOUpdateMetrics:
        """Train on the stored rollout and empty the buffer. With `imitate` the actions are imitated and the
        rewards ignored."""
        batch = self.buffer.finish()
        advantages, returns = gae(batch, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda)
        advantages = subtract_twin_baseline(advantages, batch.valid, self.twins, fitted=self.config.fit_twins)
        weights = torch.ones_like(returns) if imitate else None
        metrics = self._train(batch, advantages, returns, self.config, imitated=weights)
        self.buffer.length = 0
        return metrics

    def teach(self, batch: RolloutBatch, weights: Tensor, *, lr_share: float = 1.0) -> PPOUpdateMetrics:
        """Imitate the actions of sequences [N, T], in one pass and with a weight for each action [N, T]. They
        may be on another device than the policy. `lr_share` is that of the learning rate of imitation."""
        device = self.policy.device
        batch = RolloutBatch.of({name: part.to(device) for name, part in batch.tensors().items()})
        weights = weights.to(device)
        advantages, returns = gae(batch, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda)
        config = replace(
            self.config,
            epochs=1,
            minibatches=-(-len(weights) // LESSON_SEQUENCES),
            imitation_lr=lr_share * (self.config.imitation_lr or self.learning_rate),
        )
        metrics = self._train(batch, advantages, returns, config, imitated=weights)
        return replace(metrics, log_prob_drift=0.0)  # nobody acted as the lesson says

    def _train(
        self,
        batch: RolloutBatch,
        advantages: Tensor,
        returns: Tensor,
        config: PPOConfig,
        *,
        imitated: Tensor | None,
    ) -> PPOUpdateMetrics:
        """One update. `imitated`: weights of the actions to imitate; None: PPO."""
        family, imitate = batch.obs.family, imitated is not None
        self.popart.update(returns[batch.valid], family[batch.valid])
        normalized_returns = self.popart.normalize(returns, family)
        normalized_advantages, advantage_std = self._normalize(advantages, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = config.imitation_lr if imitate and config.imitation_lr else self.learning_rate
        loop = optimize(
            self.policy,
            self.optimizer,
            batch,
            advantages=normalized_advantages if imitated is None else imitated,
            normalized_returns=normalized_returns,
            config=config,
            entropy_coef=self.entropy_coef,
            seed=stream_seed(self.seed, "policy", self.updates, counter=1),
            imitate=imitate,
            skip_budget=MAX_SKIPPED_STEPS - self.skipped_steps,
        )
        self.skipped_steps = self.skipped_steps + loop.skipped_steps if loop.skipped_steps else 0
        metrics = self._metrics(batch, loop, returns, advantage_std)
        if config.critic_steps:
            loss = fit_critic(
                self.policy,
                self.critic_optimizer,
                batch,
                normalized_returns=normalized_returns,
                config=config,
            )
            metrics = replace(metrics, value_loss=loss)
        self.updates += 1
        self.imitations += imitate
        return metrics

    def _normalize(self, advantages: Tensor, batch: RolloutBatch) -> tuple[Tensor, float]:
        """Advantages on the scale of the config, and their own deviation."""
        scales, family = self.policy.network.value_scale, batch.obs.family
        if self.config.advantage_scale == "returns":
            return scale_by_family(advantages, batch.choice, family, scales=scales)
        floors = [self.config.advantage_floor * scale for scale in scales.tolist()]
        return normalize_by_family(advantages, batch.choice, family, floors=floors)

    def _metrics(
        self, batch: RolloutBatch, loop: LoopResult, returns: Tensor, advantage_std: float
    ) -> PPOUpdateMetrics:
        valid, initial = batch.valid, loop.initial
        # Without a kept step the policy is the one from before, which `initial` describes.
        seen = loop.measured if loop.optimizer_steps else {name: [value] for name, value in initial.items()}
        return_mean = masked_mean(returns, valid)
        return PPOUpdateMetrics(
            update=self.updates + 1,
            steps=int(valid.sum()),
            choice_fraction=masked_mean(batch.choice.float(), valid).item(),
            reward_mean=masked_mean(batch.reward, valid).item(),
            return_mean=return_mean.item(),
            return_std=masked_mean((returns - return_mean) ** 2, valid).sqrt().item(),
            value_mean=masked_mean(batch.value, valid).item(),
            explained_variance=explained_by_family(batch.value, returns, valid, batch.obs.family),
            advantage_std=advantage_std,
            **{
                name: fmean(seen[name])
                for name in (
                    "policy_loss",
                    "value_loss",
                    "entropy",
                    "approx_kl",
                    "clip_fraction",
                    "grad_norm",
                )
            },
            approx_kl_max=max(*seen["approx_kl"], loop.stop_kl or 0.0),
            ratio_max=max(seen["ratio_max"]),
            ratio_min=min(seen["ratio_min"]),
            log_prob_drift=initial["log_prob_drift"],
            grad_norm_max=max(seen["grad_norm"]),
            optimizer_steps=loop.optimizer_steps,
            skipped_steps=loop.skipped_steps,
            kl_stops=int(loop.stop_kl is not None),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            entropy_coef=self.entropy_coef,
            epsilon=self.epsilon,
            value_scale=self.policy.network.value_scale.mean().item(),
            head_entropy=tuple(fmean(seen[f"head_entropy.{name}"]) for name in HEAD_NAMES),
            head_kl=tuple(fmean(seen[f"head_kl.{name}"]) for name in HEAD_NAMES),
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The whole agent as tensors and JSON, for a file of its own or as part of a checkpoint."""
        tensors = {f"network.{name}": t for name, t in self.policy.network.state_dict().items()}
        tensors |= {
            f"adam.{name}": t for name, t in adam_tensors(self.optimizer, self.policy.network).items()
        }
        critic = adam_tensors(self.critic_optimizer, self.policy.network)
        tensors |= {f"critic.{name}": t for name, t in critic.items()}
        tensors |= {f"buffer.{name}": t for name, t in self.buffer.state_tensors().items()}
        return tensors, {
            "kind": KIND,
            "version": VERSION,
            "schema": self.policy.schema(),
            "config": asdict(self.config),
            "seed": self.seed,
            "num_envs": self.buffer.num_envs,
            "num_steps": self.buffer.num_steps,
            "num_slots": self.buffer.num_slots,
            "num_blueprints": self.buffer.num_blueprints,
            "twins": self.twins,
            "buffer_length": self.buffer.length,
            "updates": self.updates,
            "imitations": self.imitations,
            "skipped_steps": self.skipped_steps,
            "popart": [statistics.state_dict() for statistics in self.popart.statistics],
        }

    @classmethod
    def from_state(
        cls,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        feature_schema: str,
        config: PPOConfig | None = None,
        device: str = "cpu",
        origin: object = "agent state",
    ) -> PPOAgent:
        """Rebuild the agent from its `state`; `config`, if given, must equal the stored one."""
        check_version(meta, VERSION, origin)
        header = decode(AgentHeader, meta, origin, complete=True)
        if config is not None:
            for name, value in asdict(config).items():
                require_equal(origin, f"config.{name}", getattr(header.config, name), value)
        parts: dict[str, dict[str, Tensor]] = {"network": {}, "adam": {}, "critic": {}, "buffer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part not in parts:
                raise StructureError(
                    f"{origin}: tensor {name!r} belongs to no part of an agent ({', '.join(parts)})"
                )
            parts[part][rest] = tensor
        policy = RecurrentPolicy.rebuild(
            parts["network"], header.schema, origin=origin, feature_schema=feature_schema, device=device
        )
        agent = cls(
            policy,
            header.config,
            num_envs=header.num_envs,
            num_steps=header.num_steps,
            num_slots=header.num_slots,
            num_blueprints=header.num_blueprints,
            seed=header.seed,
            twins=header.twins,
        )
        agent.updates, agent.imitations = header.updates, header.imitations
        agent.skipped_steps = header.skipped_steps
        if len(header.popart) != len(policy.families):
            raise StructureError(
                f"{origin}: popart has {len(header.popart)} statistics, must have {len(policy.families)}, "
                "one for each family"
            )
        for statistics, stored in zip(agent.popart.statistics, header.popart, strict=True):
            statistics.load_state_dict(asdict(stored))
        load_adam(origin, agent.optimizer, policy.network, parts["adam"])
        load_adam(origin, agent.critic_optimizer, policy.network, parts["critic"])
        agent.buffer.load_state_tensors(header.buffer_length, parts["buffer"])
        return agent

    def save(self, path: str | os.PathLike[str]) -> None:
        write_archive(path, *self.state())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        feature_schema: str,
        config: PPOConfig | None = None,
        device: str = "cpu",
    ) -> PPOAgent:
        """Restore a saved agent. A file that is damaged, of another kind or of other settings is an error
        that names the difference."""
        tensors, meta = read_archive(path, kind=KIND)
        return cls.from_state(
            tensors, meta, feature_schema=feature_schema, config=config, device=device, origin=path
        )

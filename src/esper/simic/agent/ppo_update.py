"""Proximal policy optimisation (Schulman et al. 2017), recurrent and masked. Pure functions, then the loop
over minibatches.

Shapes: E envs, T steps. `where` marks the rows that count; sums over rows are divided by their number, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from esper.leyline import HEAD_NAMES, EsperError
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.policy import PolicyEvaluation, RecurrentPolicy


class NonFiniteUpdateError(EsperError):
    """Loss or gradient kept coming out as NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Every constant of the agent. Annealed values go linearly from their start to `…_end` over
    `anneal_updates`."""

    gamma: float = 1.0
    """Discount. Episodes are short and end at a known horizon, so the default discounts nothing."""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation."""
    epochs: int = 6
    """K: passes over each rollout."""
    minibatches: int = 4
    """Groups of env rows per pass."""
    clip: float = 0.2
    """The ratio's clip range."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = 0.05
    """An update ends early above 1.5 times this KL; None never stops."""
    lr: float = 1e-3
    """Adam's step size."""
    lr_end: float | None = None
    """Step size when annealing is over; none: the same."""
    imitation_lr: float | None = None
    """Step size while imitating; none: that of the beginning."""
    entropy_coef: float = 0.02
    """Weight of the joint action's entropy."""
    entropy_coef_end: float = 0.0
    """Entropy weight when annealing is over."""
    epsilon: float = 0.1
    """Share of uniform exploration mixed into every head."""
    epsilon_end: float = 0.0
    """Exploration when annealing is over."""
    anneal_updates: int = 0
    """Updates until lr, entropy weight and exploration reach their ends; 0 keeps the starts."""
    advantage_floor: float = 0.1
    """Least divisor of advantages, as a share of the spread of returns."""
    popart_decay: float = 0.95
    """How much the statistics of returns keep from one update to the next."""
    bf16: bool = False
    """Run the network in bfloat16, while acting and in the update alike."""

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            **dict.fromkeys(("gamma", "gae_lambda", "epsilon", "epsilon_end", "lr_end"), (0.0, 1.0)),
            **dict.fromkeys(
                ("value_coef", "entropy_coef", "entropy_coef_end", "anneal_updates"), (0.0, math.inf)
            ),
            **dict.fromkeys(("epochs", "minibatches"), (1, math.inf)),
            **dict.fromkeys(("lr", "imitation_lr", "advantage_floor"), (1e-9, 1.0)),
            **dict.fromkeys(("clip", "max_grad_norm", "target_kl"), (1e-9, math.inf)),
            "popart_decay": (1e-3, 1.0),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise EsperError(f"PPOConfig: {name} is {value}, must lie in [{low}, {high}]")

    def annealed(self, name: Literal["lr", "entropy_coef", "epsilon"], updates: int) -> float:
        """The scheduled value after so many updates."""
        start, end = getattr(self, name), getattr(self, f"{name}_end")
        if self.anneal_updates == 0 or end is None:
            return start
        return start + (end - start) * min(updates / self.anneal_updates, 1.0)


def masked_mean(x: Tensor, where: Tensor) -> Tensor:
    # where, not a product: a row that does not count may hold anything.
    return torch.where(where, x, 0.0).sum() / where.sum().clamp(min=1)


def gae(batch: RolloutBatch, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [E, T] (Schulman et al. 2016), cut at every end of a segment."""
    advantages = torch.zeros_like(batch.reward)
    last_advantage = torch.zeros_like(batch.reward[:, 0])
    next_value = torch.zeros_like(last_advantage)
    next_starts_anew = torch.ones_like(batch.reset[:, 0])
    for t in reversed(range(batch.reward.shape[1])):
        nextnonterminal = ~(batch.terminal[:, t] | batch.truncated[:, t] | next_starts_anew)
        following = torch.where(
            nextnonterminal, next_value, torch.where(batch.truncated[:, t], batch.bootstrap[:, t], 0.0)
        )
        delta = batch.reward[:, t] + gamma * following - batch.value[:, t]
        last_advantage = delta + gamma * gae_lambda * torch.where(nextnonterminal, last_advantage, 0.0)
        advantages[:, t] = last_advantage
        next_value, next_starts_anew = batch.value[:, t], batch.reset[:, t] | ~batch.valid[:, t]
    return advantages, advantages + batch.value


def without_luck(advantages: Tensor, where: Tensor, twins: int) -> Tensor:
    """Each advantage less the mean of its twins' at the same step: what befell all of them is not what one of
    them did.

    A twin that did not decide there does not count; without another one an advantage stays as it is."""
    if twins == 1:
        return advantages
    grouped, counts = (
        torch.where(where, x, 0.0).unflatten(0, (-1, twins))
        for x in (advantages, torch.ones_like(advantages))
    )
    others, number = grouped.sum(1, keepdim=True) - grouped, counts.sum(1, keepdim=True) - counts
    return advantages - (others / number.clamp(min=1)).flatten(0, 1)


def normalize_advantages(advantages: Tensor, where: Tensor, *, floor: float) -> tuple[Tensor, float]:
    """Zero mean and unit spread over the rows where the policy had a choice; also returns the spread before.

    A spread below `floor` is divided by `floor`: what is left of the advantages once a task is solved is
    noise, and blown up to full size it would undo what was learned."""
    mean = masked_mean(advantages, where)
    std = masked_mean((advantages - mean) ** 2, where).sqrt().item()
    return (advantages - mean) / max(std, floor), std


def policy_loss(logratio: Tensor, advantages: Tensor, where: Tensor, *, clip: float) -> Tensor:
    """The clipped surrogate on the joint ratio of all relevant heads."""
    ratio = logratio.exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return -masked_mean(torch.minimum(unclipped, clipped), where)


def value_loss(normalized_value: Tensor, normalized_return: Tensor, where: Tensor) -> Tensor:
    return 0.5 * masked_mean((normalized_value - normalized_return) ** 2, where)


def approx_kl(logratio: Tensor, where: Tensor) -> Tensor:
    """KL(behaviour ‖ current) ≈ E[ratio − 1 − logratio] (Schulman's k3): unbiased and never negative."""
    return masked_mean(torch.expm1(logratio) - logratio, where)


def clipfrac(logratio: Tensor, where: Tensor, *, clip: float) -> Tensor:
    return masked_mean(((logratio.exp() - 1).abs() > clip).float(), where)


def explained_variance(value: Tensor, returns: Tensor, where: Tensor) -> float:
    """0 where the returns are constant: there is nothing to explain."""
    if int(where.sum()) < 2:
        return 0.0
    total = returns[where].var(correction=0)
    return (1 - (returns - value)[where].var(correction=0) / total).item() if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What the minibatch loop measured."""

    measured: dict[str, list[float]]  # one value per minibatch; a NaN if all were skipped
    optimizer_steps: int
    skipped_steps: int
    stop_kl: float | None
    """The KL estimate that ended the loop, if one did."""


def _by_head(name: str, x: Tensor, where: Tensor) -> dict[str, Tensor]:
    """Means of [E, T, 8] for each head."""
    means = torch.where(where.unsqueeze(-1), x, 0.0).sum((0, 1)) / where.sum().clamp(min=1)
    return {f"{name}.{head}": mean for head, mean in zip(HEAD_NAMES, means.unbind(-1), strict=True)}


def minibatch_loss(
    seen: PolicyEvaluation,
    mb: RolloutBatch,
    advantages: Tensor,
    normalized_returns: Tensor,
    *,
    config: PPOConfig,
    entropy_coef: float,
    imitate: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to descend, and what to report about it. To imitate is to maximise likelihood, which takes no
    ratio."""
    logratio = torch.zeros_like(seen.log_prob) if imitate else seen.log_prob - mb.behaviour_log_prob
    pg_loss = (
        -masked_mean(seen.log_prob, mb.choice)
        if imitate
        else policy_loss(logratio, advantages, mb.choice, clip=config.clip)
    )
    v_loss = value_loss(seen.normalized_value, normalized_returns, mb.valid)
    entropy = masked_mean(seen.entropy, mb.choice)
    with torch.no_grad():
        counted = torch.where(mb.choice, logratio, 0.0)
        head_logratio = torch.where(
            mb.choice[..., None], seen.head_log_probs - mb.behaviour_head_log_probs, 0.0
        )
        measured = {
            "policy_loss": pg_loss,
            "value_loss": v_loss,
            "entropy": entropy,
            "approx_kl": approx_kl(logratio, mb.choice),
            "clip_fraction": clipfrac(logratio, mb.choice, clip=config.clip),
            "ratio_max": counted.max().exp(),
            "ratio_min": counted.min().exp(),
            "log_prob_drift": head_logratio.abs().max(),
            **_by_head("head_entropy", seen.head_entropies, mb.choice),
            **_by_head("head_kl", (torch.expm1(head_logratio) - head_logratio) * (not imitate), mb.choice),
        }
    return pg_loss + config.value_coef * v_loss - entropy_coef * entropy, measured


def optimize(
    policy: RecurrentPolicy,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    *,
    advantages: Tensor,
    normalized_returns: Tensor,
    config: PPOConfig,
    entropy_coef: float,
    seed: int,
    skip_budget: int,
    imitate: bool = False,
) -> LoopResult:
    """K epochs over minibatches of whole env rows, each unrolled from its stored hidden state.

    A minibatch whose loss or gradient norm is not finite is skipped, and the first one's gradients are left
    on the parameters; `skip_budget` of them raise. A step after which the next minibatch sees a KL above 1.5
    times the target is taken back, and the loop ends: near-deterministic policies with a memory can be
    destroyed by one step, and a limit that is only noticed afterwards would not prevent it."""
    parameters = list(policy.network.parameters())
    before_step = [torch.empty_like(p) for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    num_envs = len(advantages)
    order = [
        rows.to(advantages.device)
        for _ in range(config.epochs)
        for rows in torch.randperm(num_envs, generator=generator).tensor_split(
            min(config.minibatches, num_envs)
        )
    ]
    log: list[dict[str, float]] = []
    steps = skipped = 0
    stop_kl: float | None = None
    broken: list[Tensor | None] | None = None
    for i, rows in enumerate([*order, order[0]]):  # the last one only checks the last step
        mb = batch.rows(rows)
        with torch.set_grad_enabled(i < len(order)):
            seen = policy.evaluate(
                mb.obs, mb.hidden, mb.masks, mb.actions, reset=mb.reset, epsilon=mb.epsilon
            )
            loss, measured = minibatch_loss(
                seen,
                mb,
                advantages[rows],
                normalized_returns[rows],
                config=config,
                entropy_coef=entropy_coef,
                imitate=imitate,
            )
        if (
            steps
            and config.target_kl is not None
            and (kl := measured["approx_kl"].item()) > 1.5 * config.target_kl
        ):
            for parameter, saved in zip(parameters, before_step, strict=True):
                parameter.data.copy_(saved)
            stop_kl, steps = kl, steps - 1
            break
        if i == len(order):
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        measured |= {"loss": loss.detach(), "grad_norm": norm}
        values = dict(zip(measured, torch.stack(list(measured.values())).tolist(), strict=True))
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            skipped += 1
            broken = broken or [p.grad for p in parameters]
            if skipped >= skip_budget:
                raise NonFiniteUpdateError(
                    f"env rows {rows.tolist()}: loss {values['loss']}, gradient norm {values['grad_norm']}; {skipped} steps "
                    "skipped; look for NaN or infinity in rewards and observations of these envs, or lower lr"
                )
            continue
        nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
        log.append(values)
        for parameter, saved in zip(parameters, before_step, strict=True):
            saved.copy_(parameter.data)
        optimizer.step()
        steps += 1
    for parameter, gradient in zip(parameters, broken or (), strict=False):  # for whoever asks what was wrong
        parameter.grad = gradient
    by_name = {name: [values[name] for values in log] or [math.nan] for name in (*measured, "grad_norm")}
    return LoopResult(by_name, optimizer_steps=steps, skipped_steps=skipped, stop_kl=stop_kl)

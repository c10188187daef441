"""Proximal policy optimisation (Schulman et al. 2017), recurrent and masked: pure functions, then the loop
over minibatches.

Shapes: E envs, T steps. `where` marks the rows that count; means are taken over these rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from esper.leyline import HEAD_NAMES, EsperError
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.policy import PolicyEvaluation, RecurrentPolicy


class NonFiniteUpdateError(EsperError):
    """Loss or gradient were repeatedly NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Hyperparameters of the agent. Annealed values change linearly from their start to `…_end` over
    `anneal_updates`."""

    gamma: float = 1.0
    """Discount. Episodes are short and end at a known horizon, so the default discounts nothing."""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation."""
    epochs: int = 6
    """Number of passes over each rollout (K)."""
    minibatches: int = 4
    """Number of minibatches per pass; each holds whole episodes of some envs."""
    clip: float = 0.2
    """Clip range of the probability ratio: 1 ± this."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = 0.05
    """A step after which the KL exceeds 1.5 times this is undone, and the update ends; none: no limit."""
    lr: float = 1e-3
    """Learning rate of the policy (Adam)."""
    lr_end: float | None = None
    """Learning rate at the end of annealing; none: the same as at its start."""
    imitation_lr: float | None = None
    """Learning rate while imitating a teacher; none: `lr`."""
    entropy_coef: float = 0.02
    """Weight of the joint action's entropy."""
    entropy_coef_end: float = 0.0
    """Entropy weight at the end of annealing."""
    epsilon: float = 0.1
    """Share of uniform exploration mixed into every head."""
    epsilon_end: float = 0.0
    """Exploration at the end of annealing."""
    anneal_updates: int = 0
    """Number of updates until learning rate, entropy weight and exploration reach their end values; 0: no
    annealing, except that a run then follows its anneal_fraction."""
    explore_ops_only: bool = False
    """Explore operations and slots alone, without blueprints and other parameters."""
    advantage_scale: Literal["batch", "returns"] = "batch"
    """Divisor of advantages: batch (their own standard deviation in the rollout, which makes luck as large as
    skill once a task is solved) or returns (the running standard deviation of returns)."""
    advantage_floor: float = 0.1
    """Minimum divisor of advantages for `batch`, as a share of the standard deviation of returns."""
    fit_twins: bool = False
    """Whether the share of the other twins' advantage that is subtracted is fitted for each step of the
    episode; otherwise all of it is."""
    critic_steps: int = 0
    """Number of steps that the value head is trained after each update, by an optimizer of its own which a
    limit of the KL does not stop; 0: it is trained with the policy."""
    critic_lr: float = 1e-3
    """Learning rate of that optimizer (Adam)."""
    popart_decay: float = 0.95
    """Weight of earlier returns in their statistics, per update."""
    bf16: bool = False
    """Run the network in bfloat16, both for acting and in the update."""

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            **dict.fromkeys(("gamma", "gae_lambda", "epsilon", "epsilon_end", "lr_end"), (0.0, 1.0)),
            **dict.fromkeys(
                ("value_coef", "entropy_coef", "entropy_coef_end", "anneal_updates", "critic_steps"),
                (0.0, math.inf),
            ),
            **dict.fromkeys(("epochs", "minibatches"), (1, math.inf)),
            **dict.fromkeys(("lr", "imitation_lr", "critic_lr", "advantage_floor"), (1e-9, 1.0)),
            **dict.fromkeys(("clip", "max_grad_norm", "target_kl"), (1e-9, math.inf)),
            "popart_decay": (1e-3, 1.0),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise EsperError(f"PPOConfig: {name} is {value}, must lie in [{low}, {high}]")

    def annealed(self, name: Literal["lr", "entropy_coef", "epsilon"], updates: int) -> float:
        """The scheduled value after this number of updates."""
        start, end = getattr(self, name), getattr(self, f"{name}_end")
        if self.anneal_updates == 0 or end is None:
            return start
        return start + (end - start) * min(updates / self.anneal_updates, 1.0)


def masked_mean(x: Tensor, where: Tensor) -> Tensor:
    # where, not a product: a row that does not count may hold anything.
    return torch.where(where, x, 0.0).sum() / where.sum().clamp(min=1)


def gae(batch: RolloutBatch, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [E, T] (Schulman et al. 2016), computed within each segment. A segment that a
    rollback has ended is followed by what the rows without a decision paid and by the value after them."""
    advantages = torch.zeros_like(batch.reward)
    last_advantage = torch.zeros_like(batch.reward[:, 0])
    next_value = torch.zeros_like(last_advantage)
    next_starts_anew = torch.ones_like(batch.reset[:, 0])
    next_is_valid = torch.ones_like(next_starts_anew)
    for t in reversed(range(batch.reward.shape[1])):
        valid, terminal, truncated = batch.valid[:, t], batch.terminal[:, t], batch.truncated[:, t]
        nextnonterminal = ~(terminal | truncated | next_starts_anew)
        after_cut = torch.where(next_is_valid, batch.bootstrap[:, t], next_value)
        following = torch.where(nextnonterminal, next_value, torch.where(truncated, after_cut, 0.0))
        delta = batch.reward[:, t] + gamma * following - batch.value[:, t]
        last_advantage = delta + gamma * gae_lambda * torch.where(nextnonterminal, last_advantage, 0.0)
        advantages[:, t] = last_advantage
        # Without a decision there is no value: what is paid here, and then the value of what follows.
        ends = torch.where(truncated, batch.bootstrap[:, t], torch.where(terminal, 0.0, next_value))
        next_value = torch.where(valid, batch.value[:, t], batch.reward[:, t] + gamma * ends)
        next_starts_anew, next_is_valid = batch.reset[:, t] | ~valid, valid
    return advantages, advantages + batch.value


def subtract_twin_baseline(advantages: Tensor, where: Tensor, twins: int, *, fitted: bool = False) -> Tensor:
    """Subtract from each advantage the mean advantage of the env's other twins at the same step.

    Twins share initial weights, data and condition, so their mean is a baseline for everything that does not
    depend on the env's own actions. Only twins marked in `where` count; without one the advantage stays.

    Twins that have acted differently go their own ways, and what is left of their luck in common shrinks.
    With `fitted` each step subtracts the share, between 0 and 1, that leaves the least variance."""
    if twins == 1:
        return advantages
    grouped = torch.where(where, advantages, 0.0).unflatten(0, (-1, twins))
    counts = where.to(advantages.dtype).unflatten(0, (-1, twins))
    others = grouped.sum(1, keepdim=True) - grouped
    number = counts.sum(1, keepdim=True) - counts
    baseline = (others / number.clamp(min=1)).flatten(0, 1)
    if fitted:
        counted = torch.where(where, baseline, 0.0)
        joint = (counted * torch.where(where, advantages, 0.0)).sum(0)
        baseline = baseline * (joint / (counted**2).sum(0).clamp(min=1e-12)).clamp(0.0, 1.0)
    return advantages - baseline


def normalize_advantages(advantages: Tensor, where: Tensor, *, floor: float) -> tuple[Tensor, float]:
    """Normalise to zero mean and unit standard deviation over `where`; also returns the original deviation.

    The divisor is at least `floor`: once a task is solved, the remaining advantages are noise, and scaled up
    to unit size they would undo the training."""
    mean = masked_mean(advantages, where)
    std = masked_mean((advantages - mean) ** 2, where).sqrt().item()
    return (advantages - mean) / max(std, floor), std


def normalize_by_family(
    advantages: Tensor, where: Tensor, family: Tensor, *, floors: Sequence[float]
) -> tuple[Tensor, float]:
    """`normalize_advantages` within each family [E, T], which has its own floor; also returns the mean of the
    deviations. J has another scale in every family: without this, the widest one would be all that counts."""
    normalized, deviations = torch.zeros_like(advantages), []
    for index, floor in enumerate(floors):
        own = family == index
        if own.any():
            scaled, deviation = normalize_advantages(advantages, where & own, floor=floor)
            normalized = torch.where(own, scaled, normalized)
            deviations.append(deviation)
    return normalized, fmean(deviations)


def scale_by_family(
    advantages: Tensor, where: Tensor, family: Tensor, *, scales: Tensor
) -> tuple[Tensor, float]:
    """Advantages over the scale of returns of their family [F]; also returns the mean of their deviations
    within families, as `normalize_by_family`. Nothing is centred: 0 is what was expected."""
    present = family[where].unique().tolist()
    deviations = [advantages[where & (family == index)].std(correction=0).item() for index in present]
    return advantages / scales[family], fmean(deviations or [0.0])


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


def explained_by_family(value: Tensor, returns: Tensor, where: Tensor, family: Tensor) -> float:
    """Mean of `explained_variance` over the families: that the families differ explains nothing."""
    present = family[where].unique().tolist()
    return fmean(explained_variance(value, returns, where & (family == index)) for index in present or [0])


def explained_variance(value: Tensor, returns: Tensor, where: Tensor) -> float:
    """Explained variance of the values; 0 if the returns are constant."""
    if int(where.sum()) < 2:
        return 0.0
    total = returns[where].var(correction=0)
    return (1 - (returns - value)[where].var(correction=0) / total).item() if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What the minibatch loop measured."""

    measured: dict[str, list[float]]
    """One value per optimizer step that was kept; a step that was undone has none."""
    initial: dict[str, float]
    """Measured before any step: on the first minibatch that was finite, or on the last if none was."""
    optimizer_steps: int
    """Steps that were kept."""
    skipped_steps: int
    stop_kl: float | None
    """Largest KL estimate that undid a step; None if none was undone."""


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
    """The loss to minimise, and its metrics. With `imitate` the policy loss is the negative log-likelihood,
    which has no ratio and no bonus for entropy."""
    if imitate:
        logratio = torch.zeros_like(seen.log_prob)
        pg_loss = -masked_mean(seen.log_prob, mb.choice)
    else:
        logratio = seen.log_prob - mb.behaviour_log_prob
        pg_loss = policy_loss(logratio, advantages, mb.choice, clip=config.clip)
    v_loss = value_loss(seen.normalized_value, normalized_returns, mb.valid)
    entropy = masked_mean(seen.entropy, mb.choice)
    with torch.no_grad():
        counted = torch.where(mb.choice, logratio, 0.0)
        head_logratio = torch.where(
            mb.choice[..., None], seen.head_log_probs - mb.behaviour_head_log_probs, 0.0
        )
        head_kl = torch.expm1(head_logratio) - head_logratio
        if imitate:
            head_kl = torch.zeros_like(head_kl)
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
            **_by_head("head_kl", head_kl, mb.choice),
        }
    loss = pg_loss if imitate else pg_loss - entropy_coef * entropy
    return (loss if config.critic_steps else loss + config.value_coef * v_loss), measured


class _StepBackup:
    """Everything that an optimizer step changes: weights, Adam's moments and its step counts."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._weights: list[Tensor] = []
        self._states: list[dict[str, Tensor]] = []

    def save(self) -> None:
        self._weights = [parameter.detach().clone() for parameter in self._parameters]
        self._states = [
            {name: value.clone() for name, value in self._optimizer.state[parameter].items()}
            for parameter in self._parameters
        ]

    def restore(self) -> None:
        for parameter, weights, state in zip(self._parameters, self._weights, self._states, strict=True):
            parameter.data.copy_(weights)
            # Before the first step of its life a parameter has no state, and must have none again.
            self._optimizer.state[parameter] = state


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
    """Run K epochs over minibatches of whole env rows, each unrolled from its stored hidden state.

    A minibatch whose loss or gradient norm is not finite is skipped, and the gradients of the first such
    minibatch stay on the parameters; `skip_budget` of them raise an error.

    If the next minibatch measures a KL above 1.5 times the target, the last step is undone (weights and
    optimizer state): one step can destroy a near-deterministic policy with a memory, so noticing the limit
    is not enough. The loop then ends, unless no step is left. In that case it goes on at half the step size:
    with unchanged moments the next update would only try the same step again, and learning would stall."""
    parameters = list(policy.network.parameters())
    backup = _StepBackup(parameters, optimizer)
    # Imitation has no ratio, so its KL is always 0: without a limit nothing is copied or checked.
    kl_limit = None if imitate or config.target_kl is None else 1.5 * config.target_kl
    order = _minibatch_rows(config, num_envs=len(advantages), seed=seed, device=advantages.device)
    passes = order if kl_limit is None else [*order, order[0]]  # one more pass checks the last step
    kept: list[dict[str, float]] = []
    initial: dict[str, float] | None = None
    skipped = 0
    stop_kl: float | None = None
    broken_gradients: list[Tensor | None] | None = None
    values: dict[str, float] = {}
    for i, rows in enumerate(passes):
        mb = batch.rows(rows)
        with torch.set_grad_enabled(i < len(order)):
            seen = policy.evaluate(
                mb.obs,
                mb.hidden,
                mb.masks,
                mb.actions,
                reset=mb.reset,
                epsilon=mb.epsilon,
                entropy_gradient=entropy_coef > 0 and not imitate,
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
        if kept and kl_limit is not None:
            kl = measured["approx_kl"].item()
            if kl > kl_limit:
                backup.restore()
                kept.pop()
                stop_kl = max(kl, stop_kl or 0.0)
                if kept:
                    break
                for group in optimizer.param_groups:
                    group["lr"] /= 2
                continue
        if i == len(order):
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        measured |= {"loss": loss.detach(), "grad_norm": norm}
        values = dict(zip(measured, torch.stack(list(measured.values())).tolist(), strict=True))
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            skipped += 1
            if broken_gradients is None:
                broken_gradients = [p.grad for p in parameters]
            if skipped >= skip_budget:
                raise NonFiniteUpdateError(
                    f"env rows {rows.tolist()}: loss {values['loss']}, gradient norm {values['grad_norm']}; "
                    f"{skipped} steps skipped; look for NaN or infinity in rewards and observations of these "
                    "envs, or lower lr"
                )
            continue
        nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
        if initial is None:
            initial = values
        if kl_limit is not None:
            backup.save()
        optimizer.step()
        kept.append(values)
    if broken_gradients is not None:  # diagnostics read them after the update
        for parameter, gradient in zip(parameters, broken_gradients, strict=True):
            parameter.grad = gradient
    return LoopResult(
        {name: [step[name] for step in kept] for name in values},
        initial=values if initial is None else initial,
        optimizer_steps=len(kept),
        skipped_steps=skipped,
        stop_kl=stop_kl,
    )


def fit_critic(
    policy: RecurrentPolicy,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    *,
    normalized_returns: Tensor,
    config: PPOConfig,
) -> float:
    """Train the value head on the whole rollout; returns its mean loss. The layers below belong to the policy
    and do not change: what the policy does stays the same to the last bit."""
    with torch.no_grad():
        features, _ = policy.network(batch.obs, batch.hidden, batch.reset)
    losses = []
    for _ in range(config.critic_steps):
        value = policy.network.normalized_value(features)
        loss = value_loss(value, normalized_returns, batch.valid)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean().item()
    if not math.isfinite(mean):
        raise NonFiniteUpdateError(
            f"loss of the value head {mean}; look for NaN or infinity in rewards and observations, or lower "
            "critic_lr"
        )
    return mean


def _minibatch_rows(config: PPOConfig, *, num_envs: int, seed: int, device: torch.device) -> list[Tensor]:
    """Env rows of each minibatch, all epochs in a row, each epoch in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    for _ in range(config.epochs):
        shuffled = torch.randperm(num_envs, generator=generator).to(device)
        rows.extend(shuffled.tensor_split(min(config.minibatches, num_envs)))
    return rows

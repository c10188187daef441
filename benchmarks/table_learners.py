"""Algorithms that learn which plan to grow, on a table of plans: PPO in steps from what it was to what it is,
action values, and searches.

Every algorithm gets worlds to learn in and worlds to be judged in, and a budget of env-steps; an episode
counts what it counts in the real environment. PPO and action values are the project's own code.

E envs, W worlds, P plans, S slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.plan_table import PlanTable
from benchmarks.table_env import TableEnv
from esper.leyline import TempoAction, stream_seed
from esper.simic.agent.normalization import RewardNormalizer
from esper.simic.agent.plan_values import PlanValueLearner, Replay, ValuesConfig
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.training.distinct_twins import draw_distinct
from esper.simic.training.plan_learner import PlanLearner, PlanSpace
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy, action_uniforms

ENVS = 64
TWINS = 8
HIDDEN, SLOT_HIDDEN = 64, 32
KEEP = 4
"""After each rung of successive halving, one plan of this many stays."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """Worlds to learn in, and worlds to be judged in."""

    train: Ints
    test: Ints

    @classmethod
    def drawn(cls, table: PlanTable, seed: int) -> Split:
        """Three quarters of the worlds, drawn, to learn in."""
        rng = np.random.default_rng(stream_seed(seed, "sampling", 1_000_000))
        order = rng.permutation(table.objective.shape[1])
        last = 3 * len(order) // 4
        return cls(order[:last], order[last:])


@dataclass(slots=True)
class Learned:
    """Result of one run."""

    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Env-steps, and J on the worlds to be judged in: of the best plan by the learner's estimate, and of a
    plan that it samples."""
    explained: list[float] = field(default_factory=list)
    """Explained variance of the values, update by update."""
    value_ratio: list[float] = field(default_factory=list)
    """Standard deviation of returns over PopArt's scale, update by update."""

    def add(self, steps: int, greedy: float, sampled: float | None = None) -> None:
        self.curve.append((steps, greedy, greedy if sampled is None else sampled))


def chosen_objective(table: PlanTable, worlds: Ints, plans: Ints | int) -> float:
    """Mean J of one plan in each world."""
    return float(table.objective[plans, worlds].mean())


# -- PPO -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOVariant:
    """One stage of PPO."""

    config: PPOConfig
    dead_ends: bool = False
    normalize_rewards: bool = True
    twins: int = 1
    distinct: bool = False
    """Twins that have done the same take different actions, and one of them grows nothing."""
    baseline: bool = False
    """J of never growing, measured once in each world, is subtracted."""


_MANY_STEPS: dict[str, object] = {"epochs": 10, "minibatches": 8, "target_kl": 0.2}
_CALM: dict[str, object] = {**_MANY_STEPS, "gae_lambda": 1.0, "lr_end": 0.0}
_HYGIENE: dict[str, object] = {
    **_CALM,
    "advantage_scale": "returns",
    "critic_steps": 50,
    "explore_ops_only": True,
    "fit_twins": True,
}


def _config(rounds: int, **changes: object) -> PPOConfig:
    return PPOConfig(anneal_updates=max(1, round(0.8 * rounds)), **changes)  # type: ignore[arg-type]


def ppo_variants(rounds: int) -> dict[str, PPOVariant]:
    """Each adds something to the one before it, but for the last, which adds to the fifth."""
    plain = PPOVariant(config=_config(rounds))
    many = PPOVariant(
        config=_config(rounds, **_MANY_STEPS), normalize_rewards=False, twins=TWINS, distinct=True
    )
    return {
        "PPO as it was": replace(plain, dead_ends=True),
        "+ dead ends closed": plain,
        "+ twins, each by itself": replace(plain, twins=TWINS),
        "+ distinct twins": replace(plain, twins=TWINS, distinct=True),
        "+ many steps, rewards as they are": many,
        "+ λ = 1, rate falls to 0": replace(many, config=_config(rounds, **_CALM)),
        "+ hygiene of the critic": replace(many, config=_config(rounds, **_HYGIENE)),
        "many steps and persistent worlds": replace(many, baseline=True),
    }


def make_agent(table: PlanTable, variant: PPOVariant, steps: int, seed: int) -> PPOAgent:
    torch.manual_seed(stream_seed(seed, "policy") % 2**63)
    network = TamiyoNetwork(BASE_DIM, SLOT_DIM, QUOTE_DIM, hidden=HIDDEN, slot_hidden=SLOT_HIDDEN)
    network.prefer(1.0)
    return PPOAgent(
        RecurrentPolicy(network),
        variant.config,
        num_envs=ENVS,
        num_steps=steps,
        num_slots=len(table.plans[0]),
        num_blueprints=len(table.blueprints),
        seed=seed,
        twins=variant.twins,
    )


def learn_ppo(
    table: PlanTable, split: Split, variant: PPOVariant, *, seed: int, rounds: int, every: int
) -> Learned:
    """Train for `rounds` and judge after every `every` of them."""
    env = TableEnv(table, split.train, envs=ENVS, seed=seed, twins=variant.twins, dead_ends=variant.dead_ends)
    agent = make_agent(table, variant, env.steps, seed)
    normalizer = RewardNormalizer()
    never = torch.from_numpy(table.objective[0]).float()
    spent = len(split.train) * table.env_steps if variant.baseline else 0
    learned = Learned()
    learned.add(spent, *judge(agent, table, split, variant, seed))
    for round_idx in range(rounds):
        env.begin_round(round_idx)
        uniforms = action_uniforms(seed, round_idx, range(ENVS), env.steps)
        rewards = []
        hidden = agent.initial_hidden()
        agent.begin_rollout(hidden)
        for t in range(env.steps):
            obs, masks = env.observe()
            reset = torch.full((ENVS,), t == 0)
            given = None
            if variant.distinct:
                given = draw_distinct(
                    agent.policy,
                    obs,
                    hidden,
                    masks,
                    twins=TWINS,
                    epsilon=agent.epsilon,
                    reset=reset,
                    seed=seed,
                    round_idx=round_idx,
                    epoch=t,
                    numbers=range(ENVS),
                )
            step = agent.act(obs, hidden, masks, uniforms=uniforms[:, t], reset=reset, given=given)
            result = env.act(step.actions)
            reward = result.reward
            if variant.baseline:
                reward = torch.where(result.terminal, reward - never[env.world], reward)
            rewards += reward[result.valid].tolist()
            scale = normalizer.scale if variant.normalize_rewards else 1.0
            agent.record(
                obs,
                masks,
                step,
                reward=reward / scale,
                terminal=result.terminal,
                reset=reset,
                valid=result.valid,
            )
            hidden = step.hidden
        metrics = agent.update()
        normalizer.update(rewards)
        spent += ENVS * table.env_steps
        learned.explained.append(metrics.explained_variance)
        learned.value_ratio.append(metrics.return_std / metrics.value_scale)
        if (round_idx + 1) % every == 0 or round_idx + 1 == rounds:
            learned.add(spent, *judge(agent, table, split, variant, seed))
    return learned


def judge(
    agent: PPOAgent, table: PlanTable, split: Split, variant: PPOVariant, seed: int
) -> tuple[float, float]:
    """Mean J in the worlds to be judged in: most likely actions, and sampled ones without exploration."""
    results = []
    for deterministic in (True, False):
        env = TableEnv(table, split.test, envs=len(split.test), seed=seed, dead_ends=variant.dead_ends)
        env.begin(split.test)
        hidden = None
        uniforms = action_uniforms(seed, 1_000_000, range(len(split.test)), env.steps)
        for t in range(env.steps):
            obs, masks = env.observe()
            step = agent.policy.act(obs, hidden, masks, deterministic=deterministic, uniforms=uniforms[:, t])
            env.act(step.actions)
            hidden = step.hidden
        results.append(env.objectives().mean().item())
    return results[0], results[1]


# -- action values -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesVariant:
    """Action values with some of their parts taken away."""

    config: ValuesConfig = field(default_factory=ValuesConfig)
    replay: bool = True
    """Learn from all episodes so far, not from those of the last round alone."""
    thompson: bool = True
    """Twins follow the favourites of members of the ensemble, not random plans."""


def values_variants() -> dict[str, ValuesVariant]:
    return {
        "action values": ValuesVariant(),
        "action values, one member": ValuesVariant(config=ValuesConfig(members=1, share=1.0)),
        "action values, no replay": ValuesVariant(replay=False),
        "action values, random plans": ValuesVariant(thompson=False),
    }


def learn_values(
    table: PlanTable, split: Split, variant: ValuesVariant, *, seed: int, rounds: int, every: int
) -> Learned:
    """Action values that choose what to play, as in `--values-rounds`."""
    env = TableEnv(table, split.train, envs=ENVS, seed=seed, twins=TWINS)
    learner = PlanValueLearner(variant.config, BASE_DIM, SLOT_DIM, QUOTE_DIM, seed=seed)
    space = PlanSpace(slice(0, ENVS), env.num_slots, tuple(range(len(table.blueprints))), TempoAction.INSTANT)
    everything = (torch.ones(BASE_DIM), torch.ones(SLOT_DIM), torch.ones(QUOTE_DIM))
    planner = PlanLearner(learner, [space], twins=TWINS, num_slots=env.num_slots, seen=everything)
    sight = table.sight.rows(torch.from_numpy(split.test))
    plans = torch.from_numpy(table.rows())
    rng = np.random.default_rng(stream_seed(seed, "sampling", 1_000_001))
    learned = Learned()
    learned.add(0, chosen_objective(table, split.test, rng.integers(len(plans), size=len(split.test))))
    for round_idx in range(rounds):
        env.begin_round(round_idx)
        if not variant.replay:
            learner.replay = Replay()
        if variant.thompson:
            planner.begin(ENVS)
            for _ in range(env.steps):
                env.act(planner.decide(*env.observe()))
            planner.finish(env.objectives().tolist())
        else:
            learn_random_plans(table, env.world[::TWINS], learner, rng)
        if (round_idx + 1) % every == 0 or round_idx + 1 == rounds:
            gains = learner.values.gains(sight, plans)
            members = torch.from_numpy(rng.integers(len(gains), size=len(split.test)))
            own = gains[members, torch.arange(len(split.test))]
            learned.add(
                (round_idx + 1) * ENVS * table.env_steps,
                chosen_objective(table, split.test, gains.mean(0).argmax(-1).numpy()),
                chosen_objective(table, split.test, own.argmax(-1).numpy()),
            )
    return learned


def learn_random_plans(
    table: PlanTable, worlds: Tensor, learner: PlanValueLearner, rng: np.random.Generator
) -> None:
    """One round in which one twin of each world grows nothing and the others play different random plans."""
    drawn = np.concatenate(
        [1 + rng.choice(len(table.plans) - 1, TWINS - 1, replace=False) for _ in range(len(worlds))]
    )
    index = torch.arange(len(worlds)).repeat_interleave(TWINS - 1)
    own = worlds[index].numpy()
    gain = torch.from_numpy(table.objective[drawn, own] - table.objective[0, own]).float()
    learner.learn(table.sight.rows(worlds), index, torch.from_numpy(table.rows()[drawn]), gain)


# -- searches ------------------------------------------------------------------------------------------------


def search_at_random(table: PlanTable, worlds: Ints, episodes: int, rng: np.random.Generator) -> int:
    """The plan with the highest mean gain over never growing: plans and worlds are drawn at random, and never
    growing is measured once in each world."""
    plans = len(table.plans)
    total, count = np.zeros(plans), np.zeros(plans)
    known: set[int] = set()
    while episodes > 0:
        plan, world = int(rng.integers(1, plans)), int(rng.choice(worlds))
        episodes -= 1 + (world not in known)
        known.add(world)
        total[plan] += table.objective[plan, world] - table.objective[0, world]
        count[plan] += 1
    # One more trial that gained nothing: a plan that was lucky once is no winner.
    return int((total / (count + 1)).argmax())


def halve(table: PlanTable, worlds: Ints, episodes: int, rng: np.random.Generator) -> int:
    """Successive halving: each rung has the same share of the episodes, plays its plans in the same worlds,
    and keeps a quarter of them."""
    left = np.arange(len(table.plans))
    rungs = max(1, int(np.ceil(np.log(len(left)) / np.log(KEEP))))
    order = rng.permutation(worlds)
    total, count, position = np.zeros(len(left)), np.zeros(len(left)), 0
    for rung in range(rungs):
        each = max(1, episodes // rungs // len(left))
        some = order[np.arange(position, position + each) % len(order)]
        position += each
        gains = table.objective[np.ix_(left, some)] - table.objective[0, some]
        total[left] += gains.sum(1)
        count[left] += len(some)
        ranked = left[np.argsort(-(total / np.maximum(count, 1))[left], kind="stable")]
        left = ranked[: max(1, -(-len(left) // KEEP))] if rung + 1 < rungs else ranked[:1]
    return int(left[0])


def search(
    table: PlanTable,
    split: Split,
    find: Callable[[PlanTable, Ints, int, np.random.Generator], int],
    *,
    seed: int,
    budgets: Sequence[int],
    labels: bool = False,
) -> Learned:
    """A search of its own within each budget of env-steps. With `labels` the budget is divided among the
    patterns of crippled blocks, and each pattern gets a plan: what a perfect probe would allow."""
    learned = Learned()
    for budget in budgets:
        rng = np.random.default_rng(stream_seed(seed, "sampling", budget))
        episodes = budget // table.env_steps
        if not labels:
            plan = find(table, split.train, episodes, rng)
            learned.add(budget, chosen_objective(table, split.test, plan))
            continue
        groups = _by_pattern(table, split)
        plans = np.zeros(len(split.test), dtype=np.int64)
        for train, rows in groups.values():
            plans[rows] = find(table, train, episodes // len(groups), rng) if len(train) else 0
        learned.add(budget, chosen_objective(table, split.test, plans))
    return learned


def _by_pattern(table: PlanTable, split: Split) -> Mapping[tuple[bool, ...], tuple[Ints, Ints]]:
    """For each pattern of crippled blocks: the worlds to learn in, and rows of those to be judged in."""
    patterns = sorted({tuple(row) for row in table.crippled.tolist()})
    train = [tuple(row) for row in table.crippled[split.train].tolist()]
    test = [tuple(row) for row in table.crippled[split.test].tolist()]
    return {
        pattern: (
            split.train[[own == pattern for own in train]],
            np.flatnonzero([own == pattern for own in test]),
        )
        for pattern in patterns
    }


def oracle(table: PlanTable, split: Split) -> float:
    """Mean of the best J in each world, luck included: no policy can reach it."""
    return float(table.objective[:, split.test].max(0).mean())


def best_single(table: PlanTable, split: Split) -> float:
    """J of the plan that is best over all worlds to learn in."""
    return chosen_objective(table, split.test, int(table.objective[:, split.train].mean(1).argmax()))


def by_condition(table: PlanTable, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[W]: J of the plan that is best in the other worlds with the same label, so that no world's own luck is
    rewarded. A world whose label no other has keeps the plan that is best over all others."""
    chosen = np.empty(len(labels))
    for world, label in enumerate(labels):
        others = (labels == label) & (np.arange(len(labels)) != world)
        if not others.any():
            others = np.arange(len(labels)) != world
        chosen[world] = table.objective[table.objective[:, others].mean(1).argmax(), world]
    return chosen

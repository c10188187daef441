"""Rewards through the real environment: random lifecycles with prunes, new seeds and rollbacks, paid into a
real buffer."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from env_helpers import RandomValid, make_env, small_task
from esper.leyline import (
    IRRELEVANT_VALUES,
    LIVE_STAGES,
    FactoredAction,
    LifecycleOp,
    ObjectiveConfig,
    PolicyObservation,
    PolicyStep,
    RewardConfig,
    RewardFamily,
    RewardMode,
    SeedStage,
    blueprint_index,
    head_sizes,
)
from esper.simic.agent.rollout_buffer import RolloutBuffer
from esper.simic.contracts import RewardInputs
from esper.simic.rewards import RewardComponentsTelemetry, RewardEngine

GAMMA, ENVS, EPOCHS = 0.97, 8, 18
PRICES = ObjectiveConfig(size_price=0.1, waste_price=0.02, rollback_price=0.15)
Choice = tuple[RewardFamily, RewardMode]
SPARSE, SHAPED, ESCROW = (
    (RewardFamily.CONTRIBUTION, mode) for mode in (RewardMode.SPARSE, RewardMode.SHAPED, RewardMode.ESCROW)
)
ALL: list[Choice] = [
    *((RewardFamily.CONTRIBUTION, mode) for mode in RewardMode),
    (RewardFamily.LOSS, RewardMode.SHAPED),
]
PANICS = {1: (5,), 2: (1, 3), 5: (0, 4), 6: (0,), 9: (4, 6), EPOCHS: (2, 7)}
"""Which envs blow up in which epoch: before any decision, after the first, twice in a row, twice in an
episode, at the end."""


class Growing(RandomValid):
    """Random, but fond of seeing a seed through, so that all stages occur."""

    def choose(self, env: int, seen) -> list[int]:
        action = super().choose(env, seen)
        for op in (LifecycleOp.FOSSILIZE, LifecycleOp.ADVANCE):
            if seen.masks.op[env, op] and self.streams[env].random() < 0.6:
                slots = seen.masks.slot_by_op[env, op].nonzero().flatten().tolist()
                return [int(self.streams[env].choice(slots)), *action[1:-1], int(op)]
        return action


def poison(env, victims) -> None:
    with torch.no_grad():
        for i in victims:
            next(iter(env.groups[0].model.host.parameters()))[env.envs[i].row] = math.nan


def reference_potential(env) -> float | None:
    """Φ from the table of coalitions itself; None where several seeds went in one epoch and Φ is an
    estimate."""
    table, reports = env.coalitions, env.model.reports()
    fossils = {slot for slot, r in reports.items() if r.stage is SeedStage.FOSSILIZED}
    staying = {
        slot
        for slot, r in reports.items()
        if r.stage in LIVE_STAGES and not (r.stage is SeedStage.BLENDING and r.alpha_target == 0.0)
    }
    kept = staying & set(table.slots)
    if kept and len(set(table.slots) - kept - fossils) > 1:
        return None
    total = 0.0
    for coalition in (fossils, fossils | kept):
        size = sum(reports[slot].metrics.params for slot in coalition)
        total += 0.5 * (
            table.accuracy(coalition) / 100 - 0.1 * math.log(1 + size / env.model.model.host_params)
        )
    return total - 0.02 * (env.germinated - env.fossilized - len(staying))


def make_engine(choice: Choice) -> RewardEngine:
    family, mode = choice
    return RewardEngine(RewardConfig(mode=mode), PRICES, gamma=GAMMA, num_envs=ENVS, family=family)


class Episode:
    """One round of random actions under one reward, which goes into a buffer, while all the others watch the
    same steps.

    `rows[choice][env]` holds what each stored decision was paid, in full precision; `segments[env]` the rows
    between rollbacks. After the epoch `handover` all engines are replaced by others that load their state."""

    def __init__(self, main: Choice, *, seed: int, decide: Growing | None = None, handover: int = 0) -> None:
        task = small_task("digits_impaired", epochs=EPOCHS, steps=3, val_size=96, objective=PRICES)
        self.env = make_env(task, ENVS, root_seed=seed)
        self.main, self.engines = main, {choice: make_engine(choice) for choice in ALL}
        self.env.rules = replace(self.env.rules, reward=self.reward, rollback_reward=self.rollback)
        self.buffer = RolloutBuffer(
            ENVS, EPOCHS, 3, num_blueprints=head_sizes(3)[1], base_dim=1, slot_dim=1, quote_dim=1, hidden=1
        )
        self.buffer.begin(self.buffer.hidden)
        self.rows: dict[Choice, list[list[dict[str, float]]]] = {
            choice: [[] for _ in range(ENVS)] for choice in ALL
        }
        self.segments: list[list[list[int]]] = [[[]] for _ in range(ENVS)]
        self.potentials: list[list[float | None]] = [[] for _ in range(ENVS)]
        self.charged: list[tuple[int, int, bool]] = []
        self.results, self.handover = [], handover
        self.env.begin_round(seed)
        self.play(decide or Growing(seed))

    def play(self, decide: Growing) -> None:
        reset = torch.ones(ENVS, dtype=torch.bool)
        for epoch in range(1, EPOCHS + 1):
            poison(self.env, PANICS.get(epoch, ()))
            self.env.train_epoch(epoch)
            self.env.validate(epoch)
            seen = self.env.sense(epoch)
            assert set(seen.panics) == set(PANICS.get(epoch, ()))
            result = self.env.act(seen, decide(seen))
            self.results.append(result)
            self.store(seen, result, reset)
            reset = ~torch.tensor(result.valid)
            if epoch == self.handover:
                self.hand_over()

    def reward(self, inputs: RewardInputs) -> RewardComponentsTelemetry:
        paid = {choice: engine(inputs) for choice, engine in self.engines.items()}
        env = inputs.env_idx
        self.segments[env][-1].append(len(self.potentials[env]))
        self.potentials[env].append(reference_potential(self.env.envs[env]))
        for choice, reward in paid.items():
            assert reward.total == pytest.approx(math.fsum(reward.values()), abs=1e-9)
            self.rows[choice][env].append(dict(reward))
        return paid[self.main]

    def rollback(self, env: int) -> RewardComponentsTelemetry:
        paid = {choice: engine.rollback(env) for choice, engine in self.engines.items()}
        if self.segments[env][-1]:
            self.segments[env].append([])
        for choice, rows in self.rows.items():
            for name, amount in paid[choice].items() if rows[env] else ():
                rows[env][-1][name] = rows[env][-1].get(name, 0.0) + amount
        return paid[self.main]

    def hand_over(self) -> None:
        for choice, engine in self.engines.items():
            stored = json.loads(json.dumps(engine.state()))
            self.engines[choice] = make_engine(choice)
            self.engines[choice].load_state(stored)

    def store(self, seen, result, reset: torch.Tensor) -> None:
        """What a trainer does with a step."""
        for env, amount in result.penalties:
            self.charged.append((env, self.buffer.length, self.buffer.add_penalty(env, amount)))
        zero, rewards = torch.zeros(ENVS), torch.tensor(result.rewards)
        obs = PolicyObservation(
            zero[:, None],
            torch.zeros(ENVS, 3, 1),
            torch.zeros(ENVS, *head_sizes(3)[:2], 1),
            torch.full((ENVS, 3), -1),
        )
        taken = PolicyStep(
            actions=torch.tensor([IRRELEVANT_VALUES] * ENVS),
            head_log_probs=torch.zeros(ENVS, 8),
            log_prob=zero,
            value=zero,
            op_probs=torch.zeros(ENVS, 6),
            hidden=None,
        )
        self.buffer.add(
            obs,
            seen.masks,
            taken,
            reward=rewards,
            reset=reset,
            epsilon=0.0,
            valid=torch.tensor(result.valid),
            terminal=torch.full((ENVS,), seen.epoch == EPOCHS),
        )

    def paid(self, choice: Choice, env: int) -> list[float]:
        return [sum(row.values()) for row in self.rows[choice][env]]


@pytest.fixture(scope="module")
def episode() -> Episode:
    return Episode(ESCROW, seed=0)


def test_the_story_is_worth_telling(episode: Episode) -> None:
    """Every operation happened, seeds were planted again after prunes, rollbacks fell into segments of
    several decisions."""
    assert {outcome.effective_op for result in episode.results for outcome in result.outcomes} == set(
        LifecycleOp
    )
    assert max(outcome.germinated for outcome in episode.env.ledger.outcomes) > 3
    assert max(len(segment) for segments in episode.segments for segment in segments[:-1]) >= 7


def test_components_travel_with_the_result(episode: Episode) -> None:
    """Where an env was rolled back, they are what went to its last decision, and the step itself is paid
    nothing."""
    for result in episode.results:
        for valid, reward, paid in zip(result.valid, result.rewards, result.components, strict=True):
            assert reward == (paid.total if valid else 0.0)
            assert ("rollback" in paid) is not valid


def test_the_outcome_totals_what_was_paid(episode: Episode) -> None:
    for outcome in episode.env.ledger.outcomes:
        unpaid = sum(0.15 for env, _, stored in episode.charged if env == outcome.env_id and not stored)
        assert outcome.total_reward == pytest.approx(
            sum(episode.paid(ESCROW, outcome.env_id)) - unpaid, abs=1e-9
        )


def test_a_rollback_is_charged_to_the_last_decision_in_the_buffer(episode: Episode) -> None:
    data = episode.buffer.finish()
    assert [(env, length) for env, length, stored in episode.charged if not stored] == [(5, 0)]
    assert sum(outcome.rollbacks for outcome in episode.env.ledger.outcomes) == len(episode.charged)
    for env, length, stored in episode.charged:
        if stored:
            assert data.truncated[env, int(data.valid[env, :length].nonzero()[-1])]
    for env in range(ENVS):
        assert data.reward[env][data.valid[env]].tolist() == pytest.approx(
            episode.paid(ESCROW, env), abs=1e-6
        )
        paid = sum(row.get("rollback", 0.0) for row in episode.rows[ESCROW][env])
        assert paid == pytest.approx(
            -0.15 * sum(e == env and stored for e, _, stored in episode.charged), abs=1e-12
        )


@pytest.mark.parametrize("choice", [SHAPED, ESCROW])
def test_the_potential_telescopes(episode: Episode, choice: Choice) -> None:
    """In every segment, those that a rollback ended included, its discounted payments cancel."""
    for rows, segments in zip(episode.rows[choice], episode.segments, strict=True):
        for segment in segments:
            assert sum(GAMMA**k * rows[i]["potential"] for k, i in enumerate(segment)) == pytest.approx(
                0.0, abs=1e-9
            )
        assert max(abs(row["potential"]) for row in rows) > 0.05, "it does pay"


def test_shaped_pays_the_change_of_the_reference_potential(episode: Episode) -> None:
    compared = 0
    for rows, segments, potentials in zip(
        episode.rows[SHAPED], episode.segments, episode.potentials, strict=True
    ):
        for segment in segments:
            for k, i in enumerate(segment[:-1]):  # the last one has Φ = 0 behind it
                old, new = (potentials[i - 1] if k else 0.0), potentials[i]
                if old is not None and new is not None:
                    assert rows[i]["potential"] == pytest.approx(GAMMA * new - old, abs=1e-9)
                    compared += 1
    assert compared > 80


def test_escrow_never_counts_more_than_shaped(episode: Episode) -> None:
    """Φ under escrow, summed up from its payments, is at most Φ under shaped, and now and then lower."""
    lower = 0
    for env in range(ENVS):
        for segment in episode.segments[env]:
            levels = {SHAPED: 0.0, ESCROW: 0.0}
            for i in segment[:-1]:
                for choice, level in levels.items():
                    levels[choice] = (level + episode.rows[choice][env][i]["potential"]) / GAMMA
                assert levels[ESCROW] <= levels[SHAPED] + 1e-9
                lower += levels[ESCROW] < levels[SHAPED] - 1e-6
    assert lower > 5


@pytest.mark.parametrize("choice", [SPARSE, SHAPED, ESCROW])
def test_j_is_paid_at_the_end_without_what_rollbacks_have_paid(episode: Episode, choice: Choice) -> None:
    for outcome in episode.env.ledger.outcomes:
        expected = 0.0 if outcome.env_id in PANICS[EPOCHS] else outcome.objective + 0.15 * outcome.rollbacks
        paid = sum(row["objective"] for row in episode.rows[choice][outcome.env_id])
        assert paid == pytest.approx(expected, abs=1e-9)


def test_loading_a_state_in_the_middle_changes_nothing(episode: Episode) -> None:
    resumed = Episode(ESCROW, seed=0, handover=8)
    assert resumed.rows == episode.rows
    assert all(resumed.engines[choice].state() == episode.engines[choice].state() for choice in ALL)


def test_a_seed_that_the_clock_made_permanent_is_paid_for() -> None:
    """A graft, and nothing but waiting after it: its bonus comes when it becomes permanent."""
    env, paid = make_env(small_task("digits_impaired", epochs=4, steps=24, val_size=96), ENVS), []
    engine = RewardEngine(RewardConfig(mode=RewardMode.BASIC), PRICES, gamma=GAMMA, num_envs=ENVS)
    env.rules = replace(env.rules, reward=lambda inputs: paid.append((inputs, engine(inputs))) or paid[-1][1])
    graft = replace(
        FactoredAction.wait(), op=LifecycleOp.GERMINATE, blueprint=blueprint_index("conv_light")
    ).to_indices()
    env.begin_round(0)
    for epoch in range(1, 5):
        action = graft if epoch == 1 else FactoredAction.wait().to_indices()
        env.step(epoch, lambda _, action=action: [action] * ENVS)
    assert [outcome.fossilized for outcome in env.ledger.outcomes] == [1] * ENVS
    slot = env.rules.slot_config.slot_ids[0]
    for inputs, reward in paid:
        points = inputs.after.contributions.get(slot, 0.0) if inputs.epoch == 2 else 0.0
        assert reward["fossilize"] == pytest.approx(0.02 * math.tanh(points), abs=1e-12)
    assert any(reward["fossilize"] for _, reward in paid)


def test_a_vetoed_fossilize_earns_what_waiting_earns(episode: Episode) -> None:
    """The same round, but where waiting was chosen and fossilizing is not possible, that is tried."""

    class Eager(Growing):
        tried = 0

        def choose(self, env: int, seen) -> list[int]:
            action = super().choose(env, seen)
            if action[-1] != LifecycleOp.WAIT or seen.masks.slot_by_op[env, LifecycleOp.FOSSILIZE, action[0]]:
                return action
            self.tried += 1
            return [*action[:-1], int(LifecycleOp.FOSSILIZE)]

    eager = Eager(0)
    assert Episode(ESCROW, seed=0, decide=eager).rows == episode.rows
    assert eager.tried > 10

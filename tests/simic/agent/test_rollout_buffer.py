"""The rollout buffer: columns, segments, penalties and the flags that keep undecided rows out of learning."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import (
    IRRELEVANT_VALUES,
    OP_FOSSILIZE,
    OP_WAIT,
    EsperError,
    PolicyObservation,
    PolicyStep,
    head_sizes,
)
from esper.simic.agent.rollout_buffer import RolloutBuffer

E, T, S = 3, 5, 2


@pytest.fixture
def write(toys):
    """A function that adds one column, filled with numbers that tell where they came from."""

    def add(
        buffer: RolloutBuffer,
        *,
        reward: float = 1.0,
        terminal=False,
        reset=False,
        valid=True,
        masks=None,
        broken: bool = False,
    ) -> None:
        t = buffer.length
        obs = PolicyObservation(
            torch.full((E, 4), torch.nan if broken else float(t)),
            torch.full((E, S, 3), float(t)),
            torch.full((E, *head_sizes(S)[:2], 2), float(t)),
            torch.full((E, S), t),
        )
        actions = torch.tensor(IRRELEVANT_VALUES).repeat(E, 1)
        actions[:, -1] = OP_FOSSILIZE
        step = PolicyStep(
            actions=actions,
            log_prob=torch.full((E,), -0.5),
            head_log_probs=torch.full((E, 8), -0.1),
            value=torch.full((E,), 10.0 + t),
            op_probs=torch.ones(E, 6),
            hidden=None,
        )
        flag = [torch.as_tensor(f).expand(E).clone() for f in (terminal, reset, valid)]
        buffer.add(
            obs,
            masks or toys.open_masks(E, S),
            step,
            reward=torch.full((E,), reward),
            terminal=flag[0],
            reset=flag[1],
            epsilon=0.25,
            valid=flag[2],
        )

    return add


def make() -> RolloutBuffer:
    buffer = RolloutBuffer(
        E, T, S, num_blueprints=head_sizes(S)[1], base_dim=4, slot_dim=3, quote_dim=2, hidden=6
    )
    buffer.begin((torch.ones(E, 6), torch.zeros(E, 6)))
    return buffer


def test_what_was_written_comes_back(write) -> None:
    buffer = make()
    for t in range(3):
        write(buffer, reward=float(t), terminal=t == 2)
    batch = buffer.finish()
    assert batch.reward.tolist() == [[0.0, 1.0, 2.0]] * E
    assert batch.obs.base[1, :, 0].tolist() == [0.0, 1.0, 2.0]
    assert batch.obs.blueprints.shape == (E, 3, S)
    assert batch.obs.quotes[1, :, 0, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert batch.masks.blueprint.shape == (E, 3, head_sizes(S)[1])
    assert batch.masks.slot_by_op.shape == (E, 3, 6, S)
    assert (batch.epsilon == 0.25).all()
    assert (batch.hidden[0] == 1).all()
    assert batch.choice.all()
    assert not batch.truncated.any()
    rows = batch.rows(torch.tensor([2, 0]))
    assert rows.masks.op.shape == (2, 3, 6)
    assert rows.hidden[0].shape == (2, 6)


def test_choice_is_false_where_only_waiting_is_legal(write, toys) -> None:
    buffer = make()
    masks = toys.open_masks(E, S)
    masks.op[0] = False
    masks.op[0, OP_WAIT] = True
    write(buffer, terminal=True, masks=masks)
    assert buffer.finish().choice[:, 0].tolist() == [False, True, True]


def test_an_undecided_row_records_waiting_and_no_broken_numbers(write) -> None:
    buffer = make()
    write(buffer, terminal=torch.tensor([False, True, False]))
    write(buffer, valid=torch.tensor([True, False, True]), terminal=True)
    write(buffer, reset=True, terminal=True)
    batch = buffer.finish()
    assert batch.actions[1, 1].tolist() == [int(v) for v in IRRELEVANT_VALUES]
    assert batch.valid[1].tolist() == [True, False, True]
    assert not batch.choice[1, 1]
    assert (batch.value[1, 1], batch.behaviour_log_prob[1, 1]) == (0, 0)
    assert buffer.total_rewards().tolist() == [3.0] * E
    all_invalid = make()
    write(all_invalid, valid=False, broken=True)
    assert all_invalid.finish().obs.base.isfinite().all()


def test_a_full_rollout_refuses_more(write) -> None:
    buffer = make()
    for _ in range(T):
        write(buffer)
    with pytest.raises(EsperError, match="full: 5 steps"):
        write(buffer)


def test_the_step_after_an_undecided_one_must_be_a_reset(write) -> None:
    buffer = make()
    write(buffer, valid=torch.tensor([True, True, False]))
    with pytest.raises(EsperError, match="env 2: step 1 follows an invalid step"):
        write(buffer)


@pytest.mark.parametrize("ending", ["nothing", "reset", "invalid"])
def test_every_segment_must_be_closed(write, ending: str) -> None:
    buffer = make()
    write(buffer, terminal=torch.tensor([True, False, True]))
    if ending == "reset":
        write(buffer, reset=True, terminal=True)
    elif ending == "invalid":
        write(buffer, valid=torch.tensor([True, False, True]), terminal=True)
    with pytest.raises(
        EsperError, match="env 1: the segment that ends at step 0 is neither terminal nor truncated"
    ):
        buffer.finish()
    buffer.truncate([(1, 0)], torch.tensor([4.0]))
    batch = buffer.finish()
    assert batch.truncated[1, 0]
    assert batch.bootstrap[1, 0] == 4.0


def test_truncation_is_checked(write) -> None:
    buffer = make()
    write(buffer, terminal=True)
    with pytest.raises(EsperError, match="terminal row cannot be truncated"):
        buffer.truncate([(0, 0)], torch.tensor([1.0]))
    with pytest.raises(EsperError, match="1 truncated rows but 2 bootstrap values"):
        buffer.truncate([(0, 0)], torch.zeros(2))
    buffer.truncate([], torch.zeros(0))


def test_broken_rewards_are_named(write) -> None:
    buffer = make()
    write(buffer)
    write(buffer, reward=float("inf"), terminal=True)
    with pytest.raises(EsperError, match="env 0, step 1: reward is inf"):
        buffer.finish()
    with pytest.raises(EsperError, match="empty"):
        make().finish()


class TestPenalty:
    def test_it_lands_on_the_last_decision_which_ends_its_segment(self, write) -> None:
        buffer = make()
        write(buffer)
        write(buffer)
        assert buffer.add_penalty(1, -2.5)
        write(buffer, valid=torch.tensor([True, False, True]))
        write(buffer, reset=torch.tensor([False, True, False]), terminal=True)
        batch = buffer.finish()
        assert batch.reward[1].tolist() == [1.0, -1.5, 1.0, 1.0]
        assert buffer.total_rewards().tolist() == [4.0, 1.5, 4.0]
        assert batch.truncated[1].tolist() == [False, True, False, False]
        assert batch.terminal[1].tolist() == [False, False, False, True]
        assert batch.reward[0].tolist() == [1.0] * 4

    def test_panics_in_a_row_all_charge_the_decision_that_led_there(self, write) -> None:
        buffer = make()
        write(buffer)
        for panic in range(3):
            assert buffer.add_penalty(0, -1.0)
            write(
                buffer, valid=torch.tensor([False, True, True]), reset=torch.tensor([panic > 0, False, False])
            )
        assert buffer.columns["reward"][0, 0] == -2.0

    def test_an_episode_without_a_decision_cannot_be_charged(self, write) -> None:
        buffer = make()
        assert not buffer.add_penalty(0, -1.0)
        write(buffer, terminal=True)
        assert not buffer.add_penalty(0, -1.0), (
            "the previous episode is over and must not pay for the next one"
        )
        write(buffer, valid=torch.tensor([False, True, True]), reset=True)
        assert not buffer.add_penalty(0, -1.0)
        assert buffer.columns["reward"][0, 0] == 1.0

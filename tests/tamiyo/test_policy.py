"""The policy's distribution, sampling, entropy and files. E envs, S slots; every reference here is computed
another way."""

from __future__ import annotations

import itertools
import os
from dataclasses import fields, replace

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper._archive import write_archive
from esper.leyline import (
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    NUM_HEADS,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    RELEVANCE,
    ActionMasks,
    AlphaAlgorithm,
    AlphaCurve,
    EsperError,
    PolicyObservation,
    ShapeError,
    StructureError,
    head_sizes,
)
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import (
    EmptyMaskError,
    RecurrentPolicy,
    action_contract,
    action_uniforms,
    categorical_entropy,
    has_choice,
    map_tensors,
    mixture_log_probs,
    schema_hash,
)

torch.set_num_threads(1)

BASE, SLOT_DIM, QUOTE_DIM, OP = 6, 4, 3, HEAD_NAMES.index("op")
NUM_OPS = 6


def make_policy(*, seed: int = 0, peaked: float = 1.0, bf16: bool = False) -> RecurrentPolicy:
    """A small policy whose heads are `peaked` times as opinionated as a fresh one's, times ten."""
    torch.manual_seed(seed)
    network = TamiyoNetwork(BASE, SLOT_DIM, QUOTE_DIM, hidden=32, slot_hidden=16)
    with torch.no_grad():
        for layer in (
            network.op_head[-1],
            network.slot_score,
            network.blueprint_score,
            network.parameter_out,
        ):
            layer.weight.mul_(100 * peaked)
    network.bf16 = bf16
    return RecurrentPolicy(network, feature_schema="test-features")


def observe(envs: int, slots: int, seed: int = 1) -> PolicyObservation:
    g = torch.Generator().manual_seed(seed)
    return PolicyObservation(
        torch.randn(envs, BASE, generator=g),
        torch.randn(envs, slots, SLOT_DIM, generator=g),
        torch.randn(envs, slots, head_sizes(slots)[1], QUOTE_DIM, generator=g),
        torch.randint(-1, 13, (envs, slots), generator=g),
    )


def random_masks(envs: int, slots: int, seed: int = 2, share: float = 0.6) -> ActionMasks:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        mask = torch.rand(*shape, generator=g) < share
        mask[..., 0] |= ~mask.any(-1)
        return mask

    _, *parameters, ops = head_sizes(slots)
    op = draw(envs, ops)
    op[:, OP_WAIT] = True
    return ActionMasks(op, draw(envs, ops, slots), *(draw(envs, n) for n in parameters))


def open_masks(envs: int, slots: int) -> ActionMasks:
    return random_masks(envs, slots, share=1.1)


def only_op(masks: ActionMasks, op: int) -> ActionMasks:
    mask = torch.zeros_like(masks.op)
    mask[:, op] = True
    return ActionMasks(mask, *(getattr(masks, f.name) for f in fields(masks)[1:]))


def uniforms(envs: int, seed: int = 3) -> Tensor:
    return action_uniforms(seed, 0, range(envs), 1)[:, 0]


def legal_actions(masks: ActionMasks, env: int) -> Tensor:
    """Every complete legal action of one env, by enumeration over the relevance table."""
    actions = []
    for op in masks.op[env].nonzero().flatten().tolist():
        choices = []
        for head, name in enumerate(HEAD_NAMES):
            if head == OP:
                choices.append([op])
            elif not RELEVANCE[op][head]:
                choices.append([int(IRRELEVANT_VALUES[head])])
            else:
                mask = masks.slot_by_op[env, op] if name == "slot" else getattr(masks, name)[env]
                choices.append(mask.nonzero().flatten().tolist())
        actions += itertools.product(*choices)
    return torch.tensor(actions)


def distribution(policy: RecurrentPolicy, obs: PolicyObservation, masks: ActionMasks, epsilon: float):
    envs = len(obs.base)
    return policy.distribution(
        map_tensors(obs, lambda t: t.unsqueeze(1)),
        policy.initial_hidden(envs),
        map_tensors(masks, lambda t: t.unsqueeze(1)),
        reset=torch.zeros(envs, 1, dtype=torch.bool),
        epsilon=torch.full((envs, 1), epsilon),
    )[0]


class TestParity:
    @pytest.mark.parametrize("op", range(NUM_OPS))
    @pytest.mark.parametrize("epsilon", [0.0, 0.1])
    def test_acting_and_evaluating_agree_for_every_op(self, op: int, epsilon: float) -> None:
        policy, envs, steps, slots = make_policy(), 5, 7, 3
        masks = [only_op(random_masks(envs, slots, seed=t), op) for t in range(steps)]
        seen = [observe(envs, slots, seed=t) for t in range(steps)]
        reset = torch.rand(envs, steps, generator=torch.Generator().manual_seed(9)) < 0.2
        hidden = first = (torch.randn(envs, 32), torch.randn(envs, 32))
        taken = []
        for t in range(steps):
            step = policy.act(
                seen[t], hidden, masks[t], uniforms=uniforms(envs, seed=t), epsilon=epsilon, reset=reset[:, t]
            )
            assert (step.actions[:, OP] == op).all()
            assert step.hidden is not None
            hidden = step.hidden
            taken.append(step)
        sequence = PolicyObservation(
            *(torch.stack([getattr(o, f.name) for o in seen], 1) for f in fields(PolicyObservation))
        )
        again = policy.evaluate(
            sequence,
            first,
            ActionMasks(*(torch.stack([getattr(m, f.name) for m in masks], 1) for f in fields(ActionMasks))),
            torch.stack([s.actions for s in taken], 1),
            reset=reset,
            epsilon=torch.full((envs, steps), epsilon),
        )
        torch.testing.assert_close(
            again.head_log_probs, torch.stack([s.head_log_probs for s in taken], 1), atol=1e-6, rtol=0
        )
        torch.testing.assert_close(
            again.log_prob, torch.stack([s.log_prob for s in taken], 1), atol=2e-6, rtol=0
        )
        torch.testing.assert_close(
            policy.network.denormalize(again.normalized_value, sequence.family),
            torch.stack([s.value for s in taken], 1),
            atol=1e-6,
            rtol=0,
        )

    @pytest.mark.parametrize("epsilon", [0.0, 0.1])
    def test_no_tempo_is_needed_where_nothing_can_be_germinated(self, epsilon: float) -> None:
        """At the last decision no tempo leaves time; the other operations, and all gradients, are as ever."""
        policy, envs, slots = make_policy(), 4, 2
        obs, masks = observe(envs, slots), open_masks(envs, slots)
        masks.op[:, OP_GERMINATE] = masks.slot_by_op[:, OP_GERMINATE] = False
        late = replace(masks, tempo=torch.zeros_like(masks.tempo))
        results = []
        for allowed in (masks, late):
            policy.network.zero_grad()
            step = policy.act(
                obs, policy.initial_hidden(envs), allowed, uniforms=uniforms(envs), epsilon=epsilon
            )
            again = policy.evaluate(
                map_tensors(obs, lambda t: t.unsqueeze(1)),
                policy.initial_hidden(envs),
                map_tensors(allowed, lambda t: t.unsqueeze(1)),
                step.actions.unsqueeze(1),
                reset=torch.zeros(envs, 1, dtype=torch.bool),
                epsilon=torch.full((envs, 1), epsilon),
            )
            (again.log_prob.sum() + again.entropy.sum()).backward()
            gradients = [p.grad for p in policy.network.parameters() if p.grad is not None]
            assert all(g.isfinite().all() for g in gradients)
            assert any(g.any() for g in gradients)
            results.append((step.actions, step.log_prob, again.log_prob, again.entropy, *gradients))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)

    def test_value_alone_equals_the_value_of_acting(self) -> None:
        policy, obs, hidden = make_policy(), observe(3, 2), (torch.randn(3, 32), torch.randn(3, 32))
        step = policy.act(obs, hidden, open_masks(3, 2), deterministic=True)
        torch.testing.assert_close(policy.value(obs, hidden), step.value, atol=0, rtol=0)

    def test_blueprints_that_nothing_offers_are_left_out_of_an_evaluation(self) -> None:
        envs, slots, offered = 6, 3, [4, 7, 12]
        policy, obs, masks = make_policy(), observe(envs, slots), open_masks(envs, slots)
        hidden = torch.zeros(head_sizes(slots)[1], dtype=torch.bool)
        hidden[[i for i in range(len(hidden)) if i not in offered]] = True
        obs = replace(obs, quotes=obs.quotes.masked_fill(hidden[:, None], 0.0))
        masks = replace(only_op(masks, OP_GERMINATE), blueprint=masks.blueprint & ~hidden)
        step = policy.act(obs, None, masks, uniforms=uniforms(envs))
        sequences = (
            map_tensors(obs, lambda t: t.unsqueeze(1)),
            policy.initial_hidden(envs),
            map_tensors(masks, lambda t: t.unsqueeze(1)),
        )
        options = {"reset": torch.zeros(envs, 1, dtype=torch.bool), "epsilon": torch.zeros(envs, 1)}
        again = policy.evaluate(*sequences, step.actions.unsqueeze(1), **options)
        torch.testing.assert_close(again.log_prob[:, 0], step.log_prob)
        torch.testing.assert_close(
            again.head_entropies, distribution(policy, obs, masks, 0.0).entropies(step.actions.unsqueeze(1))
        )
        measured = policy.evaluate(
            *sequences, step.actions.unsqueeze(1), **options, entropy_gradient=False
        ).head_entropies
        assert torch.equal(measured, again.head_entropies)
        assert again.head_entropies.requires_grad
        assert not measured.requires_grad

    def test_bfloat16_acts_and_evaluates_alike_with_float32_probabilities(self) -> None:
        policy, obs, masks = make_policy(bf16=True), observe(4, 3), random_masks(4, 3)
        step = policy.act(obs, None, masks, uniforms=uniforms(4))
        again = policy.evaluate(
            map_tensors(obs, lambda t: t.unsqueeze(1)),
            policy.initial_hidden(4),
            map_tensors(masks, lambda t: t.unsqueeze(1)),
            step.actions.unsqueeze(1),
            reset=torch.zeros(4, 1, dtype=torch.bool),
            epsilon=torch.zeros(4, 1),
        )
        assert again.log_prob.dtype == again.entropy.dtype == step.value.dtype == torch.float32
        torch.testing.assert_close(again.log_prob[:, 0], step.log_prob, atol=0.05, rtol=0)
        assert policy.network.op_head[0].weight.dtype == torch.float32


class TestLegality:
    @pytest.mark.parametrize("epsilon", [0.0, 0.3])
    def test_masked_actions_have_probability_exactly_zero_and_are_never_sampled(self, epsilon: float) -> None:
        policy, envs, slots = make_policy(peaked=3), 64, 3
        obs, masks = observe(envs, slots), random_masks(envs, slots)
        for seed in range(10):
            step = policy.act(obs, None, masks, uniforms=uniforms(envs, seed), epsilon=epsilon)
            assert (step.op_probs[~masks.op] == 0).all()
            torch.testing.assert_close(step.op_probs.sum(-1), torch.ones(envs))
            for env in range(envs):
                assert (legal_actions(masks, env) == step.actions[env]).all(-1).any()

    def test_irrelevant_heads_hold_their_placeholder_and_weigh_exactly_nothing(self) -> None:
        policy, envs = make_policy(), 48
        step = policy.act(observe(envs, 3), None, open_masks(envs, 3), uniforms=uniforms(envs), epsilon=0.5)
        relevant = torch.tensor(RELEVANCE)[step.actions[:, OP]]
        assert step.actions[:, OP].unique().numel() == NUM_OPS
        assert (step.actions[~relevant] == torch.tensor(IRRELEVANT_VALUES).expand(envs, -1)[~relevant]).all()
        assert (step.head_log_probs[~relevant] == 0).all()
        torch.testing.assert_close(step.log_prob, step.head_log_probs.sum(-1))

    def test_waiting_alone_has_no_entropy_at_all(self) -> None:
        policy, masks = make_policy(), only_op(open_masks(2, 3), OP_WAIT)
        dist = distribution(policy, observe(2, 3), masks, 0.1)
        actions, log_probs = dist.sample(uniforms(2).unsqueeze(1))
        assert (dist.entropies(actions) == 0).all()
        assert (log_probs == 0).all()

    @pytest.mark.parametrize("slots", [1, 3, 12])
    def test_gradients_are_finite_whatever_the_masks(self, slots: int) -> None:
        policy = make_policy(peaked=10)
        for seed in range(5):
            masks = random_masks(6, slots, seed=seed, share=0.3)
            masks.slot_by_op[:, 1:][~masks.op[:, 1:]] = (
                False  # rows of illegal ops are empty, as the mask builder leaves them
            )
            dist = distribution(policy, observe(6, slots), masks, 0.05 * seed)
            actions, _ = dist.sample(uniforms(6).unsqueeze(1))
            policy.network.zero_grad()
            (dist.log_probs(actions).sum() + dist.entropies(actions).sum()).backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in policy.network.parameters())

    def test_an_env_without_a_legal_op_is_an_error_that_names_it(self) -> None:
        masks = open_masks(4, 2)
        masks.op[2] = False
        with pytest.raises(EmptyMaskError, match="env 2: no op is allowed"):
            make_policy().act(observe(4, 2), None, masks, deterministic=True)

    def test_an_op_that_cannot_be_completed_is_an_error_that_names_head_and_env(self) -> None:
        masks = open_masks(4, 2)
        masks.blueprint[3] = False
        with pytest.raises(
            EmptyMaskError, match="env 3: op GERMINATE is allowed, but no value of its head 'blueprint' is"
        ):
            make_policy().act(observe(4, 2), None, masks, deterministic=True)
        masks.op[3, OP_GERMINATE] = False
        make_policy().act(observe(4, 2), None, masks, deterministic=True)

    def test_a_broken_observation_is_an_error_that_names_the_env(self) -> None:
        obs = observe(3, 2)
        obs.base[1, 0] = torch.nan
        with pytest.raises(EsperError, match="env 1: the policy's output is not finite"):
            make_policy().act(obs, None, open_masks(3, 2), deterministic=True)

    def test_choice_means_more_than_one_complete_action(self) -> None:
        masks = random_masks(40, 2, share=0.4)
        masks.op[:10] = False
        masks.op[:10, OP_FOSSILIZE] = True  # whose only freedom is the slot
        expected = torch.tensor([len(legal_actions(masks, env)) > 1 for env in range(40)])
        assert torch.equal(has_choice(masks), expected)
        assert 0 < int(expected[:10].sum()) < 10


class TestEntropy:
    @pytest.mark.parametrize("epsilon", [0.0, 0.2])
    def test_chain_rule_equals_enumeration(self, epsilon: float) -> None:
        policy, envs, slots = make_policy(peaked=2), 3, 2
        obs, masks = observe(envs, slots), random_masks(envs, slots, share=0.75)
        dist = distribution(policy, obs, masks, epsilon)
        shares = dist.entropies(torch.tensor(IRRELEVANT_VALUES).expand(envs, 1, NUM_HEADS))
        for env in range(envs):
            log_probs = self.enumerate_log_probs(policy, obs, masks, env, epsilon)
            torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0), atol=1e-5, rtol=0)
            torch.testing.assert_close(
                shares[env, 0].sum(), -(log_probs.exp() * log_probs).sum(), atol=1e-5, rtol=0
            )

    def test_above_ten_slots_the_sampled_share_is_right_on_average(self) -> None:
        policy, slots = make_policy(peaked=2), 11
        obs, masks = observe(1, slots), random_masks(1, slots, share=0.4)
        legal = legal_actions(masks, 0)
        many = map_tensors(obs, lambda t: t.expand(len(legal), *t.shape[1:]))
        many_masks = map_tensors(masks, lambda t: t.expand(len(legal), *t.shape[1:]))
        dist = distribution(policy, many, many_masks, 0.1)
        log_probs = dist.log_probs(legal.unsqueeze(1))[:, 0].sum(-1)
        expected = (log_probs.exp() * dist.entropies(legal.unsqueeze(1))[:, 0].sum(-1)).sum()
        torch.testing.assert_close(expected, -(log_probs.exp() * log_probs).sum(), atol=1e-5, rtol=0)

    @staticmethod
    def enumerate_log_probs(
        policy: RecurrentPolicy, obs: PolicyObservation, masks: ActionMasks, env: int, epsilon: float
    ) -> Tensor:
        legal = legal_actions(masks, env)
        one = map_tensors(obs, lambda t: t[env : env + 1].expand(len(legal), *t.shape[1:]))
        one_masks = map_tensors(masks, lambda t: t[env : env + 1].expand(len(legal), *t.shape[1:]))
        return distribution(policy, one, one_masks, epsilon).log_probs(legal.unsqueeze(1))[:, 0].sum(-1)

    @given(st.lists(st.floats(-60, 60), min_size=2, max_size=13), st.floats(0, 1), st.data())
    @settings(max_examples=200, deadline=None)
    def test_mixture_is_a_distribution_with_a_floor_and_no_cap(
        self, logits: list[float], epsilon: float, data: st.DataObject
    ) -> None:
        mask = torch.tensor(
            data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)).filter(any))
        )
        log_probs = mixture_log_probs(torch.tensor(logits), mask, torch.tensor([epsilon]))
        probs = log_probs.exp()
        legal = int(mask.sum())
        softmax = torch.zeros(len(logits), dtype=torch.float64)
        softmax[mask] = torch.tensor(logits, dtype=torch.float64)[mask].softmax(-1)
        expected = torch.where(mask, (1 - epsilon) * softmax + epsilon / legal, 0.0)
        torch.testing.assert_close(probs.double(), expected, atol=1e-6, rtol=1e-4)
        assert (probs[~mask] == 0).all()
        assert -1e-6 <= categorical_entropy(log_probs) <= torch.tensor(float(legal)).log() + 1e-5


class TestLearnability:
    @pytest.mark.parametrize("epsilon", [0.0, 0.1])
    def test_log_probs_keep_their_gradient_at_peaked_logits(self, epsilon: float) -> None:
        policy = make_policy()
        with torch.no_grad():
            policy.network.op_head[-1].bias[OP_WAIT] = 12.0
        dist = distribution(policy, observe(2, 2), open_masks(2, 2), epsilon)
        assert (dist.op_log_probs.exp()[..., OP_WAIT] > 0.85).all()
        for op in range(1, NUM_OPS):
            weight = policy.network.op_head[0].weight
            (gradient,) = torch.autograd.grad(dist.op_log_probs[..., op].sum(), weight, retain_graph=True)
            assert gradient.isfinite().all()
            assert gradient.abs().max() > 1e-6

    @pytest.mark.parametrize("op", range(NUM_OPS))
    def test_without_exploration_any_single_action_can_become_near_certain(self, op: int) -> None:
        torch.manual_seed(op)
        policy = RecurrentPolicy(TamiyoNetwork(BASE, SLOT_DIM, QUOTE_DIM, hidden=32, slot_hidden=16))
        obs, masks = observe(1, 3), open_masks(1, 3)
        legal = legal_actions(only_op(masks, op), 0)
        wanted = legal[len(legal) // 2].view(1, 1, NUM_HEADS)
        optimizer = torch.optim.Adam(policy.network.parameters(), lr=0.02)
        for _ in range(60):
            loss = -distribution(policy, obs, masks, 0.0).log_probs(wanted).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert distribution(policy, obs, masks, 0.0).log_probs(wanted).sum().exp() > 0.99


class TestSampling:
    @pytest.mark.parametrize("slots", [1, 3, 10, 50])
    def test_an_env_does_not_depend_on_how_many_run_beside_it(self, slots: int) -> None:
        torch.manual_seed(0)
        policy = RecurrentPolicy(TamiyoNetwork(BASE, SLOT_DIM, QUOTE_DIM))
        envs = 64
        obs, masks, u = observe(envs, slots), random_masks(envs, slots), uniforms(envs)
        hidden = (torch.randn(envs, 128), torch.randn(envs, 128))
        whole = policy.act(obs, hidden, masks, uniforms=u, epsilon=0.1)
        for count in (1, 2, 3, 4, 7, 16, 17, 33):
            part = policy.act(
                map_tensors(obs, lambda t, n=count: t[:n]),
                (hidden[0][:count], hidden[1][:count]),
                map_tensors(masks, lambda t, n=count: t[:n]),
                uniforms=u[:count],
                epsilon=0.1,
            )
            assert part.hidden is not None
            assert whole.hidden is not None
            for name in ("actions", "log_prob", "head_log_probs", "value", "op_probs"):
                assert torch.equal(getattr(part, name), getattr(whole, name)[:count]), (count, name)
            assert torch.equal(part.hidden[0], whole.hidden[0][:count])
            assert torch.equal(part.hidden[1], whole.hidden[1][:count])

    def test_frequencies_follow_the_probabilities(self) -> None:
        policy, envs = make_policy(), 4096
        obs = map_tensors(observe(1, 2), lambda t: t.expand(envs, *t.shape[1:]))
        masks = map_tensors(random_masks(1, 2, share=0.8), lambda t: t.expand(envs, *t.shape[1:]))
        step = policy.act(
            obs, None, masks, uniforms=torch.rand(envs, NUM_HEADS, generator=torch.Generator().manual_seed(0))
        )
        frequency = step.actions[:, OP].bincount(minlength=NUM_OPS) / envs
        torch.testing.assert_close(frequency, step.op_probs[0], atol=4 * 0.5 / envs**0.5, rtol=0)

    def test_the_largest_uniform_still_picks_a_legal_action(self) -> None:
        policy, masks = make_policy(), random_masks(8, 3, share=0.3)
        step = policy.act(
            observe(8, 3), None, masks, uniforms=torch.full((8, NUM_HEADS), 1 - 2.0**-53, dtype=torch.float64)
        )
        assert step.log_prob.isfinite().all()

    def test_deterministic_takes_the_mode_of_each_factor(self) -> None:
        policy, obs, masks = make_policy(), observe(5, 3), random_masks(5, 3)
        step = policy.act(obs, None, masks, deterministic=True)
        assert torch.equal(step.actions[:, OP], step.op_probs.argmax(-1))
        assert torch.equal(
            step.actions, policy.act(obs, None, masks, deterministic=True, epsilon=0.5).actions
        )

    def test_sampling_without_random_numbers_is_an_error(self) -> None:
        with pytest.raises(ShapeError, match=r"uniforms of shape \(2, 8\), got none"):
            make_policy().act(observe(2, 1), None, open_masks(2, 1))

    def test_streams_belong_to_root_episode_and_env(self) -> None:
        a = action_uniforms(7, 3, range(4), 5)
        assert a.shape == (4, 5, NUM_HEADS)
        assert torch.equal(a[2], action_uniforms(7, 3, [2], 5)[0])
        assert torch.equal(a[:, :2], action_uniforms(7, 3, range(4), 2))
        for other in (action_uniforms(8, 3, range(4), 5), action_uniforms(7, 4, range(4), 5)):
            assert not (a == other).any()
        assert 0 <= a.min() < a.max() < 1


class TestFiles:
    def test_a_stored_policy_acts_bit_identically(self, tmp_path) -> None:
        policy, obs, masks = make_policy(), observe(3, 2), open_masks(3, 2)
        policy.network.value_mean.fill_(2.5)
        policy.save(tmp_path / "deep" / "policy.safetensors")
        again = RecurrentPolicy.load(tmp_path / "deep" / "policy.safetensors", feature_schema="test-features")
        a, b = (p.act(obs, None, masks, uniforms=uniforms(3)) for p in (policy, again))
        assert torch.equal(a.actions, b.actions)
        assert torch.equal(a.log_prob, b.log_prob)
        assert torch.equal(a.value, b.value)
        assert os.listdir(tmp_path / "deep") == ["policy.safetensors"]

    def test_other_features_are_refused_by_name(self, tmp_path) -> None:
        make_policy().save(tmp_path / "p")
        with pytest.raises(StructureError, match="features is 'test-features' in the file and 'newer' here"):
            RecurrentPolicy.load(tmp_path / "p", feature_schema="newer")

    def test_another_action_contract_is_refused_by_name(self, tmp_path) -> None:
        policy = make_policy()
        other = policy.schema() | {"actions": "0" * len(policy.schema()["actions"])}
        header = {"kind": "policy", "version": 2, "schema": other}
        write_archive(tmp_path / "p", policy.network.state_dict(), header)
        with pytest.raises(StructureError, match="actions is '0000"):
            RecurrentPolicy.load(tmp_path / "p", feature_schema="test-features")

    @pytest.mark.parametrize(
        ("table", "other"),
        [
            ("TEMPO_EPOCHS", (2, 5, 8)),
            ("ALPHA_TARGET_VALUES", (0.4, 0.7, 1.0)),
            ("ALPHA_SPEED_EPOCHS", (1, 3, 5, 8)),
            ("ALPHA_CURVE_VALUES", (AlphaCurve.COSINE,) * 5),
            ("ALPHA_CURVE_STEEPNESS", (12.0, 12.0, 6.0, 12.0, 25.0)),
            ("STYLE_ALPHA_ALGORITHMS", (AlphaAlgorithm.ADD,) * 4),
            ("STYLE_CURVES", (AlphaCurve.LINEAR,) * 4),
        ],
    )
    def test_the_action_contract_covers_what_choices_stand_for(self, monkeypatch, table, other) -> None:
        before = action_contract()
        monkeypatch.setattr(f"esper.tamiyo.policy.{table}", other)
        assert action_contract() != before

    def test_damage_is_named(self, tmp_path) -> None:
        make_policy().save(tmp_path / "p")
        data = bytearray((tmp_path / "p").read_bytes())
        (tmp_path / "cut").write_bytes(data[:-100])
        with pytest.raises(StructureError, match="not a readable safetensors file"):
            RecurrentPolicy.load(tmp_path / "cut", feature_schema="test-features")
        data[-1] ^= 1
        (tmp_path / "flipped").write_bytes(data)
        with pytest.raises(StructureError, match=r"tensor '[\w.]+' is missing or damaged"):
            RecurrentPolicy.load(tmp_path / "flipped", feature_schema="test-features")
        safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
        with pytest.raises(StructureError, match="no field 'esper'"):
            RecurrentPolicy.load(tmp_path / "foreign", feature_schema="test-features")

    def test_a_failed_write_leaves_the_old_file_and_no_litter(self, tmp_path, monkeypatch) -> None:
        policy = make_policy()
        policy.save(tmp_path / "p")
        before = (tmp_path / "p").read_bytes()

        def full_disk(_: int) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            make_policy(seed=1).save(tmp_path / "p")
        assert (tmp_path / "p").read_bytes() == before
        assert os.listdir(tmp_path) == ["p"]

    def test_the_schema_hash_changes_with_each_part(self) -> None:
        policy = make_policy()
        schemas = [
            policy.schema(),
            RecurrentPolicy(policy.network, feature_schema="other").schema(),
            RecurrentPolicy(
                TamiyoNetwork(BASE, SLOT_DIM, QUOTE_DIM, hidden=48), feature_schema="test-features"
            ).schema(),
        ]
        assert len({schema_hash(s) for s in schemas}) == 3

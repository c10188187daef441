"""The policy network: sizes, symmetry over slots, exact resets inside sequences, and how it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from esper.leyline import HEAD_NAMES, RELEVANCE, PolicyObservation, ShapeError
from esper.tamiyo.network import PARAMETER_BLOCKS, TamiyoNetwork, pool_slots

torch.set_num_threads(1)

BASE, SLOT, QUOTE = 7, 5, 3


def make(seed: int = 0, **sizes: int) -> TamiyoNetwork:
    torch.manual_seed(seed)
    return TamiyoNetwork(BASE, SLOT, QUOTE, **{"hidden": 32, "slot_hidden": 16, **sizes})


def observe(envs: int, steps: int, slots: int, seed: int = 1, blueprints: int = 6) -> PolicyObservation:
    g = torch.Generator().manual_seed(seed)
    return PolicyObservation(
        torch.randn(envs, steps, BASE, generator=g),
        torch.randn(envs, steps, slots, SLOT, generator=g),
        torch.randn(envs, steps, slots, blueprints, QUOTE, generator=g),
        torch.randint(-1, 15, (envs, steps, slots), generator=g),
    )


def no_reset(envs: int, steps: int) -> torch.Tensor:
    return torch.zeros(envs, steps, dtype=torch.bool)


def test_default_size_is_about_a_third_of_a_million() -> None:
    network = TamiyoNetwork(base_dim=60, slot_dim=70, quote_dim=10)
    assert 200_000 < sum(p.numel() for p in network.parameters()) < 350_000


@pytest.mark.parametrize("slots", [1, 3, 50])
def test_one_set_of_weights_serves_any_number_of_slots(slots: int) -> None:
    network = make()
    features, _ = network(observe(2, 3, slots), network.initial_hidden(2), no_reset(2, 3))
    assert network.op_logits(features).shape == (2, 3, 6)
    assert network.slot_logits(features).shape == (2, 3, 6, slots)
    assert network.normalized_value(features).shape == (2, 3)


def test_reordering_the_slots_reorders_their_scores_and_nothing_else() -> None:
    network, obs = make(), observe(2, 3, 4)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = PolicyObservation(
        obs.base, obs.slots[:, :, order], obs.quotes[:, :, order], obs.blueprints[:, :, order]
    )
    a, _ = network(obs, network.initial_hidden(2), no_reset(2, 3))
    b, _ = network(shuffled, network.initial_hidden(2), no_reset(2, 3))
    torch.testing.assert_close(network.slot_logits(a)[..., order], network.slot_logits(b), atol=1e-6, rtol=0)
    torch.testing.assert_close(network.op_logits(a), network.op_logits(b), atol=1e-6, rtol=0)
    torch.testing.assert_close(network.normalized_value(a), network.normalized_value(b), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("slots", "filled"), [(1, 2), (2, 5), (3, 10), (5, 50)])
def test_slots_that_do_not_exist_change_no_bit(slots: int, filled: int) -> None:
    """16 envs: rows of matrix products are the same bits at multiples of 8 (see ROW_MULTIPLE)."""
    network, obs = make(), observe(16, 1, slots)
    more = filled - slots
    padded = PolicyObservation(
        obs.base,
        torch.nn.functional.pad(obs.slots, (0, 0, 0, more)),
        torch.nn.functional.pad(obs.quotes, (0, 0, 0, 0, 0, more)),
        torch.nn.functional.pad(obs.blueprints, (0, more), value=-1),
        torch.nn.functional.pad(obs.exists, (0, more)),
    )
    a, hidden_a = network(obs, network.initial_hidden(16), no_reset(16, 1))
    b, hidden_b = network(padded, network.initial_hidden(16), no_reset(16, 1))
    assert torch.equal(a.context, b.context)
    assert torch.equal(hidden_a[0], hidden_b[0])
    assert torch.equal(network.op_logits(a), network.op_logits(b))
    assert torch.equal(network.slot_logits(a), network.slot_logits(b)[..., :slots])
    assert torch.equal(network.normalized_value(a), network.normalized_value(b))


def test_pooling_takes_the_slots_that_exist() -> None:
    slots = torch.tensor([[[1.0, -4.0], [3.0, -2.0], [9.0, 9.0]], [[5.0, 5.0]] * 3])
    exists = torch.tensor([[True, True, False], [False, False, False]])
    mean, largest = pool_slots(slots, exists)
    assert mean.tolist() == [[2.0, -3.0], [0.0, 0.0]]
    assert largest.tolist() == [[3.0, -2.0], [0.0, 0.0]]


def test_every_family_has_a_value_of_its_own_and_a_new_one_the_mean_of_all() -> None:
    network, obs = make(), observe(4, 2, 3)
    weight = network.value_out.weight.clone()
    network.add_family()
    assert torch.equal(network.value_out.weight, weight.repeat(2, 1)), "the only known family is their mean"
    with torch.no_grad():
        network.value_out.weight.normal_(generator=torch.Generator().manual_seed(3))
        network.value_out.bias.copy_(torch.tensor([0.5, -2.0]))
        network.value_mean.copy_(torch.tensor([1.0, 30.0]))
        network.value_scale.copy_(torch.tensor([0.2, 7.0]))
    network.add_family()

    def values(index: int) -> torch.Tensor:
        family = torch.full((4, 2), index)
        seen = replace(obs, family=family)
        features, _ = network(seen, network.initial_hidden(4), no_reset(4, 2))
        return network.denormalize(network.normalized_value(features), family)

    first, second, new = (values(index).detach() for index in range(3))
    assert (first - second).abs().min() > 1
    torch.testing.assert_close(new, (first + second) / 2, atol=1e-5, rtol=1e-6)


def test_unrolling_with_resets_equals_stepping_with_a_zeroed_state() -> None:
    network, envs, steps = make(), 5, 12
    g = torch.Generator().manual_seed(2)
    x = torch.randn(envs, steps, 32, generator=g)
    reset = torch.rand(envs, steps, generator=g) < 0.3
    hidden = (torch.randn(envs, 32, generator=g), torch.randn(envs, 32, generator=g))
    whole, (h_end, c_end) = network.unroll(x, hidden, reset)
    h, c = hidden
    for t in range(steps):
        keep = (~reset[:, t, None]).float()
        gates = x[:, t] @ network.lstm.weight_ih_l0.T + (h * keep) @ network.lstm.weight_hh_l0.T
        i, f, g_, o = (gates + network.lstm.bias_ih_l0 + network.lstm.bias_hh_l0).chunk(4, dim=1)
        c = f.sigmoid() * c * keep + i.sigmoid() * g_.tanh()
        h = o.sigmoid() * c.tanh()
        torch.testing.assert_close(whole[:, t], h, atol=1e-6, rtol=0)
    torch.testing.assert_close((h_end, c_end), (h, c), atol=1e-6, rtol=0)


def test_a_broken_state_does_not_survive_its_reset() -> None:
    network = make()
    nan = torch.full((1, 32), torch.nan)
    out, _ = network.unroll(torch.zeros(1, 2, 32), (nan, nan), torch.tensor([[True, False]]))
    assert out.isfinite().all()


def test_starts_near_uniform_and_with_memories_of_every_length() -> None:
    network = make(hidden=64)
    features, _ = network(observe(8, 2, 3), network.initial_hidden(8), no_reset(8, 2))
    for logits in (
        network.op_logits(features),
        network.slot_logits(features),
        network.parameter_logits(features.context, features.slots[..., 0, :]),
        network.blueprint_logits(features.context, features.slots[..., 0, :], features.quotes[..., 0, :, :]),
    ):
        assert logits.abs().max() < 0.15
    forget = network.lstm.bias_ih_l0[64:128].sigmoid()
    lifetimes = 1 / (1 - forget)
    assert lifetimes.min() < 2.5
    assert lifetimes.max() > 60


def scores(network: TamiyoNetwork, obs: PolicyObservation) -> torch.Tensor:
    """[E, T, S, B] of every blueprint in every slot."""
    context, slots, quotes = network(obs, network.initial_hidden(2), no_reset(2, 1))[0][:3]
    return network.blueprint_logits(context.unsqueeze(-2), slots, quotes)


def test_indices_of_blueprints_are_not_read() -> None:
    network, obs = make(), observe(2, 1, 3)
    others = replace(obs, blueprints=torch.full_like(obs.blueprints, 99))
    assert torch.equal(scores(network, obs), scores(network, others))


def test_reordering_the_blueprints_reorders_their_scores_and_nothing_else() -> None:
    network, obs = make(), observe(2, 1, 3)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = replace(obs, quotes=obs.quotes[..., order, :])
    torch.testing.assert_close(scores(network, obs)[..., order], scores(network, shuffled), atol=1e-6, rtol=0)


@pytest.mark.parametrize("blueprints", [1, 6, 40])
def test_one_set_of_weights_serves_any_number_of_blueprints(blueprints: int) -> None:
    assert scores(make(), observe(2, 1, 3, blueprints=blueprints)).shape == (2, 1, 3, blueprints)


def test_what_is_not_offered_changes_nothing() -> None:
    """A registered blueprint that is not offered has a quote of zeros: an op, a slot or the score of another
    blueprint must not depend on it."""
    network, obs = make(), observe(2, 1, 3)
    more = replace(obs, quotes=torch.cat([obs.quotes, torch.zeros(2, 1, 3, 5, QUOTE)], -2))
    few, many = (network(o, network.initial_hidden(2), no_reset(2, 1))[0] for o in (obs, more))
    torch.testing.assert_close(few.context, many.context, atol=1e-6, rtol=0)
    torch.testing.assert_close(few.slots, many.slots, atol=1e-6, rtol=0)
    torch.testing.assert_close(scores(network, obs), scores(network, more)[..., :6], atol=1e-6, rtol=0)


def test_a_quote_matters_to_its_slot_and_to_the_op() -> None:
    network, obs = make(), observe(2, 1, 3)
    dearer = obs.quotes.clone()
    dearer[:, :, 1, 2] += 1.0
    other = replace(obs, quotes=dearer)
    a, b = (network(o, network.initial_hidden(2), no_reset(2, 1))[0] for o in (obs, other))
    assert not torch.allclose(a.slots[:, :, 1], b.slots[:, :, 1])
    assert torch.equal(a.slots[:, :, 0], b.slots[:, :, 0])
    assert not torch.allclose(network.op_logits(a), network.op_logits(b))


def test_value_gradient_reaches_the_memory() -> None:
    network = make()
    features, _ = network(observe(2, 4, 3), network.initial_hidden(2), no_reset(2, 4))
    network.normalized_value(features).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.lstm.parameters())


def test_every_relevant_parameter_has_logits_of_its_own() -> None:
    pairs = {(block.op, block.head) for block in PARAMETER_BLOCKS}
    parameters = [h for h, name in enumerate(HEAD_NAMES) if name not in ("slot", "blueprint", "op")]
    expected = {(op, h) for op in range(6) for h in parameters if RELEVANCE[op][h]}
    assert pairs == expected
    assert len(pairs) == len(PARAMETER_BLOCKS)


def test_wrong_feature_sizes_are_named() -> None:
    network, obs = make(), observe(1, 1, 2)
    with pytest.raises(ShapeError, match=r"base has 8 features; the network reads 7"):
        network(
            replace(obs, base=torch.zeros(1, 1, 8)),
            network.initial_hidden(1),
            no_reset(1, 1),
        )
    with pytest.raises(ShapeError, match=r"slots has 9 features; the network reads 5"):
        network(
            replace(obs, slots=torch.zeros(1, 1, 2, 9)),
            network.initial_hidden(1),
            no_reset(1, 1),
        )
    with pytest.raises(ShapeError, match=r"quotes has 4 features; the network reads 3"):
        network(
            replace(obs, quotes=torch.zeros(1, 1, 2, 6, 4)),
            network.initial_hidden(1),
            no_reset(1, 1),
        )


def test_masked_inputs_and_memory_do_not_change_the_output() -> None:
    network, obs = make(), observe(3, 2, 4)
    network.mask_inputs([1], [0, 2], [1], memory=False)
    changed = replace(obs, base=obs.base.clone(), slots=obs.slots.clone(), quotes=obs.quotes.clone())
    changed.base[..., 1] += 5.0
    changed.slots[..., [0, 2]] -= 7.0
    changed.quotes[..., 1] += 3.0
    loud = tuple(torch.randn(3, network.architecture["hidden"]) for _ in range(2))
    seen, _ = network(obs, network.initial_hidden(3), no_reset(3, 2))
    unseen, _ = network(changed, loud, no_reset(3, 2))
    assert torch.equal(seen.context, unseen.context)
    assert torch.equal(seen.quotes, unseen.quotes)
    changed.base[..., 0] += 5.0
    assert not torch.equal(seen.context, network(changed, loud, no_reset(3, 2))[0].context)
    whole, _ = make()(obs, network.initial_hidden(3), no_reset(3, 2))
    assert not torch.equal(seen.context, whole.context)

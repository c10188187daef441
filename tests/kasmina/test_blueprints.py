"""The catalogue: every seed, under every blend, in every topology, is born silent, feels a gradient and
learns real images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina import (
    CNNHost,
    GPTHost,
    MLPHost,
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    blueprint_names,
    build_blueprint,
    register_blueprint,
)
from esper.kasmina.blueprints import ImageSeed
from esper.kasmina.layers import Lanes, Mode
from esper.kasmina.seed import GATE_BANK
from esper.leyline import (
    AlphaAlgorithm,
    BlueprintError,
    Incubation,
    SeedStage,
    blueprint_ids,
)
from helpers import (
    EAGER,
    HOSTS,
    TOKENS,
    all_tensors,
    blueprints,
    bring,
    digits,
    fuse,
    make,
    passed,
    population_batch,
    stir_seed,
    train_step,
)

CATALOGUE = [(topology, name) for topology in HOSTS for name in blueprints(topology)]
every_seed = pytest.mark.parametrize(("topology", "name"), CATALOGUE)
every_blend = pytest.mark.parametrize("algorithm", AlphaAlgorithm)
ALGORITHMS = dict(enumerate(AlphaAlgorithm))
"""Row → blend; the other rows of a population of eight stay as they are."""
SLOT = "r0c1"


def planted(topology: Any, name: str, stage: SeedStage, **options: Any) -> MorphogeneticModel:
    """Eight equal networks; in the first three a seed under each blend."""
    model = make(topology, 8, random_seeds=[4] * 8, **options)
    for row, algorithm in ALGORITHMS.items():
        bring(model, SLOT, name, stage, row=row, algorithm=algorithm, init_seed=11)
    return model


# -- the registry --------------------------------------------------------------------------------------------


def test_every_index_stands_for_a_blueprint_of_some_topology():
    assert {name for topology in HOSTS for name in blueprint_names(topology)} == set(blueprint_ids())


@pytest.mark.parametrize(
    ("topology", "name"), [("cnn", "lora"), ("transformer", "conv_light"), ("mlp", "attention")]
)
def test_unknown_blueprints_are_refused_with_the_known_ones(topology, name):
    with pytest.raises(
        BlueprintError, match=f"blueprint '{name}' is unknown for topology {topology}; allowed: .*noop, norm"
    ):
        build_blueprint(topology, name, 1, 8)


def test_a_name_is_registered_once():
    with pytest.raises(BlueprintError, match="blueprint 'norm' is already registered for cnn"):
        register_blueprint("norm", "cnn", ImageSeed)


@pytest.mark.parametrize(
    ("name", "topologies", "factory", "message"),
    [
        ("Mine", "cnn", ImageSeed, "blueprint name 'Mine'; allowed: a lower-case letter"),
        ("_gate", "cnn", ImageSeed, "blueprint name '_gate'"),
        (7, "cnn", ImageSeed, "blueprint name 7"),
        ("mine", "rnn", ImageSeed, "topology 'rnn' is unknown; allowed: cnn, transformer, mlp"),
        ("mine", ("cnn", "rnn"), ImageSeed, "topology 'rnn' is unknown"),
        ("mine", (), ImageSeed, "no topology is given"),
        ("mine", ("cnn", "cnn"), ImageSeed, "named twice"),
        ("norm", ("mlp", "cnn"), ImageSeed, "blueprint 'norm' is already registered for mlp"),
        ("forward", "cnn", ImageSeed, "nn.ModuleDict, which has an attribute of this name"),
        ("mine", "cnn", 3, "factory is 3, must be"),
        ("mine", "mlp", ImageSeed, "ImageSeed grows on images, topology mlp has none"),
    ],
)
def test_a_registration_that_cannot_work_changes_nothing(name, topologies, factory, message):
    before = blueprint_ids(), {t: blueprint_names(t) for t in HOSTS}
    with pytest.raises(BlueprintError, match=message):
        register_blueprint(name, topologies, factory)
    assert before == (blueprint_ids(), {t: blueprint_names(t) for t in HOSTS})


def hidden(c: int) -> int:
    return max(8, c // 4)


COUNTS = {
    ("cnn", "norm"): lambda c: 2 * c + c,
    ("cnn", "attention"): lambda c: 2 * c * max(c // 4, 2) + c + c,
    ("cnn", "conv_small"): lambda c: c * c + 3 * c,
    ("cnn", "conv_light"): lambda c: 9 * c * c + 3 * c,
    ("cnn", "conv_heavy"): lambda c: 2 * 9 * c * c + 5 * c,
    ("cnn", "residual"): lambda c: 2 * 9 * c * c + 5 * c,
    ("cnn", "depthwise"): lambda c: 9 * c + c * c + 3 * c,
    ("cnn", "bottleneck"): lambda c: 2 * c * hidden(c) + 9 * hidden(c) ** 2 + 3 * c,
    ("transformer", "attention"): lambda c: 4 * c * c + 4 * c + c,
    ("transformer", "flex_attention"): lambda c: 4 * c * c + 4 * c + c,
    ("transformer", "transformer_block"): lambda c: (
        (4 * c * c + 4 * c) + 2 * 2 * c + (c * 4 * c + 4 * c) + (4 * c * c + c) + c
    ),
    **{(t, "norm"): lambda c: 2 * c + c for t in ("transformer", "mlp")},
    **{(t, "lora"): lambda c: 2 * 8 * c + c for t in ("transformer", "mlp")},
    **{(t, "lora_large"): lambda c: 2 * 32 * c + c for t in ("transformer", "mlp")},
    **{(t, "mlp_small"): lambda c: (c * 2 * c + 2 * c) + (2 * c * c + c) + c for t in ("transformer", "mlp")},
    **{(t, "mlp"): lambda c: (c * 4 * c + 4 * c) + (4 * c * c + c) + c for t in ("transformer", "mlp")},
}
HOSTS_OF_WIDTH = {
    "cnn": lambda c: CNNHost(1, base=c // 2),
    "transformer": lambda c: GPTHost(1, features=c),
    "mlp": lambda c: MLPHost(1, features=c),
}


@pytest.mark.parametrize(("topology", "name"), COUNTS)
@pytest.mark.parametrize("channels", [8, 64])
@every_blend
def test_parameter_counts(topology, name, channels, algorithm):
    model = MorphogeneticModel(HOSTS_OF_WIDTH[topology](channels))
    record = model.germinate(SLOT, name, algorithm=algorithm).records[0]
    gate = 0
    if algorithm is AlphaAlgorithm.GATE:
        gate = channels * hidden(channels) + hidden(channels) + hidden(channels) + 1
    assert record.params == COUNTS[topology, name](channels) + gate
    assert model.total_params() == model.host_params + record.params
    assert model.reports()[SLOT].metrics.params == record.params


def test_every_seed_has_a_count_above():
    assert set(COUNTS) == set(CATALOGUE)


def test_a_1d_convolution_has_five_taps_and_grows_on_lines_only():
    model = make("line")
    model.germinate(SLOT, "conv_1d")
    channels = model.slot(SLOT).channels
    assert model.slot(SLOT).banks["conv_1d"].conv.weight.shape == (1, channels, channels, 1, 5)
    assert model.slot(SLOT).params(0) == 5 * channels**2 + 3 * channels
    with pytest.raises(BlueprintError, match="blueprint 'conv_1d' grows on features of height 1"):
        make("cnn").germinate(SLOT, "conv_1d")


# -- at birth ------------------------------------------------------------------------------------------------


@every_seed
def test_identity_at_birth_and_a_gradient_at_birth(topology, name):
    model, plain = planted(topology, name, SeedStage.HOLDING), make(topology, 8, random_seeds=[4] * 8)
    x, y = population_batch(model, 1)
    losses, wanted = model.losses(x, y), plain.losses(x, y)
    assert torch.equal(losses.outputs, wanted.outputs), "at alpha 1, in training mode"
    losses.total().backward()
    wanted.total().backward()
    slot = model.slot(SLOT)
    for row in ALGORITHMS:
        norms = [float(p.grad[row].norm()) for p in slot.banks[name].parameters()]
        assert max(norms) > 1e-6, f"a dead seed under {ALGORITHMS[row].name}"
        assert all(torch.isfinite(p.grad[row]).all() for p in slot.banks[name].parameters())
    for (host_name, p), q in zip(model.host.named_parameters(), plain.host.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6), (
            f"a silent seed leaves the gradient of {host_name} alone"
        )
    assert torch.equal(model.eval()(x), plain.eval()(x)), "at alpha 1, in evaluation mode"


@every_seed
@pytest.mark.parametrize("incubation", Incubation)
def test_an_incubating_seed_feels_a_gradient_at_birth(topology, name, incubation):
    model = planted(topology, name, SeedStage.TRAINING, incubation=incubation)
    model.losses(*population_batch(model, 1)).total().backward()
    bank = model.slot(SLOT).banks[name]
    for row in ALGORITHMS:
        assert max(float(p.grad[row].norm()) for p in bank.parameters()) > 1e-6
    for row in range(len(ALGORITHMS), 8):
        assert all(not p.grad[row].any() for p in bank.parameters()), "no seed, no gradient"


@every_seed
def test_delta_is_linear_in_gamma(topology, name):
    model = make(topology)
    bring(model, SLOT, name, SeedStage.HOLDING, stir=0.3)
    bank, h = model.slot(SLOT).banks[name], features(model, population_batch(model, 1)[0], SLOT)
    once = bank(h, Lanes(1, Mode.EVAL))
    assert once.shape == h.shape
    with torch.no_grad():
        bank.gamma.weight *= 2
    assert torch.equal(bank(h, Lanes(1, Mode.EVAL)), 2 * once), "scaling by two is exact if nothing follows γ"
    with torch.no_grad():
        bank.gamma.weight.zero_()
    assert not bank(h, Lanes(1, Mode.EVAL)).any()


@pytest.mark.parametrize("topology", HOSTS)
@every_blend
def test_noop_does_nothing(topology, algorithm):
    model, plain = make(topology, 8), make(topology, 8)
    bring(model, SLOT, "noop", SeedStage.HOLDING, row=2, algorithm=algorithm)
    gate = model.seed_params(2)
    assert gate == 0 if algorithm is not AlphaAlgorithm.GATE else gate > 0
    optimizer, reference = PopulationOptimizer(model), PopulationOptimizer(plain)
    for step in range(3):
        x, y = population_batch(model, step)
        assert torch.equal(train_step(model, optimizer, x, y), train_step(plain, reference, x, y))
    model.eval()
    assert torch.equal(model(x), plain.eval()(x))


# -- blending ------------------------------------------------------------------------------------------------


def features(model: MorphogeneticModel, x: Tensor, slot_id: str) -> Tensor:
    """What reaches a slot while all slots before it are empty."""
    for index in range(model.slot_after.index(slot_id) + 1):
        x = model.host.segment(index, x, Lanes(model.population, Mode.EVAL))
    return x


def onwards(model: MorphogeneticModel, h: Tensor, slot_id: str) -> Tensor:
    for index in range(model.slot_after.index(slot_id) + 1, len(model.slot_after) + 1):
        h = model.host.segment(index, h, Lanes(model.population, Mode.EVAL))
    return h


@every_seed
@every_blend
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_blend_formulas(topology, name, algorithm, alpha):
    model = make(topology, dtype=torch.float64).eval()
    bring(
        model,
        SLOT,
        name,
        SeedStage.BLENDING,
        algorithm=algorithm,
        tempo_epochs=1,
        stir=0.3,
    )
    passed(model.set_alpha_target(SLOT, alpha, steps=0))
    x, _ = population_batch(model, 1)
    h, banks, one = features(model, x, SLOT), model.slot(SLOT).banks, Lanes(1, Mode.EVAL)
    delta = banks[name](h, one)
    assert delta.abs().max() > 1e-3
    if algorithm is AlphaAlgorithm.ADD:
        blended = h + alpha * delta
    elif algorithm is AlphaAlgorithm.MULTIPLY:
        blended = h * (1 + alpha * delta.tanh())
    else:
        gate = banks[GATE_BANK](h, one)
        assert (gate > 0).all()
        assert (gate < 1).all()
        blended = h + alpha * gate * delta
    assert torch.allclose(model(x), onwards(model, blended, SLOT), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", blueprints("transformer"))
@every_blend
def test_no_token_sees_what_follows_it(name, algorithm):
    model = make("transformer", dtype=torch.float64).eval()
    bring(model, "r0c0", name, SeedStage.HOLDING, algorithm=algorithm, stir=0.5)
    x, _ = population_batch(model, 1)
    before = model(x)
    for position in (3, 6):
        changed = x.clone()
        changed[:, :, position:] = (changed[:, :, position:] + 5) % TOKENS
        after = model(changed)
        assert torch.allclose(after[:, :, :position], before[:, :, :position], rtol=1e-10, atol=1e-12)
        assert not torch.allclose(after[:, :, position:], before[:, :, position:], rtol=1e-3, atol=1e-3)


def test_attention_looks_back():
    """The counterpart of the test above: a causal mask that hid everything would pass it."""
    for name in ("attention", "flex_attention", "transformer_block"):
        model = make("transformer", dtype=torch.float64).eval()
        bring(model, "r0c1", name, SeedStage.HOLDING, stir=0.5)
        h = torch.randn(1, 2, 6, 8, dtype=torch.float64)
        bank = model.slot("r0c1").banks[name]
        before = bank(h, Lanes(1, Mode.EVAL))
        h[:, :, 0, ::2] += 1.0  # a norm would hide a shift of all channels
        assert (bank(h, Lanes(1, Mode.EVAL)) - before)[:, :, 1:].abs().amax((0, 1, 3)).min() > 1e-6


def test_gates_differ_between_samples():
    for topology in HOSTS:
        model = make(topology)
        bring(model, SLOT, "norm", SeedStage.HOLDING, algorithm=AlphaAlgorithm.GATE, stir=1.0)
        h = features(model, population_batch(model, 1)[0], SLOT)
        gate = model.slot(SLOT).banks[GATE_BANK](h, Lanes(1, Mode.EVAL))
        per_sample = gate[:, 0].flatten(1) if topology == "cnn" else gate[0].flatten(1)
        assert per_sample.std(0).min() > 1e-5


# -- learning from real images -------------------------------------------------------------------------------

IMAGES = 24
REAL_HOSTS = {
    "cnn": lambda: CNNHost(8, base=8, channels=1, size=8),
    "transformer": lambda: GPTHost(8, vocabulary=TOKENS, features=32, layers=2, context=16, segments=2),
    "mlp": lambda: MLPHost(8, inputs=64, features=32),
}
REAL_SLOTS = {"cnn": "r0c1", "transformer": "r0c0", "mlp": "r0c0"}
SEED_LR = {"cnn": 0.05, "transformer": 0.05, "mlp": 0.1}


@every_seed
def test_every_seed_learns_real_images_on_a_frozen_host(topology, name):
    """Rows 0 to 2 hold a seed under each blend, the others none: theirs is the loss with the seed off."""
    model = MorphogeneticModel(REAL_HOSTS[topology](), random_seeds=[3] * 8, **EAGER)
    slot_id = REAL_SLOTS[topology]
    if topology == "transformer":
        # The tied head of an untrained transformer is too quiet for any features to matter.
        with torch.no_grad():
            model.host.tokens.weight *= 5
    for row, algorithm in ALGORITHMS.items():
        bring(model, slot_id, name, SeedStage.HOLDING, row=row, algorithm=algorithm, init_seed=7)
    x, y = digits(topology, IMAGES)
    x, y = fuse(model, [(x if topology == "cnn" else x[0], y[0])] * 8)
    before = model.losses(x, y).main
    assert (before == before[-1]).all(), "all equal at birth"
    frozen = {
        key: t for key, t in all_tensors(model).items() if key.startswith("host.") and "running" not in key
    }
    optimizer = PopulationOptimizer(
        model, OptimizerConfig(kind="adamw", host_lr=0.0, host_decay=0.0, seed_lr=SEED_LR[topology])
    )
    for _ in range(20):
        train_step(model, optimizer, x, y)
    main = model.losses(x, y).main.detach()
    assert all(torch.equal(all_tensors(model)[key], t) for key, t in frozen.items())
    ratios = {algorithm.name: float(main[row] / main[-1]) for row, algorithm in ALGORITHMS.items()}
    assert max(ratios.values()) <= 0.98, ratios


def test_seeds_of_one_bank_do_not_share_weights():
    model = make("cnn", 8, random_seeds=[4] * 8)
    for row in (1, 6):
        bring(model, SLOT, "conv_light", SeedStage.HOLDING, row=row, init_seed=11)
    stir_seed(model, SLOT, 6, 0.5)
    x, _ = population_batch(model, 1)
    plain = make("cnn", 8, random_seeds=[4] * 8).eval()
    changed = [row for row in range(8) if not torch.equal(model.eval()(x)[row], plain(x)[row])]
    assert changed == [6]

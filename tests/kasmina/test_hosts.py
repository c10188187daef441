"""Hosts: sizes, equality with the same network in plain torch, initial loss, crippled rows, and what they
refuse."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import (
    CNNHost,
    GPTHost,
    MLPHost,
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    build_host,
    cross_entropy,
    export_row,
)
from esper.kasmina.layers import Conv2d, Lanes, Mode
from esper.leyline import EsperError, PopulationError, SeedStage, ShapeError, SlotIdError
from helpers import (
    HOSTS,
    blueprints,
    bring,
    fuse,
    generator,
    make,
    network_batch,
    population_batch,
    train_step,
)

topologies = pytest.mark.parametrize("topology", HOSTS)


class PlainCNN(nn.Module):
    """Convolution, batch norm, ReLU and pooling, as anyone would write them."""

    def __init__(
        self,
        *,
        base: int,
        blocks: int,
        kernel: int,
        pools: int,
        channels: int,
        classes: int,
        height: int | None = None,
    ) -> None:
        super().__init__()
        tall, self.pool = (1, (1, 2)) if height == 1 else (kernel, (2, 2))
        widths = [channels] + [base * 2**i for i in range(blocks)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, (tall, kernel), padding=(tall // 2, kernel // 2), bias=False)
            for a, b in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Linear(widths[-1], classes)
        self.pools = pools

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = torch.relu(norm(conv(x)))
            if i < self.pools:
                x = F.max_pool2d(x, self.pool)
        return self.head(x.mean((2, 3)))

    @classmethod
    def like(cls, host: CNNHost, row: int) -> PlainCNN:
        spec = {k: v for k, v in host.spec().items() if k not in ("kind", "size")}
        plain = cls(**spec).to(host.head.weight.dtype)
        with torch.no_grad():
            for block, conv, norm in zip(host.blocks, plain.convs, plain.norms, strict=True):
                conv.weight.copy_(block.conv.weight[row])
                for name in ("weight", "bias", "running_mean", "running_var"):
                    getattr(norm, name).copy_(getattr(block.norm, name)[row])
            plain.head.weight.copy_(host.head.weight[row])
            plain.head.bias.copy_(host.head.bias[row])
        return plain


def plain_gpt(host: GPTHost, row: int, tokens: Tensor) -> Tensor:
    """A pre-norm transformer with tied embeddings, on one row's weights."""
    p = {name: tensor[row] for name, tensor in host.named_parameters()}
    x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    for i in range(len(host.blocks)):
        w = {name.removeprefix(f"blocks.{i}."): t for name, t in p.items() if name.startswith(f"blocks.{i}.")}
        y = F.layer_norm(x, x.shape[-1:], w["norm1.weight"], w["norm1.bias"])
        q, k, v = (
            t.unflatten(-1, (host.heads, -1)).transpose(1, 2)
            for t in F.linear(y, w["attention.qkv.weight"], w["attention.qkv.bias"]).chunk(3, -1)
        )
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf).softmax(-1)
        y = (scores @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(y, w["attention.proj.weight"], w["attention.proj.bias"])
        y = F.layer_norm(x, x.shape[-1:], w["norm2.weight"], w["norm2.bias"])
        x = x + F.linear(F.gelu(F.linear(y, w["up.weight"], w["up.bias"])), w["down.weight"], w["down.bias"])
    return F.linear(F.layer_norm(x, x.shape[-1:], p["norm.weight"], p["norm.bias"]), p["tokens.weight"])


def plain_mlp(host: MLPHost, row: int, x: Tensor) -> Tensor:
    for layer in host.layers:
        x = torch.relu(F.linear(x, layer.weight[row], layer.bias[row]))
    return F.linear(x, host.head.weight[row], host.head.bias[row])


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"base": 8}, 6_418),
        ({}, 94_762),
        ({"base": 16}, 24_346),
        ({"base": 8, "blocks": 5}, 99_922),
        ({"base": 1, "kernel": 1}, 77),
        ({"base": 2, "kernel": 1, "pools": 0}, 164),
        ({"base": 2, "kernel": 1, "blocks": 5}, 1_140),
    ],
)
@pytest.mark.parametrize("population", [1, 8])
def test_cnn_parameter_counts(options, count, population):
    model = MorphogeneticModel(CNNHost(population, **options))
    assert model.host_params == count
    assert model.total_params(population - 1) == count


@topologies
def test_counts_are_those_of_one_row(topology):
    assert (
        make(topology, 8).host_params
        == make(topology, 1).host_params
        == sum(p.numel() for p in HOSTS[topology](1).parameters())
    )


# -- slots ---------------------------------------------------------------------------------------------------


def test_cnn_slots():
    specs = CNNHost(1, base=4, blocks=3, pools=2).injection_specs()
    assert [(s.slot_id, s.channels) for s in specs] == [
        ("r0c0", 4),
        ("r1c0", 4),
        ("r0c1", 8),
        ("r1c1", 8),
        ("r0c2", 16),
    ]
    model = MorphogeneticModel(CNNHost(1, base=4, blocks=3, pools=2))
    assert list(model.seed_slots) == ["r0c0", "r1c0", "r0c1", "r1c1", "r0c2"], (
        "activations pass in this order"
    )
    assert model.slot_config.slot_ids == ("r0c0", "r0c1", "r0c2", "r1c0", "r1c1"), (
        "the policy counts in this one"
    )
    assert model.slot_depths == (0.0, 0.5, 1.0, 0.25, 0.75), "the policy's order, by that of activations"
    assert MorphogeneticModel(CNNHost(1, base=4), slots=["r0c1"]).slot_depths == (0.0,)


def test_gpt_and_mlp_slots():
    assert [
        (s.slot_id, s.channels) for s in GPTHost(1, layers=6, segments=3, features=8).injection_specs()
    ] == [("r0c0", 8), ("r0c1", 8), ("r0c2", 8)]
    assert [(s.slot_id, s.channels) for s in MLPHost(1, features=5, layers=2).injection_specs()] == [
        ("r0c0", 5),
        ("r0c1", 5),
    ]


@topologies
def test_slot_channels_are_those_of_the_features(topology):
    host, model = HOSTS[topology](8), make(topology, 8)
    x, _ = population_batch(model, 1)
    for index, spec in enumerate(host.injection_specs()):
        x = host.segment(index, x, Lanes(8, Mode.EVAL))
        assert x.shape[1 if topology == "cnn" else -1] == spec.channels * (8 if topology == "cnn" else 1)


@topologies
def test_only_wanted_slots_exist(topology):
    model = make(topology, slots=["r0c1"])
    assert list(model.seed_slots) == ["r0c1"]
    with pytest.raises(SlotIdError, match="slot 'r0c0' is unknown; allowed: r0c1"):
        model.germinate("r0c0", "norm")


# -- the same network in plain torch -------------------------------------------------------------------------


CNNS = [
    {"base": 8, "size": 16},
    {"base": 3, "size": 8, "channels": 1},
    {"base": 1, "kernel": 1, "size": 8},
    {"base": 2, "kernel": 1, "pools": 0, "size": 6},
    {"base": 2, "blocks": 4, "pools": 2, "size": 9, "kernel": 5},
    {"base": 3, "size": 40, "channels": 1, "height": 1},
    {"base": 2, "blocks": 4, "pools": 2, "size": 9, "kernel": 5, "height": 1},
]


@pytest.mark.parametrize("options", CNNS, ids=str)
@pytest.mark.parametrize("slots", [None, ["r0c1"]], ids=["all_slots", "one_slot"])
def test_cnn_with_empty_slots_is_bit_identical_to_plain_torch(options, slots):
    model = MorphogeneticModel(CNNHost(1, **options), slots, random_seeds=[5])
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_decay=0.0, clip=1e9))
    for step in range(5):
        x = torch.randn(model.host.example_input(7).shape, generator=generator(step))
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.randint(0, 10, (1, 7), generator=generator(step))
        plain = PlainCNN.like(model.host, 0)
        optimizer.zero_grad()
        losses = model.losses(x, y)
        losses.total().backward()
        outputs = plain(x).unsqueeze(0)
        cross_entropy(outputs, y).sum().backward()
        assert torch.equal(losses.outputs, outputs)
        for block, conv, norm in zip(model.host.blocks, plain.convs, plain.norms, strict=True):
            assert torch.equal(block.conv.weight.grad[0], conv.weight.grad)
            assert torch.equal(block.norm.weight.grad[0], norm.weight.grad)
            assert torch.equal(block.norm.running_mean[0], norm.running_mean)
            assert torch.equal(block.norm.running_var[0], norm.running_var)
        assert torch.equal(model.host.head.weight.grad[0], plain.head.weight.grad)
        optimizer.step()
        assert torch.equal(model.eval()(x)[0], PlainCNN.like(model.host, 0).eval()(x))
        model.train()


@pytest.mark.parametrize("population", [1, 8])
def test_cnn_population_equals_plain_networks(population):
    model = MorphogeneticModel(CNNHost(population, base=3, channels=2, size=8)).double()
    x = torch.randn(5, population * 2, 8, 8, generator=generator(1), dtype=torch.float64)
    plain = [PlainCNN.like(model.host, row) for row in range(population)]
    out = model(x)
    for row in range(population):
        assert torch.allclose(out[row], plain[row](x[:, 2 * row : 2 * row + 2]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("population", [1, 8])
def test_gpt_population_equals_plain_networks(population):
    host = GPTHost(population, vocabulary=19, features=12, heads=3, layers=4, context=10, segments=2)
    model = MorphogeneticModel(host).double()
    with torch.no_grad():
        for i, p in enumerate(model.host.parameters()):  # off the special values 0 and 1
            p += 0.1 * torch.randn(p.shape, generator=generator(i), dtype=torch.float64)
    tokens = torch.randint(0, 19, (population, 3, 8), generator=generator(1))
    out = model(tokens)
    for row in range(population):
        assert torch.allclose(out[row], plain_gpt(model.host, row, tokens[row]), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("population", [1, 8])
def test_mlp_population_equals_plain_networks(population):
    model = MorphogeneticModel(MLPHost(population, inputs=7, features=9, layers=3, classes=4)).double()
    x = torch.randn(population, 5, 7, generator=generator(1), dtype=torch.float64)
    out = model(x)
    for row in range(population):
        assert torch.allclose(out[row], plain_mlp(model.host, row, x[row]), rtol=1e-12, atol=1e-13)


@topologies
@pytest.mark.parametrize("population", [1, 8])
def test_segments_chain_to_the_forward_pass(topology, population):
    model = make(topology, population).eval()
    x, _ = population_batch(model, 3)
    h = x
    for index in range(len(model.host.execution_order()) + 1):
        h = model.host.segment(index, h, Lanes(population, Mode.EVAL))
    assert torch.equal(h, model(x))


@topologies
def test_cross_entropy_of_each_lane(topology):
    model = make(topology, 8)
    x, y = population_batch(model, 3)
    losses = model.losses(x, y)
    for row in range(8):
        expected = F.cross_entropy(losses.outputs[row].flatten(0, -2), y[row].flatten())
        assert losses.main[row].item() == pytest.approx(expected.item(), rel=1e-6)


# -- initial values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocabulary": 17, "features": 8, "heads": 2, "layers": 2, "segments": 2},
        {"vocabulary": 1000, "features": 128, "layers": 6},
    ],
    ids=["default", "small", "large"],
)
def test_gpt_starts_at_the_loss_of_knowing_nothing(options):
    for first in (0, 100):
        model = MorphogeneticModel(GPTHost(8, **options), random_seeds=range(first, first + 8))
        tokens = torch.randint(0, model.host.vocabulary, (8, 4, 33), generator=generator(first))
        main = model.losses(tokens[..., :-1], tokens[..., 1:]).main
        wanted = math.log(model.host.vocabulary)
        assert (main / wanted - 1).abs().max() < 0.05, main


def test_gpt_starts_with_quiet_branches():
    """Depth must not change the scale of the stream: each branch begins as a small correction to what it
    reads."""
    host = MorphogeneticModel(GPTHost(1, layers=12, segments=3)).host
    tokens = torch.randint(0, 256, (1, 4, 64), generator=generator(1))
    x = host.tokens.weight[0][tokens] + host.positions.weight[0]
    first = x.std().item()
    h = tokens
    for index in range(3):
        h = host.segment(index, h, Lanes(1, Mode.EVAL))
        assert 0.9 * first < h.std().item() < 1.5 * first


@topologies
def test_a_rows_initial_values_do_not_depend_on_the_population(topology):
    alone = make(topology, 1, random_seeds=[77])
    first = make(topology, 8, random_seeds=[77, *range(7)])
    last = make(topology, 16, random_seeds=[*range(15), 77])
    for a, b, c in zip(alone.host.parameters(), first.host.parameters(), last.host.parameters(), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[0], c[15])


@topologies
def test_rows_differ_and_a_reset_draws_them_again(topology):
    model, other = make(topology, 8), make(topology, 8, random_seeds=[0, 1, 2, 3, 99, 5, 6, 7])
    assert all(not torch.equal(p[0], p[1]) for p in model.host.parameters() if p[0].std() > 0)
    x, y = population_batch(model, 1)
    model.losses(x, y)  # moves the batch norms' records
    model.reset_row(4, 99)
    expected = dict(other.host.named_parameters())
    for name, p in model.host.named_parameters():
        assert torch.equal(p, expected[name]), name
    for name, buffer in model.host.named_buffers():
        assert torch.equal(buffer[4], dict(other.host.named_buffers())[name][4])
        assert "running" not in name or not torch.equal(buffer[3], dict(other.host.named_buffers())[name][3])


# -- crippled rows -------------------------------------------------------------------------------------------


def small_cnn(population: int, kernel: int = 3) -> MorphogeneticModel:
    return MorphogeneticModel(CNNHost(population, base=2, channels=1, size=8, kernel=kernel)).double()


def test_a_crippled_row_is_a_network_of_1x1_kernels_and_stays_one():
    model, reference = small_cnn(8), small_cnn(1, kernel=1)
    model.host.set_centre_tap(3, [True, True, True])
    with torch.no_grad():
        for (name, p), (_, q) in zip(
            model.host.named_parameters(), reference.host.named_parameters(), strict=True
        ):
            q[0] = p[3][..., 1:2, 1:2] if name.endswith("conv.weight") else p[3]
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_decay=0.0))
    reference_optimizer = PopulationOptimizer(reference, OptimizerConfig(host_decay=0.0))
    for step in range(10):
        batches = [network_batch(model, 100 * step + row) for row in range(8)]
        main = train_step(model, optimizer, *fuse(model, batches))
        alone = train_step(reference, reference_optimizer, *fuse(reference, [batches[3]]))
        assert main[3].item() == pytest.approx(alone[0].item(), abs=1e-10)


def test_other_rows_do_not_notice_a_crippled_one():
    whole, model = small_cnn(8), small_cnn(8)
    model.host.set_centre_tap(3, [True, False, True])
    for step in range(3):
        x, y = population_batch(model, step)
        main, untouched = model.losses(x, y).main, whole.losses(x, y).main
        others = [row for row in range(8) if row != 3]
        assert torch.equal(main[others], untouched[others])
        assert main[3] != untouched[3]


def test_blocks_are_crippled_one_by_one_and_healed():
    model = small_cnn(8).eval()
    x, _ = population_batch(model, 1)
    whole = model(x)
    model.host.set_centre_tap(2, [False, True, False])
    taps = [block.conv.taps[2, 0, 0] for block in model.host.blocks]
    centre = torch.zeros(3, 3, dtype=torch.float64)
    centre[1, 1] = 1
    assert all(map(torch.equal, taps, [torch.ones_like(centre), centre, torch.ones_like(centre)]))
    assert not torch.equal(model(x)[2], whole[2])
    model.host.set_centre_tap(2, [False, False, False])
    assert torch.equal(model(x), whole)
    model.host.set_centre_tap(2, [True, True, True])
    model.reset_row(2, 2)
    assert torch.equal(model(x), whole), "a fresh network has its whole kernels"


def test_marks_must_fit_the_blocks():
    host = CNNHost(1, base=2)
    before = [block.conv.taps.clone() for block in host.blocks]
    for marks in ([True], [True] * 4):
        with pytest.raises(EsperError, match=rf"{len(marks)} marks \[True.* for 3 blocks"):
            host.set_centre_tap(0, marks)
    for row in (1, -1):
        with pytest.raises(PopulationError, match=f"row {row} is out of range; allowed: 0 to 0"):
            host.set_centre_tap(row, [True, True, True])
    assert all(torch.equal(block.conv.taps, b) for block, b in zip(host.blocks, before, strict=True))


# -- lines ---------------------------------------------------------------------------------------------------


def test_a_line_host_is_a_square_one_without_the_taps_that_see_only_padding():
    line = MorphogeneticModel(CNNHost(8, base=2, channels=1, size=12, height=1, pools=0)).double().eval()
    square = MorphogeneticModel(CNNHost(8, base=2, channels=1, size=12, pools=0)).double().eval()
    line.host.set_centre_tap(3, [False, True, False])
    with torch.no_grad():
        for (name, p), (_, q) in zip(
            line.host.named_parameters(), square.host.named_parameters(), strict=True
        ):
            if name.endswith("conv.weight"):
                assert p.shape[-2:] == (1, 3)
                q[..., 1:2, :] = p
            else:
                q.copy_(p)
    square.host.set_centre_tap(3, [False, True, False])
    x, _ = population_batch(line, 5)
    assert x.shape[2] == 1
    assert torch.allclose(line(x), square(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", blueprints("line"))
def test_no_kernel_of_a_seed_in_a_line_host_is_higher_than_1(name):
    widths = {}
    for host in ("line", "cnn"):
        if name not in blueprints(host):
            continue
        model = make(host, 8)
        bring(model, "r1c0", name, SeedStage.HOLDING, stir=0.1)
        convolutions = [m for m in model.slot("r1c0").banks[name].modules() if isinstance(m, Conv2d)]
        widths[host] = [conv.weight.shape[-1] for conv in convolutions]
        if host == "line":
            assert all(conv.weight.shape[-2] == 1 for conv in convolutions)
            x, _ = network_batch(model, 1)
            plain = export_row(model, 0)
            assert torch.allclose(plain(x), model.eval()(x.repeat(1, 8, 1, 1))[0], atol=1e-6)
    assert widths["line"] == widths.get("cnn", [5]), "conv_1d has no square twin"


# -- specs and bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        CNNHost(1, classes=7, blocks=2, base=3, kernel=5, pools=1, channels=2, size=12),
        CNNHost(1, blocks=2, base=3, channels=1, size=12, height=1),
        GPTHost(1, vocabulary=9, features=12, heads=3, layers=4, context=5, segments=2),
        MLPHost(1, inputs=3, features=4, layers=3),
    ],
)
def test_a_spec_builds_the_host_again(host):
    twin = build_host(host.spec(), 8)
    assert twin.spec() == host.spec()
    assert type(twin) is type(host)
    assert twin.population == 8
    assert [p.shape[1:] for p in twin.parameters()] == [p.shape[1:] for p in host.parameters()]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "rnn"}, "host kind 'rnn' is unknown; allowed: cnn, gpt, mlp"),
        ({}, "host kind None is unknown"),
        ({"kind": "cnn", "depth": 3}, "does not fit a cnn host: .*'depth'"),
        ({"kind": "cnn", "blocks": 1}, "blocks is 1, must be at least 2"),
        ({"kind": "cnn", "pools": 4}, "pools is 4; allowed: 0 to 3"),
        ({"kind": "cnn", "pools": -1}, "pools is -1; allowed: 0 to 3"),
        ({"kind": "cnn", "size": 4}, "pools is 3; allowed: 0 to 2"),
        ({"kind": "cnn", "size": 32, "height": 2}, "height is 2; allowed: 1, or the size 32"),
        ({"kind": "gpt", "layers": 4}, "layers 4 must be a multiple of segments 3"),
        ({"kind": "gpt", "heads": 5}, "features 64 of heads 5"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(EsperError, match=message):
        build_host(spec)


BAD_INPUT: list[tuple[Any, ...]] = [
    ("cnn", (2, 7, 8, 8), r"shape \(2, 7, 8, 8\), wanted \[batch, 8·1, height, width\]"),
    ("cnn", (2, 8, 8), r"shape \(2, 8, 8\)"),
    ("cnn", (2, 8, 8, 7), "height and width at least 8"),
    ("line", (2, 8, 12, 12), r"shape \(2, 8, 12, 12\), wanted \[batch, 8·1, 1, width\], width at least 8"),
    ("line", (2, 8, 1, 7), "width at least 8"),
    ("mlp", (8, 2, 15), r"shape \(8, 2, 15\), wanted \[8, batch, 16\]"),
    ("mlp", (1, 2, 16), r"shape \(1, 2, 16\), wanted \[8, batch, 16\]"),
    ("mlp", (2, 16), r"shape \(2, 16\)"),
    ("transformer", (8, 2, 17), r"shape \(8, 2, 17\), wanted \[8, batch, at most 16\]"),
    ("transformer", (2, 16), r"shape \(2, 16\)"),
]


@pytest.mark.parametrize(("topology", "shape", "message"), BAD_INPUT)
def test_input_of_the_wrong_shape(topology, shape, message):
    model = make(topology, 8)
    x = torch.zeros(shape, dtype=torch.long if topology == "transformer" else torch.float32)
    for call in (model, lambda x: model.losses(x, torch.zeros(8, 2, dtype=torch.long))):
        with pytest.raises(ShapeError, match=message):
            call(x)


@pytest.mark.parametrize("token", [-1, 17, 10**6])
def test_tokens_outside_the_vocabulary_reach_no_other_network(token):
    model = make("transformer", 8)
    x, y = population_batch(model, 1)
    x[2, 0, 3] = token
    low, high = min(int(x.min()), token), max(int(x.max()), token)
    for call in (lambda: model(x), lambda: model.losses(x, y)):
        with pytest.raises(EsperError, match=f"tokens from {low} to {high}; allowed: 0 to 16"):
            call()


@topologies
def test_targets_of_the_wrong_shape(topology):
    model = make(topology, 8)
    x, y = population_batch(model, 1)
    with pytest.raises(ShapeError, match=r"targets have shape .*, outputs want"):
        model.losses(x, y[:4])
    with pytest.raises(ShapeError, match=r"targets have shape \(3,\), outputs want \(2, 3\)"):
        cross_entropy(torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.long))


@topologies
def test_one_network_takes_targets_without_a_population(topology):
    model = make(topology, 1)
    x, y = population_batch(model, 1)
    assert torch.equal(model.losses(x, y[0]).main, model.losses(x, y).main)

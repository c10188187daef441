"""Seeds in ordinary torch: everything that holds for the seeds that ship holds for a user's module, and what
cannot hold is refused with the reason."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import (
    FlopMeter,
    NetworkRow,
    OptimizerConfig,
    PopulationOptimizer,
    build_blueprint,
    evaluate_coalitions,
    export_row,
    load_network,
    measure_traits,
    save_network,
)
from esper.kasmina.layers import Lanes, Mode, group_count
from esper.leyline import AlphaAlgorithm, BlueprintError, Incubation, SeedStage, StructureError, blueprint_ids
from helpers import (
    all_tensors,
    bring,
    differing,
    distance,
    fuse,
    make,
    network_batch,
    population_batch,
    registered,
    row_tensors,
    train_step,
    wanted_coalitions,
)

SLOT = "r0c1"


class Gated(nn.Module):
    """Images: a convolution, a norm, a tied 1×1 convolution, a buffer and a plain view."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.GroupNorm(2, 2 * channels)
        )
        self.outer = nn.Conv2d(2 * channels, channels, 1)
        self.again = self.outer
        self.register_buffer("slope", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        hidden = hidden.view(len(x), -1).view_as(hidden)
        return self.outer(F.relu(hidden)) + self.slope * self.again(hidden)


class Mixer(nn.Module):
    """Sequences: causal means of the tokens so far, and a position of their own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(features), nn.Linear(features, features)
        self.place = nn.Parameter(0.1 * torch.randn(64, features))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        counts = torch.arange(1, tokens + 1, device=x.device).unsqueeze(1)
        return self.out(F.gelu(self.norm(x + self.place[:tokens]).cumsum(1) / counts))


def vectors(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, features))


OWN = {"cnn": Gated, "transformer": Mixer, "mlp": vectors}
own = pytest.mark.parametrize("topology", OWN)


@pytest.fixture(autouse=True)
def names():
    with (
        registered("own", "cnn", Gated),
        registered("own", "transformer", Mixer),
        registered("own", "mlp", vectors),
    ):
        yield


# -- a seed like any other -----------------------------------------------------------------------------------


@own
@pytest.mark.parametrize("algorithm", AlphaAlgorithm)
def test_identity_at_birth_and_a_gradient_at_birth(topology, algorithm) -> None:
    model, plain = make(topology, 8, random_seeds=[4] * 8), make(topology, 8, random_seeds=[4] * 8)
    for row in (0, 3):
        bring(model, SLOT, "own", SeedStage.HOLDING, row=row, algorithm=algorithm)
    x, y = population_batch(model, 1)
    losses, wanted = model.losses(x, y), plain.losses(x, y)
    assert torch.equal(losses.outputs, wanted.outputs), "at alpha 1, in training mode"
    losses.total().backward()
    wanted.total().backward()
    for (name, a), b in zip(model.host.named_parameters(), plain.host.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    gamma = model.slot(SLOT).banks["own"].gamma.weight.grad
    assert (gamma[[0, 3]].abs().sum(1) > 0).all()
    assert (gamma[[1, 2, 4, 5, 6, 7]] == 0).all()


@own
def test_a_row_draws_its_own_initial_weights_and_nobody_elses_numbers(topology) -> None:
    model = make(topology, 8)
    before = torch.random.get_rng_state()
    for row, init_seed in ((0, 5), (1, 6), (2, 5)):
        bring(model, SLOT, "own", SeedStage.HOLDING, row=row, init_seed=init_seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in model.slot(SLOT).banks["own"].named_parameters():
        assert torch.equal(tensor[0], tensor[2]), name
        assert (tensor[3:] == 0).all(), "no seed, no weights"
        if name.endswith(("out.weight", "0.weight")):
            assert not torch.equal(tensor[0], tensor[1])
    torch.manual_seed(1)
    again = make(topology, 8)
    bring(again, SLOT, "own", SeedStage.HOLDING, row=4, init_seed=5)
    for a, b in zip(
        model.slot(SLOT).banks["own"].parameters(), again.slot(SLOT).banks["own"].parameters(), strict=True
    ):
        assert torch.equal(a[0], b[4])


@own
@pytest.mark.parametrize("incubation", Incubation)
def test_a_population_is_so_many_networks(topology, incubation) -> None:
    """In float64, after some steps of training with every blend and stage."""
    numbers, stages = list(range(8)), cycle([SeedStage.HOLDING, SeedStage.TRAINING, SeedStage.BLENDING])
    lives = [(list(AlphaAlgorithm)[n % 3], stage) for n, stage in zip(numbers, stages, strict=False)]
    lives[5] = None

    def live(population: int, here: list[int]):
        model = make(
            topology,
            population,
            dtype=torch.float64,
            incubation=incubation,
            random_seeds=[n + 9 for n in here],
        )
        optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw", host_lr=0.01, seed_lr=0.01))
        for row, number in enumerate(here):
            if lives[number] is not None:
                algorithm, stage = lives[number]
                bring(model, SLOT, "own", stage, row=row, init_seed=number, algorithm=algorithm, stir=0.1)
        for step in range(6):
            batches = [network_batch(model, 100 * n + step) for n in here]
            train_step(model, optimizer, *fuse(model, batches))
        return model, optimizer

    model, optimizer = live(8, numbers)
    for number in numbers:
        single, own_optimizer = live(1, [number])
        apart = distance(row_tensors(single, own_optimizer, 0), row_tensors(model, optimizer, number))
        assert apart < 1e-9, number


STAGES = (
    (SeedStage.TRAINING, Incubation.SHADOW),
    (SeedStage.TRAINING, Incubation.STE),
    (SeedStage.BLENDING, Incubation.SHADOW),
    (SeedStage.HOLDING, Incubation.SHADOW),
)


@own
@pytest.mark.parametrize(("stage", "incubation"), STAGES)
def test_a_row_is_the_same_bits_in_any_company(topology, stage, incubation) -> None:
    traces = []
    for width, neighbours in (
        (8, {}),
        (16, {}),
        (16, dict.fromkeys((0, 7, 9, 15), "own")),
        (24, {1: "norm", 8: "own"}),
    ):
        model = make(topology, width, incubation=incubation)
        optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw", host_lr=0.02, seed_lr=0.02))
        for row, name in (neighbours | {3: "own"}).items():
            until = stage if row == 3 else SeedStage.HOLDING
            bring(model, SLOT, name, until, row=row, stir=0.1, init_seed=row)
        losses = {f"loss {s}": train_step(model, optimizer, *population_batch(model, s))[3] for s in range(3)}
        table = evaluate_coalitions(model, population_batch(model, 3)[0], wanted_coalitions(model))
        outputs = [o for row, o in zip(table.rows, table.outputs, strict=True) if row == 3]
        traces.append(row_tensors(model, optimizer, 3) | losses | dict(enumerate(outputs)))
    for trace in traces[1:]:
        assert differing(traces[0], trace) == []


def test_a_row_that_breaks_breaks_alone() -> None:
    model, healthy = make("cnn", 8), make("cnn", 8)
    for m in (model, healthy):
        for row in (2, 6):
            bring(m, SLOT, "own", SeedStage.HOLDING, row=row, stir=0.1)
    with torch.no_grad():
        next(iter(model.slot(SLOT).banks["own"].module.parameters()))[2] = torch.nan
    for m in (model, healthy):
        optimizer = PopulationOptimizer(m)
        train_step(m, optimizer, *population_batch(m, 0))
    for row in range(8):
        same = differing(
            {n: t[row] for n, t in all_tensors(model).items() if t.numel()},
            {n: t[row] for n, t in all_tensors(healthy).items() if t.numel()},
        )
        assert bool(same) is (row == 2)


@own
def test_it_learns(topology) -> None:
    model = make(topology, 8)
    bring(model, SLOT, "own", SeedStage.TRAINING, row=1, tempo_epochs=3)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw", host_lr=0.0, seed_lr=0.02))
    x, y = population_batch(model, 3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.losses(x, y)
        losses.append(float(loss.incubation.detach()))
        loss.total().backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.01


# -- against the same seed on population layers --------------------------------------------------------------


def conv_light_in_torch(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.GroupNorm(group_count(channels), channels),
        nn.ReLU(),
    )


def test_conv_light_written_by_a_user_is_conv_light() -> None:
    """Same output and gradients in float64 with the same weights, same size, same FLOPs, same traits."""
    with registered("twin", "cnn", conv_light_in_torch):
        ours, theirs = (build_blueprint("cnn", name, 8, 6).double() for name in ("conv_light", "twin"))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                a.copy_(torch.randn(a.shape, generator=generator))
                b.copy_(a)
        x = torch.randn(3, 48, 5, 5, dtype=torch.float64, generator=generator)
        x = x.contiguous(memory_format=torch.channels_last)
        rows = torch.tensor([4, 1, 1, 7, 0, 2, 3, 6])
        for lanes in (
            Lanes(8, Mode.TRAIN),
            Lanes(8, Mode.TRAIN, rows),
            Lanes(8, Mode.EVAL, rows),
            Lanes(8, Mode.SHADOW),
        ):
            gradients = []
            for bank in (ours, theirs):
                bank.zero_grad()
                h = x.clone(memory_format=torch.preserve_format).requires_grad_()
                out = bank(h, lanes)
                out.square().sum().backward()
                gradients.append([out.detach(), h.grad, *(p.grad for p in bank.parameters())])
            for a, b in zip(*gradients, strict=True):
                assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        model = make("cnn")
        meter = FlopMeter(model)
        assert meter.bank(SLOT, "twin") == meter.bank(SLOT, "conv_light")
        for channels, positions in ((4, (8, 8)), (64, (40, 40))):
            expected = measure_traits("cnn", "conv_light", channels, positions)
            assert measure_traits("cnn", "twin", channels, positions) == expected


@own
def test_traits_and_flops_of_own_seeds(topology) -> None:
    model = make(topology)
    channels, meter = model.slot(SLOT).channels, FlopMeter(model)
    positions = model.slot(SLOT).positions
    pixels = 1
    for side in positions:
        pixels *= side
    reach, *flags = measure_traits(topology, "own", channels, positions)
    if topology == "cnn":
        assert (reach, flags) == (3 / 4, [1, 1, 0])
        forward = 2 * pixels * (9 * 2 * channels**2 + 2 * 2 * channels**2)
    elif topology == "transformer":
        assert (reach, flags) == (1.0, [1, 1, 0])
        forward = 2 * pixels * channels**2
    else:
        assert (reach, flags) == (1.0, [0, 1, 0])
        forward = 2 * 2 * 5 * channels
    assert meter.bank(SLOT, "own").forward == forward
    assert meter.bank(SLOT, "own").training == 3 * forward


def test_code_that_looks_at_values_can_be_counted() -> None:
    class Careful(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.detach().abs().max()) > 1e-6 else x

    with registered("careful", "cnn", lambda channels: Careful(channels, channels, 1)):
        model = make("cnn")
        model.germinate(SLOT, "careful")
        assert FlopMeter(model).bank(SLOT, "careful").forward == 2 * 4 * 4 * 4 * 4


# -- saved and exported --------------------------------------------------------------------------------------


@own
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_export_is_the_row(topology, dtype) -> None:
    model = make(topology, 8, dtype=dtype)
    for row, algorithm in enumerate(AlphaAlgorithm):
        bring(model, SLOT, "own", SeedStage.FOSSILIZED, row=row, algorithm=algorithm, stir=0.3)
    x, _ = network_batch(model, 5)
    for row in range(3):
        plain = export_row(model, row)
        assert (plain(x) - NetworkRow(model, row)(x)).abs().max() < (
            1e-5 if dtype is torch.float32 else 1e-12
        )
        modules = list(plain.modules())
        assert any(isinstance(m, OWN[topology] if topology != "mlp" else nn.Tanh) for m in modules)
        assert not any(type(m).__module__.startswith("esper") for m in modules)
        copy = pickle.loads(pickle.dumps(plain))
        assert torch.equal(copy(x), plain(x))
    if dtype is torch.float32:
        exported = torch.export.export(export_row(model, 0), (x,)).module()
        assert torch.allclose(exported(x), export_row(model, 0)(x), atol=1e-6)


def test_an_export_of_torch_layers_runs_where_there_is_no_esper(tmp_path: Path) -> None:
    with registered("twin", "cnn", conv_light_in_torch):
        model = make("cnn")
        bring(model, SLOT, "twin", SeedStage.FOSSILIZED, stir=0.3)
        x, _ = network_batch(model, 5)
        torch.save((export_row(model), x, NetworkRow(model)(x)), tmp_path / "plain.pt")
    code = (
        "import sys, torch; sys.modules['esper'] = None; "
        f"m, x, y = torch.load({str(tmp_path / 'plain.pt')!r}, weights_only=False); "
        "assert torch.allclose(m(x), y, atol=1e-6)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@own
def test_a_saved_network_goes_on_exactly_and_says_what_it_needs(topology, tmp_path: Path) -> None:
    model = make(topology, 8)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw"))
    for row, stage in ((0, SeedStage.HOLDING), (5, SeedStage.TRAINING)):
        bring(model, SLOT, "own", stage, row=row)
    for step in range(3):
        train_step(model, optimizer, *population_batch(model, step))
    save_network(tmp_path / "net", model, optimizer)
    loaded, theirs = load_network(tmp_path / "net")
    for step in range(3, 6):
        train_step(model, optimizer, *population_batch(model, step))
        train_step(loaded, theirs, *population_batch(model, step))
    assert differing(all_tensors(model), all_tensors(loaded)) == []


def test_a_network_with_an_unknown_blueprint_says_what_to_do(tmp_path: Path) -> None:
    with registered("mine", "cnn", Gated):
        model = make("cnn")
        bring(model, SLOT, "mine", SeedStage.HOLDING)
        save_network(tmp_path / "net", model)
    with pytest.raises(
        StructureError, match=r"blueprint 'mine' is unknown for topology cnn.*--import MODULE"
    ):
        load_network(tmp_path / "net")


# -- what is refused -----------------------------------------------------------------------------------------


class Replacing(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return x * self.seen


class Unregistered(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = torch.randn(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Frozen(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1)
        self.weight.requires_grad_(False)


class Python(nn.Conv2d):
    """Draws its weights from another generator."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1)
        nn.init.constant_(self.weight, random.random())


class Wavering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def conv(channels: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 1), *more)


REFUSED = {
    "shape": (
        lambda c: conv(c, nn.MaxPool2d(2)),
        r"shape \(2, 4, 4, 4\) into \(2, 4, 2, 2\); the shape must stay",
    ),
    "broadcast": (lambda c: nn.AdaptiveAvgPool2d(1), r"into \(2, 4, 1, 1\)"),
    "dropout": (
        lambda c: conv(c, nn.Dropout(0.1)),
        r"random numbers in training mode \(dropout\?\).*leave dropout out",
    ),
    "in place": (
        lambda c: nn.Sequential(nn.ReLU(inplace=True), conv(c)),
        "changes its input in place.*inplace=False",
    ),
    "replaced buffer": (Replacing, "replaces buffer seen.*in place"),
    "unregistered": (Unregistered, "neither parameters nor buffers"),
    "frozen": (Frozen, r"parameter weight requires no gradient.*register_buffer"),
    "other generator": (Python, "weight differs between two modules.*draw initial values with torch only"),
    "unsteady": (lambda c: Wavering(), "differs between two passes"),
    "lazy": (lambda c: nn.LazyConv2d(c, 1), "parameter weight has no shape yet"),
    "no module": (lambda c: torch.zeros(c), "its factory returned a Tensor; it takes a number of channels"),
    "tuple": (lambda c: nn.Identity() if c == 0 else Pair(), "returned a tuple, must return a tensor"),
    "own failure": (lambda c: nn.Conv2d(c, c, 1, groups=7), "the module for 4 channels fails: ValueError"),
    "own failure in use": (lambda c: nn.Linear(c, c + 1), "the module for 4 channels fails|into"),
}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(("factory", "message"), REFUSED.values(), ids=list(REFUSED))
def test_a_module_that_cannot_be_a_seed_is_refused_when_it_is_planted(factory, message) -> None:
    with registered("mine", "cnn", factory):
        model = make("cnn", 8)
        before = all_tensors(model)
        with pytest.raises(BlueprintError, match=f"blueprint 'mine': .*{message}"):
            model.germinate(SLOT, "mine", row=2)
        assert differing(before, all_tensors(model)) == []
        assert model.seed_in(SLOT, 2) is None


def test_batch_norm_dropout_of_0_and_unused_parameters_are_fine() -> None:
    def fine(channels: int) -> nn.Module:
        module = conv(channels, nn.BatchNorm2d(channels), nn.Dropout(0.0))
        module.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return module

    with registered("fine", "cnn", fine):
        model = make("cnn", 8)
        bring(model, SLOT, "fine", SeedStage.HOLDING, row=1, stir=0.1)
        optimizer = PopulationOptimizer(model)
        before = model.slot(SLOT).banks["fine"].module.rows.unused.detach().clone()
        train_step(model, optimizer, *population_batch(model, 0))
        assert torch.equal(model.slot(SLOT).banks["fine"].module.rows.unused, before)


def test_shapes_are_also_checked_where_the_host_runs_at_another_size() -> None:
    """A module for one size of images: right at the host's own, refused at another."""

    class Fixed(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(channels, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(x, 4) * self.weight

    with registered("fixed", "cnn", Fixed):
        model = make("cnn", 1)
        bring(model, SLOT, "fixed", SeedStage.HOLDING)
        model(torch.zeros(2, 1, 8, 8))
        with pytest.raises(BlueprintError, match="the shape must stay"):
            model(torch.zeros(2, 1, 16, 16))
        assert measure_traits("cnn", "fixed", 4, (4, 4)) == (1 / 4, 0, 0, 1)


def test_a_name_gets_the_next_index_for_all_topologies() -> None:
    assert blueprint_ids()[-1] == "own"
    assert blueprint_ids().count("own") == 1
    with (
        pytest.raises(BlueprintError, match="blueprint 'own' is already registered for mlp"),
        registered("own", "mlp", vectors),
    ):
        pass


def test_every_combination_of_mode_and_rows_records_what_it_should() -> None:
    """Batch statistics: TRAIN records them in the lanes' rows, padding and the other modes do not."""
    with registered("bn", "cnn", lambda c: nn.BatchNorm2d(c)):
        x = torch.randn(4, 16, 3, 3, generator=torch.Generator().manual_seed(0)) + 1.0
        rows = torch.tensor([5, 2, 6, 0, 5, 5, 5, 5])
        for mode, padding in product(Mode, (0, 4)):
            bank = build_blueprint("cnn", "bn", 8, 2)
            lanes = Lanes(8, mode, rows if padding else None, padding)
            bank(x, lanes)
            tracked = bank.module.rows.num_batches_tracked.tolist()
            trained = [5, 2, 6, 0] if padding else range(8)
            assert tracked == [int(mode is Mode.TRAIN and row in trained) for row in range(8)]

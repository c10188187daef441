"""Growth sensors against brute force: a zero layer really inserted into a plain torch network."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import CNNHost, MLPHost, MorphogeneticModel, OptimizerConfig, PopulationOptimizer
from esper.kasmina.blueprints import ConvLight
from esper.kasmina.hosts import ConvBlock
from esper.kasmina.layers import PopulationLayer
from esper.leyline import EsperError, Incubation, SeedStage, Topology
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_split
from esper.simic.sensors import GrowthProbe, GrowthSensors, register_sensor, registered_sensors
from esper.tamiyo import RecurrentPolicy
from esper.tamiyo.features import MAGNITUDE, schema
from esper.tamiyo.inputs import SENSORS
from helpers import (
    all_tensors,
    bring,
    differing,
    make,
    network_batch,
    population_batch,
    same_bits,
    train_step,
)
from run_helpers import train

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, equal_nan=True, **TIGHT)


def measure_growth(model: MorphogeneticModel, x: Tensor, y: Tensor, host_norm: Tensor) -> GrowthSensors:
    """The sensors on one batch, without a step."""
    probe = GrowthProbe()
    model.losses(x, y, probe=probe).total().backward()
    return probe.read(model, host_norm)


def stacked(sensors: GrowthSensors) -> Tensor:
    """All sensors as [K, P, S]."""
    return torch.stack(list(sensors.named().values()))


def plain(layer: nn.Module | Tensor, row: int) -> nn.Module:
    assert isinstance(layer, PopulationLayer)
    return layer.plain(row).train()


class PlainCNN:
    """One row as anyone would write it: training mode, ordinary layers, and a zero convolution beside one
    slot."""

    def __init__(self, model: MorphogeneticModel, row: int) -> None:
        host = model.host
        assert isinstance(host, CNNHost)
        blocks = [block for block in host.blocks if isinstance(block, ConvBlock)]
        self.blocks = [(plain(block.conv, row), plain(block.norm, row)) for block in blocks]
        self.head = plain(host.head, row)
        self.seeds: dict[str, tuple[float, list[nn.Module]]] = {}
        for slot_id in model.slot_config.slot_ids:
            seed = model.seed_in(slot_id, row)
            if seed is not None and seed.is_blended:
                bank = model.slot(slot_id).banks["conv_light"]
                assert isinstance(bank, ConvLight)
                self.seeds[slot_id] = (
                    seed.alpha.alpha,
                    [plain(layer, row) for layer in (bank.conv, bank.norm, bank.gamma)],
                )

    def host_norm(self, x: Tensor, y: Tensor) -> Tensor:
        parameters = [p for conv, norm in self.blocks for p in (*conv.parameters(), *norm.parameters())]
        parameters += list(self.head.parameters())
        gradients = torch.autograd.grad(self.loss(x, y, "", None)[0], parameters)
        return torch.stack([g.square().sum() for g in gradients]).sum().sqrt()

    def loss(self, x: Tensor, y: Tensor, probed: str, zero: nn.Conv2d | None) -> tuple[Tensor, Tensor | None]:
        boundary = None
        for i, (conv, norm) in enumerate(self.blocks):
            for slot_id in (f"r0c{i}", f"r1c{i}"):
                x = F.relu(norm(conv(x))) if slot_id[1] == "0" else F.max_pool2d(x, 2)
                before = x
                if slot_id in self.seeds:
                    alpha, (kernel, group_norm, gamma) = self.seeds[slot_id]
                    x = x + alpha * gamma(F.relu(group_norm(kernel(x))))
                if slot_id == probed and zero is not None:
                    x = x + zero(before)
                    boundary = x
        return F.cross_entropy(self.head(x.mean((2, 3))), y), boundary

    def sense(
        self, x: Tensor, y: Tensor, slot_id: str, channels: int, host_rms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        zero = nn.Conv2d(channels, channels, 3, padding=1, bias=False, dtype=x.dtype)
        nn.init.zeros_(zero.weight)
        loss, boundary = self.loss(x, y, slot_id, zero)
        assert boundary is not None
        weight, at_boundary = torch.autograd.grad(loss, [zero.weight, boundary])
        centre = weight[:, :, 1, 1].norm()
        off_centre = (weight.square().sum() - centre.square()).clamp(min=0).sqrt()
        return (
            at_boundary.norm(),
            weight.norm() / (weight.numel() ** 0.5 * host_rms),
            off_centre / 8**0.5 / centre,
        )


@pytest.mark.parametrize("grown", [False, True], ids=["dormant", "grown"])
@pytest.mark.parametrize("population", [1, 8])
def test_cnn_against_a_zero_convolution_in_a_plain_network(population: int, grown: bool) -> None:
    model = make("cnn", population, dtype=torch.float64)
    if grown:
        for row in {0, population // 2}:
            bring(model, "r0c0", "conv_light", SeedStage.FOSSILIZED, row=row, stir=0.3)
            bring(model, "r1c1", "conv_light", SeedStage.BLENDING, row=row, stir=0.3, tempo_epochs=3)
            bring(model, "r0c2", "norm", SeedStage.TRAINING, row=row, stir=0.3)
    x, y = population_batch(model, 1)
    rows = [(PlainCNN(model, row), *network_batch(model, 1000 + row)) for row in range(population)]
    host_norm = torch.stack([network.host_norm(xs, ys) for network, xs, ys in rows])
    measured = measure_growth(model, x, y, host_norm)
    assert measured.tap_ratio is not None
    assert {name: values.shape for name, values in measured.named().items()} == dict.fromkeys(
        SENSORS, (population, 6)
    )
    for row, (network, xs, ys) in enumerate(rows):
        rms = host_norm[row] / model.host_params**0.5
        for i, slot_id in enumerate(model.slot_config.slot_ids):
            norm, score, ratio = network.sense(xs, ys, slot_id, model.slot(slot_id).channels, rms)
            assert close(measured.boundary_norm[row, i], norm)
            assert close(measured.growth_score[row, i], score)
            # Where a map has one pixel only the centre sees it, and rounding leaves a ratio of about 0.
            assert torch.allclose(measured.tap_ratio[row, i], ratio, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("size", [8, 16])
def test_the_host_norm_of_the_optimizer_is_the_same_unit(size: int) -> None:
    """At rate 0 the last step measured the hosts that the sensors see: its norm is the plain network's."""
    model = MorphogeneticModel(CNNHost(1, base=2, channels=1, size=size)).double()
    optimizer = PopulationOptimizer(model)
    optimizer.host_lr.zero_()
    x, y = torch.randn(4, 1, size, size, dtype=torch.float64), torch.tensor([[1, 2, 3, 4]])
    reference = PlainCNN(model, 0).host_norm(x, y[0])
    train_step(model, optimizer, x, y)
    assert optimizer.stats is not None
    assert close(optimizer.stats.host_norm[0], reference)


def test_mlp_against_a_zero_linear_layer_in_a_plain_network() -> None:
    model = make("mlp", 8, dtype=torch.float64)
    host = model.host
    assert isinstance(host, MLPHost)
    x, y = population_batch(model, 2)
    host_norm = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    measured = measure_growth(model, x, y, host_norm)
    assert measured.tap_ratio is None
    for row in range(8):
        layers, head = [plain(layer, row) for layer in host.layers], plain(host.head, row)
        for probed in range(len(layers)):
            zero = nn.Linear(8, 8, bias=False, dtype=torch.float64)
            nn.init.zeros_(zero.weight)
            h = x[row]
            for i, layer in enumerate(layers):
                h = F.relu(layer(h))
                if i == probed:
                    h = boundary = h + zero(h)
            weight, at_boundary = torch.autograd.grad(
                F.cross_entropy(head(h), y[row]), [zero.weight, boundary]
            )
            score = weight.norm() / (8 * host_norm[row] / model.host_params**0.5)
            assert close(measured.boundary_norm[row, probed], at_boundary.norm())
            assert close(measured.growth_score[row, probed], score)


def test_transformer_against_an_inserted_zero_layer() -> None:
    model = make("transformer", 8, dtype=torch.float64)
    x, y = population_batch(model, 3)
    zeros = {
        slot_id: torch.zeros(8, 8, 8, dtype=torch.float64, requires_grad=True)
        for slot_id in model.slot_config.slot_ids
    }
    outputs = model.losses(
        x, y, probe=lambda slot, h, out: out + torch.einsum("pbtd,ped->pbte", h, zeros[slot])
    ).outputs
    loss = F.cross_entropy(outputs.flatten(0, 2), y.flatten(), reduction="none").view(8, -1).mean(1).sum()
    weights = torch.autograd.grad(loss, list(zeros.values()))
    measured = measure_growth(model, x, y, torch.ones(8, dtype=torch.float64))
    for i, weight in enumerate(weights):
        assert close(measured.growth_score[:, i], weight.flatten(1).norm(dim=1) / 8 * model.host_params**0.5)


def grown(
    topology: Topology, incubation: Incubation, dtype: torch.dtype
) -> tuple[MorphogeneticModel, PopulationOptimizer]:
    model = make(topology, 8, dtype=dtype, incubation=incubation)
    first, second = model.slot_config.slot_ids[:2]
    bring(model, first, "norm", SeedStage.BLENDING, row=2, stir=0.1)
    bring(model, first, "norm", SeedStage.TRAINING, row=3, stir=0.1)
    bring(model, second, "norm", SeedStage.FOSSILIZED, row=2, stir=0.1)
    return model, PopulationOptimizer(model)


def probed_step(
    model: MorphogeneticModel, optimizer: PopulationOptimizer, x: Tensor, y: Tensor
) -> GrowthSensors:
    probe = GrowthProbe()
    optimizer.zero_grad()
    model.losses(x, y, probe=probe).total().backward()
    optimizer.step()
    assert optimizer.stats is not None
    return probe.read(model, optimizer.stats.host_norm)


@pytest.mark.parametrize("incubation", Incubation)
@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_a_step_that_measures_trains_bit_for_bit_like_one_that_does_not(
    topology: Topology, incubation: Incubation
) -> None:
    model, optimizer = grown(topology, incubation, torch.float32)
    twin, twin_optimizer = grown(topology, incubation, torch.float32)
    for step in range(3):
        x, y = population_batch(model, step)
        probed_step(model, optimizer, x, y)
        train_step(twin, twin_optimizer, x, y)
    assert not differing(all_tensors(model), all_tensors(twin))
    for row in range(8):
        assert not differing(optimizer.row_state(row), twin_optimizer.row_state(row))


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_feature_rank_against_the_eigenvalues_of_the_covariance(topology: Topology) -> None:
    model = make(topology, 8, dtype=torch.float64)
    x, y = population_batch(model, 1, batch=32)
    features: dict[str, Tensor] = {}

    def keep(slot_id: str, before: Tensor, after: Tensor) -> Tensor:
        features[slot_id] = before.detach()
        return after

    model.losses(x, y, probe=keep)
    ranks = measure_growth(model, x, y, torch.ones(8, dtype=torch.float64)).feature_rank
    for i, slot_id in enumerate(model.slot_config.slot_ids):
        for row in range(8):
            h = features[slot_id]
            samples = h.unflatten(1, (8, -1))[:, row].movedim(1, -1) if topology == "cnn" else h[row]
            samples = samples.flatten(0, -2)
            spectrum = torch.linalg.eigvalsh(torch.cov(samples.T)).clamp(min=0)
            number = spectrum.sum() ** 2 / spectrum.square().sum()
            assert close(ranks[row, i], number.log() / math.log(samples.shape[1]))


def test_feature_rank_tells_copies_from_independent_channels() -> None:
    model = make("cnn", 8)
    with torch.no_grad():
        for row in (0, 1):
            model.host.blocks[0].conv.weight[row] = model.host.blocks[0].conv.weight[row, :1]
    rank = sensors_of(model).feature_rank
    assert torch.allclose(rank[:2, 0], torch.tensor(0.0), atol=1e-3)
    assert (rank[2:, 0] > 0.03).all()


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_a_row_is_measured_alike_in_any_population(topology: Topology) -> None:
    by_population = {}
    for population in (8, 16, 64):
        model = make(topology, population, random_seeds=list(range(population)))
        x, y = population_batch(model, 1)
        by_population[population] = stacked(measure_growth(model, x, y, torch.ones(population)))[:, :8]
    assert same_bits(by_population[8], by_population[16])
    assert same_bits(by_population[8], by_population[64])


def test_reading_before_backward_says_what_to_do() -> None:
    model, probe = make("cnn", 8), GrowthProbe()
    model.losses(*population_batch(model, 1), probe=probe)
    with pytest.raises(EsperError, match="slot r0c0: no gradient has come back yet; call backward"):
        probe.read(model, torch.ones(8))


def sensors_of(model: MorphogeneticModel, seed: int = 1) -> GrowthSensors:
    return measure_growth(model, *population_batch(model, seed), torch.ones(model.population))


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_a_broken_row_stays_alone(topology: Topology) -> None:
    model, broken = make(topology, 8), make(topology, 8)
    with torch.no_grad():
        for parameter in broken.host.parameters():
            parameter[3] = torch.nan
    whole, partly = stacked(sensors_of(model)), stacked(sensors_of(broken))
    others = [row for row in range(8) if row != 3]
    assert same_bits(whole[:, others], partly[:, others])
    assert partly[:, 3].isnan().all()


def test_one_network_may_give_plain_targets() -> None:
    model = make("cnn")
    x, y = population_batch(model, 1)
    assert same_bits(
        stacked(measure_growth(model, x, y, torch.ones(1))),
        stacked(measure_growth(model, x, y[0], torch.ones(1))),
    )


def test_one_pixel_has_no_neighbours() -> None:
    ratio = sensors_of(make("cnn", 8)).tap_ratio
    assert ratio is not None
    assert (ratio[:, -1] == 0).all()


def test_a_first_block_that_cannot_look_around_shows_in_its_slot() -> None:
    """What the sensors are for. Eight pairs of networks learn digits from the same weights and batches, one
    of each pair with only the centre taps of its first block; there, a kernel's off-centre taps would gain
    most."""
    split = validation_split(load_dataset("digits"), 256, 0)
    batches = SharedBatchIterator(split, [list(range(16))], 64, steps_per_epoch=45, seed=0)
    host = CNNHost(16, base=4, channels=1, size=8)
    model = MorphogeneticModel(host, ["r0c0", "r0c1", "r0c2"], random_seeds=[row % 8 for row in range(16)])
    for row in range(8):
        host.set_centre_tap(row, [True, False, False])
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=0.1))
    for (batch,) in batches:
        train_step(model, optimizer, batch.x, batch.y)
    assert optimizer.stats is not None
    ratio = measure_growth(model, batch.x, batch.y, optimizer.stats.host_norm).tap_ratio
    assert ratio is not None
    crippled, whole = ratio[:8], ratio[8:]
    assert (crippled[:, 0] > whole[:, 0]).sum() >= 6
    assert crippled[:, 0].mean() > 1.5 * whole[:, 0].mean()
    assert crippled.mean(0).argmax() == 0


def spread(features: Tensor, gradient: Tensor) -> Tensor:
    """Standard deviation of the features, weighted by nothing: a sensor as a user writes it."""
    assert features.shape == gradient.shape
    return features.flatten(1).std(1)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr("esper.simic.sensors._REGISTERED", {})


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
@pytest.mark.usefixtures("registered")
def test_a_registered_sensor_is_measured_at_every_slot_and_disturbs_no_other(topology: Topology) -> None:
    sensor = register_sensor("spread", spread, meaning="deviation of the features", normaliser=MAGNITUDE)
    model = make(topology, 8)
    x, y = population_batch(model, 1)
    probe = GrowthProbe([sensor])
    model.losses(x, y, probe=probe).total().backward()
    measured = probe.read(model, torch.ones(8)).named()
    assert list(measured)[-1] == "spread"
    assert measured["spread"].shape == (8, len(model.slot_config.slot_ids))
    assert (measured["spread"] > 0).all()
    built_in = torch.stack([values for name, values in measured.items() if name != "spread"])
    assert same_bits(built_in, stacked(measure_growth(model, x, y, torch.ones(8))))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda features, gradient: features.mean(), r"'bad' at slot r0c0: the result is \(\), must"),
        (lambda features, gradient: 1.0, "'bad' at slot r0c0: the result is float, must be a tensor"),
    ],
)
@pytest.mark.usefixtures("registered")
def test_a_sensor_that_does_not_give_one_number_per_row_is_refused(function, words: str) -> None:
    sensor = register_sensor("bad", function, meaning="bad", normaliser=MAGNITUDE)
    model, probe = make("cnn", 8), GrowthProbe([sensor])
    model.losses(*population_batch(model, 1), probe=probe).total().backward()
    with pytest.raises(EsperError, match=words):
        probe.read(model, torch.ones(8))


@pytest.mark.usefixtures("registered")
def test_names_of_sensors_are_checked() -> None:
    register_sensor("spread", spread, meaning="x", normaliser=MAGNITUDE)
    for name in ("spread", "tap_ratio", "progress"):
        with pytest.raises(EsperError, match=f"{name}.*already registered or a built-in"):
            register_sensor(name, spread, meaning="x", normaliser=MAGNITUDE)
    with pytest.raises(EsperError, match="'My sensor'; allowed: lower-case"):
        register_sensor("My sensor", spread, meaning="x", normaliser=MAGNITUDE)
    with pytest.raises(EsperError, match="must be callable"):
        register_sensor("third", None, meaning="x", normaliser=MAGNITUDE)  # type: ignore[arg-type]
    with pytest.raises(EsperError, match="must be a Normaliser"):
        register_sensor("third", spread, meaning="x", normaliser=torch.log)  # type: ignore[arg-type]
    with pytest.raises(EsperError, match=r"sensor 'spred' is unknown \(did you mean spread\?\)"):
        registered_sensors(["spred"])
    with pytest.raises(EsperError, match="given twice"):
        registered_sensors(["spread", "spread"])


@pytest.mark.usefixtures("registered")
def test_a_run_shows_its_policy_the_sensors_that_its_config_names(tmp_path) -> None:
    register_sensor("spread", spread, meaning="deviation of the features", normaliser=MAGNITUDE)
    plain_agent, _ = train(rounds=1)
    agent, history = train(tmp_path / "run", sensors=["spread"], rounds=1)
    assert len(history) == 1
    assert plain_agent.policy.schema()["slot_dim"] + 2 == agent.policy.schema()["slot_dim"]
    assert agent.policy.schema()["features"].endswith("+spread")
    _, again = train(tmp_path / "run", sensors=["spread"], rounds=2, resume="auto")
    assert len(again) == 2
    agent.policy.save(tmp_path / "policy")
    with pytest.raises(EsperError, match=r"features is '\w+\+spread' in the file and '\w+' here"):
        RecurrentPolicy.load(tmp_path / "policy", feature_schema=schema())
    with pytest.raises(EsperError, match="sensor 'spred' is unknown"):
        train(sensors=["spred"], rounds=1)
    blind, _ = train(sensors=["spread"], blind=["spread"], rounds=1)
    assert blind.policy.schema()["features"] == agent.policy.schema()["features"]

"""The population's optimizers against torch.optim on separate networks, row by row; clipping and gradient
statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina import (
    CNNHost,
    MorphogeneticModel,
    OptimizerConfig,
    PopulationOptimizer,
    load_network,
    restore_row,
    save_network,
    snapshot_row,
)
from esper.kasmina.row import OptimizerRow
from esper.leyline import AlphaAlgorithm, EsperError, PopulationError, SeedStage, StructureError
from helpers import (
    EAGER,
    HOSTS,
    bring,
    differing,
    distance,
    fuse,
    make,
    network_batch,
    population_batch,
    row_tensors,
    train_step,
)

topologies = pytest.mark.parametrize("topology", HOSTS)
kinds = pytest.mark.parametrize("kind", ["sgd", "adamw"])
ROWS = 8
RATES: dict[str, list[float]] = {
    "host_lr": [0.01 * (row + 1) for row in range(ROWS)],
    "seed_lr": [0.02 * (ROWS - row) for row in range(ROWS)],
    "momentum": [0.9, 0.0, 0.5, 0.8, 0.95, 0.7, 0.9, 0.3],
    "host_decay": [0.0, 0.1, 5e-4, 0.01, 0.0, 0.2, 0.05, 0.0],
    "seed_decay": [0.1, 0.0, 0.2, 0.0, 0.01, 0.0, 0.3, 0.0],
    "clip": [1.0, 0.1, 100.0, 0.5, 0.02, 10.0, 1e9, 0.3],
}


class Reference:
    """One network trained with torch's own optimizers and clipping: one for the host, one for each slot."""

    def __init__(self, model: MorphogeneticModel, kind: str, row: int) -> None:
        self.model, self.kind, self.row = model, kind, row
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    def _optimizer(self, group: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
        whose = "host" if group == "host" else "seed"
        lr, decay = RATES[f"{whose}_lr"][self.row], RATES[f"{whose}_decay"][self.row]
        if self.kind == "sgd":
            return torch.optim.SGD(
                parameters, lr=lr, momentum=RATES["momentum"][self.row], weight_decay=decay
            )
        return torch.optim.AdamW(
            parameters,
            lr=lr,
            betas=(RATES["momentum"][self.row], 0.99),
            eps=OptimizerConfig().eps,
            weight_decay=decay,
        )

    def step(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """One batch; the norms before clipping."""
        groups = {"host": list(self.model.host.parameters())} | {
            slot.slot_id: list(slot.parameters()) for slot in self.model.slots() if list(slot.parameters())
        }
        for parameters in groups.values():
            for p in parameters:
                p.grad = None
        self.model.losses(*fuse(self.model, [(x, y)])).total().backward()
        norms = {}
        for group, parameters in groups.items():
            if group not in self.optimizers:
                self.optimizers[group] = self._optimizer(group, parameters)
            norms[group] = float(torch.nn.utils.clip_grad_norm_(parameters, RATES["clip"][self.row]))
            self.optimizers[group].step()
        return norms


def with_rates(model: MorphogeneticModel, kind: str) -> PopulationOptimizer:
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind=kind, beta2=0.99))
    for name, values in RATES.items():
        getattr(optimizer, name).copy_(torch.tensor(values, dtype=torch.float64))
    return optimizer


def grow(model: MorphogeneticModel, topology: Any, step: int, rows: dict[int, int]) -> None:
    """What happens before a step; `rows` maps rows of the experiment to rows of this model."""
    name = {"cnn": "conv_light", "transformer": "attention", "mlp": "mlp"}[topology]
    if step == 0 and 1 in rows:
        bring(
            model,
            "r0c0",
            name,
            SeedStage.HOLDING,
            row=rows[1],
            stir=0.1,
            algorithm=AlphaAlgorithm.GATE,
            init_seed=1,
        )
    if step == 0 and 2 in rows:
        bring(model, "r0c0", "norm", SeedStage.HOLDING, row=rows[2], stir=0.1, init_seed=2)
        bring(model, "r0c1", name, SeedStage.TRAINING, row=rows[2], init_seed=3)
    if step == 4:  # optimizer state begins here, beside older banks and in them
        for row in (3, 5):
            if row in rows:
                bring(
                    model,
                    "r0c0",
                    name,
                    SeedStage.HOLDING,
                    row=rows[row],
                    stir=0.1,
                    init_seed=row,
                    algorithm=AlphaAlgorithm.MULTIPLY,
                )


@pytest.mark.parametrize(("eps", "still"), [(OptimizerConfig().eps, True), (1e-8, False)])
def test_a_gradient_that_is_only_rounding_moves_a_weight_hardly(eps, still):
    """The batch norm that follows takes out what the seed's bias adds: its gradient is 0 but for rounding."""
    lr = 0.03
    model = MorphogeneticModel(CNNHost(8, base=2, channels=1, size=8, kernel=1), **EAGER)
    bring(model, "r0c0", "norm", SeedStage.HOLDING, stir=0.2)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw", seed_lr=lr, eps=eps))
    parameters = dict(model.slot("r0c0").banks["norm"].named_parameters())
    before = {name: parameter[0].detach().clone() for name, parameter in parameters.items()}
    train_step(model, optimizer, *population_batch(model, 0, batch=64))
    moved = {name: float((p[0].detach() - before[name]).abs().max()) / lr for name, p in parameters.items()}
    assert moved["gamma.weight"] > 0.9
    assert moved["norm.weight"] > 0.9
    assert (moved["norm.bias"] < 0.1) is still, moved


@topologies
@kinds
def test_every_row_equals_torch_with_its_own_rates(topology, kind):
    model = make(topology, ROWS, dtype=torch.float64)
    optimizer = with_rates(model, kind)
    references = []
    for row in range(ROWS):
        alone = make(topology, dtype=torch.float64)
        restore_row(alone, snapshot_row(model, row))
        references.append(Reference(alone, kind, row))
    for step in range(10):
        grow(model, topology, step, {row: row for row in range(ROWS)})
        for row, reference in enumerate(references):
            grow(reference.model, topology, step, {row: 0})
        batches = [network_batch(model, 100 * step + row) for row in range(ROWS)]
        train_step(model, optimizer, *fuse(model, batches))
        for row, reference in enumerate(references):
            norms = reference.step(*batches[row])
            assert float(optimizer.stats.host_norm[row]) == pytest.approx(norms.pop("host"), rel=1e-9)
            for slot_id, norm in norms.items():
                assert float(optimizer.stats.norm[slot_id][row]) == pytest.approx(norm, rel=1e-9)
    for row, reference in enumerate(references):
        assert distance(snapshot_row(model, row).tensors, snapshot_row(reference.model, 0).tensors) < 1e-10, (
            row
        )
        for group, theirs in reference.optimizers.items():
            if kind == "sgd" and RATES["momentum"][row] == 0:
                continue  # torch keeps no momentum then
            keys = ("momentum_buffer",) if kind == "sgd" else ("exp_avg", "exp_avg_sq")
            moments = [state[key] for state in theirs.state.values() for key in keys]
            ours = [
                t[row]
                for bank in optimizer.groups[group].values()
                if bank.learning[row]
                for tensors in zip(*bank.state.values(), strict=True)
                for t in tensors
            ]
            assert len(ours) == len(moments)
            assert all(
                torch.allclose(a, b[0], rtol=1e-8, atol=1e-11) for a, b in zip(ours, moments, strict=True)
            )


def test_steps_count_from_each_rows_birth():
    model = make("mlp", 8)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind="adamw"))
    bring(model, "r0c0", "lora", SeedStage.TRAINING, row=1)
    for step in range(3):
        train_step(model, optimizer, *population_batch(model, step))
    bring(model, "r0c0", "lora", SeedStage.TRAINING, row=6)
    for step in range(2):
        train_step(model, optimizer, *population_batch(model, step))
    seeds, host = optimizer.groups["r0c0"]["r0c0.lora"].bias, optimizer.groups["host"]["host"].bias
    assert torch.allclose(
        seeds[:, 0], torch.tensor([1 - 0.9**n for n in (0, 5, 0, 0, 0, 0, 2, 0)], dtype=seeds.dtype)
    )
    assert torch.allclose(host[:, 1], torch.full((8,), 1 - 0.999**5, dtype=host.dtype))


# -- gradient statistics -------------------------------------------------------------------------------------


def test_statistics_are_taken_before_clipping_and_count_only_the_rows_own_tensors():
    model = make("cnn", 8)
    bring(model, "r0c1", "conv_light", SeedStage.HOLDING, row=2)  # γ is 0: only γ has a gradient
    bring(model, "r0c1", "norm", SeedStage.HOLDING, row=4, stir=0.3)
    optimizer = PopulationOptimizer(model, OptimizerConfig(clip=1e-3))
    optimizer.zero_grad()
    model.losses(*population_batch(model, 1)).total().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    for row in range(8):
        host = torch.cat([g[row].flatten() for name, g in grads.items() if name.startswith("host.")]).norm()
        seeds = torch.cat(
            [g[row].flatten() for name, g in grads.items() if name.startswith("seed_slots.r0c1.")]
        ).norm()
        assert float(optimizer.stats.host_norm[row]) == pytest.approx(float(host), rel=1e-5)
        assert float(optimizer.stats.norm["r0c1"][row]) == pytest.approx(float(seeds), rel=1e-5)
    assert optimizer.stats.vanishing["r0c1"].tolist() == [0, 0, 3 / 4, 0, 0, 0, 0, 0]
    assert not optimizer.stats.exploding["r0c1"].any()
    assert list(optimizer.stats.norm) == ["r0c1"], "slots without a seed have nothing to say"


@pytest.mark.parametrize("poison", [1e6, math.inf, math.nan])
def test_exploding_gradients_are_counted_and_stay_in_their_row(poison):
    model = make("mlp", 8)
    for row in (2, 5):
        bring(model, "r0c1", "norm", SeedStage.HOLDING, row=row, stir=0.3)
    with torch.no_grad():
        model.host.head.weight[2] *= poison
    optimizer = PopulationOptimizer(model)
    train_step(model, optimizer, *population_batch(model, 1))
    assert optimizer.stats.exploding["r0c1"][2] == 1.0
    assert optimizer.stats.exploding["r0c1"][5] == 0.0
    assert all(torch.isfinite(p[[row for row in range(8) if row != 2]]).all() for p in model.parameters())


def test_recorded_gradients_reach_the_learning_seeds():
    model = make("mlp", 8)
    bring(model, "r0c0", "lora", SeedStage.TRAINING, row=1)
    bring(model, "r0c0", "norm", SeedStage.HOLDING, row=2, stir=0.3)
    model.germinate("r0c1", "norm", row=3, tempo_epochs=5)
    optimizer = PopulationOptimizer(model)
    train_step(model, optimizer, *population_batch(model, 1))
    before = model.reports(3)
    for row in (1, 2):
        model.seed_in("r0c0", row).update_metrics(gradient_ratio=None)
    model.record_gradients(optimizer.stats)
    for row in (1, 2):
        metrics = model.reports(row)["r0c0"].metrics
        norm, host = float(optimizer.stats.norm["r0c0"][row]), float(optimizer.stats.host_norm[row])
        assert metrics.gradient_norm == pytest.approx(norm)
        seed_rms, host_rms = norm / math.sqrt(metrics.params), host / math.sqrt(metrics.host_params)
        assert metrics.gradient_ratio == pytest.approx(seed_rms / host_rms)
        assert 0.0 <= metrics.gradient_health <= 1.0
    assert model.reports(3) == before, "a seed that takes no part is not measured"
    table = optimizer.stats.packed().tolist()
    model.record_gradients(optimizer.stats, table)
    assert model.reports(1)["r0c0"].metrics.gradient_norm == pytest.approx(
        float(optimizer.stats.norm["r0c0"][1])
    )


# -- rows ----------------------------------------------------------------------------------------------------


def trained(kind: str = "sgd") -> tuple[MorphogeneticModel, PopulationOptimizer]:
    model = make("mlp", 8)
    for row in (1, 2):
        bring(model, "r0c0", "lora", SeedStage.HOLDING, row=row, stir=0.1)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind=kind))
    for step in range(3):
        train_step(model, optimizer, *population_batch(model, step))
    return model, optimizer


@kinds
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", sorted(RATES))
def test_a_rate_that_is_changed_between_steps_counts_at_once(kind, name, in_place):
    def after_change(*, renewed: bool) -> dict[str, Tensor]:
        """Weights after steps with the old rates and one with the changed rate, by the same optimizer or by
        one that takes over its state."""
        model, optimizer = trained(kind)
        for step in range(2):
            train_step(model, optimizer, *population_batch(model, 30 + step))
        if renewed:
            state = [optimizer.row_state(row) for row in range(8)]
            optimizer = PopulationOptimizer(model, optimizer.config)
            for row in range(8):
                optimizer.load_row_state(row, state[row])
        rate = getattr(optimizer, name)
        if in_place:
            rate[1] = 0.03
        else:
            setattr(optimizer, name, torch.full_like(rate, 0.03))
        train_step(model, optimizer, *population_batch(model, 40))
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    assert differing(after_change(renewed=False), after_change(renewed=True)) == []


@kinds
def test_a_row_forgets_and_its_neighbours_do_not(kind):
    model, optimizer = trained(kind)
    before = {row: row_tensors(model, optimizer, row) for row in range(8)}
    optimizer.forget_row(2)
    for row in range(8):
        now = row_tensors(model, optimizer, row)
        assert (differing(before[row], now) == []) is (row != 2)
    state = {name: t for name, t in optimizer.row_state(2).items() if not name.startswith("rates.")}
    assert state
    assert not any(t.any() for t in state.values())


@kinds
def test_a_pruned_row_leaves_no_momentum_behind(kind):
    model, optimizer = trained(kind)
    bank, kept = optimizer.groups["r0c0"]["r0c0.lora"], optimizer.row_state(1)
    assert all(t[2].any() for tensors in bank.state.values() for t in tensors)
    model.prune("r0c0", row=2)
    for step in range(2):
        optimizer.sync()
        assert optimizer.groups["r0c0"]["r0c0.lora"] is bank, "row 1 still lives in it"
        assert not any(
            t[2].any() for t in (bank.bias, *(t for tensors in bank.state.values() for t in tensors))
        )
        assert step or differing(kept, optimizer.row_state(1)) == []
        train_step(model, optimizer, *population_batch(model, 20 + step))


@kinds
def test_a_rows_state_comes_back_exactly(kind):
    _, optimizer = trained(kind)
    state, others = optimizer.row_state(1), [optimizer.row_state(row) for row in range(8) if row != 1]
    optimizer.host_lr[1] = 7.0
    optimizer.forget_row(1)
    optimizer.load_row_state(1, state)
    assert differing(state, optimizer.row_state(1)) == []
    assert all(
        differing(a, optimizer.row_state(row)) == [] for a, row in zip(others, [0, *range(2, 8)], strict=True)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("host.head.weight.momentum"), r"missing tensors \['host.head.weight.momentum'\]"),
        (lambda s: s.update({"host.tail": torch.zeros(3)}), r"unknown tensors \['host.tail'\]"),
        (
            lambda s: s.update({"host.head.bias.momentum": torch.zeros(3)}),
            r"host.head.bias.momentum has shape \(3,\), wanted",
        ),
    ],
)
def test_a_rows_state_is_loaded_strictly(change, message):
    _, optimizer = trained()
    state = optimizer.row_state(1)
    broken = dict(state)
    change(broken)
    with pytest.raises(StructureError, match=message):
        optimizer.load_row_state(1, broken)
    assert differing(state, optimizer.row_state(1)) == []


def test_host_and_seeds_of_a_row_have_their_own_views():
    _, optimizer = trained()
    host, seeds = OptimizerRow(optimizer, 1, host=True), OptimizerRow(optimizer, 1, host=False)
    assert {name.split(".")[0] for name in host.state_dict()} == {"host"}
    assert {name.split(".")[0] for name in seeds.state_dict()} == {"r0c0"}
    kept = host.state_dict()
    seeds.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in seeds.state_dict().items()})
    assert not any(t.any() for t in seeds.state_dict().values())
    assert differing(kept, host.state_dict()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lion"}, "optimizer kind 'lion' is unknown; allowed: sgd, adamw"),
        ({"host_lr": -0.1}, r"host_lr is -0\.1"),
        ({"seed_lr": math.nan}, "seed_lr is nan"),
        ({"clip": math.inf}, "clip is inf"),
        ({"host_decay": -1.0}, r"host_decay is -1"),
        ({"momentum": 1.0}, r"momentum is 1\.0, must be below 1"),
        ({"beta2": 1.5}, r"beta2 is 1\.5, must be below 1"),
        ({"clip": 0.0}, "clip is 0"),
        ({"eps": 0.0}, "eps is 0"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(EsperError, match=message):
        OptimizerConfig(**options)


def test_rows_are_checked():
    _, optimizer = trained()
    for call in (optimizer.forget_row, optimizer.row_state, lambda row: optimizer.load_row_state(row, {})):
        with pytest.raises(PopulationError, match="row 8 is out of range; allowed: 0 to 7"):
            call(8)
        with pytest.raises(PopulationError, match="row -1 is out of range"):
            call(-1)


def test_clipping_leaves_small_gradients_alone_and_scales_large_ones():
    model = make("mlp", 8, dtype=torch.float64)
    optimizer = PopulationOptimizer(model, OptimizerConfig(host_lr=1.0, momentum=0.0, host_decay=0.0))
    optimizer.clip[:] = torch.tensor([1e-3, 1e9] * 4, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.host.named_parameters()}
    train_step(model, optimizer, *population_batch(model, 1))
    for row in range(8):
        moved = torch.cat(
            [(p.detach() - before[name])[row].flatten() for name, p in model.host.named_parameters()]
        ).norm()
        norm = float(optimizer.stats.host_norm[row])
        assert norm > 1e-3
        assert float(moved) == pytest.approx(
            1e-3 if row % 2 == 0 else norm, rel=1e-2 if row % 2 == 0 else 1e-9
        )


# -- warm-up of newborn seeds --------------------------------------------------------------------------------

WARM = OptimizerConfig(
    host_lr=0.05, seed_lr=0.04, host_decay=0.01, seed_decay=0.02, clip=1e9, newborn_warmup=4
)


class WarmReference:
    """One network trained with torch's SGD: a group for the host, one for each slot, and the rates of young
    seeds set by hand."""

    def __init__(self, model: MorphogeneticModel) -> None:
        self.model, self.host, self.slots = model, None, {}

    def step(self, x: Tensor, y: Tensor) -> None:
        options = {"momentum": WARM.momentum}
        if self.host is None:
            host = list(self.model.host.parameters())
            self.host = torch.optim.SGD(host, lr=0.05, weight_decay=0.01, **options)
        for slot in self.model.slots():
            if list(slot.parameters()) and slot.slot_id not in self.slots:
                born = torch.optim.SGD(slot.parameters(), lr=0.0, weight_decay=0.02, **options)
                self.slots[slot.slot_id] = [born, 0]
        self.model.zero_grad()
        self.model.losses(*fuse(self.model, [(x, y)])).total().backward()
        self.host.step()
        for entry in self.slots.values():
            entry[1] += 1
            entry[0].param_groups[0]["lr"] = 0.04 * min(entry[1] / 4, 1.0)
            entry[0].step()


@topologies
def test_a_newborn_warms_up_and_its_host_does_not(topology):
    """Rows grow at different times, in one bank; each agrees with a network of its own."""
    name = {"cnn": "conv_light", "transformer": "attention", "mlp": "mlp"}[topology]
    seeds = [60 + row for row in range(ROWS)]
    births = {0: (1, "r0c0"), 2: (4, "r0c0"), 3: (1, "r0c1")}
    model = make(topology, ROWS, dtype=torch.float64, random_seeds=seeds)
    optimizer = PopulationOptimizer(model, WARM)
    references = {
        row: WarmReference(make(topology, dtype=torch.float64, random_seeds=[seeds[row]]))
        for row in (0, 1, 4)
    }
    for step in range(9):
        if step in births:
            row, slot_id = births[step]
            model.germinate(slot_id, name, row=row, init_seed=7)
            references[row].model.germinate(slot_id, name, init_seed=7)
        train_step(model, optimizer, *population_batch(model, step))
        for row, reference in references.items():
            reference.step(*network_batch(model, 1000 * step + row))
            off = distance(snapshot_row(model, row).tensors, snapshot_row(reference.model).tensors)
            assert off < 1e-12, (step, row)


def test_each_of_the_first_updates_has_its_part_of_the_rate():
    """Without momentum and decay: the change is the gradient times k/n of the rate."""
    model = make("mlp", dtype=torch.float64)
    config = OptimizerConfig(momentum=0.0, host_decay=0.0, seed_lr=0.1, clip=1e9, newborn_warmup=5)
    optimizer = PopulationOptimizer(model, config)
    model.germinate("r0c0", "mlp")
    parameters = list(model.slot("r0c0").parameters())
    for k in range(1, 9):
        optimizer.zero_grad()
        model.losses(*population_batch(model, k)).total().backward()
        wanted = [p.detach() - 0.1 * min(k / 5, 1.0) * p.grad for p in parameters]
        optimizer.step()
        for p, value in zip(parameters, wanted, strict=True):
            assert torch.allclose(p, value, rtol=0, atol=1e-14), k


@kinds
def test_a_warm_up_goes_on_where_it_was_saved(kind, tmp_path):
    model = make("cnn", ROWS)
    optimizer = PopulationOptimizer(model, OptimizerConfig(kind=kind, newborn_warmup=6))
    model.germinate("r0c0", "conv_light", row=2)
    for step in range(2):
        train_step(model, optimizer, *population_batch(model, step))
    model.germinate("r0c0", "conv_light", row=5)
    train_step(model, optimizer, *population_batch(model, 2))
    save_network(tmp_path, model, optimizer)
    twin, twin_optimizer = load_network(tmp_path)
    other = make("cnn", ROWS)  # and by rows, as checkpoints do
    other_optimizer = PopulationOptimizer(other, OptimizerConfig(kind=kind, newborn_warmup=6))
    for row in range(ROWS):
        restore_row(other, snapshot_row(model, row), row)
        other_optimizer.load_row_state(row, optimizer.row_state(row))
    for step in range(3, 9):
        batch = population_batch(model, step)
        for pair in ((model, optimizer), (twin, twin_optimizer), (other, other_optimizer)):
            train_step(*pair, *batch)
        for row in range(ROWS):
            wanted = row_tensors(model, optimizer, row)
            assert differing(wanted, row_tensors(twin, twin_optimizer, row)) == []
            assert differing(wanted, row_tensors(other, other_optimizer, row)) == []


def test_a_new_seed_in_an_old_place_warms_up_anew():
    model = make("mlp", ROWS, dtype=torch.float64)
    optimizer = PopulationOptimizer(
        model, OptimizerConfig(seed_lr=0.1, momentum=0.0, clip=1e9, newborn_warmup=10)
    )
    for row in (1, 2):
        model.germinate("r0c0", "mlp", row=row)
    for step in range(12):
        train_step(model, optimizer, *population_batch(model, step))
    model.prune("r0c0", row=1)
    while model.seed_in("r0c0", 1) is not None:
        model.step_epoch([1])
    model.germinate("r0c0", "mlp", row=1)
    bank = model.slot("r0c0").banks["mlp"]
    before = [p.detach().clone() for p in bank.parameters()]
    optimizer.zero_grad()
    model.losses(*population_batch(model, 20)).total().backward()
    gradients = [p.grad.clone() for p in bank.parameters()]
    optimizer.step()
    for row, share in ((1, 0.1), (2, 1.0)):
        for p, old, gradient in zip(bank.parameters(), before, gradients, strict=True):
            assert torch.allclose(p[row], old[row] - 0.1 * share * gradient[row], rtol=0, atol=1e-14)


@pytest.mark.parametrize("wrong", [-1, 1.5, math.nan])
def test_a_warm_up_is_a_number_of_updates(wrong):
    with pytest.raises(EsperError, match="newborn_warmup is"):
        OptimizerConfig(newborn_warmup=wrong)

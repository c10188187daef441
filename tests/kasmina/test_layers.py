"""Population layers against as many separate torch layers: outputs, gradients, buffers; and no lane ever
reaches another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina.blueprints import Gate, SqueezeExcite
from esper.kasmina.layers import (
    IMAGE,
    SEQUENCE,
    Attention,
    BatchNorm2d,
    Conv2d,
    CrippledConv2d,
    Embedding,
    GroupNorm,
    Lanes,
    LayerNorm,
    Linear,
    Mode,
    PopulationLayer,
    Scale,
    check_population,
    flatten_kernels,
    group_count,
    pool_pixels,
    seed_row,
)
from esper.leyline import PopulationError
from helpers import differing, generator

P, B = 8, 3
REPEATS = [3, 0, 3, 3, 7, 1, 1, 0]


class PlainAttention(nn.Module):
    """Causal attention written out, on the plain layers of one row."""

    def __init__(self, source: Attention, row: int) -> None:
        super().__init__()
        self.qkv, self.proj = source.qkv.plain(row), source.proj.plain(row)
        self.heads, self.distance = source.heads, source.distance_bias

    def forward(self, x: Tensor) -> Tensor:
        tokens, width = x.shape[1], x.shape[2] // self.heads
        out = []
        for head in range(self.heads):
            q, k, v = (part[..., head * width : (head + 1) * width] for part in self.qkv(x).chunk(3, -1))
            scores = q @ k.transpose(1, 2) / math.sqrt(width)
            for i in range(tokens):
                for j in range(tokens):
                    if self.distance:
                        scores[:, i, j] -= (i - j) * 2.0 ** (-8 * (head + 1) / self.heads)
                    if j > i:
                        scores[:, i, j] = -math.inf
            out.append(scores.softmax(-1) @ v)
        return self.proj(torch.cat(out, -1))


class PlainGate(nn.Module):
    def __init__(self, source: Gate, row: int) -> None:
        super().__init__()
        self.inner, self.outer, self.image = source.inner.plain(row), source.outer.plain(row), source.image

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.outer(torch.relu(self.inner(x.mean((2, 3)) if self.image else x))))
        return gate[:, :, None, None].expand(-1, x.shape[1], 1, 1) if self.image else gate


@dataclass(frozen=True)
class Case:
    """A layer, the input of one network and the plain layer of one row."""

    build: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    plain: Callable[[nn.Module, int], nn.Module] = lambda layer, row: layer.plain(row)
    tokens: int = 0

    @property
    def image(self) -> bool:
        return len(self.shape) == 4

    def inputs(self, count: int) -> list[Tensor]:
        if self.tokens:
            return [torch.randint(0, self.tokens, self.shape, generator=generator(i)) for i in range(count)]
        return [torch.randn(self.shape, generator=generator(i), dtype=torch.float64) for i in range(count)]


IMAGES, TOKENS, VECTORS = (B, 4, 6, 5), (B, 5, 8), (B, 8)  # not square: mixed up axes would show
LINES = (B, 4, 1, 7)
CASES = {
    "conv3": Case(lambda p: Conv2d(p, 4, 6, 3), IMAGES),
    "conv1": Case(lambda p: Conv2d(p, 4, 6, 1), IMAGES),
    "conv5": Case(lambda p: Conv2d(p, 4, 2, 5), IMAGES),
    "conv_bias": Case(lambda p: Conv2d(p, 4, 6, 3, bias=True), IMAGES),
    "conv_groups": Case(lambda p: Conv2d(p, 4, 6, 3, groups=2), IMAGES),
    "conv_depthwise": Case(lambda p: Conv2d(p, 4, 4, 3, groups=4), IMAGES),
    "conv_crippled": Case(lambda p: _cripple(CrippledConv2d(p, 4, 6, 3)), IMAGES),
    "line_conv": Case(lambda p: _flat(Conv2d(p, 4, 6, 3, bias=True)), LINES),
    "line_depthwise": Case(lambda p: _flat(Conv2d(p, 4, 4, 5, groups=4)), LINES),
    "line_crippled": Case(lambda p: _cripple(_flat(CrippledConv2d(p, 4, 6, 3))), LINES),
    "line_batch_norm": Case(lambda p: BatchNorm2d(p, 4), LINES),
    "batch_norm": Case(lambda p: BatchNorm2d(p, 4), IMAGES),
    "group_norm_1": Case(lambda p: GroupNorm(p, 4), IMAGES),
    "group_norm_2": Case(lambda p: GroupNorm(p, 32), (B, 32, 3, 2)),
    "layer_norm": Case(lambda p: LayerNorm(p, 8), VECTORS),
    "layer_norm_tokens": Case(lambda p: LayerNorm(p, 8), TOKENS),
    "linear": Case(lambda p: Linear(p, 8, 5), VECTORS),
    "linear_tokens": Case(lambda p: Linear(p, 8, 5, std=0.1), TOKENS),
    "linear_no_bias": Case(lambda p: Linear(p, 8, 5, bias=False), TOKENS),
    "embedding": Case(lambda p: Embedding(p, 11, 8), (B, 5), tokens=11),
    "scale_image": Case(lambda p: Scale(p, 4, image=True), IMAGES),
    "scale_vectors": Case(lambda p: Scale(p, 8, image=False), VECTORS),
    "scale_tokens": Case(lambda p: Scale(p, 8, image=False), TOKENS),
    "attention": Case(lambda p: Attention(p, 8, 2), TOKENS, PlainAttention),
    "attention_distance": Case(lambda p: Attention(p, 8, 4, distance_bias=True), TOKENS, PlainAttention),
    "gate_image": Case(lambda p: Gate(p, 4, image=True), IMAGES, PlainGate),
    "gate_tokens": Case(lambda p: Gate(p, 8, image=False), TOKENS, PlainGate),
    "gate_vectors": Case(lambda p: Gate(p, 8, image=False), VECTORS, PlainGate),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _flat(layer: Conv2d) -> Any:
    flatten_kernels(layer)
    assert layer.weight.shape[-2] == 1
    return layer


def _cripple(layer: CrippledConv2d) -> CrippledConv2d:
    layer.set_centre_tap(0, only=True)
    if len(layer.taps) > 3:
        layer.set_centre_tap(3, only=True)
    return layer


def build(case: Case, population: int = P) -> nn.Module:
    """The layer in float64, every row drawn from its own stream and then moved off its special values."""
    layer = case.build(population).double()
    taps = {name: b.clone() for name, b in layer.named_buffers() if name == "taps"}
    for row in range(population):
        seed_row(layer, row, row)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(50 + i), dtype=torch.float64)
        for name, buffer in layer.named_buffers():
            if name == "taps":
                buffer.copy_(taps[name])
                layer.row_changed()
            else:
                buffer += 0.3 * torch.rand(buffer.shape, generator=generator(60), dtype=torch.float64)
    return layer


def join(case: Case, pieces: list[Tensor]) -> Tensor:
    if case.image:
        return torch.cat(pieces, 1).contiguous(memory_format=torch.channels_last)
    return torch.stack(pieces)


def split(case: Case, x: Tensor, lanes: int) -> list[Tensor]:
    return list(x.chunk(lanes, 1)) if case.image else list(x.unbind(0))


def run(
    layer: nn.Module, case: Case, inputs: list[Tensor], lanes: Lanes
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs and input gradients of each lane, and the parameters' gradients, of a fixed random
    functional."""
    layer.zero_grad()
    x = join(case, inputs)
    x.requires_grad_(x.is_floating_point())
    outputs = split(case, layer(x, lanes), lanes.count)
    loss = sum((out * cotangent(out, i)).sum() for i, out in enumerate(outputs))
    if loss.requires_grad:
        loss.backward()
    gradients = split(case, x.grad, lanes.count) if x.grad is not None else []
    return (
        [out.detach() for out in outputs],
        gradients,
        {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None},
    )


def cotangent(out: Tensor, lane: int) -> Tensor:
    return torch.randn(out.shape, generator=generator(900 + lane), dtype=torch.float64)


def run_plain(
    case: Case, layer: nn.Module, rows: list[int], inputs: list[Tensor], *, training: bool
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]], list[nn.Module]]:
    outputs, gradients, parameters, layers = [], [], [], []
    for i, (row, x) in enumerate(zip(rows, inputs, strict=True)):
        plain = case.plain(layer, row).train(training)
        x = x.clone().requires_grad_(x.is_floating_point())
        out = plain(x)
        (out * cotangent(out, i)).sum().backward()
        outputs.append(out.detach())
        gradients += [] if x.grad is None else [x.grad]
        parameters.append({name: p.grad for name, p in plain.named_parameters()})
        layers.append(plain)
    return outputs, gradients, parameters, layers


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-11, atol=1e-12)


@every_case
@pytest.mark.parametrize(
    ("population", "rows"), [(1, None), (P, None), (P, REPEATS), (2 * P, list(range(3, 11)))]
)
def test_layer_equals_separate_plain_layers(case, population, rows):
    layer = build(case, population)
    lane_rows = list(range(population)) if rows is None else rows
    # Repeats of a row with different inputs have no single record: only lists without repeats train a batch
    # norm.
    mode = (
        Mode.EVAL if len(set(lane_rows)) < len(lane_rows) and isinstance(layer, BatchNorm2d) else Mode.TRAIN
    )
    inputs = case.inputs(len(lane_rows))
    lanes = Lanes(len(lane_rows), mode, None if rows is None else torch.tensor(rows))
    # The plain layers are taken first, from buffers that no pass has moved.
    outputs_plain, gradients_plain, parameters_plain, layers_plain = run_plain(
        case, layer, lane_rows, inputs, training=mode is Mode.TRAIN
    )
    outputs, gradients, parameters = run(layer, case, inputs, lanes)
    assert all(map(close, outputs, outputs_plain))
    assert len(gradients) == len(gradients_plain)
    assert all(map(close, gradients, gradients_plain))
    for name, gradient in parameters.items():
        total = torch.zeros_like(gradient)
        for row, plain in zip(lane_rows, parameters_plain, strict=True):
            wanted = plain[name].view(total.shape[1:])
            total[row] += wanted * layer.taps[row] if isinstance(layer, CrippledConv2d) else wanted
        assert close(gradient, total), name
    if isinstance(layer, BatchNorm2d) and mode is Mode.TRAIN:
        for row, plain in zip(lane_rows, layers_plain, strict=True):
            assert close(layer.running_mean[row], plain.running_mean)
            assert close(layer.running_var[row], plain.running_var)


@every_case
@pytest.mark.parametrize("rows", [None, REPEATS])
def test_shadow_freezes_parameters_and_buffers_but_lets_gradients_through(case, rows):
    layer = build(case)
    lane_rows = list(range(P)) if rows is None else rows
    inputs = case.inputs(P)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    outputs, gradients, parameters = run(
        layer, case, inputs, Lanes(P, Mode.SHADOW, None if rows is None else torch.tensor(rows))
    )
    outputs_plain, gradients_plain, _, _ = run_plain(case, layer, lane_rows, inputs, training=True)
    assert parameters == {}
    assert all(map(close, outputs, outputs_plain))
    assert all(map(close, gradients, gradients_plain))
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


WIDTH, ROW = 64, 5
ODD: dict[str, Case] = {
    "linear_odd": Case(lambda p: Linear(p, 5, 9), (7, 5)),
    "linear_one": Case(lambda p: Linear(p, 3, 10), (16, 3)),
    "linear_digits": Case(lambda p: Linear(p, 6, 10), (13, 6)),
    "embedding_odd": Case(lambda p: _Tied(p), (7, 5)),
    "squeeze_excite": Case(lambda p: SqueezeExcite(p, 4), (8, 4, 8, 8)),
    "scale_digits": Case(lambda p: Scale(p, 3, image=True), (32, 3, 8, 8)),
    "gate_digits": Case(lambda p: Gate(p, 3, image=True), (16, 3, 8, 8)),
    "pool": Case(lambda p: _Pool(), (8, 3, 8, 8)),
}


class _Tied(nn.Module):
    """The tied projection of an embedding."""

    def __init__(self, population: int) -> None:
        super().__init__()
        self.table = Embedding(population, 9, 5)

    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        return self.table.attend(x, lanes)


class _Pool(nn.Module):
    def forward(self, x: Tensor, lanes: Lanes) -> Tensor:
        return pool_pixels(x, lanes)


def lane_trace(case: Case, layer: nn.Module, count: int, position: int) -> dict[str, Tensor]:
    """What one row's lane gives, among `count` lanes of other rows, in float32."""
    rows = [row for row in range(WIDTH) if row != ROW][: count - 1]
    rows.insert(position, ROW)
    inputs = case.inputs(WIDTH)
    pieces = [inputs[row].float() if inputs[row].is_floating_point() else inputs[row] for row in rows]
    x = join(case, pieces)
    x.requires_grad_(x.is_floating_point())
    layer.zero_grad()
    out = layer(x, Lanes(count, Mode.TRAIN, torch.tensor(rows)))
    outputs = split(case, out, count)
    cotangents = [cotangent(o, row).float() for o, row in zip(outputs, rows, strict=True)]
    out.backward(join(case, cotangents))
    trace = {"output": outputs[position].detach()}
    if x.grad is not None:
        trace["input"] = split(case, x.grad, count)[position]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        trace[name] = parameter.grad[ROW].clone()
    return trace


@pytest.mark.parametrize("case", (CASES | ODD).values(), ids=CASES | ODD)
def test_a_lane_does_not_depend_on_the_number_of_lanes(case):
    layer = build(case, WIDTH).float()
    expected = lane_trace(case, layer, 8, 0)
    for count, position in [(8, 5), (16, 3), (16, 15), (24, 1), (24, 23), (WIDTH, 0), (WIDTH, WIDTH - 1)]:
        trace = lane_trace(case, layer, count, position)
        assert differing(expected, trace) == [], f"lane {position} of {count}"


def test_batch_norm_uses_its_record_only_in_eval():
    layer = build(CASES["batch_norm"])
    before = layer.running_mean.clone(), layer.running_var.clone()
    inputs = CASES["batch_norm"].inputs(P)
    outputs, _, _ = run(layer, CASES["batch_norm"], inputs, Lanes(P, Mode.EVAL))
    assert torch.equal(layer.running_mean, before[0])
    assert torch.equal(layer.running_var, before[1])
    for row, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        mean, var = before[0][row].view(1, -1, 1, 1), before[1][row].view(1, -1, 1, 1)
        expected = (x - mean) / (var + 1e-5).sqrt() * layer.weight[row].view(1, -1, 1, 1) + layer.bias[
            row
        ].view(1, -1, 1, 1)
        assert close(out, expected.detach())


def trace_of(case: Case, layer: nn.Module, x: Tensor, *, autocast: bool = False) -> dict[str, Tensor]:
    """Output and gradients of one pass over fused lanes."""
    x = x.detach()  # not a clone, which would settle the memory order
    x.requires_grad_(x.is_floating_point())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(x, Lanes(P, Mode.TRAIN))
    outputs = split(case, out, P)
    torch.stack([(o * cotangent(o, i)).sum() for i, o in enumerate(outputs)]).sum().backward()
    trace = {"output": out.detach()} | {name: p.grad.clone() for name, p in layer.named_parameters()}
    if x.grad is not None:
        trace["input"] = x.grad
    return trace


IMAGE_CASES = {name: case for name, case in (CASES | ODD).items() if case.image}


@pytest.mark.parametrize("case", IMAGE_CASES.values(), ids=IMAGE_CASES)
@pytest.mark.parametrize("order", ["contiguous", "strided"])
def test_images_in_another_memory_order_give_the_same_values(case, order):
    x = join(case, case.inputs(P))
    expected = trace_of(case, build(case), x)
    moved = x.contiguous() if order == "contiguous" else x.repeat_interleave(2, 1)[:, ::2]
    assert moved.stride() != x.stride()
    trace = trace_of(case, build(case), moved)
    assert trace.keys() == expected.keys()
    for name, tensor in trace.items():
        assert close(tensor, expected[name]), name


@pytest.mark.parametrize("case", (CASES | ODD).values(), ids=CASES | ODD)
def test_autocast_stays_near_full_precision_and_keeps_gradients_in_it(case):
    x = join(case, case.inputs(P))
    x = x.float() if x.is_floating_point() else x
    expected = trace_of(case, build(case).float(), x)
    trace = trace_of(case, build(case).float(), x, autocast=True)
    assert trace.keys() == expected.keys()
    for name, tensor in trace.items():
        error = (tensor.float() - expected[name]).norm() / expected[name].norm()
        assert error < 0.05, name
        assert name == "output" or tensor.dtype == torch.float32


@pytest.mark.parametrize("case", (CASES | ODD).values(), ids=CASES | ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", ["weights", "input"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_touches_no_other(case, dtype, where, poison):
    if where == "input" and case.tokens:
        pytest.skip("tokens are whole numbers")
    if where == "weights" and not any(True for _ in build(case).parameters()):
        pytest.skip("has no weights")
    sick = 3
    results = []
    for poisoned in (False, True):
        layer = build(case).to(dtype)
        inputs = [x if case.tokens else x.to(dtype) for x in case.inputs(P)]
        if poisoned and where == "weights":
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter[sick] = poison
        if poisoned and where == "input":
            inputs[sick] = torch.full_like(inputs[sick], poison)
        outputs, gradients, parameters = run(layer, case, inputs, Lanes(P, Mode.TRAIN))
        results.append((outputs, gradients, parameters, dict(layer.named_buffers())))
    (
        (outputs, gradients, parameters, buffers),
        (sick_outputs, sick_gradients, sick_parameters, sick_buffers),
    ) = results
    healthy = [row for row in range(P) if row != sick]
    for row in healthy:
        assert torch.equal(outputs[row], sick_outputs[row])
        assert not gradients or torch.equal(gradients[row], sick_gradients[row])
    for name, gradient in parameters.items():
        assert torch.equal(gradient[healthy], sick_parameters[name][healthy]), name
    for name, buffer in buffers.items():
        assert torch.equal(buffer[healthy], sick_buffers[name][healthy]), name


def test_group_norm_survives_an_input_that_wants_no_gradient():
    layer = build(CASES["group_norm_2"])
    x = join(CASES["group_norm_2"], CASES["group_norm_2"].inputs(P))
    layer(x, Lanes(P, Mode.TRAIN)).sum().backward()
    assert layer.bias.grad is not None
    assert x.grad is None


@every_case
def test_plain_layers_hold_the_row_exactly(case):
    layer = build(case)
    if not isinstance(layer, PopulationLayer):
        pytest.skip("made of population layers, has none itself")
    for row in (0, 3, P - 1):
        plain = layer.plain(row)
        own = dict(layer.named_parameters()) | dict(layer.named_buffers())
        for name, tensor in plain.named_parameters():
            wanted = own[name][row]
            wanted = wanted * layer.taps[row] if isinstance(layer, CrippledConv2d) else wanted
            assert tensor.dtype == torch.float64
            assert torch.equal(tensor, wanted.view(tensor.shape)), "a trip through float32 would round here"
        if isinstance(layer, BatchNorm2d):
            assert torch.equal(plain.running_mean, layer.running_mean[row])
            assert torch.equal(plain.running_var, layer.running_var[row])


@every_case
def test_a_row_is_drawn_from_its_own_stream(case):
    small, large = case.build(1), case.build(2 * P)
    for module in (small, large):
        for parameter in module.parameters():
            nn.init.constant_(parameter, 7.0)
    seed_row(small, 0, 123)
    seed_row(large, 9, 123)
    for (name, one), many in zip(small.named_parameters(), large.parameters(), strict=True):
        assert torch.equal(one[0], many[9]), name
        others = [row for row in range(2 * P) if row != 9]
        assert (many[others] == 7.0).all(), "other rows are left alone"


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (Conv2d(1, 30, 200, 3, bias=True), 270),
        (Conv2d(1, 300, 300, 3, groups=300), 9),
        (Linear(1, 64, 900), 64),
    ],
    ids=["conv", "depthwise", "linear"],
)
def test_initial_values_have_the_range_that_torch_uses(layer, fan_in):
    seed_row(layer, 0, 1)
    bound = 1 / math.sqrt(fan_in)
    weight = layer.weight.detach()
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.99 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(weight.mean().item()) < 0.02 * bound


def test_tied_projection_is_the_transposed_embedding():
    layer = build(CASES["embedding"])
    x = torch.randn(P, B, 5, 8, generator=generator(1), dtype=torch.float64)
    out = layer.attend(x, Lanes(P, Mode.TRAIN))
    for row in range(P):
        assert close(out[row].detach(), F.linear(x[row], layer.weight[row].detach()))


@pytest.mark.parametrize(
    ("channels", "groups"),
    [
        (1, 1),
        (2, 1),
        (8, 1),
        (16, 1),
        (31, 1),
        (32, 2),
        (48, 2),
        (64, 4),
        (96, 4),
        (128, 8),
        (256, 16),
        (512, 32),
        (1024, 32),
    ],
)
def test_group_count(channels, groups):
    assert group_count(channels) == groups


@pytest.mark.parametrize("population", [1, 8, 16, 64])
def test_allowed_populations(population):
    assert check_population(population) == population


@pytest.mark.parametrize("population", [0, -1, -8, 2, 5, 12, 63])
def test_other_populations_are_refused(population):
    with pytest.raises(PopulationError, match=f"population is {population}; allowed: 1 or a multiple of 8"):
        check_population(population)


# -- moving lanes --------------------------------------------------------------------------------------------

layouts = pytest.mark.parametrize("layout", [IMAGE, SEQUENCE], ids=["image", "sequence"])


def activations(image: bool, lanes: int) -> tuple[Tensor, list[Tensor]]:
    """A fused activation and its lanes."""
    case = Case(lambda _: nn.Identity(), (2, 3, 4, 5) if image else (2, 4, 3))
    pieces = case.inputs(lanes)
    return join(case, pieces), pieces


def lanes_of(image: bool, x: Tensor, lanes: int) -> list[Tensor]:
    return list(x.chunk(lanes, 1)) if image else list(x.unbind(0))


@layouts
@given(index=st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_take(layout, index):
    x, pieces = activations(layout.image, 8)
    taken = layout.take(x, 8, torch.tensor(index))
    assert all(map(torch.equal, lanes_of(layout.image, taken, len(index)), [pieces[i] for i in index]))
    if layout.image:
        assert taken.is_contiguous(memory_format=torch.channels_last)


@layouts
def test_per_lane(layout):
    x, pieces = activations(layout.image, 8)
    values = torch.arange(8.0, dtype=torch.float64)
    out = lanes_of(layout.image, x * layout.per_lane(values, x, 8), 8)
    assert all(torch.equal(lane, piece * i) for i, (lane, piece) in enumerate(zip(out, pieces, strict=True)))


def test_settled_gradients_are_channels_last():
    x = activations(True, 8)[0].requires_grad_()
    seen = []
    y = x * 1.0
    y.register_hook(seen.append)
    (IMAGE.settle(y).contiguous() * torch.ones(x.shape, dtype=torch.float64)).sum().backward()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(seen[0], torch.ones_like(x))

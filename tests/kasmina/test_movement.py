"""Lanes that are taken out of an activation and put back: values, gradients, memory order and types, against
slices and `torch.cat`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.kasmina.layers import IMAGE, SEQUENCE, Layout
from esper.kasmina.movement import Places
from helpers import generator

LANES, PADDING = 8, 2
layouts = pytest.mark.parametrize("layout", [IMAGE, SEQUENCE], ids=["image", "sequence"])
groups = st.permutations(range(LANES)).flatmap(
    lambda lanes: st.tuples(st.integers(1, LANES), st.integers(0, LANES)).map(
        lambda ends: [lanes[: ends[0]], lanes[ends[0] : max(ends)]]
    )
)
"""Two lists of lanes without a common one; the second may be empty."""


def activation(layout: Layout, *, channels: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (2, LANES * channels, 4, 5) if layout.image else (LANES, 2, 5, channels)
    x = torch.randn(shape, generator=generator(channels), dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if layout.image else x


def lane(layout: Layout, x: Tensor, lanes: int, at: int) -> Tensor:
    return x.chunk(lanes, 1)[at] if layout.image else x[at]


def places(lists: list[list[int]]) -> list[Places]:
    """Each list with padding that repeats its first lane."""
    return [Places(torch.tensor([*at, *[at[0]] * PADDING]), len(at)) for at in lists if at]


def change(piece: Tensor, number: int) -> Tensor:
    """What happens to a piece between its taking out and its return: not linear, so that gradients differ by
    lane."""
    return piece * piece.sin() + number


@layouts
@given(lists=groups)
def test_lanes_go_out_and_come_back_with_their_gradients(layout, lists):
    x = activation(layout).requires_grad_()
    where = places(lists)
    rest, pieces = layout.part(x, LANES, where)
    out = layout.reunite(rest, LANES, where, [change(piece, i) for i, piece in enumerate(pieces)])
    weights = torch.randn(out.shape, generator=generator(9), dtype=torch.float64)
    (out * weights).sum().backward()
    twin = x.detach().clone().requires_grad_()
    parts = []
    for at in range(LANES):
        part = lane(layout, twin, LANES, at)
        number = next((i for i, chosen in enumerate(lists) if at in chosen), None)
        parts.append(part if number is None else change(part, number))
    expected = torch.cat(parts, 1) if layout.image else torch.stack(parts)
    (expected * weights).sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(x.grad, twin.grad)


@layouts
def test_the_activation_itself_stays_as_it_is(layout):
    x = activation(layout)
    before, where = x.clone(), places([[1, 4], [0]])
    rest, pieces = layout.part(x, LANES, where)
    assert all(len(at.index) * x.numel() == LANES * p.numel() for at, p in zip(where, pieces, strict=True))
    assert torch.equal(lane(layout, pieces[0], 4, 3), lane(layout, x, LANES, 1)), "padding"
    out = layout.reunite(rest, LANES, where, [piece * 2 for piece in pieces])
    assert torch.equal(x, before)
    assert torch.equal(lane(layout, out, LANES, 4), 2 * lane(layout, x, LANES, 4))


@layouts
def test_padding_has_no_gradient(layout):
    where = places([[2, 5, 6]])
    rest, (piece,) = layout.part(activation(layout), LANES, where)
    piece.requires_grad_()
    layout.reunite(rest, LANES, where, [piece]).sum().backward()
    for at in range(3 + PADDING):
        assert torch.equal(
            lane(layout, piece.grad, 3 + PADDING, at),
            torch.full_like(lane(layout, piece, 3 + PADDING, at), at < 3),
        )
    real = layout.take_real(torch.ones_like(rest), LANES, where[0])
    assert torch.equal(real, piece.grad)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_words_of_every_size(channels, dtype):
    x = activation(IMAGE, channels=channels, dtype=dtype)
    x[0, 0, 0, 0] = torch.nan
    index = [7, 0, 3, 3]
    taken = IMAGE.take(x, LANES, torch.tensor(index))
    assert taken.is_contiguous(memory_format=torch.channels_last)
    for at, source in enumerate(index):
        assert torch.equal(taken.chunk(4, 1)[at].nan_to_num(), x.chunk(LANES, 1)[source].nan_to_num())
    where = [Places(torch.tensor([5, 2]), 2)]
    rest, (piece,) = IMAGE.part(x, LANES, where)
    out = IMAGE.reunite(rest, LANES, where, [-piece])
    assert torch.equal(out.chunk(LANES, 1)[2], -x.chunk(LANES, 1)[2])
    assert torch.equal(out.chunk(LANES, 1)[6], x.chunk(LANES, 1)[6])


def test_any_memory_order_and_offset():
    x = activation(IMAGE, dtype=torch.float32, channels=4)
    expected = IMAGE.take(x, LANES, torch.tensor([1, 6]))
    storage = torch.zeros(x.numel() + 1)
    shifted = storage[1:].view(2, 4, 5, -1).permute(0, 3, 1, 2)
    shifted.copy_(x)
    for other in (x.contiguous(), shifted, x.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(IMAGE.take(other, LANES, torch.tensor([1, 6])), expected)
        where = [Places(torch.tensor([3]), 1)]
        rest, (piece,) = IMAGE.part(other, LANES, where)
        out = IMAGE.reunite(rest, LANES, where, [piece + 1])
        assert torch.equal(out.chunk(LANES, 1)[3], x.chunk(LANES, 1)[3] + 1)
        assert out.is_contiguous(memory_format=torch.channels_last)


@layouts
def test_the_widest_type_wins(layout):
    x = activation(layout, dtype=torch.bfloat16).requires_grad_()
    where = places([[1]])
    rest, (piece,) = layout.part(x, LANES, where)
    out = layout.reunite(rest, LANES, where, [piece.float() + 1e-4])
    assert out.dtype == torch.float32
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, torch.ones_like(x))

"""Lanes taken out of fused activations and put back, as whole words of memory.

The numbers of one lane at one pixel lie side by side, often 16 bytes of them. Copied as one word each they
move several times as fast as by `index_select` and `index_copy`. Nothing is computed: whatever moves keeps
its bits. Activations are images `[B, L·C, H, W]` in channels_last, or `[L, …]`.

B batch, L lanes, C channels, W words of a lane at one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Types to move words as, by their size in bytes."""


@dataclass(frozen=True, slots=True)
class Places:
    """Some lanes of an activation."""

    index: Tensor
    """Their positions. Those after the first `count` are padding, which repeats a lane."""
    count: int
    _words: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def words(self, each: int) -> Tensor:
        """Positions of their words, of which a lane has `each`."""
        if each == 1:
            return self.index
        if each not in self._words:
            offsets = torch.arange(each, device=self.index.device)
            self._words[each] = (self.index.unsqueeze(1) * each + offsets).flatten()
        return self._words[each]


def take(x: Tensor, lanes: int, places: Places, *, image: bool) -> Tensor:
    """A copy of these lanes of `x`, padding included. No gradient passes."""
    if not image:
        return x.detach().index_select(0, places.index)
    batch, _, height, width = x.shape
    words, each = _words(x, lanes)
    taken = words.gather(1, places.words(each).expand(len(words), -1)).view(x.dtype)
    return taken.view(batch, height, width, taken.shape[1]).permute(0, 3, 1, 2)


def take_real(x: Tensor, lanes: int, places: Places, *, image: bool) -> Tensor:
    """A copy of these lanes of `x`, 0 in the padding. No gradient passes."""
    piece = take(x, lanes, places, image=image)
    padding = len(places.index) - places.count
    if padding:
        by_lane = piece.permute(0, 2, 3, 1).unflatten(3, (len(places.index), -1)) if image else piece
        by_lane.narrow(3 if image else 0, places.count, padding).zero_()
    return piece


def put(x: Tensor, lanes: int, places: Places, piece: Tensor, *, image: bool) -> None:
    """Replace these lanes of `x` by those of the piece, padding left out, in place. An image `x` is
    channels_last. No gradient passes."""
    if not image:
        x.index_copy_(0, places.index[: places.count], piece[: places.count])
        return
    words, each = _words(x, lanes)
    source, _ = _words(piece, len(places.index))
    real = places.count * each
    words.scatter_(1, places.words(each)[:real].expand(len(words), -1), source[:, :real])


def _words(x: Tensor, lanes: int) -> tuple[Tensor, int]:
    """An image as words `[B·H·W, L·W]`, and W. They are a view if the image is channels_last."""
    flat = x.detach().permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    size = math.gcd(16, x.shape[1] // lanes * x.element_size())
    if flat.storage_offset() * x.element_size() % size:
        flat = flat.clone()
    words = flat.view(WORDS[size])
    return words, words.shape[1] // lanes


def part(x: Tensor, lanes: int, places: Sequence[Places], *, image: bool) -> tuple[Tensor, list[Tensor]]:
    """`x` itself, and copies of some of its lanes: each at most once, but for padding. Both go to `reunite`,
    so that the gradient of a lane returns the way that the lane went."""
    rest, *pieces = _Part.apply(image, lanes, places, x)
    return rest, pieces


def reunite(
    rest: Tensor, lanes: int, places: Sequence[Places], pieces: Sequence[Tensor], *, image: bool
) -> Tensor:
    """A copy of `rest` with some lanes replaced by the pieces, in the widest of their types."""
    dtype = reduce(torch.promote_types, (piece.dtype for piece in pieces), rest.dtype)
    return _Reunite.apply(image, lanes, places, rest.to(dtype), *(piece.to(dtype) for piece in pieces))


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: bool, lanes: int, places: Sequence[Places], x: Tensor) -> tuple[Tensor, ...]:
        ctx.image, ctx.lanes, ctx.places = image, lanes, places
        return x.view_as(x), *(take(x, lanes, place, image=image) for place in places)

    @staticmethod
    def backward(ctx: Any, rest: Tensor, *pieces: Tensor) -> tuple[None, None, None, Tensor]:
        # The gradient of the rest's replaced lanes belongs to the lanes that replaced them.
        return None, None, None, replaced(rest, ctx.lanes, ctx.places, pieces, image=ctx.image)


class _Reunite(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: bool, lanes: int, places: Sequence[Places], rest: Tensor, *pieces: Tensor
    ) -> Tensor:
        ctx.image, ctx.lanes, ctx.places = image, lanes, places
        return replaced(rest, lanes, places, pieces, image=image)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Padding repeats a lane; a gradient of its own would count that lane twice.
        pieces = [take_real(grad, ctx.lanes, place, image=ctx.image) for place in ctx.places]
        return None, None, None, grad, *pieces


def replaced(
    x: Tensor, lanes: int, places: Sequence[Places], pieces: Sequence[Tensor], *, image: bool
) -> Tensor:
    """A copy of `x` in which these lanes are those of the pieces. No gradient passes."""
    order = torch.channels_last if image else torch.contiguous_format
    if sum(place.count for place in places) == lanes:
        out = torch.empty_like(x, memory_format=order)
    else:
        out = x.detach().clone(memory_format=order)
    for place, piece in zip(places, pieces, strict=True):
        put(out, lanes, place, piece, image=image)
    return out

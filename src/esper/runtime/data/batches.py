"""Batches for populations: one stacked batch per group of envs, gathered, augmented and normalised without
per-sample Python.

Legend: E envs, P rows of a population, B batch, C channels, H×W pixels, D numbers of a vector, T tokens,
S steps per epoch. Env i's samples are a function of (random seed, episode, env, step) alone: not of the other
envs, nor of its group or row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper._files import decode
from esper.leyline.rng import stream_seed
from esper.runtime.data.datasets import Dataset, Split
from esper.runtime.data.formats import DataError

Index = NDArray[np.int64]
PIXEL_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per pixel
SMALL_SET = 1 << 22
"""Up to this many pixels a grey dataset is kept normalised as float32: half the time per batch, four times
the memory."""
PLANNED_STEPS = 64
"""Batches are drawn for this many steps at once, so that random numbers and transfers of indices are not paid
in every step, and few are drawn in vain when the rows to gather change."""
# Counter 0 of the "condition" stream belongs to the task; these two draw the samples and the wrong labels.
SUBSET_COUNTER, NOISE_COUNTER = 1, 2


class Batch(NamedTuple):
    """The batch of one population in one step."""

    x: Tensor
    """Images [B, P·C, H, W] float32 in channels_last memory; vectors [P, B, D]; text [P, B, T] int64."""
    y: Tensor
    """[P, B] int64; text [P, B, T]."""


_NOTHING = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64))
"""The batch of a group of which no row is gathered."""


class FusedImages:
    """Resident uint8 images, gathered for P networks at once, straight into [B, P·C, H, W] channels_last.

    A pixel is one integer (its channels in successive bytes), and each image is followed by one black pixel.
    An augmentation is a row in a table of pixel offsets: the source of each output pixel, black beyond the
    edge. A batch is then one index per output pixel and one lookup. Code = (flip · s + dy) · s + dx with
    s = 2 · pad + 1: crop the padded image at (dy, dx), then mirror the crop."""

    def __init__(self, dataset: Dataset) -> None:
        x = dataset.train_x
        images, channels, height, width = x.shape
        if channels > 8 or dataset.pad < 0:
            raise DataError(
                f"images with {channels} channels, pad {dataset.pad}; allowed: 1 to 8 channels, pad ≥ 0"
            )
        self.shape = channels, height, width
        depth = 1 << (channels - 1).bit_length()
        packed = torch.zeros(images, height * width + 1, depth, dtype=torch.uint8, device=x.device)
        packed[:, :-1, :channels] = x.permute(0, 2, 3, 1).reshape(images, height * width, channels)
        self._pixels = packed.view(PIXEL_DTYPES[depth]).view(-1)
        # int32 halves the index traffic.
        self._index_dtype = torch.int32 if len(self._pixels) < 2**31 else torch.int64
        self._mean, self._std_inverse = normaliser(dataset)
        if channels == 1 and len(self._pixels) <= SMALL_SET:
            self._pixels = self._pixels.float().sub_(self._mean).mul_(self._std_inverse)
        self._offsets = self._offset_table(dataset.pad, dataset.flip).to(x.device, self._index_dtype)
        self.num_codes = len(self._offsets)

    def _offset_table(self, pad: int, flip: bool) -> Tensor:
        _, height, width = self.shape
        size = 2 * pad + 1
        crops = size * size
        code = torch.arange(2 * crops if flip else crops).view(-1, 1, 1)
        columns = torch.arange(width).view(1, 1, width)
        column = torch.where(code >= crops, width - 1 - columns, columns) + code % size - pad
        row = torch.arange(height).view(1, height, 1) + code // size % size - pad
        outside = (row < 0) | (row >= height) | (column < 0) | (column >= width)
        table = torch.where(outside, height * width, row * width + column).view(len(code), -1)
        # Rows of a power of two bytes would all fall on the same cache lines when they are read side by side.
        return torch.nn.functional.pad(table, (0, 16))

    def plan(self, index: Tensor, label: Tensor, code: Tensor) -> list[tuple[Tensor, ...]]:
        """Arguments of `gather` for each step of an epoch that reads images `index` augmented by `code`, all
        [S, P, B]."""
        columns = [index.transpose(1, 2).contiguous(), label]
        if self.num_codes > 1:
            columns.append(code.transpose(1, 2).reshape(len(code), -1))
        return list(zip(*columns, strict=True))

    def gather(self, index: Tensor, label: Tensor, code: Tensor | None = None) -> Batch:
        """One step: images `index` [B, P], augmented by `code` [B · P]."""
        (batch, rows), (channels, height, width) = index.shape, self.shape
        pixels = height * width
        if code is None:
            images = self._pixels.view(-1, pixels + 1).index_select(0, index.view(-1)).view(batch, rows, -1)
            values = images[..., :-1].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        else:
            start = index.to(self._index_dtype) * (pixels + 1)
            offsets = self._offsets.index_select(0, code).view(batch, rows, -1)[..., :pixels]
            at = torch.empty(batch, pixels, rows, dtype=start.dtype, device=start.device)
            torch.add(offsets.transpose(1, 2), start.unsqueeze(1), out=at)
            values = self._pixels.index_select(0, at.view(-1))
        if not values.is_floating_point():
            raw = values.view(-1).view(torch.uint8).view(batch, pixels, rows, -1)
            values = torch.empty(batch, pixels, rows, channels, device=raw.device)
            # One strided copy per channel is three times as fast as one copy with runs of C.
            for channel in range(channels):
                values[..., channel].copy_(raw[..., channel])
            # Two roundings, one per call: a fused multiply-add could round differently in the vector loop and
            # in its tail.
            lines = values.view(batch * height, -1)
            lines.sub_(self._mean.repeat(width * rows)).mul_(self._std_inverse.repeat(width * rows))
        return Batch(values.view(batch, height, width, rows * channels).permute(0, 3, 1, 2), label)


class FusedVectors:
    """Resident vectors, gathered for P networks at once."""

    num_codes = 1

    def __init__(self, vectors: Tensor) -> None:
        self._vectors = vectors

    def plan(self, index: Tensor, label: Tensor, _code: Tensor) -> list[tuple[Tensor, ...]]:
        return list(zip(index, label, strict=True))

    def gather(self, index: Tensor, label: Tensor) -> Batch:
        return Batch(self._vectors.index_select(0, index.reshape(-1)).view(*index.shape, -1), label)


class FusedText:
    """Resident tokens, gathered as windows of T tokens and their successors. Code = offset of the windows in
    [0, T)."""

    def __init__(self, tokens: Tensor, block: int) -> None:
        self._windows, self._block = tokens.unfold(0, block + 1, 1), block
        self.num_codes = block

    def plan(self, index: Tensor, _label: Tensor, code: Tensor) -> list[tuple[Tensor, ...]]:
        return [(start,) for start in index * self._block + code]

    def gather(self, start: Tensor) -> Batch:
        windows = self._windows.index_select(0, start.view(-1)).view(*start.shape, -1)
        return Batch(windows[..., :-1].long(), windows[..., 1:].long())


def normaliser(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation per channel, in units of raw pixels."""
    mean, std = (
        torch.tensor(values, dtype=torch.float64) * dataset.scale for values in (dataset.mean, dataset.std)
    )
    return mean.float().to(dataset.train_x.device), std.reciprocal().float().to(dataset.train_x.device)


class EnvStream:
    """The samples of one env in one episode: successive permutations of its pool, each from its own random
    stream."""

    def __init__(
        self, pool: Index, labels: Index, *, at: tuple[int, int, int], num_codes: int, shared_code: bool
    ) -> None:
        self._pool, self._labels = pool, labels
        self._at = at  # random seed, episode, env
        self._num_codes, self._shared_code = num_codes, shared_code
        self._drawn = -1

    def take(self, start: int, count: int) -> tuple[Index, Index, Index]:
        """Samples start … start + count of the episode: index, label and augmentation code of each."""
        size, parts = len(self._pool), []
        while count:
            permutation, offset = divmod(start, size)
            order, code = self._permutation(permutation)
            stop = min(offset + count, size)
            parts.append((order[offset:stop], code[offset:stop]))
            start, count = start + stop - offset, count - (stop - offset)
        chosen, codes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return self._pool[chosen], self._labels[chosen], codes

    def _permutation(self, number: int) -> tuple[Index, Index]:
        if number != self._drawn:
            seed, episode, env = self._at
            size, self._drawn = len(self._pool), number
            self._order = np.random.default_rng(stream_seed(seed, "data", episode, env, number)).permutation(
                size
            )
            self._code = np.zeros(size, np.int64)
            if self._num_codes > 1:
                rng = np.random.default_rng(stream_seed(seed, "augment", episode, env, number))
                self._code[:] = rng.integers(self._num_codes, size=None if self._shared_code else size)
        return self._order, self._code


@dataclass(frozen=True, slots=True)
class _Position:
    """The part of a SharedBatchIterator's state that changes."""

    episode: Annotated[int, msgspec.Meta(ge=0)]
    step: Annotated[int, msgspec.Meta(ge=0)]
    train_size: list[int]
    label_noise: list[float]


class SharedBatchIterator:
    """Each step yields one stacked batch per group of envs; iterating over it yields one epoch of
    `steps_per_epoch`.

    Every env draws permutations of its whole pool of training samples; a batch may span two permutations. A
    loop that was left early, or a position that was restored, continues with the rest of its epoch. Rows
    beyond a group's envs (idle rows of a padded population) repeat its first env. An env that is listed twice
    gets the same batches twice. Batches do not share memory, so they may be kept."""

    def __init__(
        self,
        split: Split,
        groups: Sequence[Sequence[int]],
        batch_size: int,
        *,
        steps_per_epoch: int,
        seed: int,
        rows: Sequence[int] | None = None,
        devices: Sequence[torch.device | str] | None = None,
    ) -> None:
        """`devices`: the device of each group's batches; None: the device of the dataset."""
        data = split.dataset
        self.groups = tuple(tuple(group) for group in groups)
        self.envs = tuple(env for group in self.groups for env in group)
        self.rows = tuple(rows) if rows is not None else tuple(len(group) for group in self.groups)
        self.batch_size, self.steps_per_epoch, self.seed = batch_size, steps_per_epoch, seed
        if batch_size < 1 or steps_per_epoch < 1:
            raise DataError(f"batch_size {batch_size}, steps_per_epoch {steps_per_epoch}; allowed: ≥ 1")
        if not self.envs or not all(self.groups):
            raise DataError(f"groups {self.groups}; allowed: one or more groups of one or more envs")
        if len(self.rows) != len(self.groups) or any(
            r < len(g) for r, g in zip(self.rows, self.groups, strict=True)
        ):
            raise DataError(
                f"rows {self.rows} for groups {self.groups}; allowed: one number per group, at least its envs"
            )
        self._split = split
        self._gathered: list[Sequence[int] | None] = [None] * len(self.groups)
        self._first, self._plans = 0, list[list[tuple[Tensor, ...]]]()  # first planned step; per group, step
        self._devices = (
            tuple(map(torch.device, devices))
            if devices is not None
            else (data.train_x.device,) * len(self.groups)
        )
        if len(self._devices) != len(self.groups):
            raise DataError(f"devices {devices} for {len(self.groups)} groups; allowed: one for each group")
        self._source: FusedImages | FusedVectors | FusedText
        if data.kind == "text":
            self._source = FusedText(data.train_x, split.block)
            self._labels = np.zeros(len(split.train), np.int64)
        else:
            self._source = FusedImages(data) if data.kind == "image" else FusedVectors(data.train_x)
            self._labels = data.train_y.cpu().numpy()[split.train]
        self.begin_episode(0)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def begin_episode(
        self,
        episode: int,
        *,
        train_size: Sequence[int | None] | None = None,
        label_noise: Sequence[float] | None = None,
    ) -> None:
        """Start an episode. Conditions have one value per env, in the order of `envs`: the number of training
        samples (None: all), and the share of them with a wrong label. A smaller pool is part of a larger one
        of the same env and episode."""
        whole, envs = len(self._split.train), len(self.envs)
        given = [None] * envs if train_size is None else train_size
        sizes = [whole if size is None else size for size in given]
        noise = [0.0] * envs if label_noise is None else list(label_noise)
        if len(sizes) != envs or len(noise) != envs:
            raise DataError(
                f"train_size {sizes}, label_noise {noise}; allowed: one value for each of {envs} envs"
            )
        if not all(1 <= size <= whole for size in sizes):
            raise DataError(f"train_size {sizes}; allowed: 1 to {whole}")
        if not all(0 <= share <= 1 for share in noise):
            raise DataError(f"label_noise {noise}; allowed: 0 to 1")
        if self._split.dataset.kind == "text" and any(noise):
            raise DataError(f"label_noise {noise} with text; allowed: 0")
        self._episode, self._step = episode, 0
        self._sizes, self._noise = sizes, noise
        self._streams = {
            env: self._stream(env, size, wrong)
            for env, size, wrong in zip(self.envs, self._sizes, self._noise, strict=True)
        }
        self._plans = []

    def _stream(self, env: int, size: int, noise: float) -> EnvStream:
        pool, labels = self._split.train, self._labels
        if size < len(pool):
            rng = np.random.default_rng(
                stream_seed(self.seed, "condition", self._episode, env, SUBSET_COUNTER)
            )
            chosen = rng.permutation(len(pool))[:size]
            pool, labels = pool[chosen], labels[chosen]
        if wrong := round(noise * size):
            rng = np.random.default_rng(
                stream_seed(self.seed, "condition", self._episode, env, NOISE_COUNTER)
            )
            at = rng.permutation(size)[:wrong]
            classes = self._split.dataset.num_classes
            labels = labels.copy()
            labels[at] = (labels[at] + rng.integers(1, classes, size=wrong)) % classes
        return EnvStream(
            pool,
            labels,
            at=(self.seed, self._episode, env),
            num_codes=self._source.num_codes,
            shared_code=self._split.dataset.kind == "text",
        )

    def gather(self, rows: Sequence[Sequence[int] | None]) -> None:
        """From the next batch on, batches hold these rows of each group, in this order; None: all. A group
        without rows gets empty batches, at no cost."""
        if len(rows) != len(self.groups) or any(
            not 0 <= row < count
            for chosen, count in zip(rows, self.rows, strict=False)
            for row in chosen or ()
        ):
            raise DataError(f"rows to gather {rows} of groups with {self.rows} rows; allowed: those of each")
        self._gathered, self._plans = list(rows), []

    def skip_epoch(self) -> None:
        """Leave out the rest of the epoch: the next batch is the first of the next one."""
        self._step += -self._step % self.steps_per_epoch

    @property
    def epoch_done(self) -> bool:
        """Whether the last batch that was yielded ended an epoch."""
        return self._step % self.steps_per_epoch == 0

    def __iter__(self) -> Iterator[list[Batch]]:
        for _ in range(self.steps_per_epoch - self._step % self.steps_per_epoch):
            yield self._next()

    def _next(self) -> list[Batch]:
        if not self._plans or not self._first <= self._step < self._first + PLANNED_STEPS:
            self._first, self._plans = self._step, self._plan(self._step)
        step = self._step - self._first
        self._step += 1
        batches = [self._source.gather(*plan[step]) if plan else _NOTHING for plan in self._plans]
        return [
            Batch(*(t.to(device, non_blocking=True) for t in batch))
            for batch, device in zip(batches, self._devices, strict=True)
        ]

    def _plan(self, first: int) -> list[list[tuple[Tensor, ...]]]:
        """Draw the samples of the steps from `first` on."""
        start, count = first * self.batch_size, PLANNED_STEPS * self.batch_size
        wanted = [self._envs_to_gather(number) for number in range(len(self.groups))]
        taken = {env: self._streams[env].take(start, count) for env in {*chain(*wanted)}}
        plans: list[list[tuple[Tensor, ...]]] = []
        for members in wanted:
            if not members:
                plans.append([])
                continue
            columns = (
                np.stack(column).reshape(len(members), PLANNED_STEPS, -1).swapaxes(0, 1)
                for column in zip(*(taken[env] for env in members), strict=True)
            )
            home = self._split.dataset.train_x.device
            plans.append(
                self._source.plan(
                    *(torch.from_numpy(np.ascontiguousarray(column)).to(home) for column in columns)
                )
            )
        return plans

    def _envs_to_gather(self, number: int) -> list[int]:
        """The env of each row that the batches of a group hold."""
        group, rows = self.groups[number], self._gathered[number]
        of_row = [*group, *[group[0]] * (self.rows[number] - len(group))]
        return of_row if rows is None else [of_row[row] for row in rows]

    def state(self) -> dict[str, Any]:
        """The position and everything it depends on, as plain JSON values."""
        return {
            **self._identity(),
            "episode": self._episode,
            "step": self._step,
            "train_size": self._sizes,
            "label_noise": self._noise,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next batches are those that would have followed it."""
        for field, mine in self._identity().items():
            if state.get(field) != mine:
                raise DataError(
                    f"saved data position has {field} {state.get(field)!r}, this run has {mine!r}"
                )
        if missing := [
            field for field in ("episode", "step", "train_size", "label_noise") if field not in state
        ]:
            raise DataError(f"saved data position lacks {', '.join(missing)}")
        own = {field.name: state[field.name] for field in fields(_Position)}
        position = decode(_Position, own, "saved data position")
        self.begin_episode(position.episode, train_size=position.train_size, label_noise=position.label_noise)
        self._step = position.step

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self._split.dataset.name,
            "samples": len(self._split.train),
            "batch_size": self.batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "seed": self.seed,
            "envs": list(self.envs),
            "codes": self._source.num_codes,
        }


@dataclass(frozen=True)
class EvalBatches:
    """Fixed samples in a fixed order, the same for all envs. The last batch may be smaller. Images stay uint8
    until they are used."""

    x: Tensor  # images [V, C, H, W] uint8; vectors [V, D] float32; text [V, T]
    y: Tensor  # [V]; text [V, T]
    batch_size: int
    mean: Tensor | None = None  # per channel; None for vectors and text
    std_inverse: Tensor | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size {self.batch_size}; allowed: ≥ 1")

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, rows: int = 1) -> Iterator[Batch]:
        """Every batch, the same samples in each of `rows` rows."""
        for x, y in zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True):
            if x.is_floating_point():
                yield Batch(x.expand(rows, -1, -1), y.expand(rows, -1))
            elif self.mean is None or self.std_inverse is None:
                yield Batch(x.long().expand(rows, -1, -1), y.long().expand(rows, -1, -1))
            else:
                pixels = x.permute(0, 2, 3, 1).float().sub_(self.mean).mul_(self.std_inverse)
                yield Batch(fuse_shared(pixels.permute(0, 3, 1, 2), rows), y.expand(rows, -1))


def fuse_shared(x: Tensor, rows: int) -> Tensor:
    """Images [B, C, H, W] given to each of P rows: [B, P·C, H, W], channels_last."""
    batch, channels, height, width = x.shape
    if rows == 1:
        return x.contiguous(memory_format=torch.channels_last)
    lines = x.permute(0, 2, 3, 1).reshape(-1, channels)
    # Selecting columns is three times as fast as expanding and copying runs of C.
    tiled = lines.index_select(1, torch.arange(channels, device=x.device).repeat(rows))
    return tiled.view(batch, height, width, rows * channels).permute(0, 3, 1, 2)


def validation_batches(split: Split, batch_size: int, *, final: bool = False) -> EvalBatches:
    """The validation samples of a split; with `final` those of the last epoch."""
    data = split.dataset
    index = torch.from_numpy(split.final if final else split.val).to(data.train_x.device)
    if split.block:
        at = index.unsqueeze(1) * split.block + torch.arange(split.block, device=index.device)
        return EvalBatches(data.train_x[at], data.train_y[at], batch_size)
    scaling = normaliser(data) if data.kind == "image" else ()
    return EvalBatches(data.train_x[index], data.train_y[index], batch_size, *scaling)


def test_batches(split: Split, batch_size: int) -> EvalBatches:
    """The test part of the dataset: for final figures only, never for training a network or a policy."""
    data, block = split.dataset, split.block
    if block:
        end = (len(data.test_x) - 1) // block * block
        return EvalBatches(data.test_x[:end].view(-1, block), data.test_y[:end].view(-1, block), batch_size)
    scaling = normaliser(data) if data.kind == "image" else ()
    return EvalBatches(data.test_x, data.test_y, batch_size, *scaling)

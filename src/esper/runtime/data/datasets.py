"""Datasets as resident tensors by name, built in or registered by users; and the split that takes a
validation set out of the training part.

Nothing here substitutes one dataset for another: a dataset that is not on this machine is an error that says
how to get it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import unknown_name
from esper.leyline.rng import stream_seed
from esper.runtime.data.formats import DataError
from esper.runtime.data.sources import RECIPES, data_root, load_cached

ASSETS = Path(__file__).parent / "assets"


Kind = Literal["image", "vector", "text"]
Arrays = Mapping[str, Any]
"""`train_x`, `train_y`, `test_x`, `test_y`; text has no labels."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset in memory: N images of C×H×W pixels, N vectors of D numbers, or L tokens."""

    name: str
    kind: Kind
    train_x: Tensor
    """Images [N, C, H, W] uint8 in channels_last memory; vectors [N, D] float32; text [L], uint8 or int32."""
    train_y: Tensor
    """Labels [N] int64; text: the next token, train_x[1:]."""
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    """Number of classes; text: size of the vocabulary."""
    mean: tuple[float, ...] = ()
    """Images: mean of each channel, of pixels divided by `scale`."""
    std: tuple[float, ...] = ()
    scale: float = 255.0
    """Images: the largest pixel value."""
    pad: int = 0
    """Images: black pixels added on each side before a random crop of the original size."""
    flip: bool = False
    """Images: whether every second image is mirrored horizontally."""
    vocab: tuple[str, ...] = ()
    """Text: characters by token id; empty when the tokens come from a tokenizer."""

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device; batches are then gathered and augmented there."""
        moved = {key: getattr(self, key).to(device) for key in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **moved)


class DatasetFacts(NamedTuple):
    """Facts about a dataset that are known without loading it."""

    kind: Kind
    shape: tuple[int, ...]
    """Of one sample: C×H×W or D; empty for text."""
    classes: int


_FACTS = {
    "digits": DatasetFacts("image", (1, 8, 8), 10),
    "digits_flat": DatasetFacts("vector", (64,), 10),
    "cifar10": DatasetFacts("image", (3, 32, 32), 10),
    "fashion_mnist": DatasetFacts("image", (1, 28, 28), 10),
    "mnist1d": DatasetFacts("image", (1, 1, 40), 10),
    "mnist": DatasetFacts("image", (1, 28, 28), 10),
    "mnist14": DatasetFacts("image", (1, 14, 14), 10),
    "fashion14": DatasetFacts("image", (1, 14, 14), 10),
}
IMAGE_FACTS: dict[str, dict] = {
    "digits": {"mean": (0.3059,), "std": (0.3765,), "scale": 16.0},
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "pad": 4, "flip": True},
    "fashion_mnist": {"mean": (0.2860,), "std": (0.3530,)},
    "mnist1d": {"mean": (128 / 255,), "std": (23 / 255,)},  # undoes the quantisation to 23 levels per unit
    "mnist": {"mean": (0.1307,), "std": (0.3081,)},
    "mnist14": {"mean": (0.1308,), "std": (0.2803,)},
    "fashion14": {"mean": (0.2863,), "std": (0.3303,)},
}
MNIST1D_TRAIN = 4000  # the signals that come first are its training part, as published
SYNTHETIC = re.compile(r"synthetic(?::(\d{1,4})x(\d{1,4})x(\d{1,4}))?")
_REGISTERED: dict[str, Dataset | Callable[[], Dataset]] = {}


def dataset_names() -> list[str]:
    """Names of all datasets, registered ones last."""
    return ["digits", "digits_flat", "mnist1d", *RECIPES, "synthetic", *_REGISTERED]


def registered_names() -> list[str]:
    """Names of the datasets that `register_dataset` has added."""
    return list(_REGISTERED)


def dataset_facts(name: str) -> DatasetFacts | None:
    """Facts about a dataset that are known without loading it; None if there are none. Unknown names are
    errors."""
    registered = _REGISTERED.get(name)
    if isinstance(registered, Dataset):
        shape = tuple(registered.train_x.shape[1:])
        return DatasetFacts(registered.kind, shape, registered.num_classes)
    if match := SYNTHETIC.fullmatch(name):
        shape = tuple(int(size) for size in match.groups()) if match[1] else (3, 32, 32)
        return DatasetFacts("image", shape, 10)
    if name not in dataset_names():
        raise unknown_name("dataset", name, [*dataset_names(), "synthetic:CxHxW"])
    return _FACTS.get(name)


def register_dataset(
    name: str,
    data: Arrays | Callable[[], Arrays],
    *,
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    pad: int = 0,
    flip: bool = False,
) -> None:
    """Make a dataset available by name. `data` holds numpy arrays or tensors, or is a function that returns
    them when they are first needed. `train_x` and `test_x` decide the kind:

    - [N, H, W] or [N, H, W, C] uint8: images. `mean` and `std` are per channel, of pixels divided by 255; by
      default those of the training images. `pad` and `flip` augment: random crops out of an image padded with
      this many black pixels on each side, and horizontal mirroring.
    - [N, D] of any number type: vectors. They are used as they are.
    - [L] integers, without labels: text as token ids.

    `train_y` and `test_y` hold labels from 0 to `classes` − 1; by default `classes` is the largest label (or
    token) of both parts plus one."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise DataError(f"dataset name {name!r}; allowed: lower-case letters, digits and _")
    if name in dataset_names():
        raise DataError(f"dataset {name!r} is already registered; choose another name")
    check = partial(_checked_dataset, name, classes=classes, mean=mean, std=std, pad=pad, flip=flip)
    _REGISTERED[name] = partial(_call, name, data, check) if callable(data) else check(data)


def _call(name: str, function: Callable[[], Arrays], check: Callable[[Arrays], Dataset]) -> Dataset:
    """The dataset of a registered function, which is called once."""
    dataset = check(function())
    _REGISTERED[name] = dataset
    return dataset


def _checked_dataset(
    name: str,
    data: Arrays,
    *,
    classes: int | None,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    pad: int,
    flip: bool,
) -> Dataset:
    """A dataset from a user's arrays, each checked."""
    if not isinstance(data, Mapping):
        raise DataError(f"dataset {name!r}: the data is a {type(data).__name__}, must be arrays by name")
    arrays = {key: np.asarray(value) for key, value in data.items()}
    if "train_x" not in arrays:
        raise DataError(f"dataset {name!r}: array 'train_x' is missing; given: {', '.join(arrays) or 'none'}")
    text = arrays["train_x"].ndim == 1
    wanted = {"train_x", "test_x"} if text else {"train_x", "train_y", "test_x", "test_y"}
    for key in sorted(wanted ^ arrays.keys()):
        state = "missing" if key in wanted else "not expected"
        raise DataError(f"dataset {name!r}: array {key!r} is {state}; wanted: {', '.join(sorted(wanted))}")
    train, test = arrays["train_x"], arrays["test_x"]
    if train.shape[1:] != test.shape[1:] or not len(train) or not len(test):
        raise DataError(
            f"dataset {name!r}: train_x has shape {train.shape}, test_x {test.shape}; "
            "allowed: one or more samples each, of the same shape"
        )
    labels = ("train_x", "test_x") if text else ("train_y", "test_y")
    number = _check_labels(name, arrays, labels, classes)
    if text:
        # Batches are gathered from uint8 or int32.
        tokens = {key: torch.from_numpy(arrays[key].astype(np.int32)) for key in labels}
        return Dataset(
            name=name,
            kind="text",
            train_x=tokens["train_x"],
            train_y=tokens["train_x"][1:],
            test_x=tokens["test_x"],
            test_y=tokens["test_x"][1:],
            num_classes=number,
        )
    train_y, test_y = (torch.from_numpy(arrays[key].astype(np.int64)) for key in labels)
    if train.ndim == 2:
        for key in ("train_x", "test_x"):
            if not np.issubdtype(arrays[key].dtype, np.number) or not np.isfinite(arrays[key]).all():
                raise DataError(f"dataset {name!r}: {key} must hold finite numbers")
        return Dataset(
            name=name,
            kind="vector",
            train_x=torch.from_numpy(train.astype(np.float32)),
            train_y=train_y,
            test_x=torch.from_numpy(test.astype(np.float32)),
            test_y=test_y,
            num_classes=number,
        )
    if train.ndim not in (3, 4) or train.dtype != np.uint8 or test.dtype != np.uint8:
        raise DataError(
            f"dataset {name!r}: train_x is {train.dtype} of shape {train.shape}, test_x {test.dtype}; "
            "allowed: uint8 images [N, H, W] or [N, H, W, C], vectors [N, D], or tokens [L]"
        )
    pixels = train.reshape(-1, 1 if train.ndim == 3 else train.shape[3]) / 255.0
    deviation = pixels.std(0)
    return Dataset(
        name=name,
        kind="image",
        num_classes=number,
        mean=_per_channel(name, "mean", mean, pixels.mean(0)),
        std=_per_channel(name, "std", std, np.where(deviation > 0, deviation, 1.0)),
        pad=pad,
        flip=flip,
        train_x=_channels_first(train),
        train_y=train_y,
        test_x=_channels_first(test),
        test_y=test_y,
    )


def _check_labels(
    name: str, arrays: Mapping[str, NDArray], keys: tuple[str, str], classes: int | None
) -> int:
    """The number of classes, or size of the vocabulary, that these labels or tokens need."""
    for key in keys:
        labels, samples = arrays[key], arrays[key.replace("_y", "_x")]
        if not np.issubdtype(labels.dtype, np.integer) or labels.shape != samples.shape[:1]:
            raise DataError(
                f"dataset {name!r}: {key} is {labels.dtype} of shape {labels.shape}, must be "
                f"{len(samples)} integers in one row"
            )
    low = min(int(arrays[key].min()) for key in keys)
    high = max(int(arrays[key].max()) for key in keys)
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 2):
        raise DataError(f"dataset {name!r}: classes is {classes!r}, must be a whole number from 2 up")
    if low < 0 or (classes is not None and high >= classes):
        limit = "0 up" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"dataset {name!r}: labels from {low} to {high}; allowed: {limit}")
    return max(high + 1, 2) if classes is None else classes


def _channels_first(images: NDArray[np.uint8]) -> Tensor:
    """A copy as [N, C, H, W] in channels_last memory."""
    with_channels = images if images.ndim == 4 else images[..., None]
    return torch.from_numpy(np.array(with_channels, order="C")).permute(0, 3, 1, 2)


def _per_channel(
    name: str, key: str, given: tuple[float, ...] | None, measured: NDArray
) -> tuple[float, ...]:
    if given is None:
        return tuple(measured.tolist())
    if len(given) != len(measured) or (key == "std" and min(given) <= 0):
        raise DataError(
            f"dataset {name!r}: {key} is {given}; allowed: {len(measured)} numbers, one per channel"
            + (", above 0" if key == "std" else "")
        )
    return tuple(given)


def load_dataset(name: str, root: Path | str | None = None) -> Dataset:
    """A dataset by name, on the CPU. `root` is the data directory, by default $ESPER_DATA or
    ~/.cache/esper."""
    if name in _REGISTERED:
        registered = _REGISTERED[name]
        return registered if isinstance(registered, Dataset) else registered()
    if name == "digits_flat":
        images = load_dataset("digits")
        train_x, test_x = (
            (x.flatten(1) / images.scale - images.mean[0]) / images.std[0]
            for x in (images.train_x, images.test_x)
        )
        return replace(images, name=name, kind="vector", train_x=train_x, test_x=test_x)
    if name == "digits":
        with np.load(ASSETS / "digits.npz") as file:
            images, labels, test = file["images"][..., None], file["labels"], file["test_index"]
        train = np.setdiff1d(np.arange(len(labels)), test)
        return _image_dataset(
            name,
            {
                "train_x": images[train],
                "train_y": labels[train],
                "test_x": images[test],
                "test_y": labels[test],
            },
            num_classes=10,
        )
    if name == "mnist1d":
        with np.load(ASSETS / "mnist1d.npz") as file:
            signals, labels = file["signals"][:, None, :, None], file["labels"]
        return _image_dataset(
            name,
            {
                "train_x": signals[:MNIST1D_TRAIN],
                "train_y": labels[:MNIST1D_TRAIN],
                "test_x": signals[MNIST1D_TRAIN:],
                "test_y": labels[MNIST1D_TRAIN:],
            },
            num_classes=10,
        )
    if match := SYNTHETIC.fullmatch(name):
        shape = tuple(int(size) for size in match.groups()) if match[1] else (3, 32, 32)
        return synthetic_dataset(shape)
    if name not in RECIPES:
        raise DataError(str(unknown_name("dataset", name, [*dataset_names(), "synthetic:CxHxW"])))
    arrays, facts = load_cached(name, data_root(root))
    if RECIPES[name].kind == "text":
        train_x, test_x = torch.from_numpy(arrays["train_x"]), torch.from_numpy(arrays["test_x"])
        return Dataset(
            name=name,
            kind="text",
            train_x=train_x,
            train_y=train_x[1:],
            test_x=test_x,
            test_y=test_x[1:],
            num_classes=facts["num_classes"],
            vocab=tuple(facts["vocab"]),
        )
    return _image_dataset(name, arrays, num_classes=facts["num_classes"])


def _image_dataset(name: str, arrays: dict[str, NDArray[np.uint8]], *, num_classes: int) -> Dataset:
    """Arrays are [N, H, W, C]: seen as [N, C, H, W], that is channels_last memory without a copy."""
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return Dataset(
        name=name,
        kind="image",
        num_classes=num_classes,
        **IMAGE_FACTS[name],
        train_x=tensors["train_x"].permute(0, 3, 1, 2),
        train_y=tensors["train_y"].long(),
        test_x=tensors["test_x"].permute(0, 3, 1, 2),
        test_y=tensors["test_y"].long(),
    )


def synthetic_dataset(
    shape: tuple[int, ...] = (3, 32, 32),
    *,
    num_classes: int = 10,
    train: int = 5000,
    test: int = 1000,
    noise: float = 48.0,
    seed: int = 0,
) -> Dataset:
    """Images of C×H×W around one random prototype per class; the same for the same arguments."""
    channels, height, width = shape
    if min(*shape, num_classes, train, test) < 1:
        raise DataError(
            f"synthetic data of shape {shape}, {num_classes} classes, {train} + {test} images; "
            "allowed: all ≥ 1"
        )
    rng = np.random.default_rng(stream_seed(seed, "data"))
    prototypes = rng.uniform(64, 192, size=(num_classes, height, width, channels)).astype(np.float32)
    labels = rng.integers(num_classes, size=train + test)
    images = prototypes[labels]
    images += noise * rng.standard_normal(images.shape, dtype=np.float32)
    pixels = torch.from_numpy(images.clip(0, 255).astype(np.uint8)).permute(0, 3, 1, 2)
    y = torch.from_numpy(labels)
    return Dataset(
        name="synthetic",
        kind="image",
        train_x=pixels[:train],
        train_y=y[:train],
        test_x=pixels[train:],
        test_y=y[train:],
        num_classes=num_classes,
        mean=(0.5,) * channels,
        std=(0.24,) * channels,
    )


def stratified(labels: NDArray, size: int, seed: int) -> NDArray[np.int64]:
    """`size` sorted indices with each class in proportion: evenly spaced positions in a shuffle that is
    sorted by class."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.sort(by_class[((np.arange(size) + 0.5) * len(labels) / max(size, 1)).astype(np.int64)])


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which samples of the training part are for training and which for validation. A sample of text is a
    window of `block` tokens with its targets. Training windows may start up to block − 1 tokens later, so the
    window between the two parts is not used."""

    dataset: Dataset
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    final: NDArray[np.int64]
    """Validation samples of the last epoch: those of the other epochs, and perhaps more."""
    block: int = 0  # text only: tokens per window


def validation_split(
    dataset: Dataset, val_size: int, seed: int, *, block: int = 0, final_size: int = 0
) -> Split:
    """One fixed validation set for all envs: images and vectors by class from the "split" stream of `seed`,
    text from the end. `final_size` samples, if that is more, are kept for the last epoch."""
    final_size = max(val_size, final_size)
    text = dataset.kind == "text"
    if text != (block > 0):
        raise DataError(f"block {block} with {dataset.kind} data; allowed: ≥ 1 for text, 0 for other data")
    samples = (len(dataset.train_x) - 1) // block if text else len(dataset.train_x)
    if not 0 <= val_size <= final_size < samples - text:
        raise DataError(
            f"val_size {val_size}, final_size {final_size} of {samples} samples for training in "
            f"{dataset.name}; allowed: 0 to {samples - 1 - text}"
        )
    if text:
        first = samples - final_size
        train, final = np.arange(first - 1), np.arange(first, samples)
        val = np.arange(samples - val_size, samples)
    else:
        labels = dataset.train_y.cpu().numpy()
        val = stratified(labels, val_size, stream_seed(seed, "split"))
        rest = np.setdiff1d(np.arange(samples), val)
        more = rest[stratified(labels[rest], final_size - val_size, stream_seed(seed, "split", 1))]
        train, final = np.setdiff1d(rest, more), np.union1d(val, more)
    return Split(dataset=dataset, train=train, val=val, final=final, block=block)

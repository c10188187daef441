"""Datasets as resident tensors, found by name; and the split that takes a validation set out of the training
part.

Nothing here substitutes one dataset for another: what is not on this machine is an error that says how to get
it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import allowed
from esper.leyline.rng import stream_seed
from esper.runtime.data.formats import DataError
from esper.runtime.data.sources import RECIPES, data_root, load_cached

DIGITS_FILE = Path(__file__).parent / "assets" / "digits.npz"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset in memory. N images of C×H×W pixels, or L tokens."""

    name: str
    kind: Literal["image", "text"]
    train_x: Tensor  # images [N, C, H, W] uint8 in channels_last memory; text [L], uint8 or int32
    train_y: Tensor  # labels [N] int64; text: the next token, train_x[1:]
    test_x: Tensor
    test_y: Tensor
    num_classes: int  # text: size of the vocabulary
    mean: tuple[float, ...] = ()  # per channel, of pixels divided by `scale`
    std: tuple[float, ...] = ()
    scale: float = 255.0  # the largest pixel value
    pad: int = (
        0  # usual augmentation: random crop out of an image padded with this many black pixels on each side …
    )
    flip: bool = False  # … and horizontal mirroring of every second image
    vocab: tuple[str, ...] = ()  # characters by token id; empty when the tokens come from a tokenizer

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device; batches are then gathered and augmented there."""
        moved = {key: getattr(self, key).to(device) for key in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **moved)


IMAGE_FACTS: dict[str, dict] = {
    "digits": {"mean": (0.3059,), "std": (0.3765,), "scale": 16.0},
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "pad": 4, "flip": True},
    "fashion_mnist": {"mean": (0.2860,), "std": (0.3530,)},
}
SYNTHETIC = re.compile(r"synthetic(?::(\d+)x(\d+)x(\d+))?")


def dataset_names() -> list[str]:
    return ["digits", *RECIPES, "synthetic"]


def load_dataset(name: str, root: Path | str | None = None) -> Dataset:
    """A dataset by name, on the CPU. `root` is the data directory, by default $ESPER_DATA or
    ~/.cache/esper."""
    if name == "digits":
        with np.load(DIGITS_FILE) as file:
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
    if match := SYNTHETIC.fullmatch(name):
        shape = tuple(int(size) for size in match.groups()) if match[1] else (3, 32, 32)
        return synthetic_dataset(shape)
    if name not in RECIPES:
        raise DataError(
            f"unknown dataset {name!r}; {allowed(dataset_names())} (synthetic:CxHxW for another shape)"
        )
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
            f"synthetic data of shape {shape}, {num_classes} classes, {train} + {test} images; allowed: all ≥ 1"
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
    """`size` indices, sorted, each class in proportion: evenly spaced places in a shuffle that is sorted by
    class."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.sort(by_class[((np.arange(size) + 0.5) * len(labels) / max(size, 1)).astype(np.int64)])


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which samples of the training part are for training and which for validation. A sample of text is a
    window of `block` tokens with its targets; training windows may start up to block − 1 tokens later, so one
    window lies idle between the two parts."""

    dataset: Dataset
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    block: int = 0  # text only: tokens per window


def validation_split(dataset: Dataset, val_size: int, seed: int, *, block: int = 0) -> Split:
    """One fixed validation set for all envs: images by class from the "split" stream of `seed`; text from the
    end."""
    text = dataset.kind == "text"
    if text != (block > 0):
        raise DataError(f"block {block} with {dataset.kind} data; allowed: ≥ 1 for text, 0 for images")
    samples = (len(dataset.train_x) - 1) // block if text else len(dataset.train_x)
    if not 0 <= val_size < samples - text:
        raise DataError(
            f"val_size {val_size} of {samples} samples for training in {dataset.name}; "
            f"allowed: 0 to {samples - 1 - text}"
        )
    if text:
        first = samples - val_size
        train, val = np.arange(first - 1), np.arange(first, samples)
    else:
        val = stratified(dataset.train_y.cpu().numpy(), val_size, stream_seed(seed, "split"))
        train = np.setdiff1d(np.arange(samples), val)
    return Split(dataset=dataset, train=train, val=val, block=block)

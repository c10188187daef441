"""Real data for the examples: handwritten digits (embedded in the package), CIFAR-10 (fetched with `esper
data get cifar10`), and English text (the documentation of Python, which every Python has)."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from esper.runtime.data import load_dataset


def images(name: str = "digits", train: int = 1200, val: int = 500) -> tuple[TensorDataset, TensorDataset]:
    """Normalised images [N, C, H, W] and labels."""
    data = load_dataset(name)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
    x, y = (data.train_x[: train + val].float() / data.scale - mean) / std, data.train_y[: train + val]
    return TensorDataset(x[:train].contiguous(), y[:train]), TensorDataset(x[train:].contiguous(), y[train:])


def loaders(name: str = "digits", train: int = 1200, val: int = 500) -> tuple[DataLoader, DataLoader]:
    """Shuffled training batches of 64, and validation batches."""
    first, second = images(name, train, val)
    return DataLoader(first, 64, shuffle=True), DataLoader(second, 250)


def text(block: int = 32, train: int = 512, val: int = 128) -> tuple[Tensor, Tensor, int]:
    """Windows of characters for training and validation, and the size of the alphabet."""
    characters = "".join(pydoc_data.topics.topics.values())
    codes = torch.tensor([min(ord(c), 127) for c in characters[: (train + val) * block]])
    alphabet, tokens = codes.unique(return_inverse=True)
    windows = tokens.view(-1, block)
    return windows[:train], windows[train:], len(alphabet)

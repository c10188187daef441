"""Rows `attach.*`: the cost of Esper in a user's own training step, on a CNN and on GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from benchmarks.harness import Row, interleave

EMPTY, GROWN = 1.02, 1.03
"""Goals."""
Step = Callable[[], object]


class UserCNN(nn.Module):
    """Three stages of a residual network on 32×32 images, `grown` with blocks written by hand."""

    def __init__(self, width: int = 16, *, stem_stride: int = 1, grown: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stem_stride, padding=1)
        self.layer1 = Stage(width, width, 1)
        self.layer2 = Stage(width, 2 * width, 2)
        self.layer3 = Stage(2 * width, 4 * width, 2)
        self.more = nn.ModuleList([ConvByHand(c * width) if grown else nn.Identity() for c in (1, 2, 4)])
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.more[0](self.layer1(self.stem(x)))
        x = self.more[1](self.layer2(x))
        return self.head(self.more[2](self.layer3(x)).mean((2, 3)))


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.short(x))


class ConvByHand(nn.Module):
    """What `conv_light` adds, as a user would write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        groups = next((g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16), 1)
        self.norm = nn.GroupNorm(groups, channels)
        self.gamma = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x))) * self.gamma


class MLPByHand(nn.Module):
    """What `mlp_small` adds, as a user would write it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)
        self.gamma = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.gamma


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    def run() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    return run


def _grow(
    model: nn.Module, slots: list[str], example: object, blueprint: str | None, *, watched: bool
) -> torch.optim.Optimizer:
    """Attach and plant a seed in each slot. Sensors watch every batch of the first epoch and the last of all
    others; `watched` measures the first."""
    grower = esper.attach(model, slots, example, policy=None)
    state = grower.state_dict()
    state["sensing"]["expected"] = dict.fromkeys(state["sensing"]["expected"], 0 if watched else 10**9)
    grower.load_state_dict(state)
    if blueprint is not None:
        for name in grower.body.names:
            grower.germinate(name, blueprint)
    return torch.optim.SGD(grower.param_groups(), lr=1e-4, momentum=0.9)


def _cnn(blueprint: str | None, *, watched: bool = False) -> tuple[Step, Step]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 3, 32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)
    torch.manual_seed(0)
    ours, theirs = UserCNN(), UserCNN(grown=blueprint is not None)
    optimizer = _grow(ours, ["layer1", "layer2", "layer3"], x[:2], blueprint, watched=watched)
    plain = torch.optim.SGD(theirs.parameters(), lr=1e-4, momentum=0.9)
    step = _step(ours, optimizer, lambda: F.cross_entropy(ours(x), y))
    return step, _step(theirs, plain, lambda: F.cross_entropy(theirs(x), y))


def _gpt2(blueprint: str | None, *, watched: bool = False) -> tuple[Step, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    ours, theirs = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    if blueprint is not None:
        blocks = theirs.transformer.h
        for index, block in enumerate(blocks):
            blocks[index] = Followed(block, MLPByHand(128))
    optimizer = _grow(ours, ["transformer.h.*"], {"input_ids": tokens}, blueprint, watched=watched)
    plain = torch.optim.SGD(theirs.parameters(), lr=1e-4, momentum=0.9)
    step = _step(ours, optimizer, lambda: ours(input_ids=tokens, labels=tokens).loss)
    return step, _step(theirs, plain, lambda: theirs(input_ids=tokens, labels=tokens).loss)


class Followed(nn.Module):
    """A block of GPT-2 and one more module after it, as a user would write it."""

    def __init__(self, block: nn.Module, more: nn.Module) -> None:
        super().__init__()
        self.block, self.more = block, more

    def forward(self, *args: object, **kwargs: object) -> object:
        out = self.block(*args, **kwargs)
        if isinstance(out, tuple):
            return self.more(out[0]), *out[1:]
        return self.more(out)


def rows() -> Iterator[Row]:
    yield Row("attach.first_epoch_vs_plain.cnn", interleave(*_cnn(None, watched=True))[0])
    for name, goal, planted in (("empty_vs_plain", EMPTY, False), ("grown_vs_by_hand", GROWN, True)):
        ours, theirs = _cnn("conv_light" if planted else None)
        yield Row(f"attach.{name}.cnn", interleave(ours, theirs)[0], goal)
        if find_spec("transformers") is None:
            yield Row(f"attach.{name}.gpt2", None, goal, "transformers is not installed")
            continue
        ours, theirs = _gpt2("mlp_small" if planted else None)
        yield Row(f"attach.{name}.gpt2", interleave(ours, theirs)[0], goal)

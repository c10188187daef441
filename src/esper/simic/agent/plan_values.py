"""What plans are worth: an ensemble of small networks that estimate by how much a plan raises J.

A *plan* says which blueprint grows in each slot. All members learn from the same episodes, each from its own
random half of them: where they have seen little they disagree, and an episode that follows one member's
favourite plan explores just there (bootstrapped Thompson sampling, Osband et al. 2016).

W worlds, S slots, B blueprints, P plans, M members, N episodes, H hidden size. A plan is a row [S] of
blueprint indices, −1 where nothing grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper._archive import load_tensors
from esper.leyline import EsperError, PolicyObservation, stream_seed
from esper.simic.agent.adam_state import adam_tensors, load_adam

GAIN_FLOOR = 0.01
"""Smallest scale of gains: one point of J. Below it, differences between plans are noise."""
FEATURE_LIMIT = 5.0
"""Standardised features are clipped to ± this: one outlier must not decide a value."""
SEARCH_ROWS = 4096
"""Plans that are evaluated at once; bounds the memory of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesConfig:
    """Settings of the action values."""

    members: int = 8
    """Number of networks in the ensemble."""
    hidden: int = 32
    """Number of units in each of their layers."""
    steps: int = 100
    """Training steps after each round."""
    batch: int = 128
    """Episodes in a training step."""
    lr: float = 1e-3
    """Learning rate of their optimizer, AdamW."""
    weight_decay: float = 0.01
    """Weight decay of their optimizer, AdamW."""
    share: float = 0.5
    """Share of the episodes that each member learns from, drawn for each member."""
    lessons: int = 96
    """Minibatches from which the policy is taught after each round, of 8 episodes each."""
    keep: int = 2048
    """Number of the newest episodes that lessons are drawn from."""
    temperature: float = 0.03
    """In a lesson an action is taught with a probability in proportion to exp(its gain / this), with gains in
    units of their standard deviation: where two are about as good, either is taught."""
    final_lessons: int = 0
    """Further minibatches from which the policy is taught after the last round, while its learning rate falls
    to 0."""

    def __post_init__(self) -> None:
        limits = {
            "members": (1, 256),
            "hidden": (1, 4096),
            "steps": (1, 100_000),
            "batch": (1, 100_000),
            "lr": (1e-9, 1.0),
            "weight_decay": (0.0, 10.0),
            "share": (0.01, 1.0),
            "lessons": (1, 100_000),
            "keep": (1, 1_000_000),
            "temperature": (0.0, 100.0),
            "final_lessons": (0, 1_000_000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise EsperError(f"ValuesConfig: {name} is {value}, must lie in [{low}, {high}]")


class Sight(NamedTuple):
    """What is seen of worlds before anything grows in them."""

    base: Tensor  # [W, Db]
    slots: Tensor  # [W, S, Ds]
    quotes: Tensor  # [W, S, B, Dq]
    exists: Tensor  # [W, S]
    family: Tensor  # [W]

    @classmethod
    def of(cls, obs: PolicyObservation, rows: Tensor) -> Sight:
        return cls(*(getattr(obs, name)[rows].cpu() for name in cls._fields))

    def rows(self, index: Tensor) -> Sight:
        return Sight(*(part[index] for part in self))


class PlanValues(nn.Module):
    """M networks. Each encodes every slot with what the plan puts into it, adds the encodings up, and reads a
    value from the sum and the world's own features. The gain is that value minus the value of growing
    nothing, so that nothing gains exactly 0."""

    base_mean: Tensor
    base_scale: Tensor
    slot_mean: Tensor
    slot_scale: Tensor

    def __init__(
        self, base_dim: int, slot_dim: int, quote_dim: int, *, members: int, hidden: int, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weights(inputs: int, outputs: int) -> nn.Parameter:
            return nn.Parameter(
                torch.randn(members, inputs, outputs, generator=generator) * math.sqrt(2.0 / inputs)
            )

        self.cell_weight = weights(slot_dim + quote_dim + 1, hidden)
        self.cell_bias = nn.Parameter(torch.zeros(members, 1, hidden))
        self.world_weight = weights(hidden + base_dim, hidden)
        self.world_bias = nn.Parameter(torch.zeros(members, 1, hidden))
        self.out_weight = weights(hidden, 1)
        for name, size in (("base", base_dim), ("slot", slot_dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))

    @property
    def members(self) -> int:
        return len(self.out_weight)

    def standardize(self, sight: Sight) -> None:
        """Take the scales of the features from these worlds."""
        there = sight.slots[sight.exists]
        for name, seen in (("base", sight.base), ("slot", there)):
            getattr(self, f"{name}_mean").copy_(seen.mean(0))
            getattr(self, f"{name}_scale").copy_(seen.std(0, correction=0) + 1e-3)

    def _world(self, sight: Sight) -> tuple[Tensor, Tensor]:
        base = (sight.base - self.base_mean) / self.base_scale
        slots = (sight.slots - self.slot_mean) / self.slot_scale
        return base.clamp(-FEATURE_LIMIT, FEATURE_LIMIT), slots.clamp(-FEATURE_LIMIT, FEATURE_LIMIT)

    def _encode(self, slots: Tensor, quotes: Tensor, is_empty: Tensor, exists: Tensor) -> Tensor:
        """[M, …, H] of slots […, Ds] with the quote […, Dq] of what grows in them."""
        cells = torch.cat([slots, quotes, is_empty.unsqueeze(-1).to(slots.dtype)], -1) * exists.unsqueeze(-1)
        flat = cells.flatten(0, -2).expand(self.members, -1, -1)
        encoded = torch.relu(torch.baddbmm(self.cell_bias, flat, self.cell_weight))
        return encoded.unflatten(1, cells.shape[:-1]) * exists.unsqueeze(-1)

    def _value(self, base: Tensor, encoded: Tensor) -> Tensor:
        """[M, N] of world features [N, Db] and summed encodings [M, N, H]."""
        joint = torch.cat([encoded, base.expand(self.members, -1, -1)], -1)
        hidden = torch.relu(torch.baddbmm(self.world_bias, joint, self.world_weight))
        return torch.bmm(hidden, self.out_weight).squeeze(-1)

    def forward(self, sight: Sight, plans: Tensor) -> Tensor:
        """Gains [M, N] of one plan [N, S] in each world [N]."""
        base, slots = self._world(sight)
        index = plans.clamp(min=0)[..., None, None].expand(*plans.shape, 1, sight.quotes.shape[-1])
        is_empty = plans < 0
        quotes = sight.quotes.gather(2, index).squeeze(2).masked_fill(is_empty.unsqueeze(-1), 0.0)
        planned = self._encode(slots, quotes, is_empty, sight.exists).sum(2)
        nothing = self._encode(slots, torch.zeros_like(quotes), torch.ones_like(is_empty), sight.exists)
        return self._value(base, planned) - self._value(base, nothing.sum(2))

    @torch.no_grad()
    def gains(self, sight: Sight, plans: Tensor) -> Tensor:
        """Gains [M, W, P] of all plans [P, S] in every world."""
        worlds = len(sight.base)
        step = max(SEARCH_ROWS // worlds, 1)
        parts = []
        for some in plans.split(step):
            repeated = sight.rows(torch.arange(worlds).repeat_interleave(len(some)))
            parts.append(self(repeated, some.repeat(worlds, 1)).unflatten(1, (worlds, -1)))
        return torch.cat(parts, -1)


class Replay:
    """All episodes so far: the sight of each world, and plan and gain of each episode in it."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []
        self.episodes: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """World, plan, gain and the members that learn from it, of each round's episodes."""

    def add(self, sight: Sight, world: Tensor, plans: Tensor, gain: Tensor, learns: Tensor) -> None:
        """Episodes [N] in the worlds of `sight`, by their row; `learns` [N, M]."""
        self.episodes.append((world + self.num_worlds, plans, gain, learns))
        self.sights.append(sight)

    @property
    def num_worlds(self) -> int:
        return sum(len(s.base) for s in self.sights)

    def sight(self) -> Sight:
        return Sight(*(torch.cat(parts) for parts in zip(*self.sights, strict=True)))

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        world, plans, gain, learns = (torch.cat(parts) for parts in zip(*self.episodes, strict=True))
        return world, plans, gain, learns

    def state_tensors(self) -> dict[str, Tensor]:
        if not self.episodes:
            return {}
        names = ("world", "plan", "gain", "learns")
        return {**self.sight()._asdict(), **dict(zip(names, self.columns(), strict=True))}

    def load_state_tensors(self, stored: Mapping[str, Tensor]) -> None:
        self.sights, self.episodes = [], []
        if stored:
            self.sights = [Sight(*(stored[name] for name in Sight._fields))]
            self.episodes = [(stored["world"], stored["plan"], stored["gain"], stored["learns"])]


class PlanValueLearner:
    """The ensemble, its optimizer and its replay. What it learns depends on its random seed and on the
    episodes alone."""

    def __init__(self, config: ValuesConfig, base_dim: int, slot_dim: int, quote_dim: int, *, seed: int):
        self.config, self.seed = config, seed
        self.values = PlanValues(
            base_dim,
            slot_dim,
            quote_dim,
            members=config.members,
            hidden=config.hidden,
            seed=stream_seed(seed, "values"),
        )
        self.optimizer = torch.optim.AdamW(
            self.values.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self.replay = Replay()
        self.rounds = 0

    def generator(self, purpose: int) -> torch.Generator:
        """Random numbers of this round, one stream for each purpose."""
        return torch.Generator().manual_seed(stream_seed(self.seed, "values", self.rounds, counter=purpose))

    def learn(self, sight: Sight, world: Tensor, plans: Tensor, gain: Tensor) -> float:
        """Add a round of episodes and train on all of them; returns the mean squared error, over the
        variance of the gains."""
        generator, config = self.generator(1), self.config
        learns = torch.rand(len(gain), config.members, generator=generator) < config.share
        self.replay.add(sight, world, plans, gain, learns)
        self.rounds += 1
        seen = self.replay.sight()
        world, plans, gain, learns = self.replay.columns()
        self.values.standardize(seen)
        target = gain / self._scales(seen.family, world, gain)
        error = 0.0
        for _ in range(config.steps):
            rows = torch.randint(len(gain), (min(config.batch, len(gain)),), generator=generator)
            counted = learns[rows].T
            predicted = self.values(seen.rows(world[rows]), plans[rows])
            squares = torch.where(counted, (predicted - target[rows]) ** 2, 0.0)
            # Each member has its own weights, so the sum over members trains each by its own mean.
            loss = (squares.sum(1) / counted.sum(1).clamp(min=1)).sum()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            error += loss.item() / config.members / config.steps
        if not math.isfinite(error):
            raise EsperError("the action values are not finite; check J of the episodes, or lower values.lr")
        return error

    def _scales(self, family: Tensor, world: Tensor, gain: Tensor) -> Tensor:
        """[N]: standard deviation of the gains of each episode's family of tasks."""
        own = family[world]
        scales = torch.ones_like(gain)
        for index in own.unique():
            rows = own == index
            scales[rows] = gain[rows].std(correction=0).clamp(min=GAIN_FLOOR)
        return scales

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"network.{name}": t for name, t in self.values.state_dict().items()}
        tensors |= {f"adam.{name}": t for name, t in adam_tensors(self.optimizer, self.values).items()}
        tensors |= {f"replay.{name}": t for name, t in self.replay.state_tensors().items()}
        return tensors, {"rounds": self.rounds}

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"network": {}, "adam": {}, "replay": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.rounds = meta["rounds"]
        load_tensors("values", self.values.state_dict(), parts["network"])
        load_adam("values", self.optimizer, self.values, parts["adam"])
        self.replay.load_state_tensors(parts["replay"])

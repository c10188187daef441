"""The configuration of a run: every setting with its meaning, checked once; presets; and where each value
came from.

Values reach a `TrainingConfig` as themselves, as JSON (`from_json`), or as text (YAML and flags, through
`resolve`); one decoder reads them all. Nothing here knows the tasks: what a task refuses is said where the
run is built."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from esper.kasmina.layers import check_population
from esper.leyline import (
    EsperError,
    GateLevel,
    Incubation,
    LossRewardConfig,
    RewardConfig,
    RewardFamily,
    SlotConfig,
    allowed,
    check_number,
)
from esper.simic.agent.ppo_update import PPOConfig
from esper.simic.rewards import check_reward_mode, prices_size
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.tamiyo.heuristic import HeuristicConfig
from esper.tolaria.governor import GovernorConfig

Policy = Literal["ppo", "heuristic", "random", "wait"]
_LEAST = {
    "rounds": 1,
    "envs": 1,
    "twins": 1,
    "seed": 0,
    "episode_length": 1,
    "rollout_length": 1,
    "batch_size": 1,
    "steps_per_epoch": 1,
    "val_size": 1,
    "max_seeds": 0,
    "hidden": 1,
    "updates_per_round": 1,
    "teacher_rounds": 0,
    "teacher_updates": 1,
    "checkpoint_every": 0,
    "keep_last": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Everything that a run is told. Lists, names of enums and mappings for sections are accepted and stored
    as declared."""

    task: str = "digits_shift"
    """The world to grow in; `esper config tasks` lists them."""
    policy: Policy = "ppo"
    """Who decides: the learned policy, the rules of thumb, uniform over legal actions, or nobody."""
    rounds: int = 100
    """Rounds to train; in each, every env plays one episode."""
    envs: int = 16
    """Networks that grow side by side."""
    twins: int = 1
    """Successive envs that share a world: weights at birth, data and condition. They differ in what is
    decided, so what luck they share is taken out of the advantages."""
    seed: int = 42
    """Root of every random stream; the same seed gives the same run."""

    episode_length: int | None = None
    """Epochs of one episode; none: the task's."""
    rollout_length: int | None = None
    """Steps between two updates; none: the whole episode."""
    batch_size: int | None = None
    """Samples per training step of one network; none: the task's."""
    steps_per_epoch: int | None = None
    """Training steps per epoch; none: the task's."""
    val_size: int | None = None
    """Validation samples, the same for all envs; none: the task's."""
    slots: tuple[str, ...] | None = None
    """Slots in which seeds may grow; none: all of the task's."""
    max_seeds: int = 0
    """Most seeds that one network may hold at a time; 0: as many as it has slots."""
    permissive_gates: bool | None = None
    """Gates that only ask for what safety needs; none: as the task says."""
    auto_forward_gates: tuple[GateLevel, ...] | None = None
    """Gates (g1, g2, g3) that the clock passes by itself as soon as they open; none: as the task says."""
    incubation: Incubation = Incubation.SHADOW
    """How a seed learns before it is blended: from a loss at its own output, or straight through."""
    data_root: str | None = None
    """Directory of the datasets; none: $ESPER_DATA or ~/.cache/esper."""

    devices: tuple[str, ...] = ("cpu",)
    """Where the networks live, in turn by population; the policy lives on the first."""
    population: int | None = None
    """Networks fused into one graph, 1 or a multiple of 8; none: the task's."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Precision of the networks' forward passes; fp16 needs a population of 1."""
    gpu_preload: bool = False
    """Keep the whole dataset in the memory of the first device, a CUDA one."""

    reward_family: RewardFamily = RewardFamily.CONTRIBUTION
    """Rewards made of contributions and J, or of changes of the loss."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss_reward: LossRewardConfig = field(default_factory=LossRewardConfig)
    rent_curriculum: float = 0.0
    """Share of the run over which the reward's price of size rises from 0 to the task's; J is always reported
    at full price."""
    normalize_rewards: bool = True
    """Divide rewards by a running scale that is constant within a round."""
    ab_reward_modes: tuple[str, ...] = ()
    """Two or more reward modes: train one policy with each, on the same random streams, and compare them."""

    ppo: PPOConfig = field(default_factory=PPOConfig)
    anneal_fraction: float = 0.8
    """Share of the run over which learning rate, entropy weight and exploration go to their ends, if
    ppo.anneal_updates is 0; 0: they stay at their starts."""
    hidden: int = 128
    """Units of the policy's recurrent layer."""
    patience: float = 1.0
    """How much a new policy prefers waiting and finishing what it planted to pruning it; 0: not at all."""
    memory: bool = True
    """Whether the policy remembers earlier epochs."""
    blind: tuple[str, ...] = ()
    """Features that the policy is not shown; docs/observations.md lists them."""
    sensors: tuple[str, ...] = ()
    """Registered sensors that enter the observation beside the built-in ones."""
    updates_per_round: int = 1
    """PPO updates from each rollout."""
    teacher: str | None = None
    """Whom to imitate first: heuristic; schedule, which are those that ship for the task; or a file of
    schedules that `esper prove --search` found, each followed where a probe of the first epoch sees its
    pattern; none: nobody."""
    teacher_rounds: int = 0
    """Rounds in which the teacher decides and the policy learns to do the same."""
    teacher_updates: int = 4
    """Updates from each round of the teacher."""
    heuristic: HeuristicConfig = field(default_factory=HeuristicConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    telemetry_dir: str | None = None
    """The run directory: configuration, events, tables, checkpoints; none: nothing is written."""
    checkpoint_every: int = 10
    """Rounds between checkpoints; 0: only at the end and when stopped."""
    keep_last: int = 3
    """Checkpoints to keep beside the best."""
    resume: str | None = None
    """Go on from this checkpoint; auto: from the newest in the run directory."""

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            object.__setattr__(self, name, _decode(kind, getattr(self, name), f"config: {name}"))
        for name, low in _LEAST.items():
            if getattr(self, name) is not None:
                check_number("config", name, getattr(self, name), low=low, integer=True)
        for name in ("task", "data_root", "telemetry_dir", "resume", "teacher"):
            if getattr(self, name) == "":
                raise EsperError(f"config: {name} is empty; leave it out or give it a value")
        if self.population is not None:
            check_population(self.population)
        if self.slots is not None:
            SlotConfig.from_ids(self.slots)
        check_reward_mode(self.reward.mode)
        for mode in self.ab_reward_modes:
            check_reward_mode(mode, "ab_reward_modes")
        for contradiction, message in self._contradictions():
            if contradiction:
                raise EsperError(f"config: {message}")

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Settings that are each allowed and make no sense together."""
        on_cuda = bool(self.devices) and self.devices[0].startswith("cuda")
        modes, gates = self.ab_reward_modes, self.auto_forward_gates or ()
        yield not self.devices, "devices is empty; name one or more, for example cpu"
        yield (
            self.episode_length is not None
            and self.rollout_length is not None
            and self.rollout_length > self.episode_length,
            f"rollout_length {self.rollout_length} exceeds episode_length {self.episode_length}",
        )
        yield (
            self.amp == "fp16" and self.population not in (None, 1),
            (
                f"amp fp16 with population {self.population}: one loss scale cannot serve several networks; "
                "allowed: population 1, or amp bf16"
            ),
        )
        yield (
            self.gpu_preload and not on_cuda,
            f"gpu_preload with devices {', '.join(self.devices)}: the first is no CUDA device",
        )
        yield (
            len(modes) == 1,
            f"ab_reward_modes has only {', '.join(modes)}; name two or more, or set reward.mode",
        )
        yield len(set(modes)) < len(modes), f"ab_reward_modes names a mode twice: {', '.join(modes)}"
        yield (
            bool(modes) and self.policy != "ppo",
            f"ab_reward_modes with policy {self.policy}, which cannot learn; allowed: ppo",
        )
        yield (
            self.reward_family is RewardFamily.LOSS and bool(modes),
            (
                "ab_reward_modes with reward_family loss, which has no modes; allowed: reward_family contribution"
            ),
        )
        yield (
            self.reward_family is RewardFamily.LOSS and self.reward.mode != RewardConfig().mode,
            (
                f"reward.mode {self.reward.mode} with reward_family loss, which has no modes; allowed: reward_family contribution, "
                f"or reward.mode {RewardConfig().mode}, the default"
            ),
        )
        yield (
            not {*gates} <= {GateLevel.G1, GateLevel.G2, GateLevel.G3} or len({*gates}) < len(gates),
            (
                f"auto_forward_gates is {', '.join(g.name.lower() for g in gates)}; allowed: g1, g2, g3, each once"
            ),
        )
        yield (
            not 0 <= self.rent_curriculum <= 1,
            f"rent_curriculum is {self.rent_curriculum}, must lie in [0, 1]",
        )
        free = self.reward_family is RewardFamily.LOSS or not prices_size(self.reward.mode)
        yield (
            bool(self.rent_curriculum) and free,
            (
                f"rent_curriculum {self.rent_curriculum} with reward_family {self.reward_family}, mode {self.reward.mode}: size has "
                "no price there that could rise"
            ),
        )
        yield (
            not 0 <= self.anneal_fraction <= 1,
            f"anneal_fraction is {self.anneal_fraction}, must lie in [0, 1]",
        )
        yield (
            (self.teacher is None) is not (self.teacher_rounds == 0),
            (
                f"teacher {self.teacher or 'none'} with teacher_rounds {self.teacher_rounds}: set both or neither"
            ),
        )
        yield (
            self.teacher is not None and self.policy != "ppo",
            f"teacher with policy {self.policy}, which cannot learn",
        )
        yield self.envs % self.twins != 0, f"envs {self.envs} with twins {self.twins}: must be a multiple"
        yield (
            self.twins > 1 and self.rollout_length is not None,
            (
                f"twins {self.twins} with rollout_length {self.rollout_length}: twins are compared over whole episodes"
            ),
        )
        yield (
            self.resume == "auto" and self.telemetry_dir is None,
            ("resume auto looks for checkpoints in telemetry_dir, which is not set"),
        )

    def to_train_kwargs(self) -> dict[str, Any]:
        """The fields as they are: `TrainingConfig(**config.to_train_kwargs()) == config`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def replace(self, **changes: Any) -> Self:
        """This config with other values, checked again."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Every field in JSON's types, sections as objects."""
        return _plain(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The config that `to_json` wrote. Every key must be known, and none may be missing."""
        found = _leaves(values, "config")
        if missing := [path for path in LEAVES if path not in found]:
            raise EsperError(f"config: {', '.join(missing)} missing; a whole config has {len(LEAVES)} values")
        return cls(**_nested(found))


def kinds(section: Any) -> dict[str, Any]:
    """The declared type of each field of a config dataclass."""
    hints = get_type_hints(section)
    return {f.name: hints[f.name] for f in fields(section)}


def _paths(section: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in kinds(section).items():
        found |= _paths(kind, f"{prefix}{name}.") if is_dataclass(kind) else {prefix + name: kind}
    return found


LEAVES: Mapping[str, Any] = _paths(TrainingConfig)
"""Every single setting by its dotted path, with its type."""


def optional(kind: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    inner = [arg for arg in get_args(kind) if arg is not NoneType]
    return (inner[0], True) if get_origin(kind) is UnionType else (kind, False)


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a type allows; empty if it is no choice."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.name.lower() for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def unknown_word(what: str, word: object, known: Iterable[str]) -> EsperError:
    """An error that names the word, the nearest known one and all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(word).lower(), known, n=1)
    return EsperError(f"{what} {word!r}{f' (did you mean {near[0]}?)' if near else ''}; {allowed(known)}")


def _decode(kind: Any, value: Any, name: str) -> Any:
    """A value as its declared type. `name` is what an error calls it."""
    kind, may_be_none = optional(kind)
    if value is None and may_be_none:
        return None
    if is_dataclass(kind):
        if isinstance(value, Mapping):
            known = kinds(kind)
            for key in value:
                if key not in known:
                    raise unknown_word(f"{name}: unknown key", key, known)
            return kind(**{key: _decode(known[key], item, f"{name}.{key}") for key, item in value.items()})  # type: ignore[operator]
        wanted = "a section with keys of its own"
    elif get_origin(kind) is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_decode(get_args(kind)[0], item, name) for item in value)
        wanted = "a list"
    elif words := choices(kind):
        if isinstance(value, str) and not isinstance(value, Enum):
            if value.lower() not in words:
                raise unknown_word(f"{name} is", value, words)
            return value.lower() if get_origin(kind) is Literal else kind[value.upper()]
        wanted = f"one of {', '.join(words)}"
    else:
        wanted = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[kind]
        if kind is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
    if kind is str and isinstance(value, StrEnum):
        return value.value
    if type(value) is kind and kind is not float:
        return value
    raise EsperError(f"{name} is {value!r}, must be {wanted}{' or none' if may_be_none else ''}")


def _from_text(kind: Any, text: Any) -> Any:
    """What a flag or a YAML scalar means for this type. Text that means nothing stays text, for `_decode` to
    refuse."""
    kind, may_be_none = optional(kind)
    if may_be_none and text in ("none", "null", ["none"]):
        return None
    if isinstance(text, list) and get_origin(kind) is tuple:
        return [_from_text(get_args(kind)[0], item) for item in text]
    try:
        if isinstance(text, str) and kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if isinstance(text, str) and kind in (int, float) else text
    except (ValueError, KeyError):
        return text


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.name.lower()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _leaves(
    values: Mapping[str, Any], origin: str, *, text: bool = False, prefix: str = ""
) -> dict[str, Any]:
    """Nested or dotted keys as dotted paths with decoded values."""
    found: dict[str, Any] = {}
    siblings = {path.removeprefix(prefix).split(".")[0] for path in LEAVES if path.startswith(prefix)}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in LEAVES:
            kind = LEAVES[path]
            inside = {path: _decode(kind, _from_text(kind, value) if text else value, f"{origin}: {path}")}
        elif key not in siblings:
            raise unknown_word(f"{origin}: unknown key", path, sorted(prefix + name for name in siblings))
        elif not isinstance(value, Mapping):
            raise EsperError(f"{origin}: {path} is {value!r}, must be a section with keys of its own")
        else:
            inside = _leaves(value, origin, text=text, prefix=f"{path}.")
        if twice := found.keys() & inside.keys():
            raise EsperError(f"{origin}: {', '.join(sorted(twice))} is given twice")
        found |= inside
    return found


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in leaves.items():
        *sections, name = path.split(".")
        at = root
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return root


@dataclass(frozen=True, slots=True)
class Preset:
    """A named starting point."""

    summary: str
    values: Mapping[str, Any]


_TAUGHT: Mapping[str, Any] = {
    "teacher": "schedule",
    "teacher_updates": 8,
    "reward.mode": "shaped",
    "ppo.imitation_lr": 3e-4,
    "ppo.lr": 3e-5,
    "ppo.entropy_coef": 0.003,
    "ppo.epsilon": 0.05,
    "ppo.minibatches": 8,
}
"""Imitation first, then steps so small that luck cannot undo what was learnt from the teacher."""
_SHORT: Mapping[str, Any] = {"envs": 128, "rounds": 8, "teacher_rounds": 6, **_TAUGHT}
PRESETS: Mapping[str, Preset] = {
    "quickstart": Preset(
        "a policy that learns something in minutes",
        {"task": "digits_shift", "envs": 64, "rounds": 7, "teacher_rounds": 5, **_TAUGHT},
    ),
    "digits_baseline": Preset("is more needed at all?", {"task": "digits_baseline", **_SHORT}),
    "digits_impaired": Preset(
        "grow, early and where images are still large", {"task": "digits_impaired", **_SHORT}
    ),
    "digits_scale": Preset("the same with five places to choose from", {"task": "digits_scale", **_SHORT}),
    "digits_shift": Preset(
        "what is wrong with this network?", {"task": "digits_shift", **_SHORT, "rounds": 10}
    ),
    "cifar_baseline": Preset("the small CIFAR-10 host", {"task": "cifar_baseline"}),
    "cifar_baseline_stable": Preset(
        "the same with smaller steps and twice the rounds",
        {"task": "cifar_baseline", "rounds": 200, "ppo.clip": 0.1, "ppo.lr": 3e-4, "ppo.lr_end": 3e-4},
    ),
    "cifar_scale": Preset("five blocks and five slots on CIFAR-10", {"task": "cifar_scale", "envs": 8}),
    "cifar_impaired": Preset("a host of 77 parameters that must grow", {"task": "cifar_impaired"}),
    "cifar_minimal": Preset("a host without pooling", {"task": "cifar_minimal"}),
    "tinystories": Preset(
        "a language model of 30 million parameters",
        {"task": "tinystories", "envs": 4, "amp": "bf16", "checkpoint_every": 1},
    ),
}


def resolve(
    preset: str | None = None, file: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[TrainingConfig, dict[str, str]]:
    """The config that a preset, over it a file, and over both flags (text) describe; and where each dotted
    path came from."""
    layers: list[tuple[str, dict[str, Any]]] = []
    if preset is not None:
        if preset not in PRESETS:
            raise unknown_word("unknown preset", preset, PRESETS)
        layers.append((f"preset {preset}", _leaves(PRESETS[preset].values, f"preset {preset}")))
    if file is not None:
        layers.append(
            (
                f"file {file}",
                _leaves(read_file(Path(file)), f"file {file}", text=Path(file).suffix != ".json"),
            )
        )
    layers.append(("flag", _leaves(flags or {}, "flag", text=True)))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(LEAVES, "default")
    for origin, found in layers:
        values |= found
        origins |= dict.fromkeys(found, origin)
    return TrainingConfig(**_nested(values)), origins


def _once(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str) or key in found:
            raise EsperError(
                f"key {key!r} is given twice" if isinstance(key, str) else f"key {key!r} is no name"
            )
        found[key] = value
    return found


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars stay text, so that `off` is no boolean and `1e-3` is a number where one is
    wanted."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        return _once(
            (self.construct_object(key, deep=True), self.construct_object(item, deep=True))
            for key, item in node.value
        )


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a .json, .yaml or .yml file."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise EsperError(f"file {path} ends in {path.suffix!r}; allowed: .json, .yaml, .yml")
    try:
        text = path.read_text(encoding="utf-8")
        found = (
            json.loads(text, object_pairs_hook=_once)
            if path.suffix == ".json"
            else yaml.load(text, _TextLoader)
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EsperError(f"file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict):
        raise EsperError(f"file {path} holds {found!r}, must hold settings by name")
    return found

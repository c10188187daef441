"""The configuration of a run: every setting with its help text and range, and one strict decoder for them.

Values reach a `TrainingConfig` as Python objects, as JSON (`from_json`) or as text (YAML and flags, through
`presets.resolve`). This module knows no tasks: a task checks the settings that concern it when the run is
built."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import msgspec

from esper._text import shorten
from esper.kasmina.layers import check_population
from esper.leyline import (
    AUTOMATIC_GATES,
    EsperError,
    GateLevel,
    Incubation,
    LossRewardConfig,
    RewardConfig,
    RewardFamily,
    SlotConfig,
    allowed,
)
from esper.leyline.errors import near
from esper.simic.agent.plan_values import ValuesConfig
from esper.simic.agent.ppo_update import PPOConfig
from esper.simic.rewards import check_reward_mode, prices_size
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.tamiyo.heuristic import HeuristicConfig
from esper.tamiyo.shipped import tuned_thresholds
from esper.tolaria.governor import GovernorConfig

Policy = Literal["ppo", "heuristic", "random", "wait"]
Granularity = Literal["plans", "parameters", "all"]


_RANGE = re.compile(r"(\w+):(\d{1,6})-(\d{1,6})(,.*)?")
"""Worlds of a family from one number to another, optionally with other sizes."""


def _numbered(text: str) -> list[str]:
    """The names of a range of worlds; any other text as it is."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    family, first, last, sizes = match.groups(default="")
    if int(first) > int(last):
        raise EsperError(f"config: task {text}: the first world, {first}, is behind the last, {last}")
    return [f"{family}:{number}{sizes}" for number in range(int(first), int(last) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """All settings of a run. The constructor also accepts lists for tuples, names for enum members and
    mappings for sections, and stores them as declared."""

    task: str | tuple[str, ...] = "digits_shift"
    """Name of the task, optionally with changes: digits_shift:base=8. `esper config tasks` lists them. With
    several names, or a range of worlds such as worlds_mixed:0-47, one policy is trained on all of these tasks
    side by side."""
    policy: Policy = "ppo"
    """Policy that decides: ppo (trained), heuristic (fixed rules), random (uniform over legal actions) or
    wait (never acts)."""
    rounds: int = 100
    """Number of training rounds. In each round, every env plays one episode."""
    envs: int = 64
    """Number of networks of each task that are trained side by side, one per env. A multiple of the
    population is cheapest: the unused rows of a population cost as much as the others."""
    twins: int = 1
    """Number of consecutive envs that share initial weights, data and condition. Their advantages are taken
    relative to their mean, which removes the noise that they share."""
    seed: int = 42
    """Random seed of the whole run. The same random seed gives the same run."""

    episode_length: int | None = None
    """Epochs per episode; none: the task's."""
    rollout_length: int | None = None
    """Env steps between two PPO updates; none: the whole episode."""
    batch_size: int | None = None
    """Samples per training step of one network; none: the task's."""
    steps_per_epoch: int | None = None
    """Training steps per epoch; none: the task's."""
    val_size: int | None = None
    """Number of validation samples, the same for all envs; none: the task's."""
    slots: tuple[str, ...] | None = None
    """Slots in which seeds may grow, for example r0c0 r0c1; none: all slots of the task."""
    max_seeds: int = 0
    """Maximum number of seeds that one network holds at a time; 0: one for each slot."""
    permissive_gates: bool | None = None
    """Whether gates check only safety instead of quality; none: as the task says."""
    auto_forward_gates: tuple[GateLevel, ...] | None = None
    """Gates (g1, g2, g3, g5) that a seed passes by itself as soon as they open; none: as the task says."""
    incubation: Incubation = Incubation.SHADOW
    """How a seed is trained before it is blended in: shadow (a loss at its own output) or ste (a
    straight-through gradient of the network's loss)."""
    data_root: str | None = None
    """Directory of the datasets; none: $ESPER_DATA or ~/.cache/esper."""

    devices: tuple[str, ...] = ("cpu",)
    """Devices of the networks. Populations are assigned in turn; the policy is on the first device."""
    population: int | None = None
    """Number of networks that are fused into one graph: 1, or a multiple of 8 and of twins; none: the task's.
    It does not follow the number of envs, so an env's result does not depend on it."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Precision of the networks' forward passes. fp16 needs a population of 1."""
    gpu_preload: bool = False
    """Keep the whole dataset in the memory of the first device, which must be a CUDA device."""

    reward_family: RewardFamily = RewardFamily.CONTRIBUTION
    """Family of rewards: contribution (contributions of seeds and J) or loss (changes of the loss)."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss_reward: LossRewardConfig = field(default_factory=LossRewardConfig)
    rent_curriculum: float = 0.0
    """Fraction of the run over which the reward's price of size rises from 0 to its full value. J is always
    reported at the full price."""
    normalize_rewards: bool = True
    """Divide rewards by a running scale that is constant within a round."""
    ab_reward_modes: tuple[str, ...] = ()
    """Two or more reward modes to compare: one policy is trained with each, on the same random streams."""

    ppo: PPOConfig = field(default_factory=PPOConfig)
    anneal_fraction: float = 0.8
    """Fraction of the run over which learning rate, entropy weight and exploration are annealed to their end
    values, if ppo.anneal_updates is 0; 0: they stay constant."""
    hidden: int = 128
    """Number of units of the policy's recurrent layer."""
    patience: float = 1.0
    """Initial bias of a new policy towards waiting and finishing seeds instead of pruning them; 0: none."""
    memory: bool = True
    """Whether the policy is recurrent. Without memory it sees only the current epoch."""
    blind: tuple[str, ...] = ()
    """Features that are hidden from the policy; docs/observations.md lists them."""
    sensors: tuple[str, ...] = ()
    """Registered sensors that enter the observation beside the built-in ones."""
    granularity: Granularity = "all"
    """What the trained policy may decide: plans (wait, or add a blueprint to a slot at once), parameters
    (also how: style and tempo) or all operations."""
    unlock_after: int = 0
    """Number of rounds without a higher mean J after which the next granularity begins; 0: never."""
    distinct_twins: bool = False
    """Whether twins that have done the same so far take different actions, and the first of each group always
    waits. It needs twins and granularity plans."""
    updates_per_round: int = 1
    """Number of PPO updates from each rollout."""
    teacher: str | None = None
    """Policy to imitate first: heuristic, schedule (the schedules that ship for the task) or a schedule file
    written by `esper prove --search`; none: no imitation."""
    teacher_rounds: int = 0
    """Number of rounds in which the teacher decides and the policy imitates it."""
    teacher_updates: int = 8
    """Number of updates from each round of the teacher."""
    values_rounds: int = 0
    """Number of first rounds in which action values, learned from J alone, choose what grows, and the policy
    is taught the best plans. They need twins: 8 are usual."""
    values: ValuesConfig = field(default_factory=ValuesConfig)
    heuristic: HeuristicConfig = field(default_factory=dict)  # type: ignore[assignment]
    """Thresholds of the heuristic, as policy and as teacher. Those that are not given are the tuned ones that
    ship for the task; where it has none, and for several tasks, the general ones."""
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    telemetry_dir: str | None = None
    """Run directory, for configuration, events, tables and checkpoints; none: nothing is recorded."""
    checkpoint_every: int = 10
    """Number of rounds between checkpoints; 0: only at the end and when the run is stopped."""
    keep_last: int = 3
    """Number of checkpoints to keep beside the best policy."""
    resume: str | None = None
    """Checkpoint to continue from; auto: the newest intact one in the run directory, or a new start if the
    run has none yet."""

    def __post_init__(self) -> None:
        nested = unflatten(flatten(_shallow(self), "config"))
        tuned = tuned_thresholds(nested["task"]) if isinstance(nested["task"], str) else tuned_thresholds()
        nested["heuristic"] = _shallow(tuned) | nested.get("heuristic", {})
        for name, kind in kinds(type(self)).items():
            object.__setattr__(self, name, _build(kind, nested.get(name, {})))
        mode = LEAVES["reward.mode"]
        modes = tuple(_decode("ab_reward_modes", item, mode, "config") for item in self.ab_reward_modes)
        object.__setattr__(self, "ab_reward_modes", modes)
        _ = self.tasks  # refuses a range that runs backwards
        if self.population is not None:
            check_population(self.population)
        if self.slots is not None:
            SlotConfig.from_ids(self.slots)
        check_reward_mode(self.reward.mode)
        for mode in self.ab_reward_modes:
            check_reward_mode(mode, "ab_reward_modes")
        for message in self._contradictions():
            raise EsperError(f"config: {message}")

    def _contradictions(self) -> Iterator[str]:
        """Settings that are each allowed and make no sense together."""
        if not self.devices:
            yield "devices is empty; name one or more, for example cpu"
        elif self.gpu_preload and not self.devices[0].startswith("cuda"):
            yield f"gpu_preload with devices {', '.join(self.devices)}: the first is not a CUDA device"
        if self.amp == "fp16" and self.population not in (None, 1):
            yield (
                f"amp fp16 with population {self.population}: one loss scale cannot serve several networks; "
                "allowed: population 1, or amp bf16"
            )
        gates = self.auto_forward_gates or ()
        if not {*gates} <= AUTOMATIC_GATES or len({*gates}) < len(gates):
            names = ", ".join(gate.name.lower() for gate in gates)
            yield f"auto_forward_gates is {names}; allowed: g1, g2, g3, g5, each once"
        if self.resume == "auto" and self.telemetry_dir is None:
            yield "resume auto looks for checkpoints in telemetry_dir, which is not set"
        yield from self._length_contradictions()
        yield from self._reward_contradictions()
        if (self.teacher is None) != (self.teacher_rounds == 0):
            yield (
                f"teacher {self.teacher or 'none'} with teacher_rounds {self.teacher_rounds}: "
                "set both or neither"
            )
        if self.values_rounds and self.teacher is not None:
            yield (
                f"values_rounds {self.values_rounds} with teacher {self.teacher}: one of them decides first; "
                "set values_rounds to 0, or leave the teacher out"
            )
        if self.values_rounds and (self.policy != "ppo" or self.rollout_length is not None):
            yield (
                f"values_rounds {self.values_rounds} with policy {self.policy}, rollout_length "
                f"{self.rollout_length or 'none'}; action values need policy ppo and whole episodes"
            )
        if self.granularity != "all" and (self.policy != "ppo" or self.teacher is not None):
            yield (
                f"granularity {self.granularity} with policy {self.policy}, teacher "
                f"{self.teacher or 'none'}; allowed: ppo without a teacher, who may use every operation"
            )
        if self.distinct_twins and (self.twins < 2 or self.granularity != "plans" or self.unlock_after):
            yield (
                f"distinct_twins with twins {self.twins}, granularity {self.granularity}, unlock_after "
                f"{self.unlock_after}; it needs twins 2 or more, granularity plans and unlock_after 0"
            )
        if self.unlock_after and self.granularity == "all":
            yield f"unlock_after {self.unlock_after} with granularity all: nothing is left to unlock"
        if self.teacher is not None and self.policy != "ppo":
            yield f"teacher with policy {self.policy}, which is not trained; allowed: ppo"

    def _length_contradictions(self) -> Iterator[str]:
        episode, rollout = self.episode_length, self.rollout_length
        if episode is not None and rollout is not None and rollout > episode:
            yield f"rollout_length {rollout} exceeds episode_length {episode}"
        if self.envs % self.twins != 0:
            yield (
                f"envs {self.envs} with twins {self.twins}: envs must be a multiple of twins. Action values "
                f"(values_rounds, here {self.values_rounds}) need twins, PPO does not"
            )
        if self.twins > 1 and rollout is not None:
            yield (
                f"twins {self.twins} with rollout_length {rollout}: twins are compared over whole episodes; "
                "allowed: twins 1, or no rollout_length"
            )

    def _reward_contradictions(self) -> Iterator[str]:
        modes, mode, default_mode = self.ab_reward_modes, self.reward.mode, RewardConfig().mode
        if len(modes) == 1:
            yield f"ab_reward_modes has only {modes[0]}; name two or more, or set reward.mode"
        if len(set(modes)) < len(modes):
            yield f"ab_reward_modes contains a mode twice: {', '.join(modes)}"
        if modes and self.policy != "ppo":
            yield f"ab_reward_modes with policy {self.policy}, which is not trained; allowed: ppo"
        if self.reward_family is RewardFamily.LOSS:
            if modes:
                yield (
                    "ab_reward_modes with reward_family loss, which has no modes; "
                    "allowed: reward_family contribution"
                )
            if mode != default_mode:
                yield (
                    f"reward.mode {mode} with reward_family loss, which has no modes; allowed: "
                    f"reward_family contribution, or reward.mode {default_mode}, the default"
                )
        size_is_free = self.reward_family is RewardFamily.LOSS or not prices_size(mode)
        if self.rent_curriculum and size_is_free:
            yield (
                f"rent_curriculum {self.rent_curriculum} with reward_family {self.reward_family}, mode "
                f"{mode}: size has no price there that could rise"
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks; those of a range of worlds one by one."""
        given = (self.task,) if isinstance(self.task, str) else self.task
        return tuple(name for text in given for name in _numbered(text))

    def to_train_kwargs(self) -> dict[str, Any]:
        """The fields as they are: `TrainingConfig(**config.to_train_kwargs()) == config`."""
        return _shallow(self)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, checked again. With another task, the thresholds of the heuristic stay;
        `heuristic={}` takes those of the new task."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Every field in JSON's types, sections as objects."""
        return _plain(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The config that `to_json` wrote. Unknown keys and missing keys are refused."""
        leaves = flatten(values, "config")
        missing = [path for path in LEAVES if path not in leaves]
        if missing:
            raise EsperError(
                f"config: {', '.join(missing)} missing; a whole config has {len(LEAVES)} values. A file with "
                "some of the settings can be given to `esper train --config`"
            )
        return cls(**unflatten(leaves))


# -- settings by dotted path ---------------------------------------------------------------------------------


def kinds(section: Any) -> dict[str, Any]:
    """The declared type of each field of a config dataclass."""
    hints = get_type_hints(section)
    return {f.name: hints[f.name] for f in fields(section)}


def _paths(section: Any, prefix: str = "") -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for name, kind in kinds(section).items():
        paths |= _paths(kind, f"{prefix}{name}.") if is_dataclass(kind) else {prefix + name: kind}
    return paths


def _sections(section: Any, prefix: str = "") -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name, kind in kinds(section).items():
        if is_dataclass(kind):
            sections |= {prefix + name: kind, **_sections(kind, f"{prefix}{name}.")}
    return sections


NAMES = str | tuple[str, ...]
"""Type of a setting that is one name or several."""
LEAVES: Mapping[str, Any] = _paths(TrainingConfig)
"""Every single setting by its dotted path, with its type."""
SECTIONS: Mapping[str, Any] = _sections(TrainingConfig)
"""Every section by its dotted path, with its dataclass."""

_ROUNDS = 10_000_000
_LIMITS: Mapping[str, tuple[float, float]] = {
    "rounds": (1, _ROUNDS),
    "envs": (1, 65_536),
    "twins": (1, 65_536),
    "seed": (0, 2**63 - 1),
    "episode_length": (1, 10_000),
    "rollout_length": (1, 10_000),
    "batch_size": (1, 1_000_000),
    "steps_per_epoch": (1, 1_000_000),
    "val_size": (1, 10_000_000),
    "max_seeds": (0, 1_000),
    "population": (1, 4_096),
    "rent_curriculum": (0, 1),
    "anneal_fraction": (0, 1),
    "hidden": (1, 4_096),
    "patience": (-100, 100),
    "unlock_after": (0, _ROUNDS),
    "updates_per_round": (1, 1_000),
    "teacher_rounds": (0, _ROUNDS),
    "teacher_updates": (1, 1_000),
    "values_rounds": (0, _ROUNDS),
    "checkpoint_every": (0, _ROUNDS),
    "keep_last": (1, 1_000_000),
    "ppo.epochs": (1, 1_000),
    "ppo.minibatches": (1, 65_536),
    "reward.escrow_window": (1, 10_000),
    "governor.history_window": (1, 100_000),
}
"""Smallest and largest value. A section may be stricter in its own check."""
_INT_LIMITS, _FLOAT_LIMITS = (0, 1_000_000_000), (-1e6, 1e6)
"""The limits of the other numbers: far beyond any use, and small enough for exact arithmetic."""
_MAX_TEXT = 4_096
"""Longest text; the longest path that Linux accepts."""


def limits(path: str) -> tuple[float, float] | None:
    """Smallest and largest value of a setting; None if it is not a number."""
    kind, _ = optional(LEAVES[path])
    if kind not in (int, float):
        return None
    return _LIMITS.get(path, _INT_LIMITS if kind is int else _FLOAT_LIMITS)


def optional(kind: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    inner = [arg for arg in get_args(kind) if arg is not NoneType]
    if get_origin(kind) is not UnionType or NoneType not in get_args(kind):
        return kind, False
    return inner[0], True


def is_list(kind: Any) -> bool:
    """Whether a setting takes several values. One that also takes a single value stores it alone."""
    return get_origin(kind) is tuple or kind == NAMES


def choices(kind: Any) -> tuple[str, ...]:
    """The names that a type allows; empty if it is not a choice."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.name.lower() for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


# -- decoding ------------------------------------------------------------------------------------------------


def unknown_word(subject: str, word: object, known: Iterable[str]) -> EsperError:
    """An error that shows the word, the nearest known one and all of them."""
    known = list(known)
    return EsperError(f"{subject} {shorten(word)}{near(word, known)}; {allowed(known)}")


def _decode(path: str, value: Any, kind: Any, origin: str) -> Any:
    """A value as its declared type. Only names of enum members and whole numbers for floats are converted."""
    inner, may_be_none = optional(kind)
    if value is None and may_be_none:
        return None
    if inner == NAMES:
        return _decode_names(path, value, origin)
    if get_origin(inner) is tuple and isinstance(value, (list, tuple)):
        item_kind = get_args(inner)[0]
        return tuple(_decode(path, item, item_kind, origin) for item in value)
    names = choices(inner)
    if names and isinstance(value, str) and not isinstance(value, Enum):
        if value.lower() not in names:
            raise unknown_word(f"{origin}: {path} is", value, names)
        return value.lower() if get_origin(inner) is Literal else inner[value.upper()]
    try:
        decoded = msgspec.convert(value, inner)
    except msgspec.ValidationError:
        none = " or none" if may_be_none else ""
        raise EsperError(
            f"{origin}: {path} is {shorten(value)}, must be {_wanted(path, inner)}{none}"
        ) from None
    if isinstance(decoded, str):
        _check_text(path, decoded, origin)
    bounds = limits(path)
    if bounds is not None and not bounds[0] <= decoded <= bounds[1]:
        raise EsperError(f"{origin}: {path} is {shorten(value)}, must be {_wanted(path, inner)}")
    return decoded


def _decode_names(path: str, value: Any, origin: str) -> str | tuple[str, ...]:
    """One name alone, several as a tuple."""
    names = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    decoded = tuple(_decode(path, name, str, origin) for name in names)
    if not decoded:
        raise EsperError(f"{origin}: {path} is empty; give one name or more")
    return decoded[0] if len(decoded) == 1 else decoded


def _wanted(path: str, kind: Any) -> str:
    """The values that a setting takes, in words."""
    if get_origin(kind) is tuple:
        return "a list"
    if choices(kind):
        return f"one of {', '.join(choices(kind))}"
    bounds = limits(path)
    if bounds is None:
        return {bool: "true or false", str: "text"}[kind]
    noun = "a whole number" if kind is int else "a finite number"
    return f"{noun} from {_figure(bounds[0])} to {_figure(bounds[1])}"


def _figure(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


def _check_text(path: str, text: str, origin: str) -> None:
    """Names and paths that no file system and no terminal can take."""
    if text == "":
        raise EsperError(f"{origin}: {path} is empty; leave it out or give it a value")
    if len(text) > _MAX_TEXT:
        raise EsperError(
            f"{origin}: {path} is {shorten(text)}, of {len(text):,} characters; at most {_MAX_TEXT:,} are "
            "allowed"
        )
    if any(ord(character) < 32 or 0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise EsperError(f"{origin}: {path} is {shorten(text)}; control characters are not allowed")


def _from_text(kind: Any, text: Any) -> Any:
    """The value of a flag or a YAML scalar for this type. Text that does not fit is returned as it is, and
    `_decode` refuses it."""
    kind, may_be_none = optional(kind)
    if may_be_none and text in ("none", "null", ["none"]):
        return None
    if isinstance(text, list) and is_list(kind):
        return text if kind == NAMES else [_from_text(get_args(kind)[0], item) for item in text]
    if not isinstance(text, str):
        return text
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (ValueError, KeyError):
        return text


def _shallow(section: Any) -> dict[str, Any]:
    return {f.name: getattr(section, f.name) for f in fields(section)}


def _plain(value: Any) -> Any:
    """A value in JSON's types."""
    if is_dataclass(value):
        return {name: _plain(item) for name, item in _shallow(value).items()}
    if isinstance(value, Enum):
        return value.name.lower()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def flatten(
    values: Mapping[str, Any], origin: str, *, text: bool = False, prefix: str = ""
) -> dict[str, Any]:
    """Nested or dotted keys as dotted paths with decoded values."""
    leaves: dict[str, Any] = {}
    siblings = {path.removeprefix(prefix).split(".")[0] for path in LEAVES if path.startswith(prefix)}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in LEAVES:
            kind = LEAVES[path]
            inside = {path: _decode(path, _from_text(kind, value) if text else value, kind, origin)}
        elif key not in siblings:
            raise unknown_word(f"{origin}: unknown key", path, sorted(prefix + name for name in siblings))
        elif isinstance(value, Mapping):
            inside = flatten(value, origin, text=text, prefix=f"{path}.")
        elif is_dataclass(value) and type(value) is SECTIONS[path]:
            inside = flatten(_shallow(value), origin, prefix=f"{path}.")
        else:
            raise EsperError(f"{origin}: {path} is {shorten(value)}, must be a section with keys of its own")
        twice = leaves.keys() & inside.keys()
        if twice:
            raise EsperError(f"{origin}: {', '.join(sorted(twice))} is given twice")
        leaves |= inside
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in leaves.items():
        *sections, name = path.split(".")
        at = root
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return root


def _build(kind: Any, value: Any) -> Any:
    """A section from its decoded values; any other value as it is."""
    if not is_dataclass(kind):
        return value
    inner = kinds(kind)
    return kind(**{name: _build(inner[name], item) for name, item in value.items()})  # type: ignore[operator]

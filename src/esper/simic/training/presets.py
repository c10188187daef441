"""Presets, files and flags: the layers that a config is resolved from, and the origin of each value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from esper._text import shorten
from esper.leyline import EsperError
from esper.simic.training.config import LEAVES, TrainingConfig, flatten, unflatten, unknown_word


@dataclass(frozen=True, slots=True)
class Preset:
    """A named starting point."""

    summary: str
    values: Mapping[str, Any]


_SMALL_STEPS: Mapping[str, Any] = {
    "ppo.imitation_lr": 3e-4,
    "ppo.lr": 3e-5,
    "ppo.entropy_coef": 0.003,
    "ppo.epsilon": 0.05,
    "ppo.minibatches": 8,
}
"""Imitation first, then PPO with steps so small that noise cannot undo what was learned before."""
_ALONE: Mapping[str, Any] = {
    **_SMALL_STEPS,
    "envs": 64,
    "twins": 8,
    "rounds": 26,
    "values_rounds": 24,
    "ppo.imitation_lr": 1e-3,
}
"""Action values find out what plans are worth and teach the policy."""
_TAUGHT: Mapping[str, Any] = {
    "envs": 128,
    "rounds": 8,
    "teacher": "schedule",
    "teacher_rounds": 6,
    "reward.mode": "shaped",
    **_SMALL_STEPS,
}
_UNTOLD = (
    "flops_budget",
    "learning_rate",
    "train_accuracy",
    "train_loss",
    "generalisation_gap",
    "val_noise",
    "val_loss",
    *(f"accuracy_change_{window}" for window in ("last", "eighth", "third")),
    *(f"loss_slope_{window}" for window in ("last", "eighth", "third")),
    "contribution_deviations",
    "contribution_velocity",
)
"""What a user's own loop does not tell, or tells in another way. A policy that learned to read it would be
misled there."""
_DIGITS: Mapping[str, str] = {
    "digits_baseline": "decide whether a healthy host needs a seed",
    "digits_impaired": "grow early, in the blocks where images are still large",
    "digits_scale": "the same with five slots",
    "digits_shift": "find out what is wrong with each network",
}
ALONE, NO_PRESET = "alone", "none"
PRESETS: Mapping[str, Preset] = {
    "quickstart": Preset(
        "trains a useful policy in minutes; its two populations can be shared by two processes",
        {
            "task": "digits_shift",
            **_ALONE,
            "rounds": 12,
            "values_rounds": 11,
            "population": 32,
        },
    ),
    ALONE: Preset("learn from J alone what to grow, on tasks that make seeds permanent", _ALONE),
    **{task: Preset(summary, {"task": task, **_ALONE}) for task, summary in _DIGITS.items()},
    "ppo_alone": Preset(
        "PPO without action values: twins that draw different plans, and many steps",
        {
            "envs": 64,
            "twins": 8,
            "distinct_twins": True,
            "granularity": "plans",
            "rounds": 39,
            "reward.mode": "sparse",
            "normalize_rewards": False,
            "ppo.epochs": 10,
            "ppo.minibatches": 8,
            "ppo.target_kl": 0.2,
            "ppo.lr_end": 0.0,
            "ppo.epsilon": 0.0,
            "ppo.entropy_coef": 0.003,
            "patience": 3.0,
        },
    ),
    "general": Preset(
        "one policy for networks and data that it has never seen, from 120 kinds of hosts; takes a CPU hour",
        {
            **_ALONE,
            "task": ("worlds_mixed:0-95", "worlds_dense:96-119"),
            "blind": _UNTOLD,
            "rounds": 2,
            "values_rounds": 2,
            "values.steps": 2000,
            "values.lessons": 1500,
            "values.keep": 12288,
            "values.final_lessons": 7500,
            "checkpoint_every": 1,
        },
    ),
    **{
        f"{task}_taught": Preset(f"{summary}; taught by the schedules that ship", {"task": task, **_TAUGHT})
        for task, summary in _DIGITS.items()
    },
    "cifar_baseline": Preset("PPO on the small CIFAR-10 host", {"task": "cifar_baseline", "envs": 16}),
    "cifar_baseline_stable": Preset(
        "the same with smaller steps and twice the rounds",
        {
            "task": "cifar_baseline",
            "envs": 16,
            "rounds": 200,
            "ppo.clip": 0.1,
            "ppo.lr": 3e-4,
            "ppo.lr_end": 3e-4,
        },
    ),
    "cifar_scale": Preset("five blocks and five slots on CIFAR-10", {"task": "cifar_scale", "envs": 8}),
    "cifar_impaired": Preset(
        "a host of 77 parameters that must grow", {"task": "cifar_impaired", "envs": 16}
    ),
    "cifar_minimal": Preset("a host without pooling", {"task": "cifar_minimal", "envs": 16}),
    "tinystories": Preset(
        "a language model of 30 million parameters",
        {"task": "tinystories", "envs": 4, "amp": "bf16", "checkpoint_every": 1},
    ),
}


def resolve(
    preset: str | None = None, file: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[TrainingConfig, dict[str, str]]:
    """The config of a preset, a file and flags (text), and the origin of each value by dotted path. The file
    overrides the preset, and flags override both."""
    layers: list[tuple[str, dict[str, Any]]] = []
    if preset not in (None, NO_PRESET):
        if preset not in PRESETS:
            raise unknown_word("unknown preset", preset, [*PRESETS, NO_PRESET])
        layers.append((f"preset {preset}", flatten(PRESETS[preset].values, f"preset {preset}")))
    if file is not None:
        is_text = Path(file).suffix != ".json"
        layers.append((f"file {file}", flatten(read_file(Path(file)), f"file {file}", text=is_text)))
    layers.append(("flag", flatten(flags or {}, "flag", text=True)))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(LEAVES, "default")
    for origin, leaves in layers:
        values |= leaves
        origins |= dict.fromkeys(leaves, origin)
    return TrainingConfig(**unflatten(values)), origins


def _unique_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise EsperError(f"key {shorten(key)} is not a name")
        if key in values:
            raise EsperError(f"key {shorten(key)} is given twice")
        values[key] = value
    return values


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars stay text, so that `off` is not a boolean and `1e-3` can be a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        return _unique_keys(
            (self.construct_object(key, deep=True), self.construct_object(item, deep=True))
            for key, item in node.value
        )


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a .json, .yaml or .yml file."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise EsperError(f"file {path} ends in {path.suffix!r}; allowed: .json, .yaml, .yml")
    if path.exists() and not path.is_file():
        raise EsperError(f"file {path} is not a regular file")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text, object_pairs_hook=_unique_keys)
        else:
            values = yaml.load(text, _TextLoader)
    except RecursionError:
        raise EsperError(f"file {path}: nested too deeply; settings have at most 3 levels") from None
    except json.JSONDecodeError as error:
        raise EsperError(f"file {path}: not valid JSON: {error}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EsperError(f"file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(values, dict):
        raise EsperError(f"file {path} holds {shorten(values)}, must hold settings by name")
    return values

"""The configuration of a run: what it accepts and refuses, that nothing is lost on the way, and where each
value came from."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import EsperError, GateLevel, Incubation, RewardFamily, RewardMode
from esper.runtime.tasks import get_task_spec
from esper.simic.agent.ppo import PPOConfig
from esper.simic.telemetry.telemetry_config import TelemetryConfig, TelemetryLevel
from esper.simic.training import vectorized
from esper.simic.training.config import LEAVES, TrainingConfig, limits
from esper.simic.training.presets import PRESETS, resolve

UNLIKE_DEFAULTS: dict[str, Any] = {
    "task": "digits_scale",
    "policy": "ppo",
    "rounds": 7,
    "envs": 3,
    "seed": 0,
    "episode_length": 12,
    "rollout_length": 6,
    "batch_size": 8,
    "steps_per_epoch": 2,
    "val_size": 64,
    "slots": ("r0c2", "r0c0"),
    "max_seeds": 2,
    "permissive_gates": False,
    "auto_forward_gates": (GateLevel.G2, GateLevel.G1),
    "incubation": Incubation.STE,
    "data_root": "data",
    "devices": ("cuda:0",),
    "population": 8,
    "amp": "bf16",
    "gpu_preload": True,
    "normalize_rewards": False,
    "ab_reward_modes": (RewardMode.SPARSE, RewardMode.ESCROW),
    "ppo": PPOConfig(lr=3e-4, target_kl=None),
    "hidden": 32,
    "anneal_fraction": 0.5,
    "updates_per_round": 2,
    "telemetry": TelemetryConfig(level=TelemetryLevel.DEBUG),
    "telemetry_dir": "runs/x",
    "checkpoint_every": 0,
    "keep_last": 1,
    "resume": "auto",
}


def refused(*parts: str, **fields: Any) -> None:
    with pytest.raises(EsperError) as error:
        TrainingConfig(**fields)
    for part in parts:
        assert part in str(error.value)


def leaf(config: TrainingConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


# -- what travels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, UNLIKE_DEFAULTS])
def test_nothing_is_lost_as_arguments_or_as_json(fields: dict[str, Any]) -> None:
    config = TrainingConfig(**fields)
    assert TrainingConfig(**config.to_train_kwargs()) == config
    assert TrainingConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert all(leaf(config, name) == value for name, value in fields.items())


def test_every_setting_is_in_the_json() -> None:
    def paths(values: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            path
            for key, value in values.items()
            for path in (paths(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key})
        }

    assert paths(TrainingConfig().to_json()) == set(LEAVES)


def test_plain_values_are_stored_as_declared() -> None:
    config = TrainingConfig(
        slots=["r0c1"],
        reward={"mode": "escrow", "rent": {"max_rent": 2}},
        ppo={"lr": 1},
        incubation="ste",
        auto_forward_gates=["G1"],
        telemetry={"level": "debug"},
        devices=["cpu"],
    )
    assert config.slots == ("r0c1",)
    assert config.reward.mode == RewardMode.ESCROW
    assert type(config.reward.rent.max_rent) is type(config.ppo.lr) is float
    assert config.incubation is Incubation.STE
    assert config.auto_forward_gates == (GateLevel.G1,)
    assert config.telemetry.level is TelemetryLevel.DEBUG
    assert config.devices == ("cpu",)


def test_a_config_cannot_be_changed_and_a_replacement_is_checked() -> None:
    config = TrainingConfig()
    with pytest.raises(FrozenInstanceError):
        config.rounds = 3  # type: ignore[misc]
    assert config.replace(rounds=3) == TrainingConfig(rounds=3)
    with pytest.raises(EsperError, match="rounds is 0"):
        config.replace(rounds=0)


def test_json_with_unknown_or_missing_keys_is_refused() -> None:
    whole = TrainingConfig().to_json()
    with pytest.raises(
        EsperError, match=r"unknown key 'epsode_length' \(did you mean episode_length\?\); allowed: .*task"
    ):
        TrainingConfig.from_json({**whole, "epsode_length": 3})
    with pytest.raises(
        EsperError, match=r"unknown key 'ppo.lrr' \(did you mean ppo.lr\?\); allowed: .*ppo.gamma"
    ):
        TrainingConfig.from_json({**whole, "ppo": {**whole["ppo"], "lrr": 3}})
    del whole["ppo"]["lr"], whole["seed"]
    with pytest.raises(EsperError, match=r"seed, ppo\.lr missing"):
        TrainingConfig.from_json(whole)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, 0)
            for name in (
                "rounds",
                "envs",
                "episode_length",
                "rollout_length",
                "batch_size",
                "steps_per_epoch",
                "val_size",
                "hidden",
                "updates_per_round",
                "keep_last",
            )
        ),
        *((name, -1) for name in ("seed", "max_seeds", "checkpoint_every")),
        ("rounds", 2.5),
        ("rounds", True),
        ("rounds", "3"),
        ("rounds", None),
        ("gpu_preload", 1),
        ("permissive_gates", "yes"),
        ("task", 3),
        ("devices", "cpu"),
        ("slots", "r0c1"),
        ("slots", [1]),
        ("ppo", 3),
        ("telemetry", None),
    ],
)
def test_a_bad_value_is_shown(name: str, value: Any) -> None:
    refused(name, repr(value[0] if isinstance(value, list) else value), **{name: value})


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"policy": "pppo"}, ["'pppo'", "did you mean ppo?", "heuristic, random, wait"]),
        ({"amp": "fp61"}, ["'fp61'", "did you mean fp16?", "off, bf16"]),
        ({"reward": {"mode": "shapd"}}, ["reward.mode", "'shapd'", "did you mean shaped?", "basic_plus"]),
        ({"ppo": {"lrr": 1}}, ["'ppo.lrr'", "did you mean ppo.lr?", "ppo.gamma"]),
        ({"ppo": {"lr": "fast"}}, ["ppo.lr", "'fast'", "a finite number"]),
        ({"ppo": {"value_coef": float("inf")}}, ["ppo.value_coef", "inf"]),
        ({"governor": {"panics": 1.5}}, ["governor.panics", "1.5", "a whole number"]),
        ({"task": ""}, ["task is empty"]),
        ({"slots": ["c0r0"]}, ["'c0r0'", "r<row>c<column>"]),
        ({"slots": ["r0c0", "r0c0"]}, ["not unique"]),
        ({"slots": []}, ["at least one slot"]),
        ({"population": 12}, ["12", "multiple of 8"]),
    ],
)
def test_a_bad_word_is_shown_with_what_is_allowed(fields: dict[str, Any], parts: list[str]) -> None:
    refused(*parts, **fields)


@pytest.mark.parametrize(
    ("parts", "fields"),
    [
        (["rollout_length 9", "episode_length 8"], {"rollout_length": 9, "episode_length": 8}),
        (["fp16", "population 8"], {"amp": "fp16", "population": 8}),
        (["gpu_preload", "cpu"], {"gpu_preload": True}),
        (["devices is empty"], {"devices": ()}),
        (["only sparse"], {"ab_reward_modes": ("sparse",)}),
        (["twice", "sparse, sparse"], {"ab_reward_modes": ("sparse", "sparse")}),
        (
            ["policy heuristic", "allowed: ppo"],
            {"ab_reward_modes": ("sparse", "shaped"), "policy": "heuristic"},
        ),
        (["ab_reward_modes", "loss"], {"ab_reward_modes": ("sparse", "shaped"), "reward_family": "loss"}),
        (["reward.mode sparse", "loss"], {"reward": {"mode": "sparse"}, "reward_family": "loss"}),
        (["g0", "g1, g2, g3"], {"auto_forward_gates": ("g0",)}),
        (["g1, g1", "each once"], {"auto_forward_gates": ("g1", "g1")}),
        (["anneal_fraction is 1.5"], {"anneal_fraction": 1.5}),
        (["anneal_fraction is -1,"], {"anneal_fraction": -1}),
        (["resume auto", "telemetry_dir"], {"resume": "auto"}),
        (["gpu_preload", "cpu, cuda:0"], {"gpu_preload": True, "devices": ("cpu", "cuda:0")}),
        (["rent_curriculum 0.5", "loss"], {"rent_curriculum": 0.5, "reward_family": "loss"}),
        (["rent_curriculum 0.5", "basic"], {"rent_curriculum": 0.5, "reward": {"mode": "basic"}}),
    ],
)
def test_contradictions_are_refused(parts: list[str], fields: dict[str, Any]) -> None:
    refused(*parts, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_length": 8, "episode_length": 8},
        {"rollout_length": 100},
        {"amp": "fp16", "population": 1},
        {"amp": "fp16"},
        {"gpu_preload": True, "devices": ("cuda:1", "cpu")},
        {"reward_family": "loss"},
        {"auto_forward_gates": ()},
        {"resume": "auto", "telemetry_dir": "d"},
        {"resume": "path"},
        {"ppo": {"anneal_updates": 7}},
    ],
)
def test_what_only_looks_like_a_contradiction_is_accepted(fields: dict[str, Any]) -> None:
    assert TrainingConfig(**fields) != TrainingConfig()


# -- layers --------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_the_file_and_that_over_the_preset(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "rounds: 20\nenvs: 4\nppo: {clip: 0.3, lr: 1e-4}\n")
    config, origins = resolve("cifar_baseline_stable", file, {"envs": "2", "ppo.lr": "5e-5"})
    expected = {
        "task": ("cifar_baseline", "preset cifar_baseline_stable"),
        "rounds": (20, f"file {file}"),
        "envs": (2, "flag"),
        "ppo.clip": (0.3, f"file {file}"),
        "ppo.lr": (5e-5, "flag"),
        "ppo.lr_end": (3e-4, "preset cifar_baseline_stable"),
        "ppo.gamma": (PPOConfig().gamma, "default"),
        "seed": (42, "default"),
    }
    assert {path: (leaf(config, path), origins[path]) for path in expected} == expected
    assert list(origins) == list(LEAVES)


def test_a_flag_that_repeats_the_default_is_still_a_flag() -> None:
    config, origins = resolve(flags={"seed": "42"})
    assert config == TrainingConfig()
    assert {path for path, origin in origins.items() if origin != "default"} == {"seed"}


def test_an_unset_flag_leaves_the_file_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "run.json", json.dumps({"amp": "bf16", "permissive_gates": False}))
    config, _ = resolve(None, file, {})
    assert (config.amp, config.permissive_gates) == ("bf16", False)


@given(st.data())
def test_each_layer_decides_exactly_what_it_names(data: st.DataObject) -> None:
    numbers = ["rounds", "envs", "hidden", "ppo.epochs", "ppo.minibatches", "governor.panics"]
    preset = {path: data.draw(st.none() | st.integers(1, 9), label=f"preset {path}") for path in numbers}
    flags = {path: data.draw(st.none() | st.integers(11, 19), label=f"flag {path}") for path in numbers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            PRESETS,
            "drawn",
            type(PRESETS["quickstart"])("", {k: v for k, v in preset.items() if v is not None}),
        )  # type: ignore[arg-type]
        config, origins = resolve("drawn", None, {k: str(v) for k, v in flags.items() if v is not None})
    for path in numbers:
        wanted, origin = next(
            ((v, o) for v, o in ((flags[path], "flag"), (preset[path], "preset drawn")) if v is not None),
            (leaf(TrainingConfig(), path), "default"),
        )
        assert (leaf(config, path), origins[path]) == (wanted, origin)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_names_a_task_that_accepts_it(preset: str) -> None:
    config, origins = resolve(preset)
    for task in config.tasks:
        assert vectorized.resolve_task(config, get_task_spec(task)).name == task
    if preset not in ("alone", "ppo_alone"):  # these two are for any task
        assert origins["task"] == f"preset {preset}"
        assert preset in ("quickstart", "general") or preset.startswith(config.task)


# -- files and text ------------------------------------------------------------------------------------------


def test_a_run_can_be_repeated_from_its_own_config(tmp_path: Path) -> None:
    config = TrainingConfig(**UNLIKE_DEFAULTS)
    assert resolve(file=write(tmp_path / "config.json", json.dumps(config.to_json())))[0] == config


def test_yaml_words_and_numbers_mean_what_they_say(tmp_path: Path) -> None:
    file = write(
        tmp_path / "run.yml",
        """
# YAML 1.1 would read off as a boolean, 1e-3 as text and 010 as eight
amp: off
ppo:
  lr: 1e-3
  target_kl: null
rounds: 010
slots: [r0c1, r0c0]
permissive_gates: true
episode_length: none
reward: {mode: Sparse}
auto_forward_gates: []
""",
    )
    config, _ = resolve(file=file)
    assert (config.amp, config.ppo.lr, config.ppo.target_kl, config.rounds) == ("off", 1e-3, None, 10)
    assert (config.slots, config.permissive_gates, config.episode_length) == (("r0c1", "r0c0"), True, None)
    assert (config.reward.mode, config.auto_forward_gates) == (RewardMode.SPARSE, ())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rounds: 3\nrounds: 4", ["'rounds' is given twice"]),
        ("ppo: {lr: 1}\nppo.lr: 2", ["ppo.lr is given twice"]),
        ("ppo: 3", ["ppo is '3'", "section"]),
        ("rounds:", ["rounds is ''", "whole number"]),
        ("rounds: many", ["rounds is 'many'"]),
        ("rounds: [3]", ["rounds is ['3']"]),
        ("[1, 2]: 3", ["is not a name"]),
        ("- rounds", ["['rounds']", "settings by name"]),
        ("rounds: {a: b", ["line 1"]),
        ("", ["holds None"]),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text: str, parts: list[str], tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", text)
    with pytest.raises(EsperError) as error:
        resolve(file=file)
    for part in [str(file), *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("run.json", '{"rounds": 3, "rounds": 4}', "'rounds' is given twice"),
        ("run.json", '{"rounds": "3"}', "rounds is '3'"),
        ("run.json", "{", "line 1"),
        ("run.toml", "rounds = 3", "allowed: .json, .yaml, .yml"),
        ("run.json", "[]", "settings by name"),
    ],
)
def test_a_bad_json_file(name: str, text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(EsperError) as error:
        resolve(file=write(tmp_path / name, text))
    assert str(tmp_path / name) in str(error.value)
    assert part in str(error.value)


LAUGHS = "\n".join(
    ["a0: &a0 [lol, lol]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("run.json", "[" * 5_000 + "]" * 5_000, "nested too deeply"),
        ("run.yaml", "[" * 5_000 + "]" * 5_000, "nested too deeply"),
        ("run.json", '{"rounds": 1' + "0" * 5_000 + "}", "digits"),
        ("run.yaml", f"slots: [{LAUGHS.splitlines()[0][4:]}]", "slots is"),
        ("run.yaml", LAUGHS, "unknown key 'a0'"),
        ("run.yaml", LAUGHS.replace("a9:", "slots:"), "unknown key 'a0'"),
        ("run.json", '{"task": "\\ud800"}', "task is '\\ud800'"),
        ("run.json", '{"telemetry_dir": "a\\u0000b"}', "control characters"),
        ("run.json", '{"seed": 100000000000000000000}', "from 0 to 9,223,372,036,854,775,807"),
    ],
)
def test_a_hostile_file_is_refused_at_once_with_a_short_message(
    name: str, text: str, part: str, tmp_path: Path
) -> None:
    with pytest.raises(EsperError) as error:
        resolve(file=write(tmp_path / name, text))
    assert part in str(error.value)
    assert len(str(error.value)) < 3_000


def test_aliases_of_aliases_are_not_printed_in_full(tmp_path: Path) -> None:
    """Nine levels of nine aliases are 387 million items."""
    levels = "[&a0 [lol], " + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))
    with pytest.raises(EsperError, match="slots is") as error:
        resolve(file=write(tmp_path / "run.yaml", f"slots: {levels}]"))
    assert len(str(error.value)) < 1_000


@pytest.mark.parametrize("path", [path for path in LEAVES if limits(path)])
def test_every_number_has_an_upper_limit_that_the_message_states(path: str) -> None:
    _, high = limits(path)  # type: ignore[misc]
    for text in ("1e300", "9" * 25, "nan", "inf"):
        with pytest.raises(EsperError, match=f"flag: {path} is .*, must be a .* from .* to {int(high):,}"):
            resolve(flags={path: text})


def test_sections_given_as_objects_are_checked_as_well() -> None:
    refused("ppo.value_coef", "to 1,000,000", ppo=PPOConfig(value_coef=1e9))


@pytest.mark.parametrize(
    "value",
    [10**5_000, "x" * 10**6, [["y" * 1_000] * 1_000] * 1_000],
    ids=["number", "text", "list"],
)
def test_long_values_are_shown_shortened(value: Any) -> None:
    with pytest.raises(EsperError, match="rounds is") as error:
        TrainingConfig(rounds=value)
    assert len(str(error.value)) < 1_000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EsperError, match=r"nothing\.yaml: No such file"):
        resolve(file=tmp_path / "nothing.yaml")


def test_an_unknown_preset_names_the_known() -> None:
    with pytest.raises(
        EsperError, match=r"preset 'cifar_basline' \(did you mean cifar_baseline\?\); allowed: quickstart"
    ):
        resolve("cifar_basline")


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("rounds", "12", 12),
        ("ppo.lr", "3e-4", 3e-4),
        ("ppo.target_kl", "none", None),
        ("slots", ["none"], None),
        ("reward_family", "loss", RewardFamily.LOSS),
        ("gpu_preload", False, False),
        ("telemetry.level", "minimal", TelemetryLevel.MINIMAL),
        ("ab_reward_modes", ["sparse", "shaped"], (RewardMode.SPARSE, RewardMode.SHAPED)),
        ("data_root", "none", None),
    ],
)
def test_what_a_flags_text_means(path: str, text: Any, value: Any) -> None:
    config, origins = resolve(flags={path: text})
    assert leaf(config, path) == value
    assert origins[path] == "flag"

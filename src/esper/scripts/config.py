"""`esper config`: show the settings of a run with their origins, list presets and tasks. The flags of
`esper train` are defined here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import zip_longest
from typing import Annotated, Any, get_args

import tyro
from rich.console import Console
from rich.table import Table
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from esper._text import printable, shorten
from esper.leyline.errors import EsperError, near
from esper.scripts.cli import fail, import_modules
from esper.simic.training.config import (
    LEAVES,
    SECTIONS,
    TrainingConfig,
    choices,
    is_list,
    optional,
    unknown_word,
)
from esper.simic.training.presets import ALONE, PRESETS, resolve

SHORT_HELP = frozenset(
    {
        "policy",
        "task",
        "rounds",
        "envs",
        "seed",
        "episode_length",
        "slots",
        "devices",
        "reward.mode",
        "ppo.lr",
        "teacher",
        "teacher_rounds",
        "telemetry_dir",
        "checkpoint_every",
        "resume",
    }
)
"""Settings that `--help` shows; `--help-all` shows all."""
OTHER_FLAGS = ("--preset", "--config", "--import", "--processes")
"""Flags that are no settings of the run."""
FULL_NAME_ONLY = frozenset({"ppo.epochs", "ppo.bf16"})
"""`--epochs` would be taken for the length of an episode and `--bf16` for the networks' precision."""
GRAMMAR = (
    "A flag overrides --config, which overrides --preset, which overrides the default. A dot in a flag may "
    "be written as a dash (--reward-mode). Flags of the ppo section may be written without the section "
    f"(--lr, --gamma). --help shows the common settings, --help-all all {len(LEAVES)}."
)
DEFAULT_IN_WORDS = {"telemetry_dir": "a new directory under runs"}
"""Defaults of the commands that differ from the default of the setting."""


# -- flags ---------------------------------------------------------------------------------------------------

Name = Annotated[
    str | None, tyro.conf.DisallowNone, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: none)")
]
File = Annotated[
    str | None, tyro.conf.DisallowNone, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
]
Imports = Annotated[
    tuple[str, ...], tyro.conf.arg(name="import", metavar="MODULE", help_behavior_hint="(repeatable)")
]


@dataclass(frozen=True)
class Arguments:
    """The command line of `esper train` and `esper config show`."""

    settings: Annotated[TrainingConfig, tyro.conf.arg(name="")] = field(default_factory=TrainingConfig)
    """Holds the given flags only, as nested mappings of text."""
    preset: Name = None
    """Preset to start from; `esper config presets` lists them. Without one and without --config, a policy is
    trained from the preset `alone`; with `none`, from the defaults."""
    config: File = None
    """YAML or JSON file with settings, for example the config.json of a run."""
    modules: Imports = ()
    """Python module to import first, for example one that registers a task."""
    processes: int = 1
    """Number of processes that train the networks on this machine. The results do not depend on it."""


def parse(prog: str, description: str, arguments: Sequence[str]) -> tuple[TrainingConfig, dict[str, str]]:
    """The config that a command line describes, and the origin of each value."""
    remaining = import_modules(arguments)
    _refuse_values_of_switches(remaining)
    _refuse_missing_values(remaining)
    wants_all = "--help-all" in remaining
    wants_help = wants_all or "--help" in remaining or "-h" in remaining
    given, unknown = tyro.cli(
        Arguments,
        prog=prog,
        description=f"{description}\n\n{GRAMMAR}",
        args=["--help"] if wants_help else remaining,
        registry=_flags(short=wants_help and not wants_all),
        return_unknown_args=True,
    )
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [name for path in LEAVES for name in flag_names(path)] + list(OTHER_FLAGS)
        suggestion = near(flag, known) if flag.startswith("--") else ""
        raise EsperError(f"unknown argument {shorten(unknown[0])}{suggestion}; --help-all lists all flags")
    flags = _given(given.settings)  # type: ignore[arg-type]  # the registry builds a mapping
    names = flags.get("task", [])
    if "policy" not in flags and len(names) > 1 and names[-1] in choices(LEAVES["policy"]):
        flags["policy"] = names.pop()  # in `--task digits_shift ppo` the last word is the policy
    preset = given.preset
    if preset is None and given.config is None and flags.get("policy", "ppo") == "ppo":
        preset = ALONE
    return resolve(preset, given.config, flags)


def flag_names(path: str) -> list[str]:
    """The spellings of a setting's flag; the first one is in the help."""
    full = "--" + path.replace("_", "-")
    names = [full]
    if "." in path:
        names.append(full.replace(".", "-"))
    if path.startswith("ppo.") and path not in FULL_NAME_ONLY:
        names.append("--" + full.removeprefix("--ppo."))
    return names


def _refuse_values_of_switches(arguments: Sequence[str]) -> None:
    """tyro would take the value for a positional argument."""
    switches = {name for path in LEAVES if optional(LEAVES[path])[0] is bool for name in flag_names(path)}
    for word in arguments:
        flag, equals, value = word.partition("=")
        if equals and flag.replace("_", "-") in switches:
            off = f"--no-{flag.removeprefix('--').replace('.', '-')}"
            raise EsperError(f"{flag} takes no value, here {shorten(value)}; allowed: {flag}, {off}")


def _refuse_missing_values(arguments: Sequence[str]) -> None:
    """tyro would print a box. Lists may be empty, and their settings check whether that is allowed."""
    flags = {"--preset", "--config"}
    for path, declared in LEAVES.items():
        kind = optional(declared)[0]
        if kind is not bool and not is_list(kind):
            flags.update(flag_names(path))
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        if word.replace("_", "-") in flags and following.startswith("--"):
            raise EsperError(f"{word} needs a value")


def _flags(*, short: bool) -> ConstructorRegistry:
    """A rule for tyro: a flag for each setting, whose value stays text and is None if it was not given.

    tyro would convert and check by itself. But presets and files must be merged with the flags that were
    given, before anything is checked, and by the decoder that reads them all."""
    registry = ConstructorRegistry()
    prefixes = {TrainingConfig: "", **{kind: f"{path}." for path, kind in SECTIONS.items()}}
    looking_up = False

    @registry.struct_rule
    def section(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal looking_up
        if looking_up or info.type not in prefixes:
            return None
        looking_up = True  # tyro's own rule knows the fields and their docstrings
        spec = ConstructorRegistry.get_struct_spec(info)
        looking_up = False
        assert isinstance(spec, StructConstructorSpec)
        fields = []
        for item in spec.fields:
            path = prefixes[info.type] + item.name
            shown = not short or any(name == path or name.startswith(f"{path}.") for name in SHORT_HELP)
            if shown and is_dataclass(item.type):
                fields.append(item)
            elif shown:
                kind = _flag_type(path, item.type, item.default)
                text = item.helptext() if callable(item.helptext) else item.helptext
                on_one_line = " ".join((text or "").split())  # tyro would keep the line breaks
                fields.append(dataclasses.replace(item, type=kind, default=None, helptext=on_one_line))
        return StructConstructorSpec(instantiate=dict, fields=tuple(fields))

    return registry


def _flag_type(path: str, declared: Any, default: Any) -> Any:
    """Text, a list of text or a switch, with the setting's words and default for the help."""
    kind, _ = optional(declared)
    inner = get_args(kind)[0] if is_list(kind) else kind
    names = choices(inner)
    metavar = (
        f"{{{','.join(names)}}}" if names else {int: "INT", float: "FLOAT", str: "STR", bool: None}[inner]
    )
    if is_list(kind):
        metavar = f"{metavar} [{metavar} ...]"
    if path == "policy":
        metavar = f"[{metavar}]"
    shown = DEFAULT_IN_WORDS.get(path, display(default))
    flag: Any = bool if inner is bool else str
    settings = tyro.conf.arg(
        metavar=metavar,
        aliases=None if path == "policy" else flag_names(path)[1:],
        help_behavior_hint=f"(default: {shown})",
    )
    value = list[flag] if is_list(kind) else flag
    if path == "policy":
        return Annotated[value | None, tyro.conf.Positional, tyro.conf.DisallowNone, settings]
    return Annotated[value | None, tyro.conf.DisallowNone, settings]


def _given(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flags |= _given(value, f"{prefix}{name}.")
        elif value is not None:
            flags[prefix + name] = value
    return flags


# -- the command ---------------------------------------------------------------------------------------------


def display(value: object) -> str:
    """A value as a flag would take it."""
    if isinstance(value, tuple):
        return " ".join(display(item) for item in value) or "(empty)"
    return value if isinstance(value, str) else str(getattr(value, "name", value)).lower()


def show(arguments: Sequence[str]) -> None:
    """Every value with its origin."""
    config, origins = parse("esper config show", "Show every setting with its origin.", arguments)
    table = Table("setting", "value", "origin", box=None)
    for path in LEAVES:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name)
        style = "dim" if origins[path] == "default" else None
        table.add_row(path, printable(display(value)), printable(origins[path]), style=style)
    Console(soft_wrap=True, markup=False).print(table)


def presets(arguments: Sequence[str]) -> None:
    """Every preset with its settings."""
    _no_more(arguments)
    table = Table("preset", "summary", "settings", box=None)
    for name, preset in PRESETS.items():
        settings = ", ".join(f"{path} {display(value)}" for path, value in preset.values.items())
        table.add_row(name, preset.summary, settings)
    Console().print(table)


def tasks(arguments: Sequence[str]) -> None:
    """Every task with its size."""
    _no_more(arguments)
    from esper.runtime.tasks import TASKS  # slow: it builds every host without weights
    from esper.runtime.worlds import EPOCHS, FAMILIES, SLOTS

    table = Table("task", "dataset", "parameters", "slots", "epochs", "population", box=None)
    for task in TASKS.values():
        table.add_row(
            printable(task.name),
            printable(task.dataset),
            f"{task.host_params:,}",
            str(len(task.slots)),
            f"≤ {task.episode_length}" if task.budget == "flops" else str(task.episode_length),
            str(task.population),
        )
    for family, draw in FAMILIES.items():
        epochs, population = f"{EPOCHS[0]} to {EPOCHS[1]}", str(draw(0).population)
        table.add_row(f"{family}:NUMBER", "drawn", "drawn", str(SLOTS), epochs, population)
    Console(markup=False).print(table)


def _no_more(arguments: Sequence[str]) -> None:
    if arguments:
        raise EsperError(f"unknown argument {shorten(arguments[0])}; no arguments are allowed here")


TOPICS = {"show": show, "presets": presets, "tasks": tasks}
USAGE = """usage: esper config show [arguments of `esper train`]
       esper config presets
       esper config tasks [--import MODULE]

show     every setting of the run that `esper train` would start, and where its value comes from
presets  every preset and its settings
tasks    every task and its size

With --import MODULE (repeatable), a module is imported first, for example one that registers a task."""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = import_modules(sys.argv[1:] if arguments is None else arguments)
        asks_for_help = not {"-h", "--help"}.isdisjoint(given)
        if asks_for_help and given[0] != "show":  # `show` takes the flags of `esper train`, and their help
            print(USAGE)
            return 0
        if not given:
            raise EsperError(f"the topic is missing\n{USAGE}")
        if given[0] not in TOPICS:
            raise unknown_word("unknown topic", given[0], TOPICS)
        TOPICS[given[0]](given[1:])
    except EsperError as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

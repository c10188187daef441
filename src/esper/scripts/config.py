"""`esper config`: what a run would be told, and where each value comes from; and the flags that `esper train`
shares with it."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, NoReturn, get_args, get_origin

from rich.console import Console
from rich.table import Table

from esper.leyline.errors import EsperError
from esper.simic.training.config import (
    LEAVES,
    PRESETS,
    Policy,
    TrainingConfig,
    choices,
    kinds,
    optional,
    resolve,
)

HEADINGS = {
    "task": "the run",
    "episode_length": "the task (by default as the task says)",
    "devices": "hardware",
    "reward_family": "rewards",
    "hidden": "the policy",
    "telemetry_dir": "recording",
}
"""First field of each group of flags, and the group's name; a section of the config is a group of its own."""
FULL_NAME_ONLY = frozenset({"ppo.epochs", "ppo.bf16"})
"""`--epochs` would be taken for the episode's length and `--bf16` for the networks' precision."""


class Parser(argparse.ArgumentParser):
    """Refuses bad input by an error instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise EsperError(message)


def field_docs(section: type) -> dict[str, str]:
    """The sentence under each field of a config dataclass."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def make_parser(prog: str, description: str) -> Parser:
    """A flag for every setting. Flags that are not given leave no trace, so they override nothing."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [{'|'.join(get_args(Policy))}] [--preset NAME] [--config FILE] [--FLAG VALUE …]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog=(
            "A dot in a flag may be written as a dash (--reward-mode), and flags of the ppo section need no section (--lr, --gamma). "
            "A flag wins over --config, that over --preset, and that over the default."
        ),
    )
    parser.add_argument(
        "policy",
        nargs="?",
        help=f"{field_docs(TrainingConfig)['policy']} (default: {TrainingConfig().policy})",
    )
    parser.add_argument(
        "--preset", metavar="NAME", help="Start from a preset; `esper config presets` lists them."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="Settings from a .yaml or .json file, such as a run's config.json."
    )
    _add_section(parser, TrainingConfig, "", parser)
    return parser


def _add_section(parser: Parser, section: Any, prefix: str, group: Any) -> None:
    docs, defaults = field_docs(section), section()
    for name, kind in kinds(section).items():
        path = f"{prefix}{name}"
        if is_dataclass(kind):
            _add_section(parser, kind, f"{path}.", parser.add_argument_group(path, inspect.getdoc(kind)))
        elif path != "policy":
            if path in HEADINGS:
                group = parser.add_argument_group(HEADINGS[path])
            sentence = docs.get(name) or inspect.getdoc(
                kind
            )  # a choice may be explained where it is declared
            _add_flag(group, path, kind, f"{sentence} (default: {display(getattr(defaults, name))})")


def _add_flag(group: Any, path: str, kind: Any, text: str) -> None:
    full = "--" + path.replace("_", "-")
    short = {full.replace(".", "-")} - {full}
    if path.startswith("ppo.") and path not in FULL_NAME_ONLY:
        short.add("--" + full.removeprefix("--ppo."))
    kind, _ = optional(kind)
    options: dict[str, Any] = {"dest": path}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        inner = get_args(kind)[0] if get_origin(kind) is tuple else kind
        words = choices(inner)
        options["metavar"] = f"{{{','.join(words)}}}" if words else {int: "N", float: "X", str: "TEXT"}[inner]
        options["nargs"] = "*" if inner is not kind else None
    group.add_argument(full, help=text.replace("%", "%%"), **options)
    if short:
        group.add_argument(*sorted(short), help=argparse.SUPPRESS, **options)


def parse(parser: Parser, arguments: Sequence[str] | None) -> tuple[TrainingConfig, dict[str, str]]:
    """The config that a command line describes, and the origin of each value."""
    given, rest = parser.parse_known_args(arguments)
    if rest:
        near = difflib.get_close_matches(rest[0].split("=")[0], list(parser._option_string_actions), n=1)
        raise EsperError(
            f"unknown argument {rest[0]!r}{f' (did you mean {near[0]}?)' if near else ''}; --help lists all"
        )
    flags = vars(given)
    return resolve(flags.pop("preset", None), flags.pop("config", None), flags)


def display(value: object) -> str:
    """A value as a flag would take it."""
    if isinstance(value, tuple):
        return " ".join(display(item) for item in value) or "(empty)"
    return str(getattr(value, "name", value)).lower() if not isinstance(value, str) else value


def show(config: TrainingConfig, origins: dict[str, str]) -> None:
    table = Table("setting", "value", "from", box=None)
    for path in LEAVES:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name)
        table.add_row(
            path, display(value), origins[path], style=None if origins[path] != "default" else "dim"
        )
    Console(soft_wrap=True).print(table)


def presets() -> None:
    table = Table("preset", "what", "settings", box=None)
    for name, preset in PRESETS.items():
        table.add_row(
            name,
            preset.summary,
            ", ".join(f"{path} {display(value)}" for path, value in preset.values.items()),
        )
    Console().print(table)


def tasks() -> None:
    from esper.runtime.tasks import TASKS  # builds every host's outline

    table = Table("task", "dataset", "parameters", "slots", "epochs", "population", box=None)
    for task in TASKS.values():
        table.add_row(
            task.name,
            task.dataset,
            f"{task.host_params:,}",
            str(len(task.slots)),
            str(task.episode_length),
            str(task.population),
        )
    Console().print(table)


LISTS = {"presets": presets, "tasks": tasks}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="esper config", description=__doc__)
    parser.add_argument(
        "what",
        choices=("show", *LISTS),
        help="show: every value with its origin, for the same arguments as "
        "`esper train`; presets, tasks: what there is to choose from",
    )
    try:
        if given[:1] == ["show"]:
            show(*parse(make_parser("esper config show", "Every value with its origin."), given[1:]))
        else:
            LISTS[parser.parse_args(given).what]()
    except EsperError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

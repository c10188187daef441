"""`esper prove`: policies and their rivals on the same held-out networks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import orjson
import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from esper._files import write_atomic
from esper.leyline import EsperError
from esper.proof import worlds_page
from esper.proof.compare import VERSION, ProofConfig
from esper.proof.compare import prove as compare
from esper.proof.page import page, sections, tables
from esper.proof.search import Track, refine_schedules, search_schedules
from esper.proof.worlds import WorldsConfig, prove_worlds
from esper.runtime.tasks import TaskSpec, parse_task
from esper.runtime.worlds import HELD_OUT_WORLDS
from esper.scripts.cli import fail, import_modules
from esper.scripts.karn import console, optional, reader
from esper.scripts.launch import launch, take_processes
from esper.scripts.process import use_one_core
from esper.simic.ranks import ALONE, Ranks, current, joined, telling
from esper.simic.training.probe import task_schedules
from esper.tamiyo import RecurrentPolicy, Schedules, load_policy, save_schedules, shipped_schedules
from esper.tamiyo.schedules import load_family_schedule
from esper.tamiyo.shipped import default_policies

Several = tyro.conf.arg(metavar="STR [STR ...]", help_behavior_hint="(default: none)")
Policies = tyro.conf.arg(
    metavar="STR [STR ...]",
    help_behavior_hint="(default: those of the task that ship, else on images the general ones)",
)
RIVALS_ALONE = ("none",)
CANDIDATES, PROBE_NETWORKS, NUM_WORLDS = 208, 256, 96


def prove(
    task: Annotated[str | None, optional("STR", "none; give it or --worlds")] = None,
    worlds: Annotated[str | None, optional("FAMILY", "none")] = None,
    policy: Annotated[tuple[str, ...], Policies] = (),
    networks: Annotated[
        int | None,
        tyro.conf.arg(
            name="seeds",
            aliases=["--networks"],
            metavar="INT",
            help_behavior_hint="(default: 96; with --worlds 2 of each world)",
        ),
    ] = None,
    first_network: Annotated[int, tyro.conf.arg(name="first-seed", aliases=["--first-network"])] = 0,
    schedule: Annotated[Path | None, optional("FILE", "the one that ships for the task")] = None,
    search: int = 0,
    candidates: int = CANDIDATES,
    refine: bool = False,
    out: Annotated[Path | None, optional("DIR", "runs/prove-TASK")] = None,
    sample: bool = False,
    probe_networks: Annotated[
        int, tyro.conf.arg(name="probe-seeds", aliases=["--probe-networks"])
    ] = PROBE_NETWORKS,
    transfer: Annotated[tuple[str, ...], Several] = (),
    first_world: int = HELD_OUT_WORLDS[0],
    num_worlds: int = NUM_WORLDS,
    falsifiers: bool = False,
    processes: int = 1,
) -> None:
    """Compare policies with their rivals on held-out networks, which no training has used. The rivals are
    never growing, random growth, the heuristic, fixed schedules, and hosts of equal size or equal FLOPs. With
    a budget of FLOPs they also are a ladder of static networks and successive halving over it. The command
    prints tables, and writes proof.json and report.html.

    With --worlds instead of --task, the comparison is over many drawn worlds. Every finished world is kept in
    the directory of the results, and the same command goes on after the last of them.

    With --import MODULE (repeatable), a module that registers tasks or datasets is imported first.

    Args:
        task: Name of a task, optionally with other sizes, such as digits_shift:base=8,episode_length=12, or a
            world by its number, such as worlds_small:20003.
            `esper config tasks` lists the tasks.
        worlds: Family of worlds, such as worlds_small, optionally with other sizes, such as
            worlds_small:val_size=64.
        policy: Policies to compare: names of policies that ship (such as digits_shift-1), policy files,
            checkpoints or run directories. A run directory means its newest checkpoint;
            RUN/checkpoints/best.safetensors is the policy of its best round. Several policies have equal
            weight in the figures of the learned policy. none: only the rivals.
        networks: Number of held-out networks, of the task or of each world, 2 or more.
        first_network: Number of the first held-out network, from 0.
        schedule: File with the fixed schedules. With --search it is written, by default to schedule.json in
            the directory of the results; otherwise it is read. With --worlds, a file with one schedule for
            all worlds, by places of slots and shares of the episode.
        search: Number of env-steps for a search for schedules, before the comparison; 0: no search.
        candidates: Number of schedules that the search starts with.
        refine: After the search, compare each winner with the schedules that differ from it in one seed, on
            the same networks.
        out: Directory for the results.
        sample: Sample the policies' actions instead of taking the most likely ones.
        probe_networks: Number of training networks on which the linear probe is fitted. It predicts from the
            first epoch which blocks are crippled.
        transfer: Other tasks, such as digits_scale, on which the policies are compared without further
            training.
        first_world: Number of the first world. Worlds from 20,000 on are held out.
        num_worlds: Number of worlds, 2 or more.
        falsifiers: In worlds, also play the policies with hidden quotes and with reversed prices.
        processes: Number of processes that share the work on this machine. The results do not depend on it.
    """
    assert processes == 1, "`main` has started the others"
    ranks = current()
    if (task is None) == (worlds is None):
        raise EsperError(
            "give either --task or --worlds, such as --task digits_shift or --worlds worlds_small"
        )
    if worlds is not None:
        given = {
            "--search": bool(search),
            "--refine": refine,
            "--transfer": bool(transfer),
            "--candidates": candidates != CANDIDATES,
            "--probe-networks": probe_networks != PROBE_NETWORKS,
        }
        unused = [flag for flag, is_given in given.items() if is_given]
        if unused:
            raise EsperError(f"{', '.join(unused)} needs --task; a comparison over worlds does not use it")
        config_of_worlds = WorldsConfig(
            family=worlds.lower(),
            first_world=first_world,
            num_worlds=num_worlds,
            networks=2 if networks is None else networks,
            first_network=first_network,
            sample=sample,
            falsifiers=falsifiers,
        )
        _prove_worlds(config_of_worlds, _load(policy, config_of_worlds.task(first_world)), schedule, out)
        return
    if falsifiers or first_world != HELD_OUT_WORLDS[0] or num_worlds != NUM_WORLDS:
        raise EsperError("--falsifiers, --first-world and --num-worlds need --worlds")
    assert task is not None
    networks = 96 if networks is None else networks
    spec, others = parse_task(task), [parse_task(name) for name in transfer]
    config = ProofConfig(
        networks=networks, first_network=first_network, sample=sample, probe_networks=probe_networks
    )
    brief = ProofConfig(networks=networks, first_network=first_network, sample=sample, brief=True)
    policies = _load(policy, spec)
    if others and not policies:
        raise EsperError(f"--transfer {' '.join(transfer)} needs at least one --policy")
    directory = Path("runs") / f"prove-{spec.name.replace(':', '-')}" if out is None else out
    if ranks.is_first:
        writable(directory)
    with bars(ranks) as track:
        schedules = _schedules(spec, schedule, search, candidates, refine, directory, track)
        results = [
            compare(spec, policies, config, schedules=schedules, track=track),
            *(compare(other, policies, brief, track=track) for other in others),
        ]
    if not ranks.is_first:
        return
    for result in results:
        show(result)
    content = {"version": VERSION} | results[0] | {"transfer": results[1:], "page": sections(results)}
    _write(directory, content, page(results))


def _load(names: Sequence[str], task: TaskSpec) -> dict[str, RecurrentPolicy]:
    """The policies by name, or where none is named those that ship for the task."""
    if tuple(names) == RIVALS_ALONE:
        return {}
    defaults = default_policies(task.name, images=task.topology == "cnn")
    return {name: load_policy(name) for name in names or defaults}


def _prove_worlds(
    config: WorldsConfig, policies: Mapping[str, RecurrentPolicy], path: Path | None, out: Path | None
) -> None:
    """The comparison over worlds."""
    family, ranks = config.family.partition(":")[0], current()
    directory = Path("runs") / f"prove-{family}" if out is None else out
    shipped = shipped_schedules(family)
    if path is None and shipped.is_file():
        path = shipped
    schedule = None if path is None else load_family_schedule(path, family).schedule
    if ranks.is_first:
        writable(directory)
    advance = _count_worlds(config.num_worlds) if ranks.is_first else lambda _more: None
    result = prove_worlds(config, policies, directory / "worlds", schedule=schedule, advance=advance)
    if not ranks.is_first:
        return
    _print_tables(worlds_page.tables(result))
    for text in worlds_page.summary(result):
        print(text)
    _print_absent(result)
    content = {"version": VERSION} | result | {"page": worlds_page.sections(result)}
    _write(directory, content, worlds_page.page(result))


def _count_worlds(total: int) -> Callable[[int], None]:
    """Progress: a line whenever worlds are finished, with the time that the rest will take."""
    start, done = time.perf_counter(), 0
    kept: int | None = None

    def advance(more: int) -> None:
        nonlocal done, kept
        done += more
        if kept is None:  # the first call counts what an earlier command has finished
            kept = more
            print(f"worlds: {done} of {total} are finished", file=sys.stderr, flush=True)
            return
        seconds = (time.perf_counter() - start) / (done - kept) * (total - done)
        left = timedelta(seconds=round(seconds))
        print(f"worlds: {done} of {total}, {left} left", file=sys.stderr, flush=True)

    return advance


def _write(directory: Path, content: Mapping[str, Any], html: str) -> None:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    write_atomic(directory / "proof.json", orjson.dumps(content, option=options))
    write_atomic(directory / "report.html", html.encode())
    print(f"results: {directory / 'proof.json'}, {directory / 'report.html'}")


def _schedules(
    task: TaskSpec,
    path: Path | None,
    budget: int,
    candidates: int,
    refine: bool,
    directory: Path,
    track: Track,
) -> Schedules | None:
    """The schedules of a search, of the given file, or of the file that ships; None if there are none."""
    if budget:
        place, is_first = path or directory / "schedule.json", current().is_first
        if is_first:
            writable(place.parent)
        schedules = search_schedules(task, budget, candidates=candidates, track=track)
        command = f"esper prove --task {task.name} --search {budget} --candidates {candidates}"
        if is_first:
            save_schedules(place, schedules, task.slots, command)
        if refine:
            schedules = refine_schedules(task, schedules, track=track)
            if is_first:
                save_schedules(place, schedules, task.slots, f"{command} --refine")
        return schedules
    if refine:
        raise EsperError("--refine needs --search, whose winners it refines")
    shipped = shipped_schedules(task.name)
    if path is None and not shipped.is_file():
        return None
    return task_schedules(task, path or shipped)


def show(result: Mapping[str, Any]) -> None:
    """Print the tables of one task."""
    _print_tables(tables(result))
    _print_absent(result)


def _print_tables(all_tables: Iterable[tuple[str, Sequence[str], list[list[str]]]]) -> None:
    for title, heads, rows in all_tables:
        if rows:
            table = Table(*heads, title=title, title_justify="left", box=None)
            for row in rows:
                table.add_row(*row)
            console().print(table, "")


def _print_absent(result: Mapping[str, Any]) -> None:
    for name, why in result["absent"].items():
        print(f"left out {name}: {why}")


# -- shared with `esper grow` and `esper eval` ---------------------------------------------------------------


def task_command(command: Callable[..., None]) -> Callable[..., int]:
    """The `main` of a command that takes a task: `--import MODULE` is handled before the other arguments."""
    run = reader(command)

    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            remaining = import_modules(sys.argv[1:] if arguments is None else arguments)
        except EsperError as error:
            return fail(error)
        return run(remaining)

    return main


def writable(directory: Path) -> Path:
    """Check that results can be written there, before hours are spent."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / ".writable", b"")
        (directory / ".writable").unlink()
    except OSError as error:
        raise EsperError(
            f"cannot write to {directory}: {error.strerror}; choose another place with --out"
        ) from error
    except ValueError as error:  # a name that no directory can have
        raise EsperError(f"cannot write to {str(directory)!r}: {error}") from error
    return directory


class Rate(ProgressColumn):
    """Env-steps per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")


@contextmanager
def bars(ranks: Ranks = ALONE) -> Iterator[Track]:
    """Progress of each part of the work in env-steps: a bar on a terminal, else a line for each tenth. Only
    the first rank shows it."""
    console = Console(stderr=True)
    if not ranks.is_first:
        yield lambda _name, _steps: lambda _more: None
        return
    if not console.is_terminal:
        yield _lines
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        yield lambda name, steps: partial(progress.advance, progress.add_task(name, total=steps))


def _lines(name: str, steps: int) -> Callable[[int], None]:
    start, done = time.perf_counter(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if done * 10 // steps > (done - more) * 10 // steps:
            seconds = time.perf_counter() - start
            left = timedelta(seconds=round(seconds * max(steps - done, 0) / done))
            print(
                f"{name}: {done:,} of {steps:,} env-steps, {done / seconds:,.0f}/s, {left} left",
                file=sys.stderr,
                flush=True,
            )

    return advance


def _told(*arguments: Any, **options: Any) -> None:
    """`prove`; the other ranks are told if it fails."""
    with telling(current()):
        prove(*arguments, **options)


_command = task_command(wraps(prove)(_told))


def main(arguments: Sequence[str] | None = None) -> int:
    use_one_core()
    try:
        processes, remaining = take_processes(sys.argv[1:] if arguments is None else arguments)
        if processes > 1:
            return launch("esper.scripts.prove", remaining, processes)
        with joined({"arguments": " ".join(remaining)}) as ranks:
            code = _command(remaining)
            if code:
                ranks.reported()
            return code
    except EsperError as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())

"""`esper prove`: policies and their rivals on the same held-out seeds."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import torch
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

from esper._charts import RIGHT, WIDTH, figure, number, stacked, tag, ticks
from esper._files import write_atomic
from esper._statistics import Estimate
from esper.leyline import EsperError, LifecycleOp
from esper.proof.compare import LEARNED, ProofConfig
from esper.proof.compare import prove as compare
from esper.proof.search import Track, refine_schedules, search_schedules
from esper.runtime.tasks import TaskSpec, parse_task
from esper.scripts.karn import console, reader
from esper.tamiyo import Schedules, load_policy, load_schedules, save_schedules, shipped_schedules

COLUMNS = (
    ("J", "iqm", 100, "points of J"),
    ("J", "mean", 100, "J, mean"),
    ("test_accuracy", "iqm", 1, "test accuracy, %"),
    ("accuracy_per_kparam", "iqm", 1, "accuracy per 1,000 parameters"),
    ("added_params", "mean", 1, "added parameters"),
    ("flops", "mean", 1e-6, "training MFLOPs"),
    ("germinated", "mean", 1, "germinated"),
    ("fossilized", "mean", 1, "fossilized"),
    ("pruned", "mean", 1, "pruned"),
    ("rollbacks", "mean", 1, "rollbacks"),
)
"""What is shown of a measure: its mean or interquartile mean, times so much, under this head."""
FIGURES = ("points of J", "test accuracy, %", "added parameters", "training MFLOPs")


def prove(
    task: str,
    policy: tuple[str, ...] = (),
    seeds: int = 96,
    first_seed: int = 0,
    schedule: Path | None = None,
    search: int = 0,
    candidates: int = 208,
    refine: bool = False,
    out: Path | None = None,
    sample: bool = False,
    probe_seeds: int = 256,
    transfer: tuple[str, ...] = (),
) -> None:
    """Compare policies with never growing, random growth, rules of thumb, fixed schedules and hosts of equal
    size or FLOPs, on seeds that no training has seen. Prints tables; writes proof.json and report.html.

    Args:
        task: A task, or one with other sizes, such as digits_shift:base=8,episode_length=12.
        policy: Policies that ship (by name) or files with one; several are strata of one cohort.
        seeds: Held-out seeds, 2 or more.
        first_seed: The first of them.
        schedule: The file of the fixed schedules; by default what ships for the task.
        search: Search for schedules first, within so many env-steps, and write them to the file.
        candidates: Schedules that the search begins with.
        refine: Then let each of the search's winners meet those that differ in one seed, on the same
        networks.
        out: Where the results go; by default runs/prove-TASK.
        sample: Sample the policies' actions instead of taking the most likely ones.
        probe_seeds: Training seeds that the probe is fitted on.
        transfer: Tasks that the policies are also tried on as they are, such as digits_scale.
    """
    torch.set_num_threads(1)
    spec, others = parse_task(task), [parse_task(name) for name in transfer]
    config = ProofConfig(seeds=seeds, first_seed=first_seed, sample=sample, probe_seeds=probe_seeds)
    brief = ProofConfig(seeds=seeds, first_seed=first_seed, sample=sample, brief=True)
    policies = {name: load_policy(name) for name in policy}
    if others and not policies:
        raise EsperError(f"--transfer {' '.join(transfer)} needs a policy to try there")
    directory = writable(Path("runs") / f"prove-{spec.name.replace(':', '-')}" if out is None else out)
    with bars() as track:
        found = _schedules(spec, schedule, search, candidates, refine, directory, track)
        results = [
            compare(spec, policies, config, schedules=found, track=track),
            *(compare(other, policies, brief, track=track) for other in others),
        ]
    for result in results:
        show(result)
    content = results[0] | {"transfer": results[1:]}
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    write_atomic(directory / "proof.json", orjson.dumps(content, option=options))
    write_atomic(directory / "report.html", page(results).encode())
    print(f"results: {directory / 'proof.json'}, {directory / 'report.html'}")


def writable(directory: Path) -> Path:
    """Make sure that results can be written there, before hours are spent."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / ".writable", b"")
        (directory / ".writable").unlink()
    except OSError as error:
        raise EsperError(
            f"cannot write to {directory}: {error.strerror}; choose another place with --out"
        ) from error
    return directory


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")


@contextmanager
def bars() -> Iterator[Track]:
    """How each part of the work gets on, in env-steps: a bar on a terminal, else a line for each tenth of
    it."""
    console = Console(stderr=True)
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
        yield lambda what, steps: partial(progress.advance, progress.add_task(what, total=steps))


def _lines(what: str, steps: int) -> Callable[[int], None]:
    start, done = time.perf_counter(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if done * 10 // steps > (done - more) * 10 // steps:
            seconds = time.perf_counter() - start
            left = timedelta(seconds=round(seconds * max(steps - done, 0) / done))
            print(
                f"{what}: {done:,} of {steps:,} env-steps, {done / seconds:,.0f}/s, {left} left",
                file=sys.stderr,
                flush=True,
            )

    return advance


def _schedules(
    task: TaskSpec,
    path: Path | None,
    budget: int,
    candidates: int,
    refine: bool,
    directory: Path,
    track: Track,
) -> Schedules | None:
    """Those that a search finds, those in the file, those that ship, or none."""
    if budget:
        place = path or directory / "schedule.json"
        writable(place.parent)
        found = search_schedules(task, budget, candidates=candidates, track=track)
        command = f"esper prove --task {task.name} --search {budget} --candidates {candidates}"
        save_schedules(place, found, task.slots, command)
        if refine:
            found = refine_schedules(task, found, track=track)
            save_schedules(place, found, task.slots, f"{command} --refine")
        return found
    if refine:
        raise EsperError("--refine needs --search, whose winners it refines")
    shipped = shipped_schedules(task.name)
    if path is None and not shipped.is_file():
        return None
    return load_schedules(path or shipped, task.name, slots=task.slots, blueprints=task.blueprints)


# -- tables --------------------------------------------------------------------------------------------------


def _with_interval(found: Estimate | None, scale: float = 1.0) -> str:
    return (
        "—"
        if found is None
        else f"{found.value * scale:.4g} [{found.low * scale:.4g}, {found.high * scale:.4g}]"
    )


def tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, heads and rows of everything there is to say."""
    names, settings = ", ".join(result["policies"]) or "none", result["settings"]
    last = settings["first_seed"] + settings["seeds"] - 1
    title = f"{result['task']}: held-out seeds {settings['first_seed']} to {last}, policies: {names}"
    yield (
        f"{title}; interquartile means of J and accuracies, means of the rest, 95 % intervals",
        ("cohort", *(column[-1] for column in COLUMNS)),
        [
            [name, *(_with_interval(row[measure][kind], scale) for measure, kind, scale, _ in COLUMNS)]
            for name, row in result["cohorts"].items()
        ],
    )
    yield (
        f"{result['task']}: learned − other, paired, in points of J and of test accuracy",
        (
            "other",
            "J, mean",
            "J, interquartile mean",
            "J, mean of each policy",
            "accuracy, mean",
            "accuracy, interquartile mean",
        ),
        [
            [
                name,
                *(_with_interval(row["J"][kind], 100) for kind in ("mean", "iqm")),
                "; ".join(_with_interval(one["mean"], 100) for one in row["J"]["by_policy"]),
                *(_with_interval(row["test_accuracy"][kind]) for kind in ("mean", "iqm")),
            ]
            for name, row in result["learned_minus"].items()
        ],
    )
    yield (
        f"{result['task']}: networks with a permanent seed in a slot, by the state of a block, in %",
        ("slot", "block", "crippled", "healthy", "difference"),
        [
            [
                row["slot"],
                str(row["block"]),
                *(_with_interval(row[part], 100) for part in ("crippled", "healthy", "difference")),
            ]
            for row in result.get("growth_by_condition", ())
        ],
    )


def show(result: Mapping[str, Any]) -> None:
    for title, heads, rows in tables(result):
        if rows:
            table = Table(*heads, title=title, title_justify="left", box=None)
            for row in rows:
                table.add_row(*row)
            console().print(table, "")
    for name, why in result["absent"].items():
        print(f"left out {name}: {why}")


# -- the page ------------------------------------------------------------------------------------------------


def intervals(title: str, note: str, rows: Mapping[str, Estimate], scale: float) -> str:
    """A dot with its interval for each name; a line at 0 where it is in sight."""
    left, step = 130, 22
    low, high = min(e.low for e in rows.values()) * scale, max(e.high for e in rows.values()) * scale
    margin = 0.05 * (high - low) or 1.0
    low, high, height = low - margin, high + margin, step * len(rows) + 20

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - RIGHT - left)

    parts = []
    for at in ticks(low, high):
        css = "limit" if abs(at) < 1e-12 else "grid"
        parts += [
            tag("line", css=css, x1=x(at), x2=x(at), y1=0, y2=height - 18),
            tag("text", escape(f"{at:g}"), x=x(at), y=height - 5, text_anchor="middle"),
        ]
    for i, (name, found) in enumerate(rows.items()):
        y = step * i + step / 2
        told = tag("title", escape(f"{name}: {_with_interval(found, scale)}"))
        parts += [
            tag("text", escape(name), x=left - 8, y=y + 4, text_anchor="end"),
            tag("line", css="total", x1=x(found.low * scale), x2=x(found.high * scale), y1=y, y2=y),
            tag(
                "circle", told, css="c1" if name == LEARNED else "c0", cx=x(found.value * scale), cy=y, r=4.5
            ),
        ]
    return figure(title, note, tag("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img"))


def _figures(result: Mapping[str, Any]) -> list[str]:
    made = [
        intervals(
            head,
            f"{'Mean' if kind == 'mean' else 'Interquartile mean'} over the held-out seeds, 95 % interval.",
            {name: row[measure][kind] for name, row in result["cohorts"].items()},
            scale,
        )
        for measure, kind, scale, head in COLUMNS
        if head in FIGURES
    ]
    if result["learned_minus"]:
        made += [
            intervals(
                f"learned − other, {head}",
                "Mean of the paired differences, 95 % interval.",
                {name: row[measure]["mean"] for name, row in result["learned_minus"].items()},
                scale,
            )
            for measure, _, scale, head in COLUMNS
            if head in FIGURES[:2]
        ]
    planted = Counter(
        (d.slot, d.epoch)
        for stratum in result["episodes"].get(LEARNED, ())
        for p in stratum
        for d in p.decisions
        if d.op == LifecycleOp.GERMINATE.name
    )
    if planted:
        epochs = range(1, 1 + max(epoch for _, epoch in planted))
        made.append(
            stacked(
                "When and where it plants",
                epochs,
                {
                    slot: [planted[slot, epoch] for epoch in epochs]
                    for slot in sorted({slot for slot, _ in planted})
                },
                note="Germinations by epoch.",
                x_label="epoch",
            )
        )
    return made


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return tag(
        "div",
        f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{body}</table>",
        css="wide",
    )


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """All of it as one HTML page that needs no network."""
    style, script = (
        files("esper.karn").joinpath("assets", name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    body = ""
    for result in results:
        said = "".join(
            f"<h3>{escape(title)}</h3>{_table(heads, rows)}" for title, heads, rows in tables(result) if rows
        )
        left_out = "".join(
            tag("p", escape(f"left out {name}: {why}"), css="absent")
            for name, why in result["absent"].items()
        )
        schedule = " + ".join(
            f"{p['blueprint']} in {p['slot']} at epoch {p['epoch']}, {p['style'].lower()}"
            for p in result["schedule"] or ()
        )
        facts = escape(
            f"host of {number(result['host_params'])} parameters; fixed schedule: "
            f"{'none' if result['schedule'] is None else schedule or 'not to grow'}"
        )
        drawn = tag("div", "".join(_figures(result)), css="grid")
        body += tag("section", f"<h2>{escape(result['task'])}</h2><p>{facts}</p>{drawn}{said}{left_out}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>proof: {escape(results[0]['task'])}</title><style>{style}</style></head><body>"
        f"<header><h1>Proof</h1></header><main>{body}</main><script>{script}</script></body></html>\n"
    )


main = reader(prove)

if __name__ == "__main__":
    sys.exit(main())

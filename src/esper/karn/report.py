"""One run as one HTML file: the page of `esper ui`, with what it shows of this run inside."""

from __future__ import annotations

from pathlib import Path

from esper._page import freeze
from esper.karn.views import Views
from esper.karn.web import layout
from esper.karn.web.feed import Feed
from esper.leyline import EsperError
from esper.nissa import RunDirectory, TelemetryError


def render_report(path: Path, growth_rounds: int = 24) -> str:
    """The page. It has the growth of `growth_rounds` evenly spaced rounds, the last among them, and of the
    best round; of the last and the best round also every decision."""
    if growth_rounds < 1:
        raise EsperError(f"report: growth_rounds is {growth_rounds}, must be 1 or more")
    run = RunDirectory.open(path)
    Views(run)  # checks every value of the log
    feed = Feed(run.path)
    feed.look()
    while feed.busy:
        feed.look()
    if feed.damage:
        raise TelemetryError("; ".join(feed.damage))
    recorded = feed.recorded()
    best = feed.best if feed.best in recorded else None
    closely = {index for index in (best, *recorded[-1:]) if index is not None}
    rounds = {index: feed.round(index) for index in sorted(_spaced(recorded, growth_rounds) | closely)}
    episodes = {
        f"{index + 1}/{network['env']}": feed.episode(index, network["env"])
        for index in sorted(closely)
        for network in rounds[index]["envs"]
    }
    name = run.path.resolve().name
    data = {
        "layout": layout.describe(),
        "run": {"id": name, "whole": True, **feed.everything()},
        "rounds": {index + 1: content for index, content in rounds.items()},
        "episodes": episodes,
    }
    return freeze(name, data)


def _spaced(recorded: list[int], count: int) -> set[int]:
    """`count` rounds at even distances, the last among them."""
    if not recorded:
        return set()
    last = len(recorded) - 1
    return {recorded[last - round(i * last / max(count - 1, 1))] for i in range(count)}

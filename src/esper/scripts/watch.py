"""`esper watch`: a run on the terminal, live or finished."""

from __future__ import annotations

import sys
from typing import Annotated

from esper.karn.screens import env_screen, overview, policy_screen
from esper.karn.summary import open_run
from esper.leyline import EsperError
from esper.scripts.karn import RunPath, console, optional, reader, width


def watch(
    run: RunPath,
    env: int = 0,
    round: Annotated[int | None, optional("INT", "the last recorded round")] = None,  # noqa: A002
) -> None:
    """Show a run on three screens: overview, policy, one env. If the run is still going, the screens follow
    it. If the output is not a terminal, the screens are printed once as plain text.

    Args:
        run: A run directory, the name of a run under runs/, or "latest".
        env: Number of the env whose screen is shown first, from 0.
        round: Number of the round in which the env is shown, from 1.
    """
    if round is not None and round < 1:
        raise EsperError(f"watch: round is {round}, must be 1 or more; rounds are counted from 1")
    round_idx = None if round is None else round - 1
    views = open_run(run)
    screens = [
        overview(views, width()),
        policy_screen(views, width()),
        env_screen(views, width(), round_idx, env),
    ]
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for screen in screens:
            console().print(screen, "")
        return
    try:
        from esper.karn.watch import WatchApp
    except ImportError as error:
        raise EsperError(f"textual is not installed ({error}); to get it: pip install textual") from error
    WatchApp(views, round_idx=round_idx, env_id=env).run()


main = reader(watch)

if __name__ == "__main__":
    sys.exit(main())

"""`esper watch`: a run on the terminal, live or finished."""

from __future__ import annotations

import sys

from esper.karn.screens import env_screen, overview, policy_screen
from esper.karn.summary import open_run
from esper.leyline import EsperError
from esper.scripts.karn import RunPath, console, reader, width


def watch(run: RunPath, env: int = 0, round: int | None = None) -> None:  # noqa: A002
    """Show a run: an overview, one env, and the policy. Elsewhere than on a terminal, print these once as
    plain text.

    Args:
        run: The run directory.
        env: The env to show first.
        round: The round to show it in; by default the last on record.
    """
    views = open_run(run)
    shown = [screen(views, width()) for screen in (overview, policy_screen)]
    shown.append(env_screen(views, width(), round, env))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for screen in shown:
            console().print(screen, "")
        return
    try:
        from esper.karn.watch import WatchApp
    except ImportError as error:
        raise EsperError(
            f"textual is not installed ({error}); to get it: pip install 'esper-grow[watch]'"
        ) from error
    WatchApp(views, round_idx=round, env_id=env).run()


main = reader(watch)

if __name__ == "__main__":
    sys.exit(main())

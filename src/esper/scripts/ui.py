"""`esper ui`: the runs below a directory as a web page, live."""

from __future__ import annotations

import secrets
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import tyro

from esper._text import printable
from esper.karn.summary import RUNS
from esper.leyline import EsperError
from esper.scripts.karn import optional, reader

HOST, PORT = "127.0.0.1", 8765


def ui(
    runs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]")] = RUNS,
    port: Annotated[int | None, optional("INT", f"{PORT}, or a free one if it is taken")] = None,
    open: bool = False,  # noqa: A002  the name of the flag
) -> None:
    """Show runs in a browser, as they train: learning, networks, decisions, comparisons and proofs. Only this
    machine can ask, and nothing is ever written. Ctrl-C ends it.

    Args:
        runs: Directory that holds the runs.
        port: Port to listen on.
        open: Open the page in a browser.
    """
    try:
        from esper.karn.web.server import make_server
    except ImportError as error:
        raise EsperError(
            f"{error.name} is not installed; to get it: pip install starlette uvicorn"
        ) from error
    token = secrets.token_urlsafe(18)
    server, listening = make_server(runs, token), _listen(port)
    url = f"http://{HOST}:{listening.getsockname()[1]}/{token}/"
    print(f"{url}\nThe page shows the runs in {printable(runs)}. Ctrl-C ends it.", flush=True)
    if open:
        webbrowser.open(url)
    with suppress(KeyboardInterrupt):  # how it is meant to end
        server.run(sockets=[listening])


def _listen(port: int | None) -> socket.socket:
    """A socket that only this machine reaches. It accepts at once, so that the URL that is printed can be
    opened before the server answers."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, PORT if port is None else port))
    except (OSError, OverflowError) as error:
        if port is not None:
            raise EsperError(f"--port {port}: {error}; choose another, or leave it out") from error
        listening.bind((HOST, 0))
    listening.listen()
    return listening


main = reader(ui)

if __name__ == "__main__":
    sys.exit(main())

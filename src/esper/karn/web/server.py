"""The server of `esper ui`: reads run directories and answers on this machine alone.

Who may ask: whoever knows the token, which is the first part of every path. A Host that is not this machine,
or an Origin that is not this page, is refused, so a page from elsewhere can neither ask nor be answered.
Nothing is ever written: only GET and HEAD exist.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esper._page import assets, shell
from esper.karn.compare import compare_runs
from esper.karn.summary import LATEST, open_run
from esper.karn.web import layout
from esper.karn.web.catalog import Catalog
from esper.karn.web.feed import Feed
from esper.karn.web.streams import POLL, Stream, encode
from esper.leyline import EsperError

OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
"""Of any port, so that the page can be reached through a tunnel."""
FEEDS = 8
"""Runs that are held in memory beside those that a client follows."""
COMPARED = 8
"""Runs that are compared at most."""
CLIENTS = 256
"""Connections at once; more are turned away."""
HEARTBEAT = 15.0
"""Seconds after which a stream that has nothing to say sends a sign of life."""
PATIENCE = 30.0
"""Seconds that a client may leave what it was sent unread; then its stream is closed."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Lets through what this page asks on this machine, with the token. Every answer has the headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no websockets here

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope))
        await (self.app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not OWN_HOST.fullmatch(host):
            return _refuse(403, "this server answers to the names of its own machine only")
        if origin is not None and origin != f"http://{host}":
            return _refuse(403, "this page cannot be asked by another one")
        if request.method not in ("GET", "HEAD"):
            return _refuse(405, "this server only reads")
        given = request.url.path.split("/")[1]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return _refuse(403, "open the URL that `esper ui` has printed: it holds a token")
        return None


def _refuse(status: int, reason: str) -> Response:
    return PlainTextResponse(f"{reason}\n", status)


class EventStream(Response):
    """Server-sent events, until the client goes or the server ends. A client that stops reading is left after
    a while; nobody else waits for it."""

    def __init__(self, events: AsyncIterator[bytes], ending: asyncio.Event) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._ending = events, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        sending = asyncio.ensure_future(self._send_all(send))
        tasks = [
            sending,
            asyncio.ensure_future(_disconnected(receive)),
            asyncio.ensure_future(self._ending.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            failure, *_ = await asyncio.gather(*tasks, return_exceptions=True)
        if self._ending.is_set():
            await send({"type": "http.response.body", "body": b""})
        elif isinstance(failure, Exception) and not isinstance(failure, TimeoutError):
            raise failure

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            message = {"type": "http.response.body", "body": event, "more_body": True}
            await asyncio.wait_for(send(message), PATIENCE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Site:
    """The answers. Everything that reads files runs in a thread."""

    def __init__(self, root: Path) -> None:
        self.catalog = Catalog(root)
        self.ending = asyncio.Event()
        self._feeds: OrderedDict[Path, Feed] = OrderedDict()

    def feed(self, run: str) -> Feed:
        """The feed of a run, shared by all clients."""
        path = self.catalog.path(run)
        feed = self._feeds.pop(path, None) or Feed(path)
        self._feeds[path] = feed
        while len(self._feeds) > FEEDS:
            self._feeds.popitem(last=False)
        return feed

    def followed(self, run: str | None) -> Stream:
        return self.catalog if run is None else self.feed(run)

    async def events(self, run: str | None, cursor: str | None) -> AsyncIterator[bytes]:
        """What a client has not seen yet, as it comes. The run `latest` changes when a newer one starts."""
        stream = await run_in_threadpool(self.followed, run)
        silent = 0.0
        while True:
            if run == LATEST:
                stream = await run_in_threadpool(self.followed, run)
            news = await run_in_threadpool(stream.since, cursor)
            if news is not None:
                message, cursor = news
                yield b"id: %s\ndata: %s\n\n" % (cursor.encode(), message)
                silent = 0.0
            elif silent >= HEARTBEAT:
                yield b": nothing new\n\n"
                silent = 0.0
            pause = 0.05 if stream.busy else POLL
            silent += pause
            await asyncio.sleep(pause)

    # -- answers ---------------------------------------------------------------------------------------------

    def layout(self, _request: Request) -> Any:
        return layout.describe()

    def round(self, request: Request) -> Any:
        return self.feed(request.query_params["run"]).round(int(request.query_params["round"]) - 1)

    def episode(self, request: Request) -> Any:
        index, env = int(request.query_params["round"]) - 1, int(request.query_params["env"])
        return self.feed(request.query_params["run"]).episode(index, env)

    def compare(self, request: Request) -> Any:
        names = request.query_params.getlist("run")
        if not 2 <= len(names) <= COMPARED:
            raise EsperError(f"compare: {len(names)} runs are given, must be 2 to {COMPARED}")
        paths = [self.catalog.path(name) for name in names]
        result = compare_runs([open_run(path) for path in paths])
        rows = [
            {
                "metric": row.metric.name,
                "unit": row.metric.unit,
                "better": row.metric.better,
                "runs": [_triple(estimate) for estimate in row.runs],
                "differences": [_triple(estimate) for estimate in row.differences],
            }
            for row in result.rows
        ]
        return {
            "rows": rows,
            "units": result.units,
            "paired": result.paired,
            "notes": result.notes,
            "curves": {name: self.feed(name).curve("rounds/avg_objective") for name in names},
        }

    def proof(self, request: Request) -> Any:
        name = request.query_params["proof"]
        content = orjson.loads(self.catalog.proof(name).read_bytes())
        if "page" not in content:
            raise EsperError(f"{name}/proof.json has no page: it was written before pages were part of it")
        return content["page"]


def _triple(estimate: Any) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


# -- the application -----------------------------------------------------------------------------------------


def make_app(site: Site, token: str) -> ASGIApp:
    """The answers of a site at their paths."""
    files = assets()

    def page(_request: Request) -> Response:
        return Response(shell(), media_type="text/html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return _refuse(404, "there is no such file")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(files[name], media_type=kind)

    async def stream(request: Request) -> Response:
        cursor = request.headers.get("last-event-id") or request.query_params.get("cursor")
        run = request.query_params.get("run")
        if run is not None:
            try:
                await run_in_threadpool(site.feed, run)
            except LookupError as error:
                return _refuse(404, str(error.args[0]))
        return EventStream(site.events(run, cursor), site.ending)

    inner = [
        Route("/", page),
        Route("/assets/{name}", asset),
        Route("/api/stream", stream),
        _route("/api/layout", site.layout),
        _route("/api/round", site.round),
        _route("/api/episode", site.episode),
        _route("/api/compare", site.compare),
        _route("/api/proof", site.proof),
    ]
    return Guard(Starlette(routes=[Mount(f"/{token}", routes=inner)]), token)


class Server(uvicorn.Server):
    """Ends its streams before it waits for its connections, which would otherwise outlast it."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)


def make_server(root: Path, token: str) -> uvicorn.Server:
    """A server over the runs below `root` that waits to be run on a socket."""
    site = Site(root)
    config = uvicorn.Config(
        make_app(site, token),
        access_log=False,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=CLIENTS,
        timeout_graceful_shutdown=1,
    )
    return Server(config, site.ending)


def _route(path: str, answer: Callable[[Request], Any]) -> Route:
    def respond(request: Request) -> Response:
        try:
            return Response(encode(answer(request)), media_type="application/json")
        except LookupError as error:
            return _refuse(404, str(error.args[0]))
        except (EsperError, ValueError, OSError) as error:
            return _refuse(400, str(error))

    return Route(path, respond)

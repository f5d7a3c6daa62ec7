"""The application: which request goes where, who may ask, and what refusals look like."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gigamlp import __version__
from gigamlp.serve import page
from gigamlp.serve.batcher import Batcher
from gigamlp.serve.errors import Refused
from gigamlp.serve.http import JSON, Bodies, Receive, Scope, Send, header, respond_refused
from gigamlp.serve.infer import Infer
from gigamlp.serve.metrics import Metrics
from gigamlp.serve.protocol import EXTENSIONS, dumps, error_body
from gigamlp.serve.repository import Repository
from gigamlp.serve.settings import Settings
from gigamlp.serve.watch import Watch

__all__ = ["ServeApp", "create_app"]

_OPEN = ("/v2/health/live", "/v2/health/ready")  # what load balancers ask, who have no token
_SMALL = 1 << 16  # bytes of a body that is no request for answers


class ServeApp(Starlette):
    """The ASGI application of one server process. Make one with `create_app`.

    Attributes
    ----------
    settings : Settings
    models : Repository
    batcher : Batcher
    draining : bool
        Whether the server is about to end: it still answers, but tells every caller to close its connection.
    """

    def __init__(self, settings: Settings, models: Repository, metrics: Metrics) -> None:
        self.settings, self.models, self.metrics, self.draining = settings, models, metrics, False
        self.batcher = Batcher(settings.max_queue_rows, settings.max_delay_us, watcher=metrics)
        self.bodies = Bodies(settings.max_body_bytes, settings.max_bodies_bytes)
        self.infer = Infer(settings, models, self.batcher, self.bodies, metrics)
        self._bearer = None if settings.token is None else b"Bearer " + settings.token.encode()
        middleware = []
        if settings.cors:
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"])
            )
        super().__init__(
            routes=_routes(self),
            middleware=middleware,
            exception_handlers={HTTPException: _http_error, Refused: _refused, Exception: _failed},
            lifespan=_life,
        )
        self.router.redirect_slashes = False  # a redirect is no answer of the protocol, and names a host it guesses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Those for answers do not pass through the router: that costs more than a model does."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self.draining:
            send = _closing(send)
        path: str = scope["path"]
        if self._bearer is not None and not self._allowed(scope, path):
            await respond_refused(send, Refused(401, "this server needs a token: send Authorization: Bearer TOKEN"))
            return
        if scope["method"] == "POST" and path.endswith("/infer") and not self.settings.cors:
            parts = path.split("/")
            if parts[:3] == ["", "v2", "models"] and (len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions")):
                await self.answer(parts[3], parts[5] if len(parts) == 7 else "", scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def answer(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for answers."""
        await self.infer(name, version, scope, receive, send)

    def note_levels(self) -> None:
        """Let the metrics know what waits at present."""
        self.metrics.levels(queue_rows=self.batcher.queued_rows, body_bytes=self.bodies.held)

    def _allowed(self, scope: Scope, path: str) -> bool:
        if path in _OPEN or not (path.startswith(("/v2", "/page/")) or path == "/metrics"):
            return True
        if scope["method"] == "OPTIONS" and self.settings.cors:  # a browser asks whether it may, without the token
            return True
        assert self._bearer is not None
        return hmac.compare_digest(header(scope, b"authorization") or b"", self._bearer)


def create_app(settings: Settings, models: Repository | None = None, metrics: Metrics | None = None) -> ServeApp:
    """Return the ASGI application for `settings`.

    The models are loaded when the application starts (ASGI's lifespan), unless `models` holds them.

    Parameters
    ----------
    settings : Settings
    models : Repository, optional
    metrics : Metrics, optional

    Examples
    --------
    >>> from gigamlp.serve.settings import Settings
    >>> app = create_app(Settings(models=("mnist-40",)))
    """
    return ServeApp(settings, models or Repository(settings), metrics or Metrics())


@asynccontextmanager
async def _life(app: Any) -> AsyncIterator[None]:
    app.batcher.start()
    if not app.models.loaded:
        await app.batcher.errand(app.models.load)
    for served in app.models:
        app.metrics.serving(served)
    watch = Watch(app.models, app.batcher, app.metrics)
    watching = asyncio.create_task(watch.run()) if app.settings.reload_s > 0 else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
        await app.batcher.close()
        app.models.close()


def _closing(send: Send) -> Send:
    async def wrapped(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return wrapped


# ---- routes --------------------------------------------------------------------------------------------------------


def _json(content: Any, status: int = 200) -> Response:
    return Response(dumps(content), status, media_type=JSON.decode())


def _routes(app: ServeApp) -> list[BaseRoute]:
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    routes: list[BaseRoute] = [
        Route("/v2", _server),
        Route("/v2/", _server),
        Route("/v2/health/live", _live),
        Route("/v2/health/ready", _ready),
        Route("/v2/repository/index", _index, methods=["POST"]),
        Route("/metrics", _metrics),
    ]
    for path in (model, version):
        routes += [
            Route(path, _model),
            Route(f"{path}/ready", _model_ready),
            Route(f"{path}/infer", _Infer, methods=["POST"]),
        ]
    return routes + page.routes(app.models)


class _Infer:
    """The way of requests for answers when there is middleware to pass through."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._all = scope, receive, send

    def __await__(self) -> Any:
        scope, receive, send = self._all
        at = scope["path_params"]
        return scope["app"].answer(at["model"], at.get("version", ""), scope, receive, send).__await__()


async def _server(request: Request) -> Response:
    return _json({"name": "gigamlp", "version": __version__, "extensions": list(EXTENSIONS)})


async def _live(request: Request) -> Response:
    return _json({"live": True})


async def _ready(request: Request) -> Response:
    app = request.app
    ready = app.models.loaded and not app.draining
    return _json({"ready": ready}, 200 if ready else 503)


async def _index(request: Request) -> Response:
    app = request.app
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _SMALL:
            raise Refused(413, f"the body is longer than {_SMALL:,} bytes")
    return _json([
        {"name": name, "version": version, "state": "READY", "reason": ""}
        for name in app.models.names
        for version in app.models.versions(name)
    ])  # fmt: skip


async def _metrics(request: Request) -> Response:
    request.app.note_levels()
    return Response(await asyncio.to_thread(request.app.metrics.text), media_type="text/plain; version=0.0.4")


async def _model(request: Request) -> Response:
    at, models = request.path_params, request.app.models
    served = models.get(at["model"], at.get("version", ""))
    return _json(served.metadata(models.versions(served.name)))


async def _model_ready(request: Request) -> Response:
    at, models = request.path_params, request.app.models
    served = models.get(at["model"], at.get("version", ""))
    return _json({"name": served.name, "ready": True})


# ---- refusals ------------------------------------------------------------------------------------------------------


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this path", 405: f"this path takes {_allow(error)}, not {request.method}"}
    message = words.get(error.status_code, error.detail)
    return Response(error_body(message), error.status_code, error.headers, JSON.decode())


def _allow(error: HTTPException) -> str:
    return str((error.headers or {}).get("Allow", "another method"))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    if error.dropped is not None:
        request.app.metrics.dropped(error.dropped)
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return Response(error_body(error.message), error.status, headers, JSON.decode())


async def _failed(request: Request, error: Exception) -> Response:
    return Response(error_body("the server failed to answer this; its log says why"), 500, media_type=JSON.decode())

"""One server process: a socket, uvicorn around the application, and an end in which nobody's request is lost."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from gigamlp.errors import InvalidInput
from gigamlp.serve.app import ServeApp, create_app
from gigamlp.serve.connection import Connection, close_stale
from gigamlp.serve.logs import event, set_up
from gigamlp.serve.repository import Repository
from gigamlp.serve.settings import Settings

__all__ = ["Server", "address", "listen", "serve"]

_BACKLOG = 2048
_TICKS_A_SECOND = 10  # uvicorn's
_LAST_LOOK_S = 0.05  # what was accepted last has this long to be read


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises
    ------
    InvalidInput
        If the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidInput(f"port {port} on {host} is in use; name another with --port") from error
        raise InvalidInput(f"cannot listen on {host} port {port}: {error}") from error
    return sock


def address(settings: Settings, sock: socket.socket) -> str:
    """Return the URL at which `sock` listens."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{sock.getsockname()[1]}"


class Server(uvicorn.Server):
    """Uvicorn that, when it is told to end, lets callers finish and tells them to close.

    Parameters
    ----------
    app : ServeApp
    started : callable, optional
        Called once connections are accepted.
    """

    def __init__(self, app: ServeApp, started: Callable[[], object] | None = None) -> None:
        settings = app.settings
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="asyncio" if sys.platform == "win32" else "uvloop",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(settings.grace_s)),
        )
        super().__init__(config)
        self._app, self._told = app, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if self.started and self._told is not None:
            self._told()

    async def on_tick(self, counter: int) -> bool:
        """Do what is due now and then, and return whether it is time to end."""
        if counter % _TICKS_A_SECOND == 0:
            self._app.note_levels()
            self._app.metrics.levels(connections=len(self.server_state.connections))
            timeout = self._app.settings.body_timeout_s
            if timeout > 0:
                now = asyncio.get_running_loop().time()
                for _ in range(close_stale(list(self.server_state.connections), now, timeout)):
                    self._app.metrics.dropped("late")
            await self._share()
        return bool(await super().on_tick(counter))

    async def _share(self) -> None:
        try:
            await asyncio.to_thread(self._app.metrics.share)
        except OSError as error:  # a full disk is no reason to stop serving
            event("metrics not shared", level="warning", reason=str(error))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: say not ready and `Connection: close` to all who ask for a while, then refuse, finish, and stop."""
        event("draining", connections=len(self.server_state.connections))
        self._app.draining = True
        if not self.force_exit:
            await asyncio.sleep(self._app.settings.linger_s)
            await self._accept_the_last(sockets or [])
        await super().shutdown(sockets)

    async def _accept_the_last(self, sockets: list[socket.socket]) -> None:
        """Stop accepting, but take the connections that the system has accepted already: closing resets them."""
        loop = asyncio.get_running_loop()
        own = [sock.dup() for sock in sockets]
        for server in self.servers:
            server.close()
        for sock in sockets:
            sock.close()
        make = partial(Connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        for sock in own:
            while True:
                try:
                    connection, _ = sock.accept()
                except BlockingIOError:
                    break
                await loop.connect_accepted_socket(make, connection)
            sock.close()
        await asyncio.sleep(_LAST_LOOK_S)


def serve(settings: Settings, ready: Callable[[str, Repository], Any] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Both end it in order; a second SIGINT at once.

    Parameters
    ----------
    settings : Settings
    ready : callable, optional
        Called with the address and the models once both are there.

    Raises
    ------
    FileNotFoundError, GigaMLPError
        If a model cannot be loaded or the port cannot be had.
    """
    set_up()
    sock = listen(settings.host, settings.port)
    try:
        models = Repository(settings)
        models.load()
        where = address(settings, sock)
        if ready is not None:
            ready(where, models)
        if settings.workers > 1:
            from gigamlp.serve.workers import supervise

            supervise(settings, models, sock)
            return
        run(Server(create_app(settings, models), lambda: event("listening", address=where)), sock)
    finally:
        sock.close()


def run(server: Server, sock: socket.socket) -> None:
    """Run `server` until a signal ends it; then return, as that is how servers end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it is done, for whoever had a handler before
        signal.signal(number, lambda *_: None)
    gc.collect()
    gc.freeze()  # what was loaded stays: no collection looks at it again
    server.run([sock])
    event("ended")

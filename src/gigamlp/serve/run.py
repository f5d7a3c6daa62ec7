"""The process: a socket, uvicorn around the application, and an end in which nobody's request is lost."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from gigamlp.errors import InvalidInput
from gigamlp.serve.app import ServeApp, create_app
from gigamlp.serve.repository import Repository
from gigamlp.serve.settings import Settings

__all__ = ["Server", "listen", "serve"]

_BACKLOG = 2048


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


class Server(uvicorn.Server):
    """Uvicorn that, when it is told to end, lets callers finish and tells them to close.

    Parameters
    ----------
    app : ServeApp
    """

    def __init__(self, app: ServeApp) -> None:
        settings = app.settings
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(settings.grace_s) or None,
            )
        )
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: say not ready and `Connection: close` to all who ask for a while, then refuse, finish, and stop."""
        self._app.draining = True
        if not self.force_exit:
            await asyncio.sleep(self._app.settings.linger_s)
        await super().shutdown(sockets)


def serve(settings: Settings, ready: Callable[[str, Repository], Any] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

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
    sock = listen(settings.host, settings.port)
    try:
        models = Repository(settings)
        models.load()
        if ready is not None:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            ready(f"http://{host}:{sock.getsockname()[1]}", models)
        server = Server(create_app(settings, models))
        server.run([sock])
    finally:
        sock.close()

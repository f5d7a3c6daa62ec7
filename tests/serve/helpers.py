"""Servers to ask: an ASGI application driven by hand, and a real `gigamlp serve` process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import numpy as np

from gigamlp import MLP, Layer, Session
from gigamlp.serve.app import ServeApp, create_app
from gigamlp.serve.repository import Repository
from gigamlp.serve.served import Served
from gigamlp.serve.settings import Settings

OCTETS = (b"content-type", b"application/octet-stream")


def served(mlp: MLP, name: str = "m", dtype: str = "uint8", version: str = "1") -> Served:
    return Served(name, version, mlp, Session(mlp, device="cpu", engine="numpy", check_finite=False), dtype)


def tiny(seed: int = 0, features: int = 3, classes: Any = None, head: str = "softmax", outputs: int = 4) -> MLP:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(5, features)), rng.normal(size=(outputs, 5))
    return MLP((Layer(weights[0], rng.normal(size=5), "relu"), Layer(weights[1])), head=head, classes=classes)


@dataclass
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Sequence[tuple[bytes, bytes]] = (),
    hang_up: asyncio.Event | None = None,
    length: bool = True,
    unfinished: bool = False,
) -> Answer | None:
    """Send one request through ASGI, as uvicorn would; None if nothing was answered."""
    parts = [body] if isinstance(body, bytes) else list(body)
    pairs = list(headers)
    if length and method == "POST":
        pairs.append((b"content-length", b"%d" % sum(map(len, parts))))
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": pairs,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
    }  # fmt: skip
    queue = [
        {"type": "http.request", "body": part, "more_body": unfinished or index + 1 < len(parts)}
        for index, part in enumerate(parts)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if queue:
            return queue.pop(0)
        if hang_up is None:
            await asyncio.Event().wait()
        else:
            await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return None
    body = b"".join(m.get("body", b"") for m in sent[1:])
    return Answer(sent[0]["status"], dict(sent[0]["headers"]), body)


@asynccontextmanager
async def running(app: ServeApp) -> AsyncIterator[ServeApp]:
    """Run the application's lifespan around a block."""
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    task = asyncio.create_task(
        app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, inbox.get, outbox.put)
    )
    await inbox.put({"type": "lifespan.startup"})
    answer = await outbox.get()
    assert answer["type"] == "lifespan.startup.complete", answer
    try:
        yield app
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        await task


def app_of(*models: Served, **own: Any) -> ServeApp:
    settings = Settings(models=("x",), **{"reload_s": 0, "max_queue_rows": 200_000, **own})
    repository = Repository(settings)
    for each in models:
        repository.put(each)
    repository.loaded = True
    return create_app(settings, repository)


# ---- a real process --------------------------------------------------------------------------------------------------


@dataclass
class Process:
    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    def connect(self, timeout: float = 30) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]


@contextmanager
def serving(*words: str) -> Iterator[Process]:
    """Run `gigamlp serve` on a free port."""
    command = [sys.executable, "-m", "gigamlp", "serve", *words, "--device", "cpu", "--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    assert process.stdout is not None
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line.rstrip("\n"))
            if '"listening"' in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(60), lines
        at = [line for line in lines if line.startswith("serving at")]
        assert at, lines
        yield Process(process, int(at[0].rpartition(":")[2]), lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)
        process.stdout.close()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

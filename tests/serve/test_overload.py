"""More than the server can do: every request is answered or refused, memory stays flat, and it recovers at once."""

from __future__ import annotations

import asyncio
import collections
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.helpers import tiny

# a model of known capacity: 10,000 rows a second, with 0.2 s of them in the queue
PROGRAM = """
import sys, time
import numpy as np
from gigamlp.serve import served
from gigamlp.serve.run import serve
from gigamlp.serve.settings import Settings

def slow(self, kind, rows):
    time.sleep(len(rows) * 1e-4)
    return np.zeros(len(rows), np.int64) if kind == "class" else np.zeros((len(rows), self.mlp.outputs), np.float32)

served.Served.run = slow
served.Served.warm = lambda self: None
served.Served.largest = lambda self: 500
say = lambda where, models: print(where.rpartition(":")[2], flush=True)
serve(Settings(models=(sys.argv[1],), device="cpu", port=0, max_rows=1000, max_queue_rows=2000), say)
"""
CAPACITY = 10_000
ROWS = 100


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def one(port: int) -> tuple[int, float]:
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = bytes(12 * ROWS)  # three FP32 a row
    writer.write(
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    answer = await reader.read(-1)
    writer.close()
    status = int(answer.split(b" ", 2)[1])
    if status == 200:
        assert len(answer.partition(b"\r\n\r\n")[2]) == ROWS
    else:
        assert b"retry-after:" in answer.lower()
    return status, time.monotonic() - begin


async def overload(port: int, pid: int, times: float, seconds: float) -> tuple[collections.Counter[int], list[int]]:
    """Send requests at a rate that does not wait for answers; return how they ended, and the memory meanwhile."""
    begin = time.monotonic()
    every = ROWS / (CAPACITY * times)
    asked: list[asyncio.Task[tuple[int, float]]] = []
    memory: list[int] = []
    while (now := time.monotonic() - begin) < seconds:
        while len(asked) * every < now:
            asked.append(asyncio.create_task(one(port)))
        memory.append(resident(pid))
        await asyncio.sleep(0.005)
    ended = await asyncio.wait_for(asyncio.gather(*asked), 30)  # a request that was lost fails here
    return collections.Counter(status for status, _ in ended), memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("seconds", [2.0, pytest.param(30.0, marks=pytest.mark.soak)])
def test_overload_is_refused_and_over_at_once(tmp_path: Path, seconds: float) -> None:
    tiny().save(tmp_path / "m.safetensors")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "m.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())

            async def go() -> None:
                deadline = time.monotonic() + 20
                while True:
                    try:
                        assert (await one(port))[0] == 200
                        break
                    except OSError:
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.05)
                await overload(port, process.pid, 4, 1.0)  # buffers and threads are there
                ended, memory = await overload(port, process.pid, 4, seconds)
                assert set(ended) == {200, 503}
                answered = ended[200] * ROWS / seconds
                assert answered > 0.5 * CAPACITY, ended  # what it refuses does not keep it from working
                assert ended[503] > ended[200]
                assert max(memory) - memory[0] < 32 << 20
                await asyncio.sleep(1.0)
                status, took = await one(port)
                assert (status, took < 0.5) == (200, True)

            asyncio.run(go())
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait(30)

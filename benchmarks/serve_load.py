"""Load on a real server process by `wrk`: latency, rows a second, and LitServe with the same model in the same run.

    python benchmarks/serve_load.py --out records/xeon2-serve-load-DATE.json --litserve /path/to/venv/bin/python

Needs Debian's `wrk`. LitServe's dependencies are its own: give the Python of a venv that has litserve and gigamlp
installed. Everything is interleaved over `--repeats` rounds and the median counts. About five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import gigamlp as gm
from gigamlp.measure.telemetry import device_info, versions
from gigamlp.record import Record, Row

WRK = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "{content}"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
done = function(summary, latency, requests)
  local bad = summary.errors
  io.write(string.format('\\nJSON {{"requests": %d, "us": %d, "p50": %d, "p99": %d, "p999": %d, "bad": %d}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), latency:percentile(99.9),
    bad.connect + bad.read + bad.write + bad.status + bad.timeout))
end
"""
# the same server around a model that does nothing: what is left is HTTP
NOTHING = """
import sys
import numpy as np
from gigamlp.serve import served
from gigamlp.serve.run import serve
from gigamlp.serve.settings import Settings

def nothing(self, kind, rows):
    return np.zeros(len(rows), np.int64) if kind == "class" else np.zeros((len(rows), self.mlp.outputs), np.float32)

served.Served.run = nothing
serve(Settings(models=("mnist-40",), device="cpu", port=int(sys.argv[1])))
"""
LITSERVE = """
import sys
import numpy as np
import litserve as ls
import gigamlp as gm

class Digits(ls.LitAPI):
    def setup(self, device):
        self.session = gm.Session(gm.load(sys.argv[2]), device="cpu", engine="cpu_fused", check_finite=False)
    def decode_request(self, request):
        return np.asarray(request["rows"], np.uint8)
    def predict(self, rows):
        return self.session.class_ids(rows)
    def encode_response(self, classes):
        return {"class": np.asarray(classes).tolist()}

if __name__ == "__main__":
    ls.LitServer(Digits(), accelerator="cpu", workers_per_device=1).run(port=int(sys.argv[1]), log_level="error",
        generate_client_file=False)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def process(command: list[str], port: int) -> Iterator[int]:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + 90
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if running.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        raise SystemExit(f"{command[:3]} did not start:\n{log.read()[-3000:]}") from None
                    time.sleep(0.1)
            yield port
        finally:
            os.killpg(running.pid, signal.SIGTERM)  # its own session: it and what it started
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def wrk(
    folder: Path, seconds: float, port: int, path: str, *, body: bytes, content: str, connections: int
) -> dict[str, Any]:
    (folder / "body").write_bytes(body)
    (folder / "post.lua").write_text(WRK.format(content=content, body=folder / "body"))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "-s",
               str(folder / "post.lua"), f"http://127.0.0.1:{port}{path}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    match = re.search(r"^JSON (.*)$", done.stdout, re.M)
    assert match, done.stdout
    found = dict(json.loads(match[1]))
    return {**found, "per_s": found["requests"] / found["us"] * 1e6}


def session_rate(name: str, x: Any, seconds: float) -> float:
    """Rows a second of the Session in this process, batches of 1,024."""
    with gm.Session(gm.load(name), device="cpu", engine="cpu_fused", check_finite=False) as session:
        rows = np.ascontiguousarray(x[:1024])
        session.class_ids(rows)
        begin, runs = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            session.class_ids(rows)
            runs += 1
        return runs * 1024 / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--litserve", help="the Python of a venv that has litserve")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("this needs wrk: apt-get install wrk")
    x = gm.data.load_mnist()[2]
    octets, infer = "application/octet-stream", "/v2/models/{}/infer"
    ports = [free_port() for _ in range(3)]
    serve = [
        sys.executable,
        "-m",
        "gigamlp",
        "serve",
        "mnist-40",
        "mnist-512",
        "--device",
        "cpu",
        "--port",
        str(ports[0]),
    ]
    rows: dict[str, list[dict[str, Any]]] = {}
    inside: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def measure(key: str, port: int, path: str, body: bytes, connections: int, *, content: str = octets) -> None:
            found = wrk(folder, options.seconds, port, path, body=body, content=content, connections=connections)
            rows.setdefault(key, []).append(found)
            times = f"p50 {found['p50']:>7} p99 {found['p99']:>7} us"
            print(f"{key:34}{found['per_s']:10,.0f}/s  {times}  bad {found['bad']}", flush=True)
            if found["bad"] and key.startswith("gigamlp"):
                raise SystemExit(f"{key}: {found['bad']} requests failed; there is nothing to compare")

        (folder / "nothing.py").write_text(NOTHING)
        (folder / "lit.py").write_text(LITSERVE)
        one, many = x[:1].tobytes(), x[:1024].tobytes()
        lit_body = json.dumps({"rows": x[:1].tolist()}).encode()
        tensor = {"name": "rows", "shape": [1, 784], "datatype": "UINT8", "data": x[0].tolist()}
        own_body = json.dumps({"inputs": [tensor], "outputs": [{"name": "class"}]}).encode()
        for _ in range(options.repeats):
            # a server that is not asked does nothing, but LitServe's loops poll: it runs only in its turn
            nothing = process([sys.executable, str(folder / "nothing.py"), str(ports[1])], ports[1])
            with process(serve, ports[0]), nothing:
                for connections in (1, 16, 256):
                    measure(f"gigamlp one c{connections}", ports[0], infer.format("mnist-40"), one, connections)
                for connections in (1, 16, 256):
                    key = f"gigamlp json c{connections}"
                    measure(key, ports[0], infer.format("mnist-40"), own_body, connections, content="application/json")
                for model, port in (("mnist-40", ports[0]), ("nothing", ports[1]), ("mnist-512", ports[0])):
                    path = infer.format("mnist-40" if model == "nothing" else model)
                    measure(f"gigamlp 1024 {model}", port, path, many, 4)
            inside.append(session_rate("mnist-512", x, options.seconds))
            if options.litserve:
                with process([options.litserve, str(folder / "lit.py"), str(ports[2]), "mnist-40"], ports[2]):
                    for connections in (1, 16, 256):
                        key = f"litserve one c{connections}"
                        measure(key, ports[2], "/predict", lit_body, connections, content="application/json")
    write(options, rows, inside)


def write(options: argparse.Namespace, rows: dict[str, list[dict[str, Any]]], inside: list[float]) -> None:
    def middle(key: str, what: str) -> float:
        return statistics.median(each[what] for each in rows[key])

    found: list[Row] = []
    for key in rows:
        who, kind, what = key.split()
        single = kind in ("one", "json")
        model = "mnist-40" if single else what
        batch = 1 if single else 1024
        per_s = middle(key, "per_s")
        body = "JSON" if kind == "json" or who == "litserve" else "raw bytes"
        note = f"over HTTP, {body}, {what[1:] if single else 4} connections, p99.9 {middle(key, 'p999'):.0f} us"
        found.append(Row(
            model, engine="cpu_fused" if what != "nothing" else None, variant=who, batch=batch,
            input_dtype="uint8", output="class", samples_per_s=per_s * batch, wall_us=1e6 / per_s,
            p50_us=middle(key, "p50"), p99_us=middle(key, "p99"), note=note,
        ))  # fmt: skip
    rate = statistics.median(inside)
    found.append(Row("mnist-512", engine="cpu_fused", variant="Session, in-process", batch=1024, input_dtype="uint8",
                     output="class", samples_per_s=rate, wall_us=1024e6 / rate))  # fmt: skip
    bars = {
        "mnist-40 / nothing (>= 0.8)": middle("gigamlp 1024 mnist-40", "per_s")
        / middle("gigamlp 1024 nothing", "per_s"),
        "mnist-512 / Session (>= 0.4)": middle("gigamlp 1024 mnist-512", "per_s") * 1024 / rate,
    }
    for kind, connections in product(("one", "json"), (1, 16, 256) if options.litserve else ()):
        ours, theirs = f"gigamlp {kind} c{connections}", f"litserve one c{connections}"
        words = f"of LitServe's (JSON), {'raw bytes' if kind == 'one' else 'JSON'}, {connections} connections"
        bars[f"requests/s, {words} (>= 4)"] = middle(ours, "per_s") / middle(theirs, "per_s")
        bars[f"p99, {words} (<= 0.333)"] = middle(ours, "p99") / middle(theirs, "p99")
    for name, value in bars.items():
        print(f"{name:60}{value:8.3f}")
    found_versions = versions()
    if options.litserve:
        code = "import importlib.metadata as m; print(m.version('litserve'))"
        found_versions["litserve"] = subprocess.run(
            [options.litserve, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    extra = {"bars": bars, "rounds": rows, "load": "wrk, one thread, on the same cores as the server"}
    Record(device_info("cpu"), found_versions, " ".join(words), found, extra).save(options.out)


if __name__ == "__main__":
    main()

"""Real processes: how they start, what broken clients do to them, how they reload, and how they end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.errors import InvalidInput
from gigamlp.serve.app import create_app
from gigamlp.serve.repository import Repository, find
from gigamlp.serve.run import Server, listen, turn_away
from gigamlp.serve.settings import Settings
from tests.serve.helpers import Process, serving, tiny

OCTETS = {"Content-Type": "application/octet-stream"}
HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    constant(2).save(path)
    return path


def constant(answer: int) -> gm.MLP:
    """Answer every row with the same class."""
    return gm.MLP([gm.Layer(np.zeros((4, 3)), np.eye(4)[answer])], input_scale=1 / 255)


class Load(threading.Thread):
    """A client that asks without pause over a connection that it keeps, and remembers every answer and failure."""

    def __init__(self, server: Process) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.answers: list[tuple[int, bytes]] = []
        self.lost: list[BaseException] = []
        self.refused = 0
        self.stop = threading.Event()

    def run(self) -> None:
        connection = self.server.connect(timeout=20)
        while not self.stop.is_set():
            try:
                connection.connect() if connection.sock is None else None
            except OSError:  # nobody listens any more: nothing was accepted, so nothing is lost
                self.refused += 1
                return
            try:
                connection.request("POST", "/v2/models/m/infer", bytes(3), OCTETS)
                answer = connection.getresponse()
                self.answers.append((answer.status, answer.read()))
            except Exception as error:  # noqa: BLE001
                self.lost.append(error)
                connection.close()


class Fresh(Load):
    """The same with a connection for every request."""

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
            except OSError:
                self.refused += 1
                return
            with sock:
                try:
                    sock.sendall(HEAD + b"Connection: close\r\nContent-Length: 3\r\n\r\n123")
                    got = b""
                    while part := sock.recv(65536):
                        got += part
                    self.answers.append((int(got.split()[1]), got[-1:]))
                except Exception as error:  # noqa: BLE001
                    self.lost.append(error)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a filter of a listening socket is Linux's")
def test_what_is_turned_away_was_never_accepted() -> None:
    sock = listen("127.0.0.1", 0)
    address = sock.getsockname()
    with socket.create_connection(address, timeout=5) as early, sock:
        turn_away(sock.dup())  # another process may do it
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
        accepted, _ = sock.accept()
        with accepted:
            early.sendall(b"x")
            accepted.setblocking(True)
            assert accepted.recv(1) == b"x"
        with pytest.raises(BlockingIOError):
            sock.accept()


def load(server: Process, clients: int = 8, kind: type[Load] = Load) -> list[Load]:
    threads = [kind(server) for _ in range(clients)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one", "workers"])
def test_sigterm_under_load_loses_no_request(model: Path, words: tuple[str, ...]) -> None:
    with serving(str(model), *words) as server:
        clients = [*load(server, 4), *load(server, 4, kind=Fresh)]
        time.sleep(0.7)
        assert server.stop() == 0
        for client in clients:
            client.join(20)
            assert not client.is_alive()
            assert client.lost == []
            assert len(client.answers) > 20
            assert {status for status, _ in client.answers} == {200}
        assert any(line["event"] == "ended" for line in server.log)


def test_ctrl_c_ends_it_as_well(model: Path) -> None:
    with serving(str(model)) as server:
        assert server.stop(signal.SIGINT) == 0


def test_a_long_request_ends_before_the_server_does(model: Path) -> None:
    with serving(str(model)) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(HEAD + b"Content-Length: 6\r\n\r\n123")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        sock.sendall(b"456")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("broken", [300, pytest.param(1000, marks=pytest.mark.soak)])
def test_broken_clients_do_not_disturb_the_good_ones(model: Path, broken: int) -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(files, 4096), most), most))  # the server inherits it
    with serving(str(model)) as server:
        half = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(broken // 2)]
        for index, sock in enumerate(half):
            sock.sendall(HEAD + b"Content-Length: 3000\r\n\r\n" + bytes(index) if index % 2 else HEAD[: index % 70])
        resets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(broken // 2)]
        for sock in resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.sendall(HEAD + b"Content-Length: 3\r\n\r\n" + bytes(3))
            sock.close()
        clients = load(server, 2)
        time.sleep(0.5)
        for client in clients:
            client.stop.set()
            client.join(10)
            assert client.lost == []
            assert set(client.answers) == {(200, b"\2")}
        for sock in half:
            sock.close()
        time.sleep(0.3)
        _, text = server.ask("GET", "/metrics")
        assert b"gigamlp_body_bytes 0.0" in text
        assert all(line["level"] == "info" for line in server.log), server.log


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", b"413"),
        (HEAD + b"Content-Length: 4\r\n\r\n1234", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n6\r\n123456\r\n0\r\n\r\n", b"200"),
        (HEAD + b"Content-Length: 3\r\n\r\n123" + HEAD + b"Content-Length: 3\r\n\r\n123", b"200"),
        (b"GET /" + b"a" * 300_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000, b"431"),
    ],
)
def test_strange_requests_are_answered_in_json(server: Process, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        try:
            sock.sendall(sent)
        except OSError:
            assert status == b"431"
        try:
            answer = sock.recv(65536)
        except ConnectionResetError:  # it was cut off while it sent
            assert status == b"431"
            return
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        if status != b"200":
            while b'{"error":' not in answer:
                more = sock.recv(65536)
                assert more, answer
                answer += more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("served") / "m.safetensors"
    constant(1).save(path)
    with serving(str(path)) as found:
        yield found


def test_damaged_requests_fail_nothing(server: Process) -> None:
    whole = HEAD + b"Content-Length: 6\r\nInference-Header-Content-Length: 0\r\n\r\n123456"
    rng = np.random.default_rng(0)
    for _ in range(150):
        sent = bytearray(whole)
        for at in rng.integers(0, len(sent), rng.integers(1, 4)):
            sent[at] = rng.integers(0, 256)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(bytes(sent[: rng.integers(1, len(sent) + 1)]))
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert b"HTTP/1.1 5" not in sock.recv(65536)
    assert server.ask("GET", "/v2/health/ready")[0] == 200
    assert all(line["level"] == "info" for line in server.log), server.log


def test_pipelined_requests_are_all_answered(server: Process) -> None:
    one = HEAD + b"Content-Length: 3\r\n\r\n123"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(one * 20)
        got = b""
        while got.count(b"HTTP/1.1 200") < 20 or not got.endswith(b"\1"):
            got += sock.recv(65536)
        assert got.count(b"HTTP/1.1") == 20


def test_requests_that_do_not_arrive_and_answers_that_are_not_read_end(model: Path) -> None:
    gm.MLP([gm.Layer(np.zeros((40, 3)))], input_scale=1 / 255).save(model)  # 21 MB, more than the system buffers
    models = Repository(Settings(models=(str(model),), device="cpu", body_timeout_s=1.0))
    with in_thread(models) as port:
        silent, half, slow = (socket.create_connection(("127.0.0.1", port)) for _ in range(3))
        half.sendall(HEAD + b"Content-Length: 3\r\n\r\n1")
        n = 65536
        head = json.dumps({
            "inputs": [
                {"name": "rows", "datatype": "UINT8", "shape": [n, 3], "parameters": {"binary_data_size": 3 * n}}
            ],
            "parameters": {"binary_data_output": True},
        }).encode()  # fmt: skip
        lengths = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (len(head), len(head) + 3 * n)
        slow.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n" + lengths + head + bytes(3 * n))
        for sock in (silent, half):
            sock.settimeout(10)
            assert sock.recv(1000).startswith(b"HTTP/1.1 408")
        deadline = time.monotonic() + 20
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        text = b""
        while b'gigamlp_dropped_total{reason="late"} 3.0' not in text or b"gigamlp_connections 1.0" not in text:
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read()
        assert b"gigamlp_body_bytes 0.0" in text
        connection.close()
        slow.close()


@contextmanager
def in_thread(models: Repository) -> Iterator[int]:
    """Serve in a thread, for settings that the command line does not have."""
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    models.load()
    server = Server(create_app(models.settings, models))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_a_refused_body_leaves_the_connection_usable(server: Process) -> None:
    connection = server.connect()
    for body, status in ((bytes(4), 400), (bytes(3), 200), (bytes(300_001), 400), (bytes(3), 200)):
        connection.request("POST", "/v2/models/m/infer", body, OCTETS)
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()


def test_a_model_is_replaced_under_load(model: Path) -> None:
    with serving(str(model)) as server:
        clients = load(server, 4)
        time.sleep(0.3)
        for answer in (3, 0, 1):
            constant(answer).save(model)  # a rename
            deadline = time.monotonic() + 20
            while server.ask("POST", "/v2/models/m/infer", bytes(3), OCTETS)[1] != bytes([answer]):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for client in clients:
            client.stop.set()
            client.join(10)
            assert client.lost == []
            assert {status for status, _ in client.answers} == {200}
            seen = [body for _, body in client.answers]
            order = list(dict.fromkeys(seen))
            assert order == [b"\2", b"\3", b"\0", b"\1"]
        assert [line["why"] for line in server.log if line["event"] == "model retired"] == ["replaced"] * 3


def test_a_damaged_file_leaves_the_old_model_in_place(model: Path) -> None:
    with serving(str(model)) as server:
        good = model.read_bytes()
        model.write_bytes(good[: len(good) // 2])
        deadline = time.monotonic() + 20
        while not any(line["event"] == "reload failed" for line in server.log):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.ask("POST", "/v2/models/m/infer", bytes(3), OCTETS) == (200, b"\2")
        model.unlink()
        time.sleep(1.2)
        assert server.ask("POST", "/v2/models/m/infer", bytes(3), OCTETS) == (200, b"\2")
        constant(0).save(model)
        deadline = time.monotonic() + 20
        while server.ask("POST", "/v2/models/m/infer", bytes(3), OCTETS)[1] != b"\0":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert b'gigamlp_reloads_total{model="m",result="failed"} 1.0' in server.ask("GET", "/metrics")[1]


def test_a_folder_of_models_and_versions(tmp_path: Path) -> None:
    for version in (1, 2):
        constant(version).save(tmp_path / "models" / "m" / str(version) / "model.safetensors")
    with serving(str(tmp_path / "models")) as server:

        def classes(path: str) -> tuple[int, bytes]:
            return server.ask("POST", f"/v2/models/{path}/infer", bytes(3), OCTETS)

        assert (classes("m"), classes("m/versions/1")) == ((200, b"\2"), (200, b"\1"))
        constant(3).save(tmp_path / "models" / "m" / "10" / "model.safetensors")
        constant(0).save(tmp_path / "models" / "new" / "1" / "model.safetensors")
        deadline = time.monotonic() + 20
        while classes("m") != (200, b"\3") or classes("new")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        shutil.rmtree(tmp_path / "models" / "m" / "10")
        while classes("m") != (200, b"\2"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert classes("m/versions/10")[0] == 404


def test_workers_are_replaced_when_they_die_and_share_their_numbers(model: Path) -> None:
    with serving(str(model), "--workers", "2") as server:
        for _ in range(20):
            assert server.ask("POST", "/v2/models/m/infer", bytes(3), OCTETS) == (200, b"\2")
        time.sleep(1.3)  # numbers are shared once a second
        assert b'gigamlp_requests_total{model="m",status="200",version="1"} 20.0' in server.ask("GET", "/metrics")[1]
        pids = next(line["workers"] for line in server.log if line["event"] == "listening")
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while b'model_info{device="cpu",engine="cpu_fused",model="m",version="1"} 2.0' not in server.ask(
            "GET", "/metrics"
        )[1] or not any(line["event"] == "worker ended" for line in server.log):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert server.stop() == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_token_of_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    with serving(str(model), "--token-file", str(tmp_path / "token")) as server:
        assert server.ask("GET", "/v2")[0] == 401
        assert server.ask("GET", "/v2", headers={"Authorization": "Bearer abc"})[0] == 200
        assert "abc" not in "".join(server.lines)


def test_it_says_what_serves(server: Process) -> None:
    assert server.lines[0].startswith("m version 1: UINT8 [n, 3] -> class, by cpu_fused on cpu")


def test_the_server_listens_to_this_machine_only(server: Process) -> None:
    assert f"serving at http://127.0.0.1:{server.port}" in server.lines


def test_json_says_where_it_listens(model: Path) -> None:
    with serving(str(model), "--json") as server:
        text = "\n".join(server.lines)
        first, _ = json.JSONDecoder().raw_decode(text[text.index("{\n") :])
        assert first["address"] == f"http://127.0.0.1:{server.port}"
        assert first["models"][0]["engines"] == ["cpu_fused"]


def refused(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gigamlp", "serve", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_cannot_be_served_is_said(tmp_path: Path, model: Path, server: Process) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"123")
    empty = tmp_path / "empty"
    empty.mkdir()
    wrong = tmp_path / "wrong" / "m" / "one" / "model.safetensors"
    constant(1).save(wrong)
    for words, message in (
        (("nope",), "no model file or folder at nope"),
        ((str(empty),), "holds no model"),
        ((str(tmp_path / "wrong"),), "whole number >= 1"),
        ((str(model), f"m={bad}"), "two models are called 'm'"),
        ((f"a/b={model}",), "cannot be a model's name"),
        ((f"x={empty}",), "leave out x="),
    ):
        with pytest.raises((InvalidInput, FileNotFoundError), match=message):
            find(Settings(models=words))
    with pytest.raises(InvalidInput, match="cannot listen"):
        listen("203.0.113.1", 0)
    assert "too few for a safetensors file" in refused(str(bad), "--device", "cpu", "--port", "0")
    assert "is in use" in refused(str(model), "--device", "cpu", "--port", str(server.port))
    assert "name at least one MODEL" in refused()


def test_names_are_given_on_the_command_line(tmp_path: Path) -> None:
    tiny(classes=["a", "b", "c", "d"]).save(tmp_path / "a=b.safetensors")
    with serving(str(tmp_path / "a=b.safetensors").join(("x=", ""))) as server:
        assert server.ask("GET", "/v2/models/x")[0] == 200

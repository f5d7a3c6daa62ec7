"""Inputs and outputs on an S3-compatible server of this machine, and on a file system of fsspec."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.score import score
from tests.fakes import make_mlp
from tests.score.test_farm import run, same

pa = pytest.importorskip("pyarrow")
fs = pytest.importorskip("pyarrow.fs")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("fsspec")

MLP = make_mlp((6, 8, 3), name="toy")
ROWS = 25_003
Where = Callable[[str], str]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Where]:
    """An S3 server with a bucket; yields what makes a URI of a key."""
    pytest.importorskip("nanio")
    port, folder = free_port(), tmp_path_factory.mktemp("s3")
    environment = {**os.environ, "NANIO_ACCESS_KEY": "key", "NANIO_SECRET_KEY": "secret-secret"}
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--log-level", "error", "--no-access-log"]
    process = subprocess.Popen(command, env=environment)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None:
                pytest.fail("the S3 server did not start")
            __import__("time").sleep(0.1)
        # this small server does not know the checksums that the AWS SDK appends unasked
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "WHEN_REQUIRED"
        options = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        system = fs.S3FileSystem(
            access_key="key", secret_key="secret-secret", endpoint_override=f"127.0.0.1:{port}", scheme="http",
            region="us-east-1", allow_bucket_creation=True,
        )  # fmt: skip
        system.create_dir("bucket")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret-secret")
            yield lambda key: f"s3://bucket/{key}?{options}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(params=["s3", "memory"])
def where(request: pytest.FixtureRequest) -> Where:
    if request.param == "memory":
        return lambda key: f"memory://bucket/{key}"
    made: Where = request.getfixturevalue("server")
    return made


def remote(uri: str) -> Any:
    from gigamlp.score.remote import Remote

    return Remote(uri)


def rows(count: int = ROWS) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, 6), dtype=np.uint8)


def inputs(folder: Path) -> list[Path]:
    folder.mkdir()
    x = rows()
    np.save(folder / "a.npy", x)
    table = pa.table({"x": pa.array([r.tobytes() for r in x], pa.binary(6))})
    pq.write_table(table, folder / "b.parquet", row_group_size=7_000)
    np.savetxt(folder / "c.csv", x[:1_003], "%d", delimiter=",")
    (folder / "d.npy").write_bytes((folder / "a.npy").read_bytes()[:-70_003])
    np.save(folder / "e.npy", x[:10, :5])
    (folder / "f.idx").write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 100, 0, 0, 0, 6]) + x[:100].tobytes())
    (folder / "g.csv.gz").write_bytes(__import__("gzip").compress((folder / "c.csv").read_bytes()))
    with pa.OSFile(str(folder / "h.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as sink:
        sink.write_table(table, max_chunksize=7_001)
    np.save(folder / "i.npy", rows(0))
    return sorted(folder.iterdir())


def put(paths: list[Path], where: Where, folder: str) -> None:
    for path in paths:
        remote(where(f"{folder}/{path.name}")).write_bytes(path.read_bytes())


def fetch(uri: str, to: Path) -> Path:
    to.parent.mkdir(exist_ok=True, parents=True)
    with remote(uri).open() as file:
        to.write_bytes(file.read())
    return to


@pytest.mark.parametrize("ending", ["npy", "parquet", "arrow"])
def test_the_output_is_that_of_local_files(where: Where, ending: str, tmp_path: Path) -> None:
    given, folder = inputs(tmp_path / "in"), f"in-{ending}"
    put(given, where, folder)
    one = run(given, tmp_path / f"out.{ending}", device="cpu")
    out = where(f"{ending} ü/out.{ending}")
    two = run(where(folder), out, device="cpu", commit_s=0)
    assert (one.rows, one.rejected, one.bytes_in) == (two.rows, two.rejected, two.bytes_in)
    assert (tmp_path / f"out.{ending}").read_bytes() == fetch(out, tmp_path / "far" / f"out.{ending}").read_bytes()
    rejected = fetch(where(f"{ending} ü/out.{ending}.rejected.jsonl"), tmp_path / "far" / "rejected").read_text()
    near = (tmp_path / f"out.{ending}.rejected.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["row"] for line in near]
    assert [json.loads(line)["row"] for line in rejected.splitlines()] == reasons
    left = remote(where(f"{ending} ü")).files()
    assert sorted(left) == [f"out.{ending}", f"out.{ending}.manifest.json", f"out.{ending}.rejected.jsonl"]
    assert run(where(folder), out, device="cpu", commit_s=0, resume=True).already


class Stopped(Exception):
    pass


@pytest.mark.parametrize("ending", ["npy", "parquet"])
@pytest.mark.parametrize("commits", [1, 3])
def test_an_interrupted_output_goes_on(
    where: Where, ending: str, commits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", rows())
    run(tmp_path / "a.npy", tmp_path / f"whole.{ending}", device="cpu", block_rows=1_000)
    folder = f"again-{ending}-{commits}"
    put([tmp_path / "a.npy"], where, folder)
    out = where(f"{folder}/whole.{ending}")
    from gigamlp.score import writing

    saved, commit = 0, writing.Writer.commit

    def stop(self: Any, state: str | None = None) -> None:
        nonlocal saved
        saved += 1
        if saved > commits:
            self._sink.sync()  # a kill between the objects and the manifest
            raise Stopped
        commit(self, state)

    options = {"device": "cpu", "block_rows": 1_000, "commit_s": 0}
    monkeypatch.setattr(writing.Writer, "commit", stop)
    with pytest.raises(Stopped):
        run(where(f"{folder}/a.npy"), out, **options)
    monkeypatch.setattr(writing.Writer, "commit", commit)
    assert not remote(out).exists()
    done = run(where(f"{folder}/a.npy"), out, resume=True, **options)
    assert done.resumed
    assert done.rows_now == ROWS - commits * 1_000
    assert fetch(out, tmp_path / "far").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_committed_objects_that_are_gone_are_missed(where: Where, tmp_path: Path) -> None:
    from gigamlp.score.remote import AppendObjects

    part = remote(where("gone/x.npy.part"))
    made = AppendObjects(part, 0)
    made.write(b"abc")
    made.sync()
    made.write(b"de")
    made.sync()
    assert AppendObjects(part, 3).size == 3
    assert part.beside("x") == [f"x.npy.part.{0:020d}"]
    remote(where("gone/kept")).write_bytes(b"")
    part.with_name(f"x.npy.part.{0:020d}").unlink()
    with pytest.raises(FileFormatError, match="0 bytes, 3 were committed"):
        AppendObjects(part, 3)


def test_patterns_and_what_is_not_there(where: Where, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows(10))
    put([tmp_path / "a.npy"], where, "pattern/x")
    put([tmp_path / "a.npy"], where, "pattern/y")
    assert run(where("pattern/*/a.npy"), tmp_path / "out.npy", device="cpu").rows == 20
    with pytest.raises(FileNotFoundError, match="no such file"):
        run(where("pattern/z.npy"), tmp_path / "out.npy", device="cpu")
    with pytest.raises(InvalidInput, match="no input there"):
        run(where("pattern/*/b.npy"), tmp_path / "out.npy", device="cpu")
    with pytest.raises(InvalidInput, match="among the inputs"):
        run(where("pattern/x/a.npy"), where("pattern/x/a.npy"), device="cpu")


def test_an_unknown_protocol() -> None:
    with pytest.raises(InvalidInput, match="no file system for this URI"):
        score(MLP, "nope://a/b.npy", "out.npy", device="cpu", engine="numpy")


def test_two_processes_read_from_the_server(server: Where, tmp_path: Path) -> None:
    given = inputs(tmp_path / "in")
    put(given, server, "shared")
    run(server("shared"), tmp_path / "one.npy", device="cpu")
    run(server("shared"), tmp_path / "two.npy", devices=["cpu", "cpu"])
    same(tmp_path / "one.npy", tmp_path / "two.npy")

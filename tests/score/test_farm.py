"""Parts of inputs answered in other processes: the same bytes as by one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigamlp.errors import DataError, DeviceError, InvalidInput
from gigamlp.score import score
from gigamlp.score.blocks import Position, Shape
from gigamlp.score.farm import find_devices
from gigamlp.score.parts import Part, read_part, split
from tests.fakes import make_mlp

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MLP = make_mlp((6, 8, 3), name="toy")


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 6), dtype=np.uint8)


def inputs(folder: Path) -> list[Path]:
    """One input of every way of sharing out: by rows, by row groups, whole, damaged, of a wrong width, empty."""
    folder.mkdir()
    np.save(folder / "a.npy", rows(150_001))
    table = pa.table({"x": pa.array([r.tobytes() for r in rows(90_001, 1)], pa.binary(6))})
    pq.write_table(table, folder / "b.parquet", row_group_size=25_000)
    np.savetxt(folder / "c.csv", rows(1_003, 2), "%d", delimiter=",")
    (folder / "d.npy").write_bytes((folder / "a.npy").read_bytes()[:-700_003])
    np.save(folder / "e.npy", rows(10)[:, :5])
    np.save(folder / "f.npy", rows(0))
    (folder / "g.parquet").write_bytes(b"PAR1 and no more")
    with pa.OSFile(str(folder / "h.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as sink:
        sink.write_table(table, max_chunksize=7_001)
    return sorted(folder.iterdir())


def run(where: Any, out: Path, **options: Any) -> Any:
    options = {"engine": "numpy", "block_rows": 10_000, "outputs": ("class", "logits"), "on_error": "skip", **options}
    return score(MLP, where, out, **options)


def same(first: Path, second: Path) -> None:
    assert first.read_bytes() == second.read_bytes()
    one, two = (path.with_name(f"{path.name}.rejected.jsonl") for path in (first, second))
    assert one.exists() == two.exists()
    if one.exists():
        assert one.read_text() == two.read_text()


def test_parts_hold_every_block_once(tmp_path: Path) -> None:
    shape = Shape(6, 10_000)
    found = [str(path) for path in inputs(tmp_path / "in")]
    parts = list(split(found, shape, Position()))
    assert len(parts) == 3 + 2 + 1 + 1 + 1 + 1 + 1 + 1
    for path in found:
        mine = [part for part in parts if part.path == path]
        whole = list(read_part(Part(path, mine[0].start), shape))
        pieces = [block for part in mine for block in read_part(part, shape)]
        assert [(b.start, b.end, b.rejects) for b in pieces] == [(b.start, b.end, b.rejects) for b in whole]
        assert all(np.array_equal(a.x, b.x) for a, b in zip(pieces, whole, strict=True))


def test_two_processes_write_the_same_bytes_as_one(tmp_path: Path) -> None:
    given = inputs(tmp_path / "in")
    one = run(given, tmp_path / "one.npy", device="cpu")
    two = run(given, tmp_path / "two.npy", devices=["cpu", "cpu"])
    same(tmp_path / "one.npy", tmp_path / "two.npy")
    assert (one.rows, one.rejected, one.bytes_in) == (two.rows, two.rejected, two.bytes_in)
    assert two.busy["compute"] > 0
    assert two.busy["read"] > 0


def test_a_run_of_one_process_goes_on_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigamlp.score.writing.TELL_S", 0.0)  # a quick machine is done before the first report
    given = inputs(tmp_path / "in")
    run(given, tmp_path / "whole.parquet", device="cpu")

    def stop(done: int, total: int, text: str) -> None:
        if done > 50_000:
            raise KeyboardInterrupt

    out = tmp_path / "again" / "whole.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(given, out, device="cpu", progress=stop, block_rows=10_000, commit_s=0)
    assert run(given, out, devices=["cpu", "cpu"], resume=True).resumed
    same(tmp_path / "whole.parquet", out)


def test_a_bad_row_ends_the_run_and_keeps_what_came_before(tmp_path: Path) -> None:
    x = rows(200_000).astype(np.float32)
    x[123_456, 2] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match=r"row 123,456"):
        run(tmp_path / "x.npy", tmp_path / "out.npy", devices=["cpu", "cpu"], on_error="fail")
    done = run(tmp_path / "x.npy", tmp_path / "out.npy", devices=["cpu", "cpu"], resume=True)
    assert (done.rows, done.rejected, done.rows_now) == (199_999, 1, 79_999)


def test_an_input_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", rows(10))
    part = next(split([str(tmp_path / "x.npy")], Shape(6, 5), Position()))
    np.save(tmp_path / "x.npy", rows(11))
    with pytest.raises(InvalidInput, match="the same, unchanged files"):
        list(read_part(part, Shape(6, 5)))


KILLED = """
import os, signal, sys
from gigamlp.score import score
from gigamlp.score.farm import Farm
from tests.score.test_farm import MLP

def end(farm, *rest):
    found = start(farm, *rest)
    (pid,) = farm._pools[0]._processes
    if sys.argv[3] == "worker":
        os.kill(pid, signal.SIGKILL)
    else:
        print(*(p for pool in farm._pools for p in pool._processes), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return found

if __name__ == "__main__":
    start, Farm.told = Farm.told, end
    score(MLP, sys.argv[1], sys.argv[2], devices=["cpu", "cpu"], engine="numpy")
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("who", ["worker", "parent"])
def test_a_killed_process(who: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", rows(1000))
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), who]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    if who == "worker":
        assert done.returncode == 1
        assert "a worker process ended" in done.stderr
        return
    assert done.returncode == -signal.SIGKILL
    for pid in map(int, done.stdout.split()):  # they ended as well: `run` returned, so nobody holds its pipes
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["gpu"], "unknown device 'gpu'"),
        (["cuda:x"], "unknown device"),
        (["cpu:1"], "unknown device"),
        (["cpu", "cuda:0"], "of one kind"),
        (["cuda", "cuda:0"], "cuda:0 is named twice"),
    ],
)
def test_devices_that_make_no_sense(named: list[str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        find_devices(named)


def test_all_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError):
        find_devices(["all"])


def test_stdin_cannot_be_shared_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="stdin cannot be shared out"):
        score(MLP, "-", tmp_path / "y.npy", devices=["cpu"], engine="numpy")

"""Kills, damage and full disks: nothing is lost, nothing comes twice, and what is wrong is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigamlp.errors import DataError, FileFormatError, InvalidInput
from gigamlp.score import score
from tests.fakes import make_mlp

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MLP = make_mlp((6, 8, 3))
X = np.random.default_rng(1).integers(0, 256, (1003, 6), dtype=np.uint8)


def run(inputs: Any, out: Path, **options: Any) -> Any:
    return score(MLP, inputs, out, **{"device": "cpu", "engine": "numpy", "block_rows": 100, **options})


def rejects(out: Path) -> list[dict[str, Any]]:
    path = out.with_name(out.name + ".rejected.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class Stopped(Exception):
    """Raised by a test in the middle of a run."""


def stop_after(rows: int) -> Any:
    def progress(done: int, total: int, text: str) -> None:
        if done >= rows:
            raise Stopped

    return progress


# ---- kills -----------------------------------------------------------------------------------------------------------

# Children are forked once everything is imported, so that the kills come while rows are answered, not before.
SUPERVISOR = """
    import os, random, signal, sys, time
    from pathlib import Path
    from gigamlp.score import score
    from tests.score.test_faults import MLP

    folder, whole, out, wanted = *map(Path, sys.argv[1:4]), int(sys.argv[4])

    def run(to):
        score(MLP, sorted(folder.glob("rows*")), to, outputs=("class", "margin"), on_error="quarantine", resume=True,
              id_columns=("_row",), device="cpu", engine="numpy", block_rows=64, commit_s=0.0)

    begin = time.perf_counter()
    run(whole)
    longest, draw, kills = time.perf_counter() - begin, random.Random(7), 0
    while kills < wanted:
        child = os.fork()
        if not child:
            run(out)
            os._exit(0)
        time.sleep(draw.uniform(0, longest / 4))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
            print("killed", flush=True)
        else:  # complete before the kill: begin anew
            assert status == 0, status
            for each in out.parent.glob(out.name + "*"):
                each.unlink()
    run(out)
"""


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_a_run_killed_at_twenty_random_moments_writes_the_same_bytes(ending: str, tmp_path: Path) -> None:
    x = np.tile(X, (8, 1)).astype(np.float32)
    x[[5, 700, 5000], 2] = np.nan
    np.save(tmp_path / "rows0.npy", x)
    np.savetxt(tmp_path / "rows1.csv", x[:2000], delimiter=",", fmt="%g")
    pq.write_table(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x[:2000].reshape(-1)), 6)}),
        tmp_path / "rows2.parquet",
        row_group_size=777,
    )
    whole, out = tmp_path / f"whole.{ending}", tmp_path / f"killed.{ending}"
    program = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(tmp_path), str(whole), str(out), "20"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed") == 20
    compare(whole, out)
    left = {p.name.removeprefix("killed") for p in tmp_path.iterdir() if p.name.startswith((".", "killed"))}
    assert left == {f".{ending}", f".{ending}.manifest.json", f".{ending}.rejected.jsonl"}


def compare(whole: Path, out: Path) -> None:
    assert out.read_bytes() == whole.read_bytes()
    for what in ("manifest.json", "rejected.jsonl"):
        one, other = (p.with_name(f"{p.name}.{what}").read_text() for p in (whole, out))
        assert other.replace("killed.", "whole.") == one


@pytest.mark.parametrize("ending", ["npy", "parquet", "arrow"])
@pytest.mark.parametrize("point", ["sync", "save", "finish", "discard"])
def test_a_run_that_dies_at_any_step_goes_on(
    ending: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step between two states of the disk, one after the other, fails once."""
    from gigamlp.score import arrow_sink, manifest, sinks

    np.save(tmp_path / "rows.npy", X)
    run(tmp_path / "rows.npy", tmp_path / f"whole.{ending}")
    whole = (tmp_path / f"whole.{ending}").read_bytes()
    owner = manifest.Manifest if point == "save" else sinks.NpySink if ending == "npy" else arrow_sink.ArrowSink
    honest = getattr(owner, point)
    for nth in (0, 1, 5, 10, 11, 12, 13):
        for when in ("before", "after"):
            out = tmp_path / f"out-{nth}-{when}.{ending}"
            count = 0

            def failing(*args: Any, nth: int = nth, when: str = when) -> None:
                nonlocal count
                count += 1
                if count - 1 == nth and when == "before":
                    raise Stopped
                honest(*args)
                if count - 1 == nth:
                    raise Stopped

            monkeypatch.setattr(owner, point, failing)
            try:
                run(tmp_path / "rows.npy", out, commit_s=0.0)
            except Stopped:
                monkeypatch.setattr(owner, point, honest)
                run(tmp_path / "rows.npy", out, resume=True)
            monkeypatch.setattr(owner, point, honest)
            assert out.read_bytes() == whole
            assert not out.with_name(out.name + ".part").exists()


def test_resume_starts_where_there_is_nothing_and_succeeds_where_all_is_done(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", X)
    out = tmp_path / "out.npy"
    first = run(tmp_path / "rows.npy", out, resume=True)
    assert (first.rows, first.already, first.resumed) == (1003, False, False)
    stamp = out.stat().st_mtime_ns
    again = run(tmp_path / "rows.npy", out, resume=True)
    assert (again.rows, again.already) == (1003, True)
    assert out.stat().st_mtime_ns == stamp
    out.unlink()
    with pytest.raises(InvalidInput, match="complete according to"):
        run(tmp_path / "rows.npy", out, resume=True)
    assert run(tmp_path / "rows.npy", out).rows_now == 1003


def interrupted(tmp_path: Path) -> Path:
    x = X.astype(np.float32)
    x[650, 1] = np.nan
    np.save(tmp_path / "rows.npy", x)
    with pytest.raises(DataError, match=r"rows.npy, row 650: holds nan in feature 1: .*--on-error skip"):
        run(tmp_path / "rows.npy", tmp_path / "out.npy")
    return tmp_path / "out.npy"


def test_what_came_before_a_failure_is_kept_and_resumed_otherwise(tmp_path: Path) -> None:
    out = interrupted(tmp_path)
    assert not out.exists()
    manifest = json.loads(out.with_name("out.npy.manifest.json").read_text())
    assert (manifest["rows"], manifest["state"]) == (600, "running")
    done = run(tmp_path / "rows.npy", out, resume=True, on_error="skip")
    assert (done.rows, done.rows_now, done.rejected, done.resumed) == (1002, 402, 1, True)
    np.testing.assert_array_equal(np.load(out), MLP.predict(np.delete(X, 650, axis=0)))


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    out = interrupted(tmp_path)
    for options, said in (
        ({"outputs": "logits"}, "outputs was"),
        ({"block_rows": 99}, "block_rows was 100 and is 99"),
        ({"engine": "torch_eager"}, "engine was"),
    ):
        with pytest.raises(InvalidInput, match=f"cannot resume: {said}"):
            run(tmp_path / "rows.npy", out, resume=True, **options)
    np.save(tmp_path / "rows.npy", X[:900])
    with pytest.raises(InvalidInput, match="has changed since"):
        run(tmp_path / "rows.npy", out, resume=True)
    out.with_name("out.npy.part").write_bytes(b"short")
    np.save(tmp_path / "other.npy", X)
    with pytest.raises(InvalidInput, match="list of inputs"):
        run(tmp_path / "other.npy", out, resume=True)
    out.with_name("out.npy.manifest.json").write_text("{}")
    with pytest.raises(FileFormatError, match="not a manifest"):
        run(tmp_path / "rows.npy", out, resume=True)
    assert run(tmp_path / "rows.npy", out).rows == 900


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    from gigamlp.score.sinks import AppendFile

    np.save(tmp_path / "rows.npy", X)
    held = AppendFile(tmp_path / "out.npy.part", 0)
    with pytest.raises(InvalidInput, match="another process is writing"):
        run(tmp_path / "rows.npy", tmp_path / "out.npy")
    held.close()


# ---- rows that have no answer ----------------------------------------------------------------------------------------


def bad_table(tmp_path: Path) -> Path:
    rows: list[Any] = X.tolist()
    rows[3], rows[4], rows[5] = None, [1, 2], [1, None, 3, 4, 5, 6]
    table = pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "id": np.arange(len(rows))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=250)
    return tmp_path / "rows.parquet"


@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
def test_nulls_and_wrong_widths_are_reported_by_row(on_error: str, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    done = run(bad_table(tmp_path), out, on_error=on_error, id_columns=["id"])
    assert (done.rows, done.rejected) == (1000, 3)
    table = pq.read_table(out).to_pydict()
    assert table["id"] == [0, 1, 2, *range(6, 1003)]
    assert table["class"] == MLP.predict(np.delete(X, [3, 4, 5], axis=0)).tolist()
    found = rejects(out)
    assert [each["row"] for each in found] == [3, 4, 5]
    assert "null" in found[0]["reason"]
    assert "has 2 features" in found[1]["reason"]
    assert "null" in found[2]["reason"]
    assert [each.get("values", "none") for each in found] == (
        [None, [1, 2], [1, None, 3, 4, 5, 6]] if on_error == "quarantine" else ["none"] * 3
    )
    with pytest.raises(DataError, match="row 3: holds null"):
        run(tmp_path / "rows.parquet", out)


def test_nan_in_a_table_of_named_columns(tmp_path: Path) -> None:
    x = X.astype(np.float64)
    x[7, 2], x[8, 5] = np.inf, np.nan
    columns: dict[str, Any] = {f"p{i}": x[:, i] for i in range(6)}
    columns["p0"] = pa.array([None if row == 9 else v for row, v in enumerate(x[:, 0])])
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    out = tmp_path / "out.npy"
    done = run(tmp_path / "rows.parquet", out, on_error="quarantine", id_columns=["_row"])
    assert (done.rows, done.rejected) == (1000, 3)
    assert np.load(out)["_row"].tolist() == [*range(7), *range(10, 1003)]
    assert [each["row"] for each in rejects(out)] == [7, 8, 9]
    assert rejects(out)[0]["values"][2] == "inf"


def test_bad_lines_of_text(tmp_path: Path) -> None:
    lines = [",".join(map(str, row)) for row in X.tolist()]
    lines[10], lines[250], lines[251], lines[999] = "1,2,3", "1,2,x,4,5,6", "", "1,2,3,4,5,6,7"
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    out = tmp_path / "out.npy"
    done = run(tmp_path / "rows.csv", out, on_error="quarantine")
    np.testing.assert_array_equal(np.load(out), MLP.predict(np.delete(X, [10, 250, 251, 999], axis=0)))
    found = rejects(out)
    assert done.rejected == 3  # an empty line is no row
    assert [(each["row"], each["values"]) for each in found] == [(10, "1,2,3"), (250, lines[250]), (998, lines[999])]
    assert "has 3 fields, the first line has 6" in found[0]["reason"]


def test_a_damaged_file_between_sound_ones(tmp_path: Path) -> None:
    rows_in, out = tmp_path / "in", tmp_path / "out" / "out.npy"
    rows_in.mkdir()
    for name in ("a", "b", "c"):
        np.save(rows_in / f"{name}.npy", X)
    data = (rows_in / "b.npy").read_bytes()
    for cut, rows in ((len(data) - 6 * 3 - 1, 999), (50, 0)):
        (rows_in / "b.npy").write_bytes(data[:cut])
        done = run(rows_in, out, on_error="skip")
        assert done.rows == 2006 + rows
        np.testing.assert_array_equal(np.load(out), MLP.predict(np.concatenate([X, X[:rows], X])))
        (found,) = rejects(out)
        assert found["input"].endswith("b.npy")
        assert (found["row"], found["rows"]) == ((999, 4) if rows else (0, None))
    assert run(rows_in, out, on_error="skip", resume=True).already
    with pytest.raises(InvalidInput, match="is among the inputs"):
        run([rows_in, out], out)


def test_a_damaged_row_group_costs_its_own_rows_only(tmp_path: Path) -> None:
    x = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 6)
    path, out = tmp_path / "rows.parquet", tmp_path / "out.npy"
    pq.write_table(pa.table({"x": x}), path, row_group_size=250, compression="zstd", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    begin = column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xee" * column.total_compressed_size
    path.write_bytes(data)
    done = run(path, out, on_error="skip")
    assert (done.rows, done.rejected) == (753, 250)
    np.testing.assert_array_equal(np.load(out), MLP.predict(np.delete(X, np.s_[500:750], axis=0)))
    (found,) = rejects(out)
    assert (found["row"], found["rows"]) == (500, 250)


def test_a_wrong_width_is_said_of_the_whole_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X[:, :5])
    np.save(tmp_path / "b.npy", X)
    with pytest.raises(DataError, match="rows 0 to 1,002: rows have 5 features, the model takes 6"):
        run([tmp_path / "a.npy", tmp_path / "b.npy"], tmp_path / "out.npy")
    done = run([tmp_path / "a.npy", tmp_path / "b.npy"], tmp_path / "out.npy", on_error="skip")
    assert (done.rows, done.rejected) == (1003, 1003)


# ---- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["npy", "arrow"])
def test_a_full_disk_leaves_what_was_committed(ending: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writes then fail in the same way, in the middle."""
    np.save(tmp_path / "rows.npy", X)
    whole, out = tmp_path / f"whole.{ending}", tmp_path / f"out.{ending}"
    run(tmp_path / "rows.npy", whole, outputs="logits")
    program = f"""
        import resource, signal
        from tests.score.test_faults import run
        from pathlib import Path
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (7000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            run({str(tmp_path / "rows.npy")!r}, Path({str(out)!r}), outputs="logits", commit_s=0.0)
        except OSError as error:
            print("full", error.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith("full"), done.stderr
    manifest = json.loads(out.with_name(out.name + ".manifest.json").read_text())
    assert 0 < manifest["rows"] < 1003
    assert run(tmp_path / "rows.npy", out, outputs="logits", resume=True).rows == 1003
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", X)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        run(tmp_path / "rows.npy", locked / "out.npy")

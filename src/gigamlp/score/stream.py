"""`score`: rows of files in, answers in a file out, at the speed of the slowest of reading, computing and writing."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import gigamlp
from gigamlp.cascade import Model
from gigamlp.errors import DataError, InvalidInput
from gigamlp.measure.clock import HostClock
from gigamlp.plan import Plan
from gigamlp.score.answers import Answers, answer, fields
from gigamlp.score.blocks import Block, Reject, Shape
from gigamlp.score.channel import Busy, flow
from gigamlp.score.files import find_inputs, read_inputs, total_rows
from gigamlp.score.lane import Lanes
from gigamlp.score.manifest import Manifest, beside, check_same, described, read_manifest
from gigamlp.score.outs import find_ids, open_sink, with_ids
from gigamlp.score.sinks import AppendFile, Sink
from gigamlp.session import Session
from gigamlp.spec import Variant

__all__ = ["ON_ERROR", "Scored", "score"]

ON_ERROR = ("fail", "skip", "quarantine")
Progress = Callable[[int, int, str], None]

_BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # of uint8 rows: a call to a GPU has to outweigh its fixed cost
_SHOWN = 10  # rejects in the result


@dataclass(frozen=True)
class Scored:
    """What a run did.

    Attributes
    ----------
    out : str
    rows, rejected : int
        Answers in the output, and rows without one, those of interrupted runs before it included.
    rows_now : int
        Rows answered by this run.
    bytes_in : int
        Bytes of the rows that this run read.
    seconds, finish_s : float
        Of this run, and of those what the output's last form took.
    busy : dict
        Seconds that each of ``read``, ``compute`` and ``write`` worked; they overlap.
    bottleneck : str
        The stage that worked longest.
    rejects : list of dict
        The first few of this run.
    resumed, already : bool
        Whether it went on from an interrupted run, and whether there was nothing left to do.
    """

    out: str
    rows: int
    rejected: int
    rows_now: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    finish_s: float = 0.0
    busy: Mapping[str, float] | None = None
    bottleneck: str | None = None
    rejects: Sequence[Mapping[str, Any]] = ()
    resumed: bool = False
    already: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and rows and bytes a second."""
        flowing = self.seconds - self.finish_s
        rates = {
            "rows_per_s": self.rows_now / flowing if flowing > 0 and self.rows_now else None,
            "bytes_per_s": self.bytes_in / flowing if flowing > 0 and self.bytes_in else None,
        }
        return {**asdict(self), **rates}


def score(
    mlp: Model,
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    outputs: str | Sequence[str] = ("class",),
    columns: Sequence[str] = (),
    id_columns: Sequence[str] = (),
    plan: Plan | None = None,
    device: str = "auto",
    engine: str | None = None,
    variant: Variant | Mapping[str, Any] | None = None,
    batch: int | None = None,
    threads: int | None = None,
    input_dtype: str | None = None,
    on_error: str = "fail",
    resume: bool = False,
    block_rows: int | None = None,
    commit_s: float = 1.0,
    streams: bool = False,
    progress: Progress | None = None,
    stdin: IO[bytes] | None = None,
) -> Scored:
    """Answer every row of the inputs, in constant memory, and write the answers in the order of the rows.

    Reading, computing and writing overlap, each in a thread of its own. What was written is committed about once a
    second: a killed run goes on from there with ``resume=True``, and its output is then the same, byte for byte, as
    that of a run that was not interrupted.

    Parameters
    ----------
    mlp : MLP or Cascade
    inputs : path-like or sequence of path-like
        Files (``.npy``, IDX, CSV, Parquet, Arrow), folders and patterns of these, ``-`` for raw rows of stdin.
    out : path-like
        ``.npy``, ``.parquet`` or ``.arrow``. Beside it lie ``OUT.manifest.json``, while it works ``OUT.part``, and if
        rows had no answer ``OUT.rejected.jsonl``.
    outputs : str or sequence of str
        Of ``class``, ``margin``, ``confidence``, ``proba``, ``logits``. Several in an ``.npy`` make a structured array.
    columns : sequence of str
        In tables: names or patterns of the columns that are features, in the order in which the model takes them.
        Default: the one column of lists or bytes, or all columns of numbers if there are as many as features.
    id_columns : sequence of str
        Columns of the inputs that go with the answers. ``_file`` and ``_row`` are always there: the input's path, and
        the row's number in it, counted from 0.
    plan, device, engine, variant, batch, threads, input_dtype
        See `Session`. `input_dtype` is also what raw rows hold, by default uint8.
    on_error : {"fail", "skip", "quarantine"}
        What happens at rows that have no answer: NaN, nulls, wrong widths, damage. ``fail`` raises, with all before
        them committed; ``skip`` leaves them out and reports them in ``OUT.rejected.jsonl``; ``quarantine`` writes what
        they hold there too.
    resume : bool
        Go on from an interrupted run. Where there is none, start; where it is complete, do nothing. Without it an
        output that is there is replaced once the new one is complete.
    block_rows : int, optional
        Rows that are read, run and written together. Default: about 32 MB of bytes, on CUDA 256.
    commit_s : float
        Seconds between two commits.
    streams : bool
        On CUDA: copy in, run and copy out on three streams at once. Not measured on a GPU yet, and off for that reason.
    progress : callable, optional
        Called with (rows done, rows in all or 0, text).
    stdin : binary file, optional
        What ``-`` reads.

    Returns
    -------
    Scored

    Raises
    ------
    DataError
        With ``on_error="fail"``: a row that has no answer.
    InvalidInput
        If arguments do not fit the model, the inputs or the run to resume.
    OSError
        If the disk is full, say. What was committed before stays valid.

    Examples
    --------
    >>> import pathlib, tempfile, numpy as np, gigamlp as gm
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> np.save(folder / "rows.npy", np.array([[3, 1], [1, 3], [9, 0]], dtype=np.uint8))
    >>> mlp = gm.MLP([gm.Layer([[1.0, 0.0], [0.0, 1.0]])])
    >>> score(mlp, folder / "rows.npy", folder / "answers.npy", device="cpu", engine="numpy").rows
    3
    >>> np.load(folder / "answers.npy")
    array([0, 1, 0])
    """
    begin = HostClock.now()
    if on_error not in ON_ERROR:
        raise InvalidInput(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
    target = Path(out)
    if target.is_dir():
        raise InvalidInput(f"{target} is a folder; name the file to write")
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    made = fields(mlp, wanted)
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    paths = find_inputs([os.fspath(each) for each in given])
    if target.resolve() in {Path(path).resolve() for path in paths}:
        raise InvalidInput(f"{target} is among the inputs; write the output to another folder, or name the inputs")
    with ExitStack() as stack:
        session = stack.enter_context(
            Session(
                mlp,
                plan,
                device=device,
                engine=engine,
                variant=variant,
                batch=batch,
                threads=threads,
                input_dtype=input_dtype,
            )
        )
        rows = block_rows or _block_rows(mlp, session.device, batch)
        shape = Shape(mlp.features, rows, tuple(columns), tuple(id_columns), input_dtype)
        settings = {
            "version": gigamlp.__version__,
            "model": mlp.digest(),
            "plan": None if plan is None else _digest(plan),
            "engine": engine or ", ".join(session._choice.engines),
            "variant": None if variant is None else str(variant),
            "device": session.device,
            "batch": batch,
            "threads": threads,
            "input_dtype": input_dtype,
            "outputs": list(wanted),
            "columns": list(columns),
            "id_columns": list(id_columns),
            "block_rows": rows,
            "out": target.name,
        }
        fresh = Manifest(settings, [described(path) for path in paths], on_error)
        manifest = _begin(fresh, target, resume=resume)
        if manifest.state == "complete":
            beside(target, "part").unlink(missing_ok=True)
            return Scored(str(target), manifest.rows, manifest.rejected, already=True, resumed=True)
        ids = find_ids(paths, shape, stdin)
        sink = open_sink(target, ids, made, manifest)
        writer = _Writer(sink, target, manifest, commit_s)
        busy = Busy()
        total = 0 if progress is None else total_rows(paths, shape)
        seen = _Seen(progress, busy, total, manifest.rows + manifest.rejected)

        runs = stack.enter_context(closing(Lanes(session))) if streams and session.device != "cpu" else session

        def compute(block: Block) -> Answers:
            answers = answer(session, runs, block, wanted)
            if block.release is not None:
                block.release()
            if on_error == "fail" and answers.block.rejects:
                raise _failed(answers.block, answers.block.rejects[0])
            seen.note(block)
            return with_ids(answers, ids)

        try:
            if manifest.state == "running":
                flow(read_inputs(paths, shape, manifest.position, stdin), compute, writer.append, busy=busy)
            flowed = HostClock.now()
            writer.finish()
        finally:
            writer.close()
        done, end = writer.manifest, HostClock.now()
        return Scored(
            str(target),
            done.rows,
            done.rejected,
            rows_now=done.rows - manifest.rows,
            bytes_in=seen.bytes,
            seconds=end - begin,
            finish_s=end - flowed,
            busy=asdict(busy),
            bottleneck=busy.bottleneck,
            rejects=writer.shown,
            resumed=manifest is not fresh,
        )


def _digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()


def _block_rows(mlp: Model, device: str, batch: int | None) -> int:
    rows = _BLOCK_BYTES[device.partition(":")[0]] // mlp.features
    rows = 1 << min(20, max(10, int(math.log2(max(rows, 1)))))
    return rows if batch is None else batch * max(1, rows // batch)


def _begin(fresh: Manifest, out: Path, *, resume: bool) -> Manifest:
    """Return the manifest to go on from, or `fresh` with nothing left of runs before."""
    path = beside(out, "manifest.json")
    for orphan in path.parent.glob(f".{path.name}.*.part"):  # a kill came while a manifest was written
        orphan.unlink(missing_ok=True)
    old = read_manifest(path) if resume else None
    if old is not None:
        check_same(old, fresh, path)
        if old.state == "complete" and not out.exists():
            raise InvalidInput(f"{out} is complete according to {path}, but not there; run without --resume")
        inputs = fresh.inputs if old.state == "running" else old.inputs
        return replace(old, inputs=inputs, on_error=fresh.on_error)
    path.unlink(missing_ok=True)
    return fresh


def _failed(block: Block, reject: Reject) -> DataError:
    where = f", from row {reject.row:,} on" if reject.rows is None else f", row {reject.row:,}"
    if reject.rows is not None and reject.rows > 1:
        where = f", rows {reject.row:,} to {reject.row + reject.rows - 1:,}"
    text = reject.reason if reject.reason.startswith(block.name) else f"{block.name}{where}: {reject.reason}"
    return DataError(f"{text}; --on-error skip leaves such rows out and reports them, what came before is kept")


class _Seen:
    """Counts what was computed, and tells it on."""

    def __init__(self, progress: Progress | None, busy: Busy, total: int, before: int) -> None:
        self.rows = self.bytes = 0
        self._progress, self._busy = progress, busy
        self._total, self._before = total, before
        self._begin = self._last = HostClock.now()

    def note(self, block: Block) -> None:
        self.rows += len(block.x)
        self.bytes += block.x.nbytes
        now = HostClock.now()
        if self._progress is None or now - self._last < 0.1:
            return
        self._last = now
        took = now - self._begin
        text = f"{self.rows:,} rows, {self.rows / took:,.0f} rows/s, {self.bytes / took / 1e9:.2f} GB/s"
        text += f", slowest: {self._busy.bottleneck}"
        done = self._before + self.rows
        if self._total > done and took > 0:
            text += f", {(self._total - done) * took / max(self.rows, 1):,.0f} s left"
        self._progress(done, self._total, text)


class _Writer:
    """Appends answers and rejects, and commits both now and then."""

    def __init__(self, sink: Sink, out: Path, manifest: Manifest, commit_s: float) -> None:
        self.manifest, self.shown = manifest, list[dict[str, Any]]()
        self._sink, self._commit_s = sink, commit_s
        self._path = beside(out, "manifest.json")
        self._rejects = AppendFile(beside(out, "rejected.jsonl"), manifest.rejected_bytes)
        self._next = manifest
        self._sound = True
        self._last = HostClock.now()

    def append(self, answers: Answers) -> None:
        """Write a block's answers and rejects; commit if it is time."""
        self._sound = False
        block, rejected = answers.block, 0
        self._sink.append(answers)
        for reject in block.rejects:
            line = _line(block.name, reject, values=self.manifest.on_error == "quarantine")
            self._rejects.write((json.dumps(line) + "\n").encode())
            rejected += reject.rows or 0
            if len(self.shown) < _SHOWN:
                self.shown.append({key: value for key, value in line.items() if key != "values"})
        self._sound = True
        self._next = self._next.to(
            position=block.end,
            rows=self._next.rows + len(block.x),
            rejected=self._next.rejected + rejected,
            bytes=self._sink.size,
            rejected_bytes=self._rejects.size,
        )
        if HostClock.now() - self._last >= self._commit_s:
            self.commit()

    def commit(self, state: str | None = None) -> None:
        """Make all that was appended what a resumed run begins with."""
        self._sink.sync()
        self._rejects.sync()
        made = self._next if state is None else self._next.to(state=state)
        made.save(self._path)
        self.manifest = self._next = made
        self._last = HostClock.now()

    def finish(self) -> None:
        """Commit the end, and give the output its name."""
        if self.manifest.state == "running":
            self._next = self._next.to(bytes=self._sink.size)  # a header alone, if there were no rows
            self.commit("finishing")
        self._sink.finish(self.manifest.rows)
        self.manifest = self.manifest.to(state="complete")
        self.manifest.save(self._path)
        self._sink.discard()

    def close(self) -> None:
        """Commit what was appended before a failure elsewhere, and close the files."""
        try:
            if self._sound and self.manifest.state == "running" and self._next is not self.manifest:
                self.commit()
        finally:
            self._sink.close()
            self._rejects.close()
            if not self._rejects.size:
                self._rejects.path.unlink(missing_ok=True)


def _line(name: str, reject: Reject, *, values: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"input": name, "row": reject.row, "rows": reject.rows, "reason": reject.reason}
    if values and isinstance(reject.values, list):  # JSON has no NaN
        line["values"] = [v if not isinstance(v, float) or math.isfinite(v) else str(v) for v in reject.values]
    elif values:
        line["values"] = reject.values
    return line

"""`score`: rows of files in, answers in a file out, at the speed of the slowest of reading, computing and writing."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import gigamlp
from gigamlp.cascade import Model
from gigamlp.errors import InvalidInput
from gigamlp.measure.clock import HostClock
from gigamlp.plan import Plan
from gigamlp.score.answers import Answers, fields
from gigamlp.score.blocks import Shape
from gigamlp.score.channel import Busy, flow
from gigamlp.score.files import STDIN, find_inputs, read_inputs, total_rows
from gigamlp.score.manifest import Manifest, beside, check_same, described, read_manifest
from gigamlp.score.outs import find_ids, open_sink, with_ids
from gigamlp.score.parts import Crew, Done, Job, Worker, gathered, split
from gigamlp.score.places import Place, is_uri, place
from gigamlp.score.writing import Progress, Seen, Writer, failed
from gigamlp.spec import Variant

__all__ = ["ON_ERROR", "Scored", "score"]

ON_ERROR = ("fail", "skip", "quarantine")
_BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # of uint8 rows: a call to a GPU has to outweigh its fixed cost


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
        """Return the fields, rows and bytes a second, and the share of the time that the bottleneck worked."""
        flowing = self.seconds - self.finish_s
        spent = None if self.busy is None else Busy(**self.busy)
        rates = {
            "rows_per_s": self.rows_now / flowing if flowing > 0 and self.rows_now else None,
            "bytes_per_s": self.bytes_in / flowing if flowing > 0 and self.bytes_in else None,
            "bottleneck_share": spent.share(flowing) if flowing > 0 and spent is not None else None,
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
    devices: Sequence[str] = (),
    ray: str | None = None,
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
        Files (``.npy``, IDX, CSV, Parquet, Arrow), folders and patterns of these, also by URI (``s3://bucket/key``);
        ``-`` for raw rows of stdin.
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
        On CUDA: copy in, run and copy out on three streams at once. On an H200 that was no faster than without.
    devices : sequence of str
        Instead of `device`: several of this host, a process each. ``("all",)`` is every GPU; ``("cpu", "cpu")`` two
        processes. Call it below ``if __name__ == "__main__":``, as the processes are started anew.
    ray : str, optional
        Run on a Ray cluster: ``auto`` for the one that runs here, ``local`` to start one, or its address. All nodes
        must see the inputs under the same paths; this process writes the output.
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
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    made = fields(mlp, wanted)
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    paths = find_inputs([os.fspath(each) for each in given])
    target = _target(out, paths)
    options = {"device": device, "engine": engine, "variant": variant, "batch": batch, "input_dtype": input_dtype}
    with ExitStack() as stack:
        job = Job(mlp, plan, {**options, "threads": threads}, wanted, streams)
        hands = _hire(paths, job, ray, devices, stack)
        where, engines = hands.told()
        rows = block_rows or _block_rows(mlp, where, batch)
        shape = Shape(mlp.features, rows, tuple(columns), tuple(id_columns), input_dtype)
        settings = {
            "version": gigamlp.__version__,
            "model": mlp.digest(),
            "plan": None if plan is None else _digest(plan),
            "engine": engine or engines,
            "variant": None if variant is None else str(variant),
            "device": where,
            "batch": batch,
            "threads": hands.threads,
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
            if isinstance(target, Path):
                beside(target, "part").unlink(missing_ok=True)
            return Scored(str(target), manifest.rows, manifest.rejected, already=True, resumed=True)
        ids = find_ids(paths, shape, stdin)
        sink = open_sink(target, ids, made, manifest)
        writer = Writer(sink, target, manifest, commit_s)
        busy = Busy()
        total = 0 if progress is None else total_rows(paths, shape)
        seen = Seen(progress, busy, total, manifest.rows + manifest.rejected)

        def taken(done: Done) -> Answers:
            if on_error == "fail" and done.answers.block.rejects:
                raise failed(done.answers.block, done.answers.block.rejects[0])
            seen.note(len(done.answers.block.x), done.bytes)
            return with_ids(done.answers, ids)

        try:
            if manifest.state == "running" and isinstance(hands, Worker):
                blocks = read_inputs(paths, shape, manifest.position, stdin)
                flow(blocks, lambda block: taken(hands.answer(block)), writer.append, busy=busy)
            elif manifest.state == "running" and not isinstance(hands, Worker):
                parts = split(paths, shape, manifest.position)
                flow(gathered(hands, parts, shape, busy), taken, writer.append, watch=busy)
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


def _target(out: str | os.PathLike[str], paths: Sequence[str]) -> Place:
    target = place(out)
    if target.is_dir():
        raise InvalidInput(f"{target} is a folder; name the file to write")
    if not isinstance(target, Path):
        if str(target) in paths:
            raise InvalidInput(f"{target} is among the inputs; write the output elsewhere")
        return target
    if target.resolve() in {Path(path).resolve() for path in paths if not is_uri(path)}:
        raise InvalidInput(f"{target} is among the inputs; write the output to another folder, or name the inputs")
    return target


def _hire(paths: Sequence[str], job: Job, ray: str | None, devices: Sequence[str], stack: ExitStack) -> Crew | Worker:
    """Return who works: a crew in other processes, or a worker in this one."""
    if STDIN in paths and (ray is not None or devices):
        raise InvalidInput("rows of stdin cannot be shared out: leave out --devices and --ray, or name files")
    if ray is not None and devices:
        raise InvalidInput("name either devices of this host or a Ray cluster, not both")
    if ray is not None:
        from gigamlp.score.ray import RayCrew

        return stack.enter_context(RayCrew(job, ray))
    if devices:
        from gigamlp.score.farm import Farm, find_devices

        return stack.enter_context(Farm(job, find_devices(devices)))
    return stack.enter_context(closing(Worker(job)))


def _digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()


def _block_rows(mlp: Model, device: str, batch: int | None) -> int:
    rows = _BLOCK_BYTES[device.partition(":")[0]] // mlp.features
    rows = 1 << min(20, max(10, int(math.log2(max(rows, 1)))))
    return rows if batch is None else batch * max(1, rows // batch)


def _begin(fresh: Manifest, out: Place, *, resume: bool) -> Manifest:
    """Return the manifest to go on from, or `fresh` with nothing left of runs before."""
    path = beside(out, "manifest.json")
    for orphan in (
        () if not isinstance(path, Path) else path.parent.glob(f".{path.name}.*.part")
    ):  # a kill came while a manifest was written
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

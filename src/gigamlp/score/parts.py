"""Parts of the inputs that other processes answer, and what answers them there.

A part begins where a block of the single-process run begins and is cut into blocks as there, so the answers are the
same, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from gigamlp.cascade import Model
from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.plan import Plan
from gigamlp.score.answers import Answers, Runs, answer
from gigamlp.score.blocks import Block, Position, Shape, reject_all
from gigamlp.score.channel import Busy, flow
from gigamlp.score.files import open_source
from gigamlp.score.manifest import described
from gigamlp.session import Session

__all__ = [
    "Crew",
    "Done",
    "Job",
    "Part",
    "Result",
    "Worker",
    "gathered",
    "read_part",
    "shared",
    "split",
    "worker_threads",
]

PART_ROWS = 1 << 16  # at least: below that the fixed cost of a task shows


@dataclass(frozen=True)
class Job:
    """What every worker is told.

    Attributes
    ----------
    mlp : MLP or Cascade
    plan : Plan or None
    options : dict
        For the Session: ``device``, ``engine`` and so on.
    outputs : tuple of str
    streams : bool
        See `score`.
    """

    mlp: Model
    plan: Plan | None
    options: Mapping[str, Any]
    outputs: tuple[str, ...]
    streams: bool = False


@dataclass(frozen=True)
class Part:
    """Successive rows of one input.

    Attributes
    ----------
    path : str
    start : Position
    stop : int or None
        The row before which it ends; None: with the input.
    seen : dict
        Size and time of the input as the caller sees it.
    """

    path: str
    start: Position
    stop: int | None = None
    seen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Done:
    """A block's answers, with the rows themselves gone.

    Attributes
    ----------
    answers : Answers
    bytes : int
        Of the rows.
    """

    answers: Answers
    bytes: int


@dataclass(frozen=True, eq=False)
class Result:
    """What a worker made of a part.

    Attributes
    ----------
    done : list of Done
        By block, in order.
    read, compute : float
        Seconds that these stages worked.
    """

    done: list[Done]
    read: float
    compute: float


class Crew(Protocol):
    """Workers in other processes.

    Attributes
    ----------
    size : int
        How many work at once.
    threads : int or None
        CPU threads of each; None where the plan says.
    """

    size: int
    threads: int | None

    def told(self) -> tuple[str, str]:
        """Return the device and the engines that they run, as the manifest names them."""
        ...

    def run(self, parts: Iterator[Part], shape: Shape) -> Iterator[Result]:
        """Yield the results in the order of the parts."""
        ...


def split(paths: Sequence[str], shape: Shape, start: Position, rows: int = PART_ROWS) -> Iterator[Part]:
    """Yield parts of at least `rows` rows, the last of an input aside, from `start` on.

    Inputs that cannot be entered in the middle (text, compressed, Arrow) are one part each.
    """
    for file in range(start.file, len(paths)):
        at = start if file == start.file else Position(file)
        path, seen = paths[file], described(paths[file])
        last = at
        for row in _cuts(path, shape):
            if row - last.row >= rows:
                yield Part(path, last, row, seen)
                last = Position(file, row)
        yield Part(path, last, None, seen)


def _cuts(path: str, shape: Shape) -> Sequence[int]:
    """Return the rows at which parts of an input may begin."""
    try:
        source = open_source(path, shape)
    except FileFormatError:
        return ()  # the worker will say so
    with closing(source):
        found: Sequence[int] = getattr(source, "cuts", ())
        return found


def read_part(part: Part, shape: Shape) -> Iterator[Block]:
    """Yield the blocks of a part. What cannot be read is a reject, not an error.

    Raises
    ------
    InvalidInput
        If the input is not the file that the caller sees under this name.
    """
    here = described(part.path)
    if part.seen and here != part.seen:
        raise InvalidInput(
            f"{part.path}: has {here['bytes']:,} bytes or another time here, {part.seen['bytes']:,} where the run "
            "began; all nodes must see the same, unchanged files"
        )
    try:
        with closing(open_source(part.path, shape)) as source:
            for block in source.blocks(part.start):
                if part.stop is not None and block.start.row >= part.stop:
                    return
                yield block
    except FileFormatError as error:
        block = reject_all(part.path, part.start, None, str(error), shape.features)
        end = Position(part.start.file + 1)
        yield Block(part.start, end, block.x, block.kept, None, block.rejects, block.name)


def gathered(crew: Crew, parts: Iterator[Part], shape: Shape, busy: Busy) -> Iterator[Done]:
    """Yield what `crew` answers, in order. `busy` gets the seconds that one of its workers was busy on average."""
    for result in crew.run(parts, shape):
        busy.read += result.read / crew.size
        busy.compute += result.compute / crew.size
        yield from result.done


def worker_threads(job: Job) -> int:
    """Return the CPU threads of one worker: what the plan or the caller says, else 1, as workers share the CPUs."""
    planned = () if job.plan is None else (c.spec.threads or 1 for c in job.plan.winners)
    return max(int(job.options.get("threads") or 1), *planned, 1)


def shared(job: Job) -> Job:
    """Return `job` for one of several workers on CPUs, with its threads named where no plan does.

    Engine ``numpy`` takes them from the environment (``OPENBLAS_NUM_THREADS``; Ray sets ``OMP_NUM_THREADS``).
    """
    engine = job.options.get("engine")
    if job.plan is not None or engine == "numpy" or (engine is None and find_spec("torch") is None):
        return job
    return replace(job, options={**job.options, "threads": worker_threads(job)})


class Worker:
    """A Session in a process of its own, and the blocks that it answers."""

    def __init__(self, job: Job) -> None:
        self._job, self._stack = job, ExitStack()
        self.threads: int | None = job.options.get("threads")
        kept = {
            "cache": False,
            **job.options,
        }  # a run that is resumed writes the same bytes, whatever was tuned between
        self.session = self._stack.enter_context(Session(job.mlp, job.plan, **kept))
        self._runs: Runs = self.session
        if job.streams and self.session.device != "cpu":
            from gigamlp.score.lane import Lanes

            self._runs = self._stack.enter_context(closing(Lanes(self.session)))

    def answer(self, block: Block) -> Done:
        """Answer a block. Rows that are refused become rejects."""
        size = block.x.nbytes
        found = answer(self.session, self._runs, block, self._job.outputs)
        if block.release is not None:
            block.release()
        rows = found.block
        bare = replace(rows, x=np.empty((len(rows.x), 0), np.uint8), release=None)
        return Done(replace(found, block=bare), size)

    def run(self, part: Part, shape: Shape) -> Result:
        """Answer a part, reading a block ahead."""
        found: list[Done] = []
        keep: Callable[[Done], None] = found.append
        busy = flow(read_part(part, shape), self.answer, keep)
        return Result(found, busy.read, busy.compute)

    def told(self) -> tuple[str, str]:
        """The device and the engines, as the manifest names them."""
        return self.session.device, ", ".join(self.session.routes.engines)

    def close(self) -> None:
        """Free the Session."""
        self._stack.close()

"""The runners of a Session: built on first use, run one batch at a time, their answers copied out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Model
from gigamlp.engines import registry
from gigamlp.engines.base import Runner
from gigamlp.engines.cascades import CascadeRunner, for_model
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.inputs import Check
from gigamlp.ladder import Piece, Rung
from gigamlp.quantize import in_scheme
from gigamlp.staging import PinnedRing, as_host_tensor, fill

__all__ = ["Bound", "Runners"]

Array = NDArray[Any]


class Bound:
    """A runner and the end of its last use.

    A runner has one input and one output buffer. The host queues work faster than a GPU does it, so two streams that
    share a runner must be ordered: `wait` before the first use on a stream, `mark` after the last.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.numpy = isinstance(runner.input, np.ndarray)
        self.partial = bool(getattr(runner, "partial", False))  # whether it takes fewer rows than its batch
        self._clean = False
        self._stream: Any = None
        self._event: Any = None

    def head(self, rows: int) -> Any:
        """Return the first `rows` rows of the static input. What is behind them holds numbers, never garbage."""
        target = self.runner.input
        if not self._clean:
            target[...] = 0
            self._clean = True
        return target[:rows]

    def load(self, block: Any) -> Any:
        """Copy `block` into the static input, which may be longer, and return all of that if the runner needs it."""
        fill(self.head(len(block)), block)
        return self.runner.input[: len(block)] if self.partial else self.runner.input

    def wait(self, stream: Any) -> None:
        """Let `stream` wait for the last use on another stream."""
        if self._event is not None and stream != self._stream:
            stream.wait_event(self._event)

    def mark(self, stream: Any) -> None:
        """Note that the last use so far is what `stream` has queued."""
        if self._event is None:
            import torch

            make: Any = torch.cuda.Event  # its typed signature differs between torch versions
            self._event = make()
        self._event.record(stream)
        self._stream = stream

    def close(self) -> None:
        """Wait for the last use and free the runner."""
        if self._event is not None:
            self._event.synchronize()
        self.runner.close()


class Runners:
    """The runners of one MLP on one device, and the lock that lets one batch at a time use them.

    Parameters
    ----------
    mlp : MLP or Cascade
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    ranges : dict, optional
        The Plan's hidden ranges, for variants in a byte scheme.
    """

    def __init__(self, mlp: Model, device: str, ranges: Mapping[str, Any] | None = None) -> None:
        self.mlp, self.device, self._ranges = mlp, device, ranges
        self._lock = threading.RLock()
        self._bound: dict[Rung, Bound] = {}
        self._ring: PinnedRing | None = None
        self.closed = False

    @property
    def lock(self) -> threading.RLock:
        """What a caller of `get` holds."""
        return self._lock

    def renew_lock(self) -> None:
        """Replace the lock: in a forked child the parent's may be held by a thread that does not exist here."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Free all runners, once the work that uses them is done. Closing twice is no error."""
        with self._lock:
            self.closed = True
            for bound in self._bound.values():
                bound.close()
            self._bound.clear()
            self._ring = None

    def get(self, rung: Rung) -> Bound:
        """Return the runner of `rung`, built on first use. The caller holds the lock.

        Raises
        ------
        InvalidInput
            If the session was closed meanwhile.
        Unsupported
            If the engine cannot build it; for a planned one the message says how to plan for it.
        """
        if self.closed:  # by another thread, between two batches
            raise InvalidInput("this session is closed; make a new Session")
        bound = self._bound.get(rung)
        if bound is None:
            bound = self._bound[rung] = self._build(rung)
        return bound

    def _build(self, rung: Rung) -> Bound:
        try:
            mlp = in_scheme(self.mlp, None if rung.variant is None else rung.variant.get("scheme"), self._ranges)
            return Bound(for_model(registry.engine(rung.engine), mlp).build(mlp, rung.spec, rung.variant))
        except Unsupported as error:
            if rung.planned_us is None:
                raise
            spec = rung.spec
            raise Unsupported(
                f"the plan's {rung.engine} does not run {spec.label}: {error.reason}; plan for it with "
                f"gigamlp.optimize(..., input_dtype={spec.input_dtype!r}, output={spec.output!r})"
            ) from error

    def totals(self, stages: int) -> list[int]:
        """Return the rows that the runners of a cascade of `stages` have answered, and how many went on from each."""
        with self._lock:
            sums = [0] * stages
            for bound in self._bound.values():
                sums = [a + b for a, b in zip(sums, cast("CascadeRunner", bound.runner).totals, strict=True)]
            return sums

    # ---- runs -----------------------------------------------------------------------------------------------------

    def on_host(self, x: Any, ready: bool, pieces: Sequence[Piece], answers: Array) -> None:
        """Rows and engine on the CPU.

        Parameters
        ----------
        x : ndarray or CPU tensor, shape [n, features]
        ready : bool
            Whether the runners can read `x` as it is: dtype, byte order, contiguous. Full batches are then not copied.
        pieces : sequence of Piece
        answers : ndarray, shape [n, ...], C-contiguous
        """
        tensors: tuple[Any, Any] | None = None
        with self._context():
            for rung, begin, end in _runs(pieces):
                full = ready and end - begin == rung.batch
                with self._lock:
                    bound = self.get(rung)
                    if bound.numpy:
                        source = x[begin:end] if full or (ready and bound.partial) else bound.load(x[begin:end])
                        answers[begin:end] = bound.runner.run(source)[: end - begin]
                        continue
                    if tensors is None:
                        tensors = (_tensor(x) if ready else None), _tensor(answers)
                    source = tensors[0][begin:end] if full else bound.load(x[begin:end])
                    tensors[1][begin:end].copy_(bound.runner.run(source)[: end - begin])

    def on_device(self, x: Any, ready: bool, pieces: Sequence[Piece], answers: Any) -> None:
        """Rows, engine and answers on the CUDA device: queued on the current stream; nothing is waited for."""
        with self._context() as stream, self._lock:
            used: dict[Rung, Bound] = {}
            try:
                for rung, begin, end in _runs(pieces):
                    bound = self._use(rung, used, stream)
                    source = x[begin:end] if ready and end - begin == rung.batch else bound.load(x[begin:end])
                    answers[begin:end].copy_(bound.runner.run(source)[: end - begin])
            finally:
                for bound in used.values():
                    bound.mark(stream)

    def through_pinned(self, x: Any, pieces: Sequence[Piece], answers: Array, check: Check | None = None) -> None:
        """Rows and answers on the host, engine on CUDA: copied through pinned buffers; all is done on return.

        `check` refuses rows [begin, end). It runs while the device has them: beforehand it took as long as their way
        there (float32, 205 MB on the H200's host: 3.3 ms each). If it raises, `answers` may be filled in part.
        """
        target = _tensor(answers)
        with self._context() as stream, self._lock:
            used: dict[Rung, Bound] = {}
            ring = self._ring = self._ring or PinnedRing()
            try:
                for rung, begin, end in _runs(pieces):
                    bound = self._use(rung, used, stream)
                    ring.upload(x[begin:end], bound.head(end - begin))
                    ring.download(bound.runner.run(bound.runner.input)[: end - begin], target[begin:end])
                    if check is not None:
                        check(begin, end)
                ring.finish()
            except BaseException:
                ring.abandon()
                raise
            finally:
                for bound in used.values():
                    bound.mark(stream)

    def _use(self, rung: Rung, used: dict[Rung, Bound], stream: Any) -> Bound:
        bound = used.get(rung)
        if bound is None:
            bound = used[rung] = self.get(rung)
            bound.wait(stream)
        return bound

    def _context(self) -> Any:
        """Return what runs happen in: no autograd; on CUDA the device is made current, and its current stream given."""
        torch: Any = sys.modules.get("torch")
        if self.device == "cpu":
            return nullcontext() if torch is None else torch.inference_mode()
        return _OnDevice(torch, self.device)


class _OnDevice(ExitStack):
    def __init__(self, torch: Any, device: str) -> None:
        super().__init__()
        self._torch, self._device = torch, device

    def __enter__(self) -> Any:
        super().__enter__()
        self.enter_context(self._torch.cuda.device(self._device))
        self.enter_context(self._torch.inference_mode())
        return self._torch.cuda.current_stream()


def _tensor(x: Any) -> Any:
    return as_host_tensor(x) if isinstance(x, np.ndarray) else x


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[Rung, int, int]]:
    """Yield (rung, begin, end) for every run; the last run of a piece may be short."""
    begin = 0
    for piece in pieces:
        stop = begin + piece.rows
        while begin < stop:
            end = min(begin + piece.rung.batch, stop)
            yield piece.rung, begin, end
            begin = end

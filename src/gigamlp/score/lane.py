"""Host rows through a GPU with copy-in, compute and copy-out at the same time, each on a stream of its own.

A Session queues all three on one stream, so that the link rests while a batch is computed and its answers come back.
Here a few slots go round, each with an input and answers on the device and pinned memory for both; events order the
streams where they meet in a slot, and the host waits for a slot only when it comes round again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Model
from gigamlp.errors import Unsupported
from gigamlp.hosted import is_staged
from gigamlp.inputs import Check, as_rows, value_check
from gigamlp.ladder import Rung
from gigamlp.mlp import MLP
from gigamlp.runners import Bound, Runners
from gigamlp.session import Session
from gigamlp.staging import as_host_tensor, fill

__all__ = ["Lane", "Lanes"]

Array = NDArray[Any]

_SLOTS = 3  # one is filled, one computed, one read back
_PIECE_BYTES = 64 << 20  # of rows on the device: a launch and its events must not show beside their transfer
_PART_BYTES = 4 << 20  # of a staged piece: the link begins when the first part is in pinned memory
_WINDOW = 0.875  # if a model reads no more than this share of a row, only that is staged


@dataclass
class _Slot:
    bound: Bound
    landed: Any  # the event after which its answers are in pinned memory, and all before that is over
    staged: Any = None  # pinned rows
    answers: Any = None  # on the device: the runner's own output is overwritten by its next run
    landing: Any = None  # pinned answers
    span: tuple[int, int] | None = None  # whose answers are under way


class Lane:
    """One dtype and output of a model on a CUDA device.

    Parameters
    ----------
    rung : Rung
        What runs, and in which batches.
    runners : Runners
        They are closed with the lane.
    columns : tuple of (start, stop), or None
        If the runners' model has only these columns of a row: rows are narrowed to them on their way.
    """

    def __init__(self, rung: Rung, runners: Runners, columns: tuple[tuple[int, int], ...] | None) -> None:
        import torch

        self._runners, self._columns = runners, columns
        self._torch: Any = torch
        self._batch = rung.batch
        with torch.cuda.device(runners.device), torch.inference_mode(), runners.lock:
            first = runners.get(rung)
            own = first.runner
            bounds = [first, *(Bound(own.bind(torch.zeros_like(own.input))) for _ in range(_SLOTS - 1))]
            for bound in bounds:
                bound.head(0)  # zeroes behind a short piece
            make: Any = torch.cuda.Event  # its typed signature differs between torch versions
            self._event = make
            self._slots = [_Slot(bound, make()) for bound in bounds]
            stream: Any = torch.cuda.Stream
            self._copy, self._compute, self._back = stream(), stream(), stream()
            torch.cuda.synchronize()

    def run(self, x: Array, out: Array, check: Check | None = None) -> None:
        """Fill `out` [n, ...] for host rows `x` [n, features]; `check` refuses rows while the device has others.

        If it raises, `out` may be filled in part.
        """
        torch = self._torch
        tensor = as_host_tensor(x)
        target = self._slots[0].bound.runner.input
        ready = tensor is not None and tensor.dtype == target.dtype and tensor.is_contiguous() and tensor.is_pinned()
        direct = tensor if ready and self._columns is None else None
        with torch.cuda.device(self._runners.device), torch.inference_mode():
            try:
                for index, begin in enumerate(range(0, len(x), self._batch)):
                    end = min(begin + self._batch, len(x))
                    slot = self._slots[index % _SLOTS]
                    self._land(slot, out)
                    self._start(slot, x[begin:end], None if direct is None else direct[begin:end])
                    slot.span = (begin, end)
                    if check is not None:
                        check(begin, end)
                for slot in sorted(self._slots, key=lambda each: each.span or (0, 0)):
                    self._land(slot, out)
            except BaseException:
                for stream in (self._copy, self._compute, self._back):
                    stream.synchronize()
                for slot in self._slots:
                    slot.span = None
                raise

    def _start(self, slot: _Slot, rows: Array, pinned: Any) -> None:
        """Queue everything for a piece; nothing of the slot is in use."""
        torch, n = self._torch, len(rows)
        uploaded, computed = self._event(), self._event()
        with torch.cuda.stream(self._copy):
            head = slot.bound.head(n)
            if pinned is not None:
                head.copy_(pinned, non_blocking=True)
            else:
                self._stage(slot, rows, head)
            uploaded.record()
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(uploaded)
            made = slot.bound.runner.run(slot.bound.runner.input)
            if slot.answers is None:
                slot.answers = torch.empty_like(made)
                slot.landing = torch.empty(made.shape, dtype=made.dtype, device="cpu", pin_memory=True)
            slot.answers.copy_(made)
            computed.record()
        with torch.cuda.stream(self._back):
            self._back.wait_event(computed)
            slot.landing[:n].copy_(slot.answers[:n], non_blocking=True)
            slot.landed.record()

    def _stage(self, slot: _Slot, rows: Array, head: Any) -> None:
        if slot.staged is None:
            whole = slot.bound.runner.input
            slot.staged = self._torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=True)
        step = max(1, _PART_BYTES // max(1, head.shape[1] * head.element_size()))
        for begin in range(0, len(rows), step):
            part = slot.staged[begin : min(begin + step, len(rows))]
            at = 0
            for start, stop in self._columns or ((0, rows.shape[1]),):
                fill(part[:, at : at + stop - start], rows[begin : begin + step, start:stop])
                at += stop - start
            head[begin : begin + step].copy_(part, non_blocking=True)

    def _land(self, slot: _Slot, out: Array) -> None:
        """Wait for a slot's answers and hand them over; then nothing uses the slot."""
        if slot.span is None:
            return
        begin, end = slot.span
        slot.landed.synchronize()
        out[begin:end] = slot.landing[: end - begin].numpy()
        slot.span = None

    def close(self) -> None:
        """Free everything."""
        for slot in self._slots[1:]:
            slot.bound.close()
        self._runners.close()
        self._slots.clear()


class Lanes:
    """A Session on CUDA, its host rows overlapped as above.

    Rows that its Plan runs elsewhere, or that are too few to overlap, go to the Session itself. Which, depends on the
    number of rows alone, so that a resumed run computes as the first one would have.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.mlp: Model = session.mlp
        self._made: dict[tuple[str, str], Lane | None] = {}

    def predict(self, x: Array) -> Array:
        """See `Session.predict`."""
        if self.mlp.head not in ("softmax", "sigmoid"):
            return self.mlp.answers(self.logits(x))
        ids = np.empty(len(x), np.int64)
        if not self._run(x, "class", ids):
            return np.asarray(self._session.predict(x))
        return ids if self._session.plain else self.mlp.labels(ids)

    def predict_proba(self, x: Array) -> Array:
        """See `Session.predict_proba`."""
        out = np.empty((len(x), 2 if self.mlp.head == "sigmoid" else self.mlp.outputs), np.float32)
        return out if self._run(x, "proba", out) else np.asarray(self._session.predict_proba(x))

    def logits(self, x: Array) -> Array:
        """See `Session.logits`."""
        out = np.empty((len(x), self.mlp.outputs), np.float32)
        return out if self._run(x, "logits", out) else np.asarray(self._session.logits(x))

    def _run(self, x: Array, output: str, out: Array) -> bool:
        session = self._session
        rows = as_rows(x, self.mlp)
        dtype = session.routes.dtype(rows)
        size = 2 if "16" in dtype else 4 if "32" in dtype else 1
        piece = max(1, _PIECE_BYTES // (self.mlp.features * size))
        if len(x) < piece:
            return False
        key = dtype, output
        if key not in self._made:
            self._made[key] = self._make(dtype, output, piece)
        lane = self._made[key]
        if lane is None:
            return False
        lane.run(rows.data, out, value_check(rows, dtype, self.mlp, finite=True, by_torch=True))
        return True

    def _make(self, dtype: str, output: str, rows: int) -> Lane | None:
        session, mlp = self._session, self.mlp
        near = session.routes.host_ladder(dtype, output)
        if near is not None and not all(is_staged(piece.rung) for piece in near.cut(rows)):
            return None  # measured: the CPU, or a kernel that reads host memory, answers sooner
        rung = session.routes.ladder(dtype, output).cut(rows)[0].rung
        ranges = session.routes.ranges
        if isinstance(mlp, MLP) and mlp.columns is not None and mlp.features_read <= _WINDOW * mlp.features:
            narrow = mlp.with_(columns=None, features=0, feature_names=None)
            try:
                return Lane(rung, Runners(narrow, session.device, ranges), mlp.columns)
            except Unsupported:  # the engine does not take rows of that width: whole rows travel, as in a Session
                return Lane(rung, Runners(mlp, session.device, ranges), None)
        return Lane(rung, Runners(mlp, session.device, ranges), None)

    def close(self) -> None:
        """Free the lanes; the Session stays."""
        for lane in self._made.values():
            if lane is not None:
                lane.close()
        self._made.clear()

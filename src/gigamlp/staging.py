"""Copies between caller's memory and a runner's buffers; for CUDA through a ring of pinned host buffers."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.inputs import writable_view

__all__ = ["PinnedRing", "as_host_tensor", "fill"]

Array = NDArray[Any]

_SLOTS = 4
# A piece is copied into pinned memory while the one before travels to the device: small enough to overlap within one
# batch, large enough that a copy's launch cost (some 5 us against 150 us at 55 GB/s) does not show.
_SLOT_BYTES = 8 << 20
_TORCH_READS = frozenset(map(np.dtype, ("u1", "i1", "i2", "i4", "i8", "?", "f2", "f4", "f8")))


def as_host_tensor(array: Array) -> Any:
    """Return a tensor over `array`'s memory, or None if torch cannot read its strides, byte order or dtype."""
    import torch

    if array.dtype not in _TORCH_READS or not array.flags.aligned:  # the set holds native byte orders only
        return None
    if not array.flags.c_contiguous and any(s < 0 or s % array.itemsize for s in array.strides):
        return None
    return torch.from_numpy(writable_view(array))


def fill(target: Any, block: Any) -> None:
    """Copy `block` [k, features] (host array or tensor) into `target` [k, features], converting its dtype.

    `target` is a NumPy array or a torch tensor. On CUDA the copy is queued on the current stream; the block may be
    changed on return.
    """
    if isinstance(target, np.ndarray):
        source = block if isinstance(block, np.ndarray) else block.float().numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # only with check_finite=False are there such values
            np.copyto(target, source, casting="unsafe")
        return
    target.copy_(_torch_source(block))


def _torch_source(block: Any) -> Any:
    """Return `block` as a tensor that `copy_` reads."""
    if not isinstance(block, np.ndarray):
        return block
    tensor = as_host_tensor(block)
    if tensor is not None:
        return tensor
    native = block.dtype.newbyteorder("=")
    with np.errstate(invalid="ignore", over="ignore"):
        return as_host_tensor(block.astype(native if native in _TORCH_READS else np.float32, order="C"))


class _Slot:
    """One pinned buffer and the event after which it is free again."""

    def __init__(self, size: int) -> None:
        import torch

        self.buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        make: Any = torch.cuda.Event  # its typed signature differs between torch versions
        self.event = make()

    def view(self, shape: tuple[int, ...], dtype: Any) -> Any:
        count = int(np.prod(shape))
        return self.buffer[: count * dtype.itemsize].view(dtype).view(shape)


class PinnedRing:
    """Pinned host buffers, used in turn, that carry rows to a CUDA device and answers back.

    All copies are queued on the device's current stream. Not thread-safe: its owner holds a lock.

    Parameters
    ----------
    slot_bytes : int
        Size of a buffer; a row that is longer makes the buffers grow.
    """

    def __init__(self, slot_bytes: int = _SLOT_BYTES) -> None:
        self._slot_bytes = slot_bytes
        self._up: deque[_Slot] = deque()
        self._down: deque[_Slot] = deque()
        self._landing: deque[tuple[_Slot, Any, Any]] = deque()  # answers under way: (slot, pinned view, where they go)

    def upload(self, block: Any, target: Any) -> None:
        """Queue the copy of `block` [k, features] on the host into `target` [k, features] on the device."""
        source = _pinned_source(block, target)
        if source is not None:
            target.copy_(source, non_blocking=True)
            return
        per_slot = self._rows_per_slot(target)
        for begin in range(0, len(target), per_slot):
            part = target[begin : begin + per_slot]
            slot = self._next(self._up)
            pinned = slot.view(tuple(part.shape), part.dtype)
            fill(pinned, block[begin : begin + per_slot])
            part.copy_(pinned, non_blocking=True)
            slot.event.record()

    def download(self, answers: Any, destination: Any) -> None:
        """Queue the copy of `answers` on the device to `destination`, a host tensor; it is there after `finish`."""
        per_slot = self._rows_per_slot(answers)
        for begin in range(0, len(answers), per_slot):
            part = answers[begin : begin + per_slot]
            if len(self._landing) == _SLOTS:
                self._land()
            slot = self._next(self._down)
            pinned = slot.view(tuple(part.shape), part.dtype)
            pinned.copy_(part, non_blocking=True)
            slot.event.record()
            self._landing.append((slot, pinned, destination[begin : begin + per_slot]))

    def finish(self) -> None:
        """Return when all answers are in their destinations. All uploads queued before them are finished then too."""
        while self._landing:
            self._land()

    def abandon(self) -> None:
        """Forget answers under way after a failure; return when nothing touches the buffers any more."""
        import torch

        self._landing.clear()
        torch.cuda.current_stream().synchronize()

    def _land(self) -> None:
        slot, pinned, destination = self._landing.popleft()
        slot.event.synchronize()
        destination.copy_(pinned)

    def _rows_per_slot(self, tensor: Any) -> int:
        row: int = int(np.prod(tensor.shape[1:])) * tensor.element_size()
        if row > self._slot_bytes:
            self.finish()
            self.abandon()
            self._up.clear()
            self._down.clear()
            self._slot_bytes = row
        return max(1, self._slot_bytes // max(row, 1))

    def _next(self, ring: deque[_Slot]) -> _Slot:
        """Return a free slot: a new one while the ring is short, else the oldest, once its copy has ended."""
        if len(ring) < _SLOTS:
            ring.append(_Slot(self._slot_bytes))
        else:
            ring.rotate(-1)
            ring[-1].event.synchronize()
        return ring[-1]


def _pinned_source(block: Any, target: Any) -> Any:
    """Return `block` as a tensor if it lies in pinned memory and needs no conversion: then no staging is needed."""
    tensor = as_host_tensor(block) if isinstance(block, np.ndarray) else block
    if tensor is None or tensor.dtype != target.dtype or not tensor.is_contiguous() or not tensor.is_pinned():
        return None
    return tensor

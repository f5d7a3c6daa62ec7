"""Arrays of any library in device memory, as a pointer, a shape and strides."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from gigamlp.errors import InvalidInput

__all__ = ["View", "view_of"]

_CUDA = (2, 13)  # DLPack's numbers for CUDA memory and CUDA managed memory


@dataclass(frozen=True)
class View:
    """A 2-D (or 1-D) array in device memory.

    Attributes
    ----------
    pointer : int
    shape : tuple of int
    dtype : str
        ``"uint8"``, ``"float32"``, …
    strides : tuple of int
        In elements.
    device : int or None
        The CUDA device's index; None where the exporting library does not say.
    owner : object
        What keeps the memory alive.
    producer : int or None
        The stream whose queued work the array is the result of, where its library says so and leaves waiting to us.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    device: int | None
    owner: Any
    producer: int | None = None


def view_of(x: Any, stream: int = 0) -> View:
    """Return where `x` lies: a torch tensor, or anything with ``__cuda_array_interface__`` or DLPack.

    Parameters
    ----------
    x : object
    stream : int
        The stream that will read it; DLPack producers are told, so that they can order their work before it.

    Raises
    ------
    InvalidInput
        If `x` is not in the memory of a CUDA device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if x.device.type != "cuda":
            raise InvalidInput(f"the rows are a tensor on {x.device}, but must be on the runner's CUDA device")
        name = str(x.dtype).removeprefix("torch.")
        return View(x.data_ptr(), tuple(x.shape), name, tuple(x.stride()), x.device.index, x)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_interface(x)
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        return _from_dlpack(x, stream)
    raise InvalidInput(
        f"rows must be on the runner's CUDA device: a torch tensor, or an array with __cuda_array_interface__ or "
        f"DLPack; got a {type(x).__name__}"
    )


def _from_interface(x: Any) -> View:
    words = x.__cuda_array_interface__
    dtype = np.dtype(words["typestr"])
    shape = tuple(int(n) for n in words["shape"])
    given = words.get("strides")
    steps = _contiguous(shape) if given is None else tuple(int(n) // dtype.itemsize for n in given)
    if words.get("mask") is not None:
        raise InvalidInput("rows with a mask cannot be read; fill in the masked values first")
    producer = words.get("stream")
    return View(int(words["data"][0]), shape, dtype.name, steps, None, x, None if producer is None else int(producer))


def _from_dlpack(x: Any, stream: int) -> View:
    kind, index = x.__dlpack_device__()
    if int(kind) not in _CUDA:
        raise InvalidInput("rows must be on the runner's CUDA device, these DLPack rows are in other memory")
    from cuda.core.utils import StridedMemoryView

    # 1 is DLPack's number for the legacy default stream, which CUDA itself calls 0
    make = getattr(StridedMemoryView, "from_dlpack", StridedMemoryView)  # older releases: the constructor
    seen = make(x, stream_ptr=stream or 1)
    shape = tuple(int(n) for n in seen.shape)
    steps = _contiguous(shape) if seen.strides is None else tuple(int(n) for n in seen.strides)
    return View(int(seen.ptr), shape, np.dtype(seen.dtype).name, steps, int(index), seen)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))

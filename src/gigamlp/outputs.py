"""Where answers go: memory of the kind and on the device of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.inputs import Rows

__all__ = ["allocate", "check_out", "destination", "label_tensor"]


def allocate(rows: Rows, shape: tuple[int, ...], dtype: str) -> Any:
    """Return new memory for the answers of `rows`: NumPy or torch, on their device (and its current stream)."""
    if rows.kind == "numpy":
        return np.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=rows.device)


def check_out(out: Any, rows: Rows, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse an `out` that cannot take the answers of `rows` as they are.

    Raises
    ------
    InvalidInput
        If its kind, device, shape or dtype differ, it cannot be written to, or it shares memory with the rows.
    """
    want = f"out must be a {'NumPy array' if rows.kind == 'numpy' else 'tensor'} of {dtype} {list(shape)}"
    if rows.kind == "numpy":
        if not isinstance(out, np.ndarray):
            raise InvalidInput(f"{want}, got a {type(out).__name__}")
        if out.dtype != np.dtype(dtype) or out.shape != shape:
            raise InvalidInput(f"{want}, got {out.dtype} {list(out.shape)}")
        if not out.flags.writeable:
            raise InvalidInput("out is read-only")
        if np.may_share_memory(out, rows.data):
            raise InvalidInput("out shares memory with the rows; answers would overwrite rows not yet read")
        return
    import torch

    if not isinstance(out, torch.Tensor):
        raise InvalidInput(f"{want} on {rows.device}, got a {type(out).__name__}")
    found = str(out.dtype).removeprefix("torch.")
    if found != dtype or tuple(out.shape) != shape or str(out.device) != rows.device:
        raise InvalidInput(f"{want} on {rows.device}, got {found} {list(out.shape)} on {out.device}")
    if out.requires_grad:
        raise InvalidInput("out requires gradients; pass out.detach()")
    data = rows.data
    if isinstance(data, np.ndarray):
        shared = bool(np.may_share_memory(out.numpy(), data))
    else:
        shared = out.untyped_storage().data_ptr() == data.untyped_storage().data_ptr() and out.numel() > 0
    if shared:
        raise InvalidInput("out shares memory with the rows; answers would overwrite rows not yet read")


def destination(out: Any, rows: Rows, shape: tuple[int, ...], dtype: str) -> Any:
    """Return where answers go: `out` if it was given and can take them, else new memory."""
    if out is not None:
        check_out(out, rows, shape, dtype)
    return allocate(rows, shape, dtype) if out is None else out


def label_tensor(classes: NDArray[Any], ids: Any, kept: dict[str, Any]) -> Any:
    """Return integer class labels as a tensor on the device of `ids`, from `kept` if they are there already."""
    import torch

    place = str(ids.device)
    if place not in kept:
        kept[place] = torch.from_numpy(classes.copy()).to(place)
    return kept[place]

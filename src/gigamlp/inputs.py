"""Rows from outside: what a Session is handed becomes checked `Rows`, or an error that says what to do. No copies."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Model
from gigamlp.errors import InvalidInput
from gigamlp.frames import is_table, table_rows
from gigamlp.spec import INPUT_DTYPES

__all__ = [
    "Check",
    "Rows",
    "as_rows",
    "is_plain",
    "natural_dtype",
    "target_dtype",
    "unusable_rows",
    "value_check",
    "writable_view",
]

Array = NDArray[Any]
Check = Callable[[int, int], None]

_TORCH_DTYPES = (*INPUT_DTYPES, "bool", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float64")
# dtype.name takes 3 us, a fifth of what one row may cost
_NAMES = {np.dtype(name): name for name in _TORCH_DTYPES if name != "bfloat16"}
# Types that hold every value of the key's type, in the order of preference.
_HOLDS = {
    "uint8": ("float32", "float16", "bfloat16"),
    "int8": ("float32", "float16", "bfloat16"),
    "float16": ("float32",),
    "bfloat16": ("float32",),
}
_LIMIT = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
_SMALL = 8192  # numbers; the quick check pays only beyond
_CHECK_NUMBERS = 1 << 21  # a check reads that many at a time, so that its temporaries stay small


@dataclass(frozen=True)
class Rows:
    """Rows of the right width, where they were and as they were.

    Attributes
    ----------
    data : ndarray or torch.Tensor, shape [n, features]
        A tensor on CUDA and for bfloat16; else a NumPy view of what was given.
    kind : {"numpy", "torch"}
        What the answers are made of.
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    dtype : str
        As NumPy and torch name it.
    """

    data: Any
    kind: str
    device: str
    dtype: str

    def __len__(self) -> int:
        return int(self.data.shape[0])


def as_rows(x: Any, mlp: Model) -> Rows:
    """Take rows of any kind: NumPy, torch, tables, DLPack (CuPy, JAX), CUDA array interface, lists and array-likes.

    Raises
    ------
    InvalidInput
        If `x` is not numbers of shape [n, features].
    """
    if isinstance(x, np.ndarray):
        return _from_numpy(x, mlp)
    torch: Any = sys.modules.get("torch")  # a tensor can only come from a torch that was imported
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        return _from_torch(x, mlp)
    if is_table(x):
        return _from_numpy(table_rows(x, mlp.features, mlp.feature_names), mlp)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, mlp)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_torch(_import_torch(x).as_tensor(x), mlp)
    if isinstance(x, str | bytes | dict | set):
        raise InvalidInput(f"rows must be an array of shape [n, {mlp.features}], got a {type(x).__name__}")
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"rows cannot be read as an array of shape [n, {mlp.features}]: {error}") from error
    return _from_numpy(array, mlp)


def _from_numpy(x: Array, mlp: Model) -> Rows:
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise InvalidInput("rows hold masked values; fill them (x.filled(0)) or drop those rows first")
    rows = mlp.check_rows(x)
    if rows.dtype.kind == "b":
        rows = rows.view(np.uint8)
    return Rows(rows, "numpy", "cpu", _NAMES.get(rows.dtype) or rows.dtype.name)


def _from_torch(x: Any, mlp: Model) -> Rows:
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in _TORCH_DTYPES:
        raise InvalidInput(f"rows must be real numbers, got a tensor of {x.dtype}; convert it, e.g. x.float()")
    if str(x.layout) != "torch.strided":
        raise InvalidInput(f"rows must be a dense tensor, got layout {x.layout}; use x.to_dense()")
    kind = x.device.type
    if kind not in ("cpu", "cuda"):
        raise InvalidInput(f"rows are on device {x.device}; pass x.cpu() or rows on a CUDA device")
    _check_shape(tuple(x.shape), mlp)
    x = x.detach()
    if dtype == "bool":
        x, dtype = x.view(_import_torch(x).uint8), "uint8"
    if kind == "cuda":
        return Rows(x, "torch", f"cuda:{x.device.index}", dtype)
    if dtype == "bfloat16":
        return Rows(x, "torch", "cpu", dtype)
    return Rows(x.resolve_neg().numpy(), "torch", "cpu", dtype)


def _from_dlpack(x: Any, mlp: Model) -> Rows:
    """DLPack of the host becomes NumPy (and so do the answers), of a CUDA device a torch tensor."""
    device = int(x.__dlpack_device__()[0])
    if device in (2, 13):  # kDLCUDA, kDLCUDAManaged
        return _from_torch(_import_torch(x).from_dlpack(x), mlp)
    if device not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise InvalidInput(f"rows are on DLPack device type {device}; pass them from host memory or a CUDA device")
    try:
        array = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        what = type(x).__name__
        raise InvalidInput(
            f"rows in this {what} cannot be read through DLPack ({error}); pass np.asarray(x)"
        ) from error
    return _from_numpy(array, mlp)


def _import_torch(x: Any) -> Any:
    try:
        import torch
    except ImportError as error:
        what = type(x).__name__
        raise InvalidInput(f"rows in this {what} are on a CUDA device, which needs gigamlp[torch]") from error
    return torch


def _check_shape(shape: tuple[int, ...], mlp: Model) -> None:
    mlp.check_rows(np.broadcast_to(np.zeros((), np.uint8), shape))  # one wording for NumPy and torch; no memory is used


# ---- which dtype to run in ------------------------------------------------------------------------------------------


def natural_dtype(dtype: str) -> str:
    """Return the input dtype that fits rows of `dtype` best: itself, or float32 for what no engine reads."""
    return dtype if dtype in INPUT_DTYPES else "float32"


def target_dtype(rows: Rows, available: Sequence[str]) -> str:
    """Return which of the `available` input dtypes `rows` run in, without a change of any value.

    The natural one; else one that holds all values of it; else, for host rows, uint8 or int8, which `value_check` then
    allows only if every value is a whole number in range.

    Raises
    ------
    InvalidInput
        If there is none.
    """
    natural = natural_dtype(rows.dtype)
    for dtype in (natural, *_HOLDS.get(natural, ())):
        if dtype in available:
            return dtype
    if rows.device == "cpu":
        for dtype in ("uint8", "int8"):
            if dtype in available:
                return dtype
    have = ", ".join(available)
    raise InvalidInput(
        f"rows are {rows.dtype}, but this session runs {have} rows only; convert them yourself (rounding them if "
        f"that is what you want), name it with Session(..., input_dtype={available[0]!r}), or plan for them with "
        f"gigamlp.optimize(..., input_dtype={natural!r})"
    )


# ---- values ---------------------------------------------------------------------------------------------------------


def value_check(rows: Rows, target: str, mlp: Model, *, finite: bool, by_torch: bool = False) -> Check | None:
    """Return what refuses rows that would lose their meaning on the way to dtype `target`; None if none could.

    Parameters
    ----------
    rows : Rows
    target : str
    mlp : MLP or Cascade
        Only the features that it reads are checked.
    finite : bool
        Whether to look for NaN, infinities and numbers beyond the target's range. For uint8 and int8 targets whole
        numbers in range are always asked for.
    by_torch : bool
        Whether torch does the arithmetic on float32 rows. It should where the engine is torch's: the threads of two
        libraries in turn disturb each other (one batch of 1,024 rows with NumPy's check took 7 ms, with torch's 0.4).

    Returns
    -------
    callable or None
        ``check(begin, end)`` raises `InvalidInput` with the first row, feature and value that does not do.
    """
    source, same = rows.dtype, rows.dtype == target
    exact = not same and target in ("uint8", "int8")
    may_overflow = "int" not in source or (target == "float16" and source not in ("uint8", "int8"))
    if not exact and not (finite and may_overflow):
        return None

    def check(begin: int, end: int) -> None:
        if rows.device != "cpu":
            _check_cuda(rows.data[begin:end], begin, target, mlp)
            return
        for row, first, block in _blocks(rows, begin, end, mlp):
            if exact:
                bad = _inexact(block, target)
            elif not (_suspicious(block, by_torch) if same else _beyond(block, target)):
                continue
            else:
                with np.errstate(invalid="ignore"):
                    bad = ~((block >= -_LIMIT[target]) & (block <= _LIMIT[target]))
            if bad.any():
                index, feature = (int(i) for i in np.argwhere(bad)[0])
                _refuse(block[index, feature], row + index, first + feature, source, target)

    return check


def unusable_rows(rows: Rows, target: str, mlp: Model) -> tuple[NDArray[np.bool_], list[str]]:
    """Return which host `rows` [n] cannot run as dtype `target`, and for each of those why: what `value_check` refuses.

    Examples
    --------
    >>> from gigamlp import MLP, Layer
    >>> mlp = MLP([Layer([[1.0, 0.0]])], head="regression")
    >>> bad, reasons = unusable_rows(as_rows(np.array([[1.0, 2.0], [np.nan, 0.0]]), mlp), "float32", mlp)
    >>> bad, reasons[0][:23]
    (array([False,  True]), 'holds nan in feature 0:')
    """
    found = np.zeros(len(rows), bool)
    reasons: dict[int, str] = {}
    for row, first, block in _blocks(rows, 0, len(rows), mlp):
        if target in ("uint8", "int8"):
            bad = _inexact(block, target)
        else:
            with np.errstate(invalid="ignore"):
                bad = ~((block >= -_LIMIT[target]) & (block <= _LIMIT[target]))
        for index in np.flatnonzero(bad.any(axis=1)).tolist():
            feature = int(np.argmax(bad[index]))
            try:
                _refuse(block[index, feature], row + index, first + feature, rows.dtype, target)
            except InvalidInput as error:
                reasons.setdefault(row + index, "holds" + str(error).partition(" holds")[2])
            found[row + index] = True
    return found, [reasons[index] for index in np.flatnonzero(found).tolist()]


def _blocks(rows: Rows, begin: int, end: int, mlp: Model) -> Iterator[tuple[int, int, Array]]:
    """Yield (row, feature, block) for blocks of the features that are read; bfloat16 as float32."""
    step = max(1, _CHECK_NUMBERS // mlp.features_read)
    for row in range(begin, end, step):
        for start, stop in mlp.columns or ((0, mlp.features),):
            block = rows.data[row : min(row + step, end), start:stop]
            yield row, start, block if isinstance(block, np.ndarray) else block.float().numpy()


def _suspicious(block: Array, by_torch: bool) -> bool:
    """Quickly say whether a block may hold NaN or infinities (finite values whose sum overflows count too)."""
    if block.size <= _SMALL:
        return not np.isfinite(block).all()
    if block.dtype == np.float16 and block.dtype.isnative:
        return bool(((block.view(np.uint16) & 0x7C00) == 0x7C00).any())
    if by_torch and block.dtype == np.float32 and block.flags.c_contiguous and block.flags.aligned:
        import torch

        ones = torch.ones(block.shape[1], dtype=torch.float32, device="cpu")
        return not math.isfinite(torch.mv(torch.from_numpy(writable_view(block)), ones).sum())
    with np.errstate(all="ignore"):
        # a matrix-vector product runs at the speed of memory on all cores: 0.4 of the time of a sum, 0.25 of isfinite
        return not np.isfinite(block @ np.ones(block.shape[1], block.dtype)).all()


def _beyond(block: Array, target: str) -> bool:
    """Whether a block holds NaN or numbers beyond `target`: two passes without temporaries, which NaN go through."""
    with np.errstate(invalid="ignore"):
        return not (block.max() <= _LIMIT[target] and block.min() >= -_LIMIT[target])


def _inexact(block: Array, target: str) -> NDArray[np.bool_]:
    info = np.iinfo(target)
    with np.errstate(invalid="ignore"):
        bad = ~((block >= info.min) & (block <= info.max))
        if block.dtype.kind == "f":
            bad |= block != np.trunc(block)
    return np.asarray(bad)


def _check_cuda(x: Any, begin: int, target: str, mlp: Model) -> None:
    for start, stop in mlp.columns or ((0, mlp.features),):
        block = x[:, start:stop]
        if target in ("uint8", "int8"):
            info = np.iinfo(target)
            bad = ~((block >= info.min) & (block <= info.max) & (block == block.double().trunc()))
        else:
            bad = ~((block >= -_LIMIT[target]) & (block <= _LIMIT[target]))
        if bool(bad.any()):  # waits for the device: hence only on request
            row, feature = (int(i) for i in bad.nonzero()[0])
            source = str(x.dtype).removeprefix("torch.")
            _refuse(x[row, start + feature].item(), begin + row, start + feature, source, target)


def _refuse(value: Any, row: int, feature: int, source: str, target: str) -> None:
    where = f"row {row} holds {value} in feature {feature}"
    if not np.isfinite(float(value)):
        raise InvalidInput(f"{where}: NaN and infinite values have no answer; clean or drop such rows first")
    if target in ("uint8", "int8"):
        info = np.iinfo(target)
        raise InvalidInput(
            f"{where}: this session runs {target} rows, and {source} rows can be converted only if all are whole "
            f"numbers in {info.min}..{info.max}; plan for them with gigamlp.optimize(..., input_dtype='float32')"
        )
    raise InvalidInput(f"{where}: it does not fit {target}, whose largest number is {_LIMIT[target]:.6g}")


# ---- views ----------------------------------------------------------------------------------------------------------


class _Writable:
    """Exposes an array's memory as writable."""

    def __init__(self, array: Array) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array  # keeps the memory alive


def writable_view(array: Array) -> Array:
    """Return `array`, or for a read-only one a view whose flag says writable: nothing may be written through it.

    torch warns about read-only arrays, as it has no read-only tensors. Engines never write to their input.
    """
    return array if array.flags.writeable else np.asarray(_Writable(array))


def is_plain(x: Any) -> bool:
    """Whether rows lie in memory as a runner reads them: contiguous, aligned, native byte order."""
    if not isinstance(x, np.ndarray):
        return bool(x.is_contiguous())
    return x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative

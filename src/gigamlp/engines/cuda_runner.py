"""The runner of ``cuda_fused``: one kernel launch a batch, on rows of any library, on the caller's stream."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.kernels.cuda.arrays import View, view_of
from gigamlp.kernels.cuda.driver import Gpu, synchronize, wait_for
from gigamlp.kernels.cuda.launch import Graph, Kernel, Launch
from gigamlp.kernels.cuda.memory import Buffer, copy_rows
from gigamlp.kernels.cuda.quick import QuickLaunch
from gigamlp.spec import Spec, Variant

if TYPE_CHECKING:
    from gigamlp.kernels.cuda.compile import Cubin
    from gigamlp.kernels.cuda.shape import Form
    from gigamlp.kernels.cuda.source import Generated

__all__ = ["CudaFusedRunner", "ManyBatches", "Program", "allocate", "load", "open_torch", "plain"]


@dataclass(frozen=True)
class Program:
    """A network on a device, ready to launch: what runners of any batch size share.

    Attributes
    ----------
    gpu : Gpu
    kernel : Kernel
    weights : Buffer
        The packed weights.
    block : int
        Threads of a block.
    grid : callable
        (rows of each batch, batches of a launch) -> blocks of the grid.
    features, row_bytes : int
        Width of a row.
    alignment : int
        What the address of the first row must be a multiple of.
    stride_fits : callable
        (bytes from row to row) -> whether the kernel reads such rows.
    outputs : tuple of (shape without the batch, dtype)
        The kernel's one or two outputs.
    overlap : bool
        Whether a launch may begin before the one before it in the stream has ended.
    """

    gpu: Gpu
    kernel: Kernel
    weights: Buffer
    block: int
    grid: Callable[[int, int], int]
    features: int
    row_bytes: int
    alignment: int
    stride_fits: Callable[[int], bool]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    overlap: bool = False

    def launch(
        self, rows: int, x: tuple[int, int], outs: Sequence[int], table: int = 0, batches: int = 1
    ) -> Launch | QuickLaunch:
        """Return the launch for `rows` rows, `x` = (address, stride), with the answers at the addresses `outs`."""
        return self.launch_with(self.arguments(rows, x, outs, table, batches), rows, batches)

    def launch_with(self, arguments: Sequence[Any], rows: int, batches: int = 1) -> Launch | QuickLaunch:
        """Return the launch with these arguments, ctypes values, for so many rows."""
        grid = self.grid(rows, batches)
        if self.overlap:
            return QuickLaunch(self.kernel, grid, self.block, arguments, overlap=True)
        return Launch(self.kernel, grid, self.block, arguments)

    def arguments(
        self, rows: int, x: tuple[int, int], outs: Sequence[int], table: int = 0, batches: int = 1
    ) -> tuple[Any, ...]:
        """Return the kernel's arguments for that, as ctypes values."""
        first, second = (*outs, 0)[:2]
        return (
            ctypes.c_void_p(x[0]),
            ctypes.c_longlong(x[1]),
            ctypes.c_void_p(self.weights.pointer),
            ctypes.c_void_p(first),
            ctypes.c_void_p(second),
            ctypes.c_longlong(rows),
            ctypes.c_void_p(table),
            ctypes.c_int(batches),
        )


def load(gpu: Gpu, made: Generated, cubin: Cubin, form: Form) -> Program:
    """Return the program of a compiled kernel with the weights of `form`, both loaded on `gpu`.

    Raises
    ------
    Unsupported
        If a block does not fit on the GPU.
    """
    kernel = Kernel(gpu, cubin.image, made.name, made.shared_bytes)
    if made.cluster > 1:
        multiprocessors, resident = kernel.clusters(made.block, made.cluster) * made.cluster, 1
    else:
        multiprocessors, resident = gpu.multiprocessors, kernel.blocks_per_multiprocessor(made.block)
    if not multiprocessors * resident:
        raise Unsupported(
            f"a block of {made.block} threads and {made.shared_bytes:,} bytes of shared memory does not fit on this GPU"
        )
    return Program(
        gpu=gpu,
        kernel=kernel,
        weights=Buffer.of(gpu, made.pack(form)),
        block=made.block,
        grid=lambda rows, batches: int(made.grid(rows, batches, multiprocessors, resident)),
        features=form.mlp.features,
        row_bytes=made.network.features,
        alignment=made.alignment,
        stride_fits=made.stride_fits,
        outputs=tuple((tuple(shape), str(dtype)) for shape, dtype in made.outputs),
        overlap=made.config.overlap,
    )


def open_torch() -> Any:
    """Return torch if it is installed with CUDA, else None. Buffers are then its tensors, else `Buffer`."""
    from gigamlp.measure.telemetry import torch_cuda_version

    if torch_cuda_version() is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def plain(device: str) -> AbstractContextManager[None]:
    """Return what a runner is built in: with torch, no gradients and ordinary (not inference) tensors."""
    if open_torch() is None:
        return nullcontext()
    from gigamlp.engines.torch_runner import plain_torch

    return plain_torch(device)


def allocate(torch: Any, gpu: Gpu, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
    """Return new device memory, as a tensor if there is torch, and its address."""
    if torch is None:
        buffer = Buffer(gpu, shape, dtype)
        return buffer, buffer.pointer
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{gpu.index}")
    return tensor, int(tensor.data_ptr())


class CudaFusedRunner:
    """Runs the fused kernel on the rows that it is given, where they lie.

    Rows may be a torch tensor (then the work is queued on torch's current stream), any array in device memory with
    ``__cuda_array_interface__`` or DLPack, or a NumPy array (copied into the static input first). They need not be the
    static input: the kernel is given their address and the stride from row to row. Rows that it cannot read where they
    lie (a stride or an address that is not aligned as it needs) are copied into the static input first, on the device.

    With ``graph=yes`` a run on the static input replays a CUDA Graph; a run on other rows is a plain launch.

    Attributes
    ----------
    engine, spec, variant, input, build_s
        See `Runner`. `input` is a torch tensor, or without torch a `Buffer`.
    stream : int
        The stream for rows that are no torch tensors, a CUstream as a number. 0 is the legacy default stream.
    """

    engine = "cuda_fused"

    def __init__(self, program: Program, spec: Spec, variant: Variant, x: Any = None) -> None:
        self.spec, self.variant, self.build_s, self.stream = spec, variant, 0.0, 0
        self._program, gpu = program, program.gpu
        self._torch = torch = open_torch()
        self._shape = (spec.batch, program.features)
        if x is None:
            self.input, address = allocate(torch, gpu, self._shape, spec.input_dtype)
            place = (address, program.row_bytes)
            if torch is not None:
                self.input.zero_()
            else:
                self.input.fill(np.zeros(self._shape, spec.input_dtype))
        else:
            self.input, place = x, self._readable(view_of(x))
        made = [allocate(torch, gpu, (spec.batch, *shape), dtype) for shape, dtype in program.outputs]
        self._outs = [address for _, address in made]
        self._answer: Any = made[0][0] if len(made) == 1 else tuple(each for each, _ in made)
        self._own = program.launch(spec.batch, place, self._outs)
        self._other = program.launch(spec.batch, (place[0], program.row_bytes), self._outs)
        self._dense = program.stride_fits(program.row_bytes)
        self._graph = Graph([self._own]) if variant.get("graph") else None
        self._go: Callable[[int], None] | None = self._graph or self._own
        self._current_stream = _stream_of(torch, gpu.index)
        self._tensors = torch is not None and isinstance(self.input, torch.Tensor)
        self._alignment = program.alignment
        self._tensor = self._dtype = self._device = None
        if torch is not None:
            self._tensor, self._dtype = torch.Tensor, getattr(torch, spec.input_dtype)
            self._device = torch.device("cuda", gpu.index)
        # a runner that is dropped gives its memory back: not before the device has finished with it
        self._finish = weakref.finalize(self, synchronize, gpu)
        self._finish.atexit = False

    def run(self, x: Any) -> Any:
        """Run on rows `x` [batch, features]; see `Runner.run`.

        Raises
        ------
        InvalidInput
            If the rows have another shape, dtype or device, or the runner is closed.
        """
        go = self._go
        if go is None:
            raise InvalidInput("this runner is closed; build another")
        if x is self.input:
            go(self._current_stream() if self._tensors else self.stream)
            return self._answer
        other = self._other
        if (  # a tensor as it should be: this is the path of every batch of a Session, so it calls nothing it need not
            type(x) is self._tensor
            and x.shape == self._shape
            and x.dtype is self._dtype
            and x.device == self._device
            and x.is_contiguous()
            and self._dense
        ):
            address = x.data_ptr()
            if not address % self._alignment:
                other.arguments[0].value = address
                other(self._current_stream())
                return self._answer
        return self._run_any(x)

    def _run_any(self, x: Any) -> Any:
        """Run on rows that are no plain tensor, or say what is wrong with them."""
        if isinstance(x, np.ndarray):
            self._load(x)
            return self.run(self.input)
        go = self._go
        assert go is not None
        is_tensor = self._torch is not None and isinstance(x, self._torch.Tensor)
        stream = self._current_stream() if is_tensor else self.stream
        view = view_of(x, stream)
        self._check(view.shape, view.dtype, view.device)
        if view.producer not in (None, stream):
            wait_for(self._program.gpu, stream, view.producer)
        if not self._plain(view):
            self._copy(view, stream)
            go(stream)
            return self._answer
        strided = self._program.launch(self.spec.batch, (view.pointer, self._stride(view)), self._outs)
        strided(stream)
        return self._answer

    def bind(self, x: Any) -> CudaFusedRunner:
        """Return a runner with the same weights and code whose static input is `x`. It has outputs of its own."""
        if self._go is None:
            raise InvalidInput("this runner is closed; build another")
        return type(self)(self._program, self.spec, self.variant, x)

    def bind_many(self, xs: Sequence[Any]) -> ManyBatches:
        """Return what runs all of `xs`, each a batch of the Spec's rows, in one launch.

        Parameters
        ----------
        xs : sequence of arrays [batch, features] in device memory
            They may lie anywhere; their addresses are remembered, and the arrays kept alive.
        """
        if self._go is None:
            raise InvalidInput("this runner is closed; build another")
        places = [self._readable(view_of(x)) for x in xs]
        strides = sorted({stride for _, stride in places})
        if len(strides) > 1:
            raise InvalidInput(f"the rows of all batches must be equally far apart; here the strides are {strides}")
        return ManyBatches(self, self._program, self._torch, list(xs), places)

    def close(self) -> None:
        """Free buffers and graph, after the device has finished with them."""
        if self._go is None:
            return
        self._finish()
        if self._graph is not None:
            self._graph.close()
        self._go = self._graph = None
        del self.input, self._answer, self._own, self._other

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _check(self, shape: tuple[int, ...], dtype: str, device: int | None) -> None:
        if shape != self._shape:
            raise InvalidInput(f"this runner takes rows of shape {list(self._shape)}, got {list(shape)}")
        if dtype != self.spec.input_dtype:
            raise InvalidInput(f"this runner takes rows of {self.spec.input_dtype}, got {dtype}")
        if device is not None and device != self._program.gpu.index:
            raise InvalidInput(f"this runner takes rows on {self.spec.device}, got rows on cuda:{device}")

    def _plain(self, view: View) -> bool:
        """Whether the kernel can read the rows where they lie."""
        program = self._program
        side_by_side = view.strides[1] == 1 or program.features == 1
        return side_by_side and program.stride_fits(self._stride(view)) and view.pointer % program.alignment == 0

    def _stride(self, view: View) -> int:
        """Bytes from row to row; one row alone has no such thing, whatever its array says."""
        program = self._program
        return view.strides[0] * (program.row_bytes // program.features) if view.shape[0] > 1 else program.row_bytes

    def _readable(self, view: View) -> tuple[int, int]:
        """Return address and stride of rows that stay where they are, or say why the kernel cannot read them there."""
        self._check(view.shape, view.dtype, view.device)
        if not self._plain(view):
            raise InvalidInput(
                f"rows that a runner is bound to must lie where its kernel can read them: at an address that is a "
                f"multiple of {self._program.alignment}, in rows without gaps between features; these have strides "
                f"{view.strides} and the address {view.pointer:#x}"
            )
        return view.pointer, self._stride(view)

    def _load(self, x: np.ndarray[Any, Any]) -> None:
        """Copy rows in host memory into the static input."""
        self._check(x.shape, x.dtype.name, None)
        if isinstance(self.input, Buffer):
            self.input.fill(x, self.stream)
        else:
            self.input.copy_(self._torch.from_numpy(np.ascontiguousarray(x)))

    def _copy(self, view: View, stream: int) -> None:
        """Copy rows on the device into the static input."""
        if self._torch is not None and isinstance(view.owner, self._torch.Tensor):
            self.input.copy_(view.owner, non_blocking=True)
            return
        if view.strides[1] != 1:
            raise InvalidInput(f"the features of a row must lie side by side, these rows have strides {view.strides}")
        target = view_of(self.input).pointer
        box = (self.spec.batch, self._program.row_bytes)
        copy_rows(self._program.gpu, target, view.pointer, box, self._stride(view), stream)


class ManyBatches:
    """Many batches, anywhere in device memory, in one launch over a table of their addresses.

    Attributes
    ----------
    inputs : list of arrays
    outputs : array or tuple of arrays, shape [batches, batch, ...]
        Row I holds the answers for ``inputs[I]``.
    """

    def __init__(
        self, runner: CudaFusedRunner, program: Program, torch: Any, inputs: list[Any], places: list[tuple[int, int]]
    ) -> None:
        if not inputs:
            raise InvalidInput("there must be at least one batch")
        self.inputs, self._runner, self._stream = inputs, runner, runner.stream
        gpu, batch, count = program.gpu, runner.spec.batch, len(inputs)
        made = [allocate(torch, gpu, (count, batch, *shape), dtype) for shape, dtype in program.outputs]
        self.outputs: Any = made[0][0] if len(made) == 1 else tuple(each for each, _ in made)
        sizes = [batch * int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in program.outputs]
        table = np.zeros((count, 4), np.int64)
        for index, (address, _) in enumerate(places):
            outs = [base + index * size for (_, base), size in zip(made, sizes, strict=True)]
            table[index] = (address, *(*outs, 0)[:2], batch)
        self._table = Buffer.of(gpu, table)
        self._launch = program.launch(batch, (0, places[0][1]), (0,), self._table.pointer, count)
        self._current_stream = _stream_of(torch, gpu.index)
        self._torch = torch
        self._finish = weakref.finalize(self, synchronize, gpu)
        self._finish.atexit = False

    def run(self) -> Any:
        """Queue the launch on torch's current stream (without torch, on the runner's `stream`); return `outputs`."""
        self._launch(self._current_stream() if self._torch is not None else self._stream)
        return self.outputs


def _stream_of(torch: Any, index: int) -> Callable[[], int]:
    """Return what gives torch's current stream on a device as a number, in the quickest way that this torch has."""
    if torch is None:
        return lambda: 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    return lambda: raw(index)

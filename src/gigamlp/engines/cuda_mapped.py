"""The runner of ``cuda_fused`` for rows in host memory: the kernel reads them there itself and answers there.

A batch of a few rows is all latencies: a copy to the device, a launch, a copy back and a synchronise are four of them.
Here there is one launch. The rows are copied into memory that the GPU reads over the bus; the answers come as packets,
each with the launch's serial number, and the host looks at them until they have it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.kernels.cuda.driver import synchronize
from gigamlp.kernels.cuda.mapped import Mapped, open_stream
from gigamlp.kernels.cuda.quick import QuickLaunch
from gigamlp.spec import Spec, Variant

if TYPE_CHECKING:
    from gigamlp.engines.cuda_runner import Program

__all__ = ["MappedRunner"]

_minimum = np.minimum.reduce

# Looks at an answer before the thread goes to sleep until the device is done: 0.1 us each, so some milliseconds, a
# thousand times what a launch on an idle GPU takes. Sleeping lets other threads run and hears of the device's errors.
_LOOKS = 50_000
_VIEWS = 256  # numbers of rows whose slices are kept
_FEW = 16  # packets up to which Python's own numbers are quicker than NumPy's: 2 us for 8 instead of 4
_LAST = 2**32 - 1  # serial number; 0 is that of memory nobody has written


class MappedRunner:
    """Runs the fused kernel on rows in host memory. On return the answers are there, as new arrays.

    Threads may share it; runs then happen one after the other.

    Attributes
    ----------
    engine, spec, variant, build_s
        See `Runner`.
    input : ndarray [batch, features]
        The static input, in page-locked host memory, or with ``memory=launch`` what the driver copies at each launch.
        ``run(runner.input)`` copies nothing.
    partial : bool
        True: `run` takes fewer rows than the Spec's batch, too.
    """

    engine = "cuda_fused"
    partial = True

    def __init__(self, program: Program, spec: Spec, variant: Variant) -> None:
        self.spec, self.variant, self.build_s = spec, variant, 0.0
        self._program, self._pid, self._lock, self._closed = program, os.getpid(), threading.Lock(), False
        gpu, batch, features = program.gpu, spec.batch, program.features
        memory, carried, pointer = variant.get("memory"), [], 0
        if memory == "launch":
            carried = [(ctypes.c_ubyte * (batch * features))()]
            self.input = np.frombuffer(memoryview(carried[0]), np.dtype(spec.input_dtype)).reshape(batch, features)
        else:
            rows = Mapped(gpu, (batch, features), spec.input_dtype, combined=memory == "combined")
            self.input, pointer = rows.array, rows.pointer
        self.input[...] = 0
        # uint64 [batch, values of a row]: value bits below, serial number above
        packets = [Mapped(gpu, (batch, *shape[:-1]), np.uint64) for shape, _ in program.outputs]
        self._packets = [each.array for each in packets]
        for array in self._packets:
            array[...] = 0
        flat: list[Any] = [array.reshape(-1) for array in self._packets]
        self._flat = [memoryview(array) for array in flat]
        self._width = self._packets[0].size // batch
        self._serial, self._rows = 0, batch
        arguments = program.arguments(batch, (pointer, features), [each.pointer for each in packets])
        serial = ctypes.c_uint32(0)
        self._rows_word, self._serial_word = arguments[5], memoryview(serial).cast("B").cast("I")
        # Python's lock is held: at most one launch is on its way in the stream, so the driver never waits
        grid = program.grid(batch, 1)
        self._launch = QuickLaunch(program.kernel, grid, program.block, (*arguments, serial, *carried), hold=True)
        self.stream = open_stream(self, gpu)
        self._go = self._launch.bound(self.stream)
        self._dtype, self._row_shape = self.input.dtype, (features,)
        self._single = spec.output == "class"  # a row's answer is one packet
        self._ids = spec.output in ("class", "margin")
        self._views: dict[int, tuple[Any, list[Any]]] = {}
        first: Any = self.input[0]
        self._first = memoryview(first)

    def run(self, x: Any) -> Any:
        """Run on rows `x` [n, features], n from 1 to the Spec's batch, and return the answers for them.

        Returns
        -------
        ndarray or tuple of ndarray
            Class ids uint32 [n], with float32 margins for output ``margin``; else float32 [n, outputs].

        Raises
        ------
        InvalidInput
            If the rows have another shape or dtype, or the runner is closed.
        DeviceError
            If the device fails, or the process is a fork of the one that made the runner.
        """
        self._check_process()
        with self._lock:
            rows = self._place(x)
            self._start(rows)
            return self._answers(rows)

    def one_id(self, row: Any) -> Any:
        """Return the answer for the one row `row` [features]: an int for output ``class``, else as `run`, without [n].

        It costs less than `run` with one row. See `run` for the errors.
        """
        if self._pid != os.getpid():
            self._check_process()
        with self._lock:
            try:  # quicker than NumPy's assignment, and refuses what has another dtype or shape by itself
                self._first[:] = row
            except (TypeError, ValueError, NotImplementedError):
                self._refuse(row, self._row_shape)
            self._start(1)
            if self._single:
                packets, serial = self._flat[0], self._serial
                for _ in repeat(None, _LOOKS):  # `_wait`, without the call
                    packet = packets[0]
                    if packet >> 32 == serial:
                        return packet & 0xFFFFFFFF
                return self._wait(packets, 0) & 0xFFFFFFFF
            got = self._answers(1)
        return tuple(part[0] for part in got) if isinstance(got, tuple) else got[0]

    def bind(self, x: Any) -> MappedRunner:
        """Return a runner of its own memory that begins with rows `x`: memory of others is not mapped."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise InvalidInput("this runner is closed; build another")
            other = MappedRunner(self._program, self.spec, self.variant)
        other.input[...] = x
        return other

    def close(self) -> None:
        """Free the memory, after the device has finished with it. A run in another thread ends first."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                synchronize(self._program.gpu, self.stream)
            finally:
                self._flat, self._packets, self._views = [], [], {}
                self.input, self._first = np.empty((0, 0), self._dtype), memoryview(b"")

    # ---- in -------------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Page-locked memory is not there after a fork: touching it would end the process."""
        if os.getpid() != self._pid:
            raise DeviceError(
                f"this runner was made in process {self._pid}, and CUDA does not survive a fork: make it in the child "
                "process, and start that with multiprocessing's 'spawn' method"
            )

    def _place(self, x: Any) -> int:
        """Copy rows into the static input, unless they are it; return how many there are."""
        if x is self.input and not self._closed:
            return self.spec.batch
        shape: tuple[int, ...] = getattr(x, "shape", ())
        fits = len(shape) == 2 and 1 <= shape[0] <= self.spec.batch and shape[1] == self._row_shape[0]
        if self._closed or not isinstance(x, np.ndarray) or not fits or x.dtype != self._dtype:
            self._refuse(x, ("1 .. " + str(self.spec.batch), *self._row_shape))
        self._of(shape[0])[0][...] = x
        return shape[0]

    def _of(self, rows: int) -> tuple[Any, list[Any]]:
        """Return the static input and the packets for so many rows: slices cost as much as what is done with them."""
        views = self._views.get(rows)
        if views is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            views = self._views[rows] = (self.input[:rows], [array[:rows].reshape(-1) for array in self._packets])
        return views

    def _refuse(self, x: Any, shape: tuple[Any, ...]) -> None:
        if self._closed:
            raise InvalidInput("this runner is closed; build another")
        words = ", ".join(str(n) for n in shape)
        got = f"{getattr(x, 'dtype', '')} {list(getattr(x, 'shape', ()))}"
        raise InvalidInput(f"this runner takes a NumPy array {self._dtype} [{words}], got a {type(x).__name__} {got}")

    # ---- the run --------------------------------------------------------------------------------------------------

    def _start(self, rows: int) -> None:
        if rows != self._rows:
            self._rows = self._rows_word.value = rows
            self._launch.resize(self._program.grid(rows, 1))
        if self._serial == _LAST:  # packets of rows that were not asked for lately may have a number that is due again
            synchronize(self._program.gpu, self.stream)
            for packets in self._packets:
                packets[...] = 0
            self._serial = 0
        self._serial = self._serial_word[0] = self._serial + 1
        status = self._go()
        if status:
            self._launch.failed(status)

    def _wait(self, packets: memoryview, index: int) -> int:
        """Return the packet at `index` as soon as it is of this run."""
        serial = self._serial
        for _ in repeat(None, _LOOKS):
            packet = packets[index]
            if packet >> 32 == serial:
                return int(packet)
        synchronize(self._program.gpu, self.stream)  # raises what the device has to complain about
        packet = packets[index]
        if packet >> 32 != serial:
            raise DeviceError("the kernel has ended without an answer; this is a defect of gigamlp, please report it")
        return int(packet)

    def _answers(self, rows: int) -> Any:
        parts = [self._part(index, rows) for index in range(len(self._packets))]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _part(self, index: int, rows: int) -> NDArray[Any]:
        """Return the values of an output's first `rows` rows, once they are all there."""
        flat = self._flat[index]
        count = rows if index or self._ids else rows * self._width
        self._wait(flat, count - 1)
        # The last packet need not be the last to arrive. What is judged must be what is returned: hence copies. None
        # has a greater serial number than this run's, so the least packet tells whether all are there.
        least = self._serial << 32
        if count <= _FEW:
            found = flat[:count].tolist()
            if min(found) < least:
                found = [self._wait(flat, i) for i in range(count)]
            values = np.array([packet & 0xFFFFFFFF for packet in found], np.uint32)
        else:
            view = self._of(rows)[1][index]
            packets = view.copy()
            if int(_minimum(packets)) < least:
                for late in np.flatnonzero(packets < least):
                    self._wait(flat, int(late))
                packets = view.copy()
            values = packets.astype(np.uint32)  # the lower half
        if self._ids and index == 0:
            return values
        floats = values.view(np.float32)
        return floats if self._ids else floats.reshape(rows, self._width)

"""The fused kernel's own text, compiled for the host and run on NumPy rows: what a GPU would answer, without one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C++ compiler to run the kernel's text on the host with"
)


class HostKernel:
    """A generated source as a program of the host."""

    def __init__(self, made, folder, arch=900):
        self.made = made
        text = made.source
        begin, end = text.index("// The instructions that CUDA C++"), text.index("// One small MLP in one kernel")
        text = f'{text[:begin]}\n#include "{HERE / "host.h"}"\n{text[end:]}\n#include "{HERE / "host_main.h"}"\n'
        text = text.replace("extern __shared__ __align__(128) u8 shared[];", "")  # host.h has it, one a block
        for name, sizes in (("held_rows", "[WARPS][HELD]"), ("held_counts", "[WARPS]")):  # static ones, too
            own = f"u32 {name}_of[CLUSTER]{sizes};\n#define {name} {name}_of[current]"
            text = text.replace(f"__shared__ u32 {name}{sizes};", own)
        path = Path(folder) / f"{abs(hash((text, arch))):x}"
        path.with_suffix(".cpp").write_text(text)
        self.program = path.with_suffix(".exe")
        flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fsanitize=alignment", "-fno-sanitize-recover=all"]
        command = [COMPILER, *flags, f"-D__CUDA_ARCH__={arch}", str(path.with_suffix(".cpp")), "-o", str(self.program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]

    def __call__(self, packed, xs, *, stride=None, grid=None, late=False, table=None):
        """Run on a list of batches [rows, features] (with a table if there are several); return their outputs."""
        made = self.made
        features = made.network.features
        stride = features if stride is None else stride
        assert made.stride_fits(stride)
        most = max(len(x) for x in xs)
        table = len(xs) > 1 if table is None else table
        grid = made.grid(most, len(xs), 2, 1) if grid is None else grid
        widths = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in made.outputs]
        numbers = [grid, late, stride, made.alignment, features, *(*widths, 0)[:2], len(packed), most, table]
        data = packed.tobytes()
        rng = np.random.default_rng(5)
        for x in xs:
            if len(x):
                wide = rng.integers(0, 256, (len(x), stride), np.uint8)
                wide[:, :features] = np.ascontiguousarray(x).view(np.uint8)
                data += wide.tobytes()[: (len(x) - 1) * stride + features]
        command = [
            str(self.program),
            *(str(int(n)) for n in (*numbers, *(len(x) for x in xs))),
            *(str(a) for a in self._stage[0]),
        ]
        done = subprocess.run(command, input=data + self._stage[1], capture_output=True, check=False, timeout=100)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr.decode()[-500:]}"
        return self._split(done.stdout, xs, widths)

    def stage(self, packed, x, *, threshold=0.0, listed=(), grid=None, late=False, stride=None):
        """Run a stage of a cascade; return its answers (0xCD.. where it gave none), both counters, and its list."""
        self._stage = [repr(float(threshold)), len(listed)], np.asarray(listed, np.uint32).tobytes()
        (answers,) = self(packed, [x], stride=stride, grid=grid, late=late)
        rest = np.frombuffer(self._rest, np.uint32)
        return answers, rest[:8], rest[8:16], rest[16:]

    _stage = [], b""

    def _split(self, data, xs, widths):
        found, at = [], 0
        for x in xs:
            parts = []
            for (shape, dtype), width in zip(self.made.outputs, widths, strict=True):
                end = at + width * len(x)
                parts.append(np.frombuffer(data[at:end], dtype).reshape(len(x), *shape))
                at = end
            found.append(parts[0] if len(parts) == 1 else tuple(parts))
        self._rest = data[at:]
        assert self._stage[0] or not self._rest
        return found

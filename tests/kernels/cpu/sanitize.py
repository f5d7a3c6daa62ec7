"""Build the native extension with a sanitizer and run its tests: ``python -m tests.kernels.cpu.sanitize KIND``.

The kernels for AMX are built with its tiles emulated, so that they are tested where there are none.

KIND is ``address,undefined`` (the default) or ``thread``. Needs g++, its sanitizer libraries, CMake and a build tool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = {
    "address,undefined": ["tests/kernels/cpu/test_kernels.py", "tests/engines/test_cpu_fused.py"],
    "thread": ["tests/engines/test_cpu_fused.py", "-k", "pool or threads"],
}
# the sanitized module takes the place of the installed one before anything imports that
PROGRAM = """
import importlib.util, sys
name = "gigamlp.kernels.cpu._native"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def build(kind: str, folder: Path) -> Path:
    """Build the extension for this Python with sanitizer `kind` in `folder` and return its file."""
    make = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DGIGAMLP_SANITIZE={kind}", "-DGIGAMLP_EMULATE_AMX=ON"]
    make += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    if shutil.which("ninja"):
        make += ["-G", "Ninja"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=subprocess.DEVNULL)
    (found,) = folder.glob("_native*.so")
    return found


def runtime(kind: str) -> str:
    """Return the libraries that must be loaded before Python: the sanitizer's, and C++'s, whose throw it wraps."""
    names = ("libtsan.so" if kind == "thread" else "libasan.so", "libstdc++.so")
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    return " ".join(found)


def main(kind: str = "address,undefined") -> int:
    """Build, run the tests, and return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        module = build(kind, Path(folder))
        env = {
            **os.environ,
            "LD_PRELOAD": runtime(kind),
            "OMP_NUM_THREADS": "1",
            # Python itself keeps memory until it ends, and tests fork on purpose
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",
        }
        command = [sys.executable, "-c", PROGRAM, str(module), *TESTS[kind]]
        return subprocess.run(command, env=env, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

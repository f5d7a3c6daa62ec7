"""The imports of NVIDIA's packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gigamlp.kernels.cuda import compile as cc

MANY_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from gigamlp.kernels.cuda.compile import nvrtc_version
from gigamlp.kernels.cuda.nvidia import core

start = Barrier(8)

def one(index):
    start.wait()
    return nvrtc_version() if index % 2 else core().Program

with ThreadPoolExecutor(8) as pool:
    assert len(list(pool.map(one, range(8)))) == 8
"""


@pytest.mark.skipif(cc.toolchain_problem() is not None, reason=str(cc.toolchain_problem()))
def test_many_threads_may_be_the_first_to_compile():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

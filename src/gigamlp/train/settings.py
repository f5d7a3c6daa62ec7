"""Process-wide settings of torch that training changes, and puts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["cpu_threads", "matmul_precision", "resolve_precision"]

_MACS_PER_THREAD = 60_000_000


@contextmanager
def matmul_precision(kind: str) -> Iterator[None]:
    """Within the block, float32 products on CUDA run in ``"ieee"`` float32 or in ``"tf32"``; afterwards as before.

    The flag belongs to the whole process, so other threads see it too while the block runs. CPU products are untouched.
    """
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    flags.fp32_precision = kind
    try:
        yield
    finally:
        flags.fp32_precision = before


@contextmanager
def cpu_threads(macs: int) -> Iterator[None]:
    """Within the block, use no more threads than a step of `macs` multiply-accumulates keeps busy; then as before.

    A step of 784-512-10 at batch 256 (1e8) takes 4 ms on one core. Threads that share such a step spin while they wait
    for each other: on two cores with another program running, two threads took 17 times longer than one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, macs // _MACS_PER_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Turn ``"auto"`` into what suits `device`: see `gigamlp.train.Recipe`."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "float32"
    return "tf32" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"

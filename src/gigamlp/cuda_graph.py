"""Capturing torch work in a CUDA Graph without what breaks graphs: for the engines and for training alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["WARMUP_RUNS", "capture", "recording"]

T = TypeVar("T")
WARMUP_RUNS = 3  # libraries load, Inductor's own graphs run once, record, and replay


@contextmanager
def recording(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture in a new graph what is queued inside the block. What it does must have run once before, to warm up.

    A graph remembers the address of the cuBLAS workspace that its products use. torch keeps one workspace per stream,
    and frees it when any graph captured on that stream is reset, or when Inductor records a graph of its own, under the
    feet of the others (pytorch #193402); and its streams are 32 that it hands out in turn, so two graphs do meet. Hence
    the workspaces are cleared first: the capture then allocates one from the graph's own memory pool, which lives as
    long as the graph, and clearing again afterwards leaves nothing behind that a later capture could pick up.
    Inductor's own graphs do the same.

    Parameters
    ----------
    stream : torch.cuda.Stream
        What captures. Its device must be current.
    pool : graph memory pool, optional
        That of another graph which never runs at the same time as this one.

    Yields
    ------
    torch.cuda.CUDAGraph
        To be replayed after the block.
    """
    import torch

    torch.cuda.synchronize()  # clearing the workspaces frees what work under way may use
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # collecting a graph's owner now would synchronise, which a capture does not survive
    torch._C._cuda_clearCublasWorkspaces()
    try:
        # thread_local: what other threads of the process do meanwhile is no business of this capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield graph
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collecting:
            gc.enable()


def capture(
    device: torch.device,
    work: Callable[[], T],
    *,
    pool: Any = None,
    stream: Any = None,
    warm: Callable[[], object] | None = None,
) -> tuple[torch.cuda.CUDAGraph, T, torch.cuda.Stream]:
    """Capture `work` in a CUDA Graph; return the graph, what `work` returned during capture, and the capture stream.

    Parameters
    ----------
    device : torch.device
    work : callable
        What the graph will hold.
    pool : graph memory pool, optional
        That of other graphs which never run at the same time as this one.
    stream : torch.cuda.Stream, optional
        Where to capture; a new one if not given.
    warm : callable, optional
        What to run on the stream beforehand; by default `work`, three times.
    """
    import torch

    with torch.cuda.device(device):
        if stream is None:
            make_stream: Any = torch.cuda.Stream  # its signature differs between torch versions
            stream = make_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if warm is not None:
                warm()
            else:
                for _ in range(WARMUP_RUNS):
                    work()
        with recording(stream, pool) as graph:
            output = work()
        torch.cuda.synchronize()
    return graph, output, stream

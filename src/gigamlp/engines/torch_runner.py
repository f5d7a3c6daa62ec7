"""Runners over a torch forward pass: called directly, or captured once in a CUDA Graph and replayed.

This module needs torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import torch

from gigamlp.cuda_graph import WARMUP_RUNS, capture
from gigamlp.engines.torch_forward import Output
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.measure.clock import stopwatch
from gigamlp.spec import Spec, Variant

__all__ = ["DirectRunner", "Forward", "GraphRunner", "Job", "float32_problem", "plain_torch"]


class Forward(Protocol):
    """A forward pass: rows [batch, features] in, output buffers back."""

    def __call__(self, x: torch.Tensor) -> Output:
        """Run on rows `x`."""
        ...

    def twin(self) -> Forward:
        """Return one with output buffers of its own; the rest may be shared."""
        ...


@dataclass(frozen=True)
class Job:
    """What a runner is for."""

    engine: str
    features: int
    spec: Spec
    variant: Variant


@contextmanager
def plain_torch(device: str) -> Iterator[None]:
    """Build inside this: no gradients, no autocast, ordinary (not inference) tensors, and `device` current."""
    kind = device.partition(":")[0]
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
        if kind == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def float32_problem(device_type: str) -> str | None:
    """Return why a float32 product would not be float32 now (a reduced precision is on for the whole process), or None.

    gigamlp neither changes that setting (it belongs to the caller) nor quietly computes in another precision.
    """
    backend = "cuda" if device_type == "cuda" else "mkldnn"
    precision = torch._C._get_fp32_precision_getter(backend, "matmul")
    if precision in ("none", "ieee"):
        return None
    return (
        f"float32 matrix products are set to {precision} in this process, so they would not be float32; "
        "turn that off with torch.set_float32_matmul_precision('highest'), or use compute=bfloat16 or float16"
    )


class TorchRunner:
    """What both kinds of runner share: the static input, its checks, CPU threads, and closing."""

    def __init__(
        self,
        job: Job,
        forward: Forward,
        x: torch.Tensor | None = None,
    ) -> None:
        spec = job.spec
        self.engine, self.spec, self.variant = job.engine, spec, job.variant
        self.build_s = 0.0
        self._job, self._forward = job, forward
        self._shape = (spec.batch, job.features)
        self._dtype, self._device = getattr(torch, spec.input_dtype), torch.device(spec.device)
        self._exact = job.variant.get("compute") == "float32"
        self._threads = spec.threads if not spec.is_cuda else None
        if x is None:
            x = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        self.input: torch.Tensor = self._checked(x)

    def _checked(self, x: Any) -> torch.Tensor:
        """Return `x`, cut from autograd, if it is what the Spec says; otherwise say what is wrong."""
        if (
            isinstance(x, torch.Tensor)
            and x.shape == self._shape
            and x.dtype is self._dtype
            and x.device == self._device
            and x.is_contiguous()
        ):
            return x.detach() if x.requires_grad else x
        raise self._refusal(x)

    def _refusal(self, x: Any) -> InvalidInput:
        if not isinstance(x, torch.Tensor):
            return InvalidInput(f"a torch runner takes a torch tensor, got {type(x).__name__}")
        if tuple(x.shape) != self._shape:
            return InvalidInput(f"this runner takes rows of shape {list(self._shape)}, got {list(x.shape)}")
        if x.dtype is not self._dtype:
            return InvalidInput(f"this runner takes rows of {self.spec.input_dtype}, got {x.dtype}")
        if x.device != self._device:
            return InvalidInput(f"this runner takes rows on {self.spec.device}, got rows on {x.device}")
        return InvalidInput(f"rows must be contiguous, their strides are {x.stride()}; use x.contiguous()")

    def _call(self, x: torch.Tensor) -> Output:
        """Call the forward pass under the Spec's threads, in true float32 if float32 was asked for."""
        if self._exact:
            problem = float32_problem(self._device.type)
            if problem is not None:
                raise Unsupported(problem)
        if self._threads is None:
            return self._forward(x)
        before = torch.get_num_threads()
        if before == self._threads:
            return self._forward(x)
        torch.set_num_threads(self._threads)
        try:
            return self._forward(x)
        finally:
            torch.set_num_threads(before)

    def _warm(self) -> None:
        for _ in range(WARMUP_RUNS if self.spec.is_cuda else 1):
            self._call(self.input)

    def _guard(self, finish: Callable[..., None], *arguments: Any) -> None:
        """Have `finish` called before this runner's memory goes, whether it is closed or just dropped."""
        self._finish = weakref.finalize(self, finish, *arguments)
        self._finish.atexit = False

    def run(self, x: torch.Tensor) -> Output:
        """Run on rows `x`; see `Runner.run`."""
        raise NotImplementedError

    def bind(self, x: torch.Tensor) -> Self:
        """Return a runner whose static input is `x`.

        It has outputs of its own and shares weights, hidden buffers and compiled code with this one: the two must not
        run at the same time on different streams or threads.
        """
        self._check_open()
        with plain_torch(self.spec.device):
            return self._bound(self._checked(x))

    def _bound(self, x: torch.Tensor) -> Self:
        return type(self)(self._job, self._forward.twin(), x)

    def close(self) -> None:
        """Free what this runner owns, after the device has finished with it."""
        if self._forward is _closed:
            return
        if self._device.type == "cuda":
            self._finish()
        self._forward = _closed
        del self.input

    def _check_open(self) -> None:
        if self._forward is _closed:
            raise InvalidInput("this runner is closed; build another")


class _Closed:
    """The forward pass of a closed runner."""

    def __call__(self, x: torch.Tensor) -> NoReturn:
        raise InvalidInput("this runner is closed; build another")

    def twin(self) -> NoReturn:
        raise InvalidInput("this runner is closed; build another")


_closed = _Closed()


class DirectRunner(TorchRunner):
    """Calls the forward pass on the rows that it is given, without copying them."""

    def __init__(
        self,
        job: Job,
        forward: Forward,
        x: torch.Tensor | None = None,
    ) -> None:
        super().__init__(job, forward, x)
        with stopwatch() as watch:
            self._warm()
        self.build_s = watch.seconds
        if self.spec.is_cuda:
            self._guard(torch.cuda.synchronize, self._device)

    def run(self, x: torch.Tensor) -> Output:
        """Run on rows `x`; see `Runner.run`."""
        if self._forward is _closed:
            self._check_open()
        return self._call(x if x is self.input else self._checked(x))


class GraphRunner(TorchRunner):
    """Replays the forward pass from a CUDA Graph that was captured on the static input.

    Parameters
    ----------
    pool : graph memory pool, optional
        That of another GraphRunner which never runs at the same time as this one.
    """

    def __init__(
        self,
        job: Job,
        forward: Forward,
        x: torch.Tensor | None = None,
        pool: Any = None,
    ) -> None:
        super().__init__(job, forward, x)
        with stopwatch() as watch:
            self._graph, self._output, self._stream = capture(self._device, lambda: self._call(self.input), pool=pool)
        self.build_s = watch.seconds
        self._replay: Callable[[], None] = self._graph.replay
        self._guard(release, self._graph, self._device)

    def run(self, x: torch.Tensor) -> Output:
        """Run on rows `x`; see `Runner.run`. Rows that are not the static input are copied into it first."""
        if self._forward is _closed:
            self._check_open()
        if x is not self.input:
            self.input.copy_(self._checked(x), non_blocking=True)
        self._replay()
        return self._output

    def _bound(self, x: torch.Tensor) -> Self:
        pool = self._graph.pool()
        return type(self)(self._job, self._forward.twin(), x, pool)

    def close(self) -> None:
        """Free graph and buffers, after the device has finished with them."""
        if self._forward is not _closed:
            super().close()
            del self._output, self._replay, self._graph


def release(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Wait until nothing runs on `device`, then free `graph`."""
    torch.cuda.synchronize(device)
    graph.reset()

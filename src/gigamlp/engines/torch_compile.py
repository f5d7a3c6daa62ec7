"""Engine ``torch_compile``: the network compiled by Inductor for one shape, on CUDA captured in a CUDA Graph too."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from gigamlp.engines.base import Runner
from gigamlp.engines.torch_common import check_supported, complete, dense_grid, dense_options, device_problem, pads
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = ["MODES", "TorchCompile"]

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which Inductor captures CUDA Graphs itself
AUTOTUNED = ("max-autotune", "max-autotune-no-cudagraphs")
GEMMS = ("any", "triton")


class TorchCompile:
    """``torch.compile`` with fullgraph and static shapes, once for each runner.

    Variants: those of `TorchEager` (without ``op=fused``: Inductor chooses epilogues itself), ``mode``, and ``graph``:
    whether the compiled code is captured in a CUDA Graph of the runner's own (the article's fastest path). In the modes
    reduce-overhead and max-autotune Inductor captures graphs itself; ``graph`` is then no. On a CPU, where there are no
    CUDA Graphs, these two modes are refused: they would be the other two under another name.

    ``gemm=triton`` (max-autotune modes on CUDA) takes the library's products out of Inductor's own choice. That choice
    is made with timers of about half a microsecond: for 784-40-10 at 10,000 rows it gave 909 M/s in one process and
    1,035 in the next (H200). With both forms as variants the tuner decides by its own, finer measurement.

    Without ``full`` the variants are few, because each one costs seconds: no out-of-place ReLU (Inductor makes both
    forms the same code) and no ``op=mm`` (it lays out weights itself).
    """

    name = "torch_compile"
    integer = False
    compiles = True

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        problem = device_problem(device)
        return problem or (_cpu_problem() if device == "cpu" else _cuda_problem(device))

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring. Raises `Unsupported` as `build` does."""
        self._check(mlp, spec)
        dense = [v for v in dense_grid(mlp, spec, full) if v.get("op") != "fused"]
        ways: tuple[tuple[str, bool], ...]
        if not spec.is_cuda:
            ways = (("default", False), ("max-autotune-no-cudagraphs", False)) if full else (("default", False),)
        elif full:
            ways = tuple(
                (mode, graph) for mode in MODES for graph in (True, False) if not (graph and mode in OWN_GRAPHS)
            )
        else:
            ways = (("max-autotune-no-cudagraphs", True), ("default", True))
        gemms = GEMMS if spec.is_cuda else GEMMS[:1]
        if full:
            return _variants(dense, ways, gemms)
        inplace = any(layer.activation == "relu" for layer in mlp.layers)
        dense = [v for v in dense if v.get("op") == "linear" and v.get("inplace") is inplace]
        if not spec.is_cuda:
            return _variants(dense, ways, gemms)
        plain = [v for v in dense if v.get("pad") == pads(mlp)[0]]
        own = _variants(plain, [(mode, False) for mode in reversed(OWN_GRAPHS)], GEMMS[:1])
        return _variants(dense, ways, gemms) + own

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner; see `Engine.build`. Compiling takes seconds (up to a minute with the max-autotune modes)."""
        self._check(mlp, spec)
        variant = complete(variant, self.variants(mlp, spec)[0])
        options = dense_options(mlp, spec, variant)
        mode, graph = variant.get("mode"), variant.get("graph")
        if mode not in MODES:
            raise InvalidInput(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
        gemm = variant.get("gemm")
        if not isinstance(graph, bool):
            raise InvalidInput(f"graph must be true or false, got {graph!r}")
        if gemm not in GEMMS:
            raise InvalidInput(f"gemm must be one of {', '.join(GEMMS)}; got {gemm!r}")
        if gemm == "triton" and not (spec.is_cuda and mode in AUTOTUNED):
            raise Unsupported("gemm=triton narrows the search of the max-autotune modes on CUDA; use gemm=any")
        if options.op == "fused":
            raise Unsupported("op=fused is not for torch_compile: Inductor chooses epilogues itself")
        if not spec.is_cuda and (graph or mode in OWN_GRAPHS):
            raise Unsupported(
                f"mode={mode} graph={'yes' if graph else 'no'} needs a CUDA device: it captures CUDA Graphs"
            )
        if graph and mode in OWN_GRAPHS:
            raise Unsupported(f"mode={mode} captures CUDA Graphs itself; use graph=no, or a mode that does not")
        from gigamlp.engines.torch_inductor import compile_net
        from gigamlp.engines.torch_runner import DirectRunner, GraphRunner, Job, plain_torch
        from gigamlp.engines.torch_weights import make_net

        with stopwatch() as watch, plain_torch(spec.device):
            net = make_net(mlp, spec, options)
            own = mode in OWN_GRAPHS
            forward = compile_net(net, mode, gemm=gemm, threads=spec.threads, own_outputs=own)
            runner = (GraphRunner if graph else DirectRunner)(Job(self.name, mlp.features, spec, variant), forward)
        runner.build_s = watch.seconds
        return runner

    def _check(self, mlp: MLP, spec: Spec) -> None:
        check_supported(mlp, spec)
        reason = self.unavailable(spec.device)
        if reason is not None:
            raise Unsupported(reason)


def _variants(dense: Sequence[Variant], ways: Sequence[tuple[str, bool]], gemms: Sequence[str]) -> list[Variant]:
    """Return every dense variant in every way (mode, graph); those that autotune also with each choice of products."""
    return [
        Variant.from_json({**v.to_json(), "mode": mode, "graph": graph, "gemm": gemm})
        for (mode, graph), v in product(ways, dense)
        for gemm in (gemms if mode in AUTOTUNED else GEMMS[:1])
    ]


def _cpu_problem() -> str | None:
    """Return what Inductor lacks to compile for the CPU, or None. It looks for ``$CXX``, else one fixed name."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", default)
    if shutil.which(compiler) is None:
        return (
            f"torch.compile needs a C++ compiler and finds no {compiler}; install g++ (apt-get install g++) or set CXX"
        )
    return _headers_problem()


def _cuda_problem(device: str) -> str | None:
    """Return what Inductor lacks to compile for `device`, or None. Triton builds its launchers with a C compiler."""
    if find_spec("triton") is None:
        return "torch.compile on CUDA needs Triton, which is not installed; it comes with torch's CUDA wheels for Linux"
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        return f"Triton needs compute capability 7.0 or newer, {device} has {major}.{minor}"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "Triton needs a C compiler and finds none; install gcc (apt-get install gcc) or set CC"
    return _headers_problem()


def _headers_problem() -> str | None:
    include = sysconfig.get_path("include")
    if (Path(include) / "Python.h").exists():
        return None
    return f"torch.compile needs Python's headers, and {include}/Python.h is missing; install python3-dev"

"""Engine ``torch_graph``: the operations of ``torch_eager``, captured once in a CUDA Graph and replayed."""

from __future__ import annotations

from collections.abc import Sequence

from gigamlp.engines.base import Runner
from gigamlp.engines.torch_common import check_supported, complete, dense_grid, dense_options, device_problem
from gigamlp.errors import Unsupported
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = ["TorchGraph"]


class TorchGraph:
    """One launch a batch: the article's headline path. The variants are those of `TorchEager`.

    A runner replays on the caller's current stream. Rows that are not its static input are copied there first, on the
    device.
    """

    name = "torch_graph"
    integer = False
    compiles = False

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        return "CUDA Graphs need a CUDA device" if device == "cpu" else device_problem(device)

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring. Raises `Unsupported` as `build` does."""
        self._check(mlp, spec)
        return dense_grid(mlp, spec, full)

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner; see `Engine.build`."""
        self._check(mlp, spec)
        variant = complete(variant, dense_grid(mlp, spec)[0])
        options = dense_options(mlp, spec, variant)
        from gigamlp.engines.torch_forward import BufferedForward
        from gigamlp.engines.torch_runner import GraphRunner, Job, plain_torch
        from gigamlp.engines.torch_weights import make_net

        with stopwatch() as watch, plain_torch(spec.device):
            runner = GraphRunner(
                Job(self.name, mlp.features, spec, variant), BufferedForward(make_net(mlp, spec, options))
            )
        runner.build_s = watch.seconds
        return runner

    def _check(self, mlp: MLP, spec: Spec) -> None:
        if not spec.is_cuda:
            raise Unsupported("CUDA Graphs need a CUDA device")
        check_supported(mlp, spec)

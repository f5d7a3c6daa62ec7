"""Engine ``torch_eager``: one torch operation after another, the article's eager variants."""

from __future__ import annotations

from collections.abc import Sequence

from gigamlp.engines.base import Runner
from gigamlp.engines.torch_common import check_supported, complete, dense_grid, dense_options, device_problem
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = ["TorchEager"]


class TorchEager:
    """Run the layers one by one, on the rows where they lie, into buffers allocated once.

    Variants: ``op`` (linear, mm; on CUDA also fused), ``pad`` (width of the output), ``inplace`` (ReLU), ``compute``.
    Runs on the CPU in float32 and bfloat16, on CUDA in float16, bfloat16 and float32.
    """

    name = "torch_eager"
    integer = False
    compiles = False

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        return device_problem(device)

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring. Raises `Unsupported` as `build` does."""
        check_supported(mlp, spec)
        return dense_grid(mlp, spec, full)

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner; see `Engine.build`."""
        check_supported(mlp, spec)
        variant = complete(variant, dense_grid(mlp, spec)[0])
        options = dense_options(mlp, spec, variant)
        from gigamlp.engines.torch_forward import BufferedForward
        from gigamlp.engines.torch_runner import DirectRunner, Job, plain_torch
        from gigamlp.engines.torch_weights import make_net

        with stopwatch() as watch, plain_torch(spec.device):
            runner = DirectRunner(
                Job(self.name, mlp.features, spec, variant), BufferedForward(make_net(mlp, spec, options))
            )
        runner.build_s = watch.seconds
        return runner

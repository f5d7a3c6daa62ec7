"""Capture a trainer's steps in CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gigamlp import _graphs
from gigamlp.train.settings import matmul_precision

if TYPE_CHECKING:
    from gigamlp.train.trainer import Trainer

__all__ = ["capture"]

_WARM_STEPS = 3


def capture(trainer: Trainer) -> tuple[Any, dict[int, Any]]:
    """Return the stream that captured, and one CUDA graph for each number of steps that the loop runs at once.

    The stream and the memory pool belong to this trainer alone. Parameters and optimiser state are zeroed in the end;
    call `Trainer.reset` before training.
    """
    state = (trainer.weights, trainer.average, trainer.mean, trainer.square)
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, Any] = {}
    stream: Any = None

    def warm() -> None:
        for steps in (min(_WARM_STEPS, trainer.chunk), 1):
            trainer.run_steps(steps)

    with torch.no_grad(), matmul_precision("tf32" if trainer.precision == "tf32" else "ieee"):
        for steps in trainer.graph_lengths():
            graphs[steps], _, stream = _graphs.capture(
                trainer.device,
                lambda steps=steps: trainer.run_steps(steps),  # type: ignore[misc]
                pool=pool,
                stream=stream,
                warm=warm,
            )
    with torch.no_grad(), torch.cuda.device(trainer.device), torch.cuda.stream(stream):
        for tensor in state:
            tensor.zero_()
    stream.synchronize()
    return stream, graphs

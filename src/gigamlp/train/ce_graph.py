"""Capture a trainer's steps in CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gigamlp.cuda_graph import recording
from gigamlp.train.settings import matmul_precision

if TYPE_CHECKING:
    from gigamlp.train.trainer import Trainer

__all__ = ["capture"]

_WARM_STEPS = 3


def capture(trainer: Trainer) -> tuple[Any, dict[int, Any]]:
    """Return the stream that captured, and one CUDA graph for each number of steps that the loop runs at once.

    The stream and the memory pool belong to this trainer alone; its graphs never run at the same time. Parameters and
    optimiser state are zeroed by the warm-up's end; call `Trainer.reset` before training.
    """
    state = (trainer.weights, trainer.average, trainer.mean, trainer.square)
    with torch.no_grad(), torch.cuda.device(trainer.device):
        make_stream: Any = torch.cuda.Stream  # its signature differs between torch versions
        stream = make_stream(trainer.device)
        stream.wait_stream(torch.cuda.current_stream(trainer.device))
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[int, Any] = {}
        with matmul_precision("tf32" if trainer.precision == "tf32" else "ieee"):
            with torch.cuda.stream(stream):
                for steps in (min(_WARM_STEPS, trainer.chunk), 1):
                    trainer.run_steps(steps)
            stream.synchronize()
            for steps in trainer.graph_lengths():
                with recording(stream, pool) as graph:
                    trainer.run_steps(steps)
                graphs[steps] = graph
        with torch.cuda.stream(stream):
            for tensor in state:
                tensor.zero_()
        stream.synchronize()
    return stream, graphs

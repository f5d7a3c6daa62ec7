"""The training loop: rows on the device, an optimiser step over flat tensors, and a CUDA graph of many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.train.network import ACTIVATE, Layout, Workspace, forward, gradient
from gigamlp.train.recipe import Recipe
from gigamlp.train.rows import Array
from gigamlp.train.settings import cpu_threads, matmul_precision, resolve_precision

__all__ = ["Resident", "Score", "Trainer", "evaluate"]

_BETAS, _EPS = (0.9, 0.999), 1e-8
_GRAPH_BYTES, _GRAPH_STEPS = 64 << 20, 32  # gathered inputs of one graph: 64 MB stay near the cache
_EVALUATE_ROWS = 8192
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Resident:
    """Rows and targets on the device.

    Parameters
    ----------
    x : Tensor [n, features]
        uint8, or float32 for other rows.
    target : Tensor
        int64 [n] class ids for ``softmax``, float32 [n, outputs] otherwise.
    scale : float or Tensor float32 [features]
    offset : Tensor float32 [features]
        The network sees ``x * scale + offset``.
    """

    x: Tensor
    target: Tensor
    scale: float | Tensor
    offset: Tensor

    def write(self, rows: Tensor, out: Tensor) -> None:
        """Write the scaled `rows` (raw, of `x`'s dtype) into `out` float [n, features]."""
        if isinstance(self.scale, float):
            torch.add(self.offset, rows, alpha=self.scale, out=out) if out.dtype == torch.float32 else out.copy_(
                torch.add(self.offset, rows, alpha=self.scale)
            )
        else:
            out.copy_(torch.addcmul(self.offset, rows.float(), self.scale))

    def write_target(self, chosen: Tensor, out: Tensor) -> None:
        """Write the chosen targets into `out` float32 [n, outputs]: class ids become one-hot rows."""
        if chosen.dtype == torch.int64:
            out.zero_().scatter_(1, chosen[:, None], 1.0)
        else:
            out.copy_(chosen)


@dataclass(frozen=True)
class Score:
    """Mean loss, and accuracy as a fraction where the head has one."""

    loss: float
    accuracy: float | None

    def better_than(self, other: Score | None) -> bool:
        """Whether accuracy, or else the loss, is better."""
        if other is None:
            return True
        if self.accuracy is not None and other.accuracy is not None and self.accuracy != other.accuracy:
            return self.accuracy > other.accuracy
        return self.loss < other.loss


def evaluate(layout: Layout, flat: Tensor, data: Resident) -> Score:
    """Return loss and accuracy of the network `flat` on `data`, in IEEE float32."""
    total = torch.zeros((), device=flat.device, dtype=torch.float64)
    right = torch.zeros((), device=flat.device, dtype=torch.int64)
    count, classes = len(data.x), layout.widths[-1]
    with torch.no_grad(), matmul_precision("ieee"):
        for begin in range(0, count, _EVALUATE_ROWS):
            part = slice(begin, min(begin + _EVALUATE_ROWS, count))
            logits = network_logits(layout, flat, data, part)
            target = data.target[part]
            if layout.head == "softmax":
                total += torch.nn.functional.cross_entropy(logits, target, reduction="sum")
                right += (logits.argmax(1) == target).sum()
            elif layout.head == "regression":
                total += torch.square(logits - target).sum() / classes
            else:
                total += torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum") / classes
                right += ((logits > 0) == (target > 0.5)).sum()
    loss = float(total) / count
    if layout.head == "regression":
        return Score(loss, None)
    return Score(loss, int(right) / (count * (1 if layout.head == "softmax" else classes)))


def network_logits(layout: Layout, flat: Tensor, data: Resident, part: slice) -> Tensor:
    """Return float32 logits [rows, outputs] of the rows in `part`, without the silent classes."""
    rows = data.x[part]
    matrices = layout.views(flat)
    x = torch.zeros(len(rows), matrices[0].shape[0], device=flat.device)
    data.write(rows, x[:, : layout.widths[0]])
    x[:, layout.widths[0]] = float(layout.biased[0])
    logits, _ = forward(layout, matrices, x, Workspace(layout, len(rows), flat.device))
    return ACTIVATE[layout.activations[-1]].apply(logits)[:, : layout.widths[-1]]


class Trainer:
    """A network, its training rows and its optimiser on one device; may train again and again.

    Parameters
    ----------
    layout : Layout
    recipe : Recipe
        Its batch must not exceed the rows.
    data : Resident
    graph : bool
        Capture the steps in CUDA graphs (on CUDA only). The graphs hold no value that changes: learning rate, step
        number and row indices are read from device memory.

    Notes
    -----
    `reset` starts over in place, so one captured trainer serves many seeds.
    """

    def __init__(self, layout: Layout, recipe: Recipe, data: Resident, *, graph: bool = False) -> None:
        self.layout, self.recipe, self.data = layout, recipe, data
        self.device = data.x.device
        if recipe.batch > len(data.x):
            raise InvalidInput(f"batch {recipe.batch} is larger than the {len(data.x)} training rows")
        if len(data.x) >= 2**31:
            raise InvalidInput(f"{len(data.x)} rows are more than this trainer's 32-bit row numbers can name")
        if graph and self.device.type != "cuda":
            raise InvalidInput(f"a CUDA graph needs a CUDA device, not {self.device}; use graph=False")
        self.precision = resolve_precision(recipe.precision, self.device)
        if self.device.type != "cuda" and self.precision == "tf32":
            raise InvalidInput("precision 'tf32' exists on CUDA only; use 'float32' on CPU")
        self.steps_per_epoch = len(data.x) // recipe.batch
        self.steps = self.steps_per_epoch * recipe.epochs
        self._allocate()
        self._graphs: dict[int, Any] = {}
        self._stream: Any = None
        self._copied: list[Any] = [None, None]
        self.reset(np.zeros(layout.size, np.float32), seed=0)
        if graph:
            from gigamlp.train.ce_graph import capture

            self._stream, self._graphs = capture(self)

    def _allocate(self) -> None:
        layout, device, batch = self.layout, self.device, self.recipe.batch
        dtype = _DTYPES[self.precision]
        cuda = device.type == "cuda"
        self.weights, self.grads, self.mean, self.square, self.average = torch.zeros(5, layout.size, device=device)
        self._half = None if dtype == torch.float32 else torch.zeros(layout.size, device=device, dtype=dtype)
        self._half_grads = None if self._half is None else torch.zeros_like(self._half)
        # The fused optimiser gives each tensor of its list blocks of its own: 32 pieces keep more of the GPU busy
        pieces = 32 if cuda else 1
        flats = (self.weights, self.grads, self.mean, self.square)
        self._pieces = [layout.pieces(flat, pieces) for flat in flats]
        self._matrices = layout.views(self.weights if self._half is None else self._half)
        self._grad_matrices = layout.views(self.grads if self._half_grads is None else self._half_grads)
        rows, _ = layout.shapes()[0]
        most = max(1, min(_GRAPH_STEPS, _GRAPH_BYTES // (batch * rows * 4))) if cuda else 1
        parts = -(-self.steps_per_epoch // most)
        self.chunk = -(-self.steps_per_epoch // parts)
        self._x = torch.zeros(self.chunk * batch, rows, device=device, dtype=dtype)
        self._x[:, layout.widths[0]] = float(layout.biased[0])
        self._target = torch.zeros(self.chunk * batch, layout.outputs, device=device)
        self._work = Workspace(layout, batch, device, dtype)
        self._index = torch.zeros(self.chunk * batch, device=device, dtype=torch.int32)
        self._now = torch.zeros(3, self.chunk, device=device)
        self._now[1] = 1
        self._table = torch.from_numpy(self.recipe.tables(self.steps)).to(device)
        self._scale = torch.full((1,), 65536.0, device=device)
        self._growth = torch.zeros(1, device=device, dtype=torch.int32)
        self._found_inf = torch.zeros(1, device=device)
        self._host = torch.zeros(2, self.steps_per_epoch * batch, dtype=torch.int32, pin_memory=cuda)

    # ---- one step --------------------------------------------------------------------------------------------------

    def gather(self, steps: int) -> None:
        """Read the rows named by the index buffer for the next `steps` steps."""
        rows = steps * self.recipe.batch
        index = self._index[:rows]
        self.data.write(self.data.x.index_select(0, index), self._x[:rows, : self.layout.widths[0]])
        self.data.write_target(self.data.target.index_select(0, index), self._target[:rows])

    def step(self, at: int) -> None:
        """Do one step with the `at`-th gathered batch."""
        rows = slice(at * self.recipe.batch, (at + 1) * self.recipe.batch)
        scaled = self.precision == "fp16"
        if self._half is not None:
            self._half.copy_(self.weights)
        gradient(
            self.layout,
            self._matrices,
            self._x[rows],
            self._target[rows],
            self._work,
            gradients=self._grad_matrices,
            scale=self._scale if scaled else None,
        )
        if self._half_grads is not None:
            self.grads.copy_(self._half_grads)
        if scaled:
            # what torch.amp.GradScaler does, in place and without asking the host, so that a graph can hold it
            self._found_inf.zero_()
            inverse = self._scale.reciprocal()
            torch._amp_foreach_non_finite_check_and_unscale_([self.grads], self._found_inf, inverse)
        rate, number, fresh = self._now[0, at], self._now[1, at], self._now[2, at]
        for kind, decay in ((0, self.recipe.weight_decay), (1, 0.0)):
            weights, grads, mean, square = (pieces[kind] for pieces in self._pieces)
            if weights:
                torch._fused_adamw_(
                    weights,
                    grads,
                    mean,
                    square,
                    [],
                    [number] * len(weights),
                    lr=rate,
                    beta1=_BETAS[0],
                    beta2=_BETAS[1],
                    weight_decay=decay,
                    eps=_EPS,
                    amsgrad=False,
                    maximize=False,
                    found_inf=self._found_inf if scaled else None,
                )
        if scaled:
            torch._amp_update_scale_(self._scale, self._growth, self._found_inf, 2.0, 0.5, 2000)
        if self.recipe.ema:
            self.average.lerp_(self.weights, fresh)

    def run_steps(self, steps: int) -> None:
        """Gather and do `steps` steps: what a graph holds."""
        self.gather(steps)
        for at in range(steps):
            self.step(at)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def reset(self, flat: Array, seed: int) -> None:
        """Start over from the parameters `flat` (float32 [layout.size]); `seed` orders the rows."""
        self.weights.copy_(torch.from_numpy(flat), non_blocking=True)
        self.average.copy_(self.weights)
        for state in (self.mean, self.square, self._growth):
            state.zero_()
        self._scale.fill_(65536.0)
        self._order = np.random.default_rng(seed)

    def run(self, on_epoch: Callable[[int], None] | None = None) -> None:
        """Train for all epochs; `on_epoch` is called with the number of epochs done, after each.

        On CUDA without `on_epoch` nothing waits for the device: the caller synchronises.
        """
        with torch.no_grad(), matmul_precision("tf32" if self.precision == "tf32" else "ieee"), self._own_stream():
            for epoch in range(self.recipe.epochs):
                self._epoch(epoch)
                if on_epoch is not None:
                    on_epoch(epoch + 1)

    def _epoch(self, epoch: int) -> None:
        side, batch = epoch % 2, self.recipe.batch
        if self._copied[side] is not None:
            self._copied[side].synchronize()  # the buffer's last copy must be done before it is written again
        order = np.arange(len(self.data.x), dtype=np.int32)
        self._order.shuffle(order)
        self._host[side].numpy()[:] = order[: self._host.shape[1]]
        for begin in range(0, self.steps_per_epoch, self.chunk):
            steps = min(self.chunk, self.steps_per_epoch - begin)
            first = epoch * self.steps_per_epoch + begin
            named = self._host[side, begin * batch : (begin + steps) * batch]
            self._index[: steps * batch].copy_(named, non_blocking=True)
            self._now[:, :steps].copy_(self._table[:, first : first + steps])
            if steps in self._graphs:
                self._graphs[steps].replay()
            else:
                self.run_steps(steps)
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event  # its signature differs between torch versions
            self._copied[side] = event()
            self._copied[side].record()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Within the block, work runs on the trainer's own stream once it has graphs; callers' streams wait for it."""
        if self.device.type != "cuda":
            with cpu_threads(self.recipe.batch * sum(rows * cols for rows, cols in self.layout.shapes())):
                yield
            return
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream(self.device)
            stream = self._stream or caller
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                yield
            caller.wait_stream(stream)

    def result(self) -> Tensor:
        """Return the flat tensor to keep: the running average, or the last weights without one. Not a copy."""
        kept: Tensor = self.average if self.recipe.ema else self.weights
        return kept

    def check(self) -> None:
        """Refuse parameters that are no longer finite.

        Raises
        ------
        TrainingError
            With advice.
        """
        if not bool(torch.isfinite(self.weights).all()):
            raise TrainingError(
                f"training became non-finite (lr={self.recipe.lr:g}, batch={self.recipe.batch}); use a smaller lr, "
                "or scale the features to a size near 1"
            )

    def graph_lengths(self) -> Iterator[int]:
        """Yield the numbers of steps that the loop runs at once: one or two."""
        yield from sorted({self.chunk, self.steps_per_epoch % self.chunk or self.chunk}, reverse=True)

    def close(self) -> None:
        """Free the graphs, after the device has finished with them. Closing twice is fine."""
        if self._graphs:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Many small networks trained at once on the same batches: one product for all first layers, one optimiser for all.

The first layers of all students lie below each other in one matrix ``[units, features + 1]`` (the last column is the
bias, and rows carry a 1 there), so that a batch meets all of them in one product. Later layers are batched products of
the students of one shape. All parameters are one flat tensor, so that AdamW and the average are a dozen elementwise
passes, whatever the number of students; learning rates and weight decays differ row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gigamlp.cuda_graph import capture
from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.mlp import Layer
from gigamlp.train.bank_layout import BankLayout, Student
from gigamlp.train.pool import Pool
from gigamlp.train.recipe import Recipe
from gigamlp.train.rows import Array
from gigamlp.train.settings import cpu_threads, matmul_precision, resolve_precision

__all__ = ["Bank", "Score"]

_BETAS, _EPS = (0.9, 0.999), 1e-8
_GRAPH_STEPS = 32
_EVALUATE_BYTES = 256 << 20
_aten = torch.ops.aten


@dataclass(frozen=True)
class Score:
    """Accuracy (a fraction) and mean cross-entropy of each student, in the bank's order: float64 [students]."""

    accuracy: Array
    loss: Array


class Bank:
    """Students, their optimiser and a pool of rows on one device.

    Parameters
    ----------
    students : sequence of Student
        Those of equal `hidden` must stand together.
    pool : Pool
        What they train on; its `logits` are needed if any student follows the teacher.
    recipe : Recipe
        Epochs, batch, warm-up, schedule, ema and precision for all; its lr and weight decay are not used.
    seed : int
        Orders the rows.
    graph : bool
        Capture the steps in CUDA graphs (on CUDA only).
    dtype : torch.dtype
        float64 for comparisons; float32 otherwise.
    """

    def __init__(
        self,
        students: Sequence[Student],
        pool: Pool,
        recipe: Recipe,
        *,
        seed: int = 0,
        graph: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout = BankLayout(students, pool.features, pool.classes)
        self.students, self.pool, self.recipe, self.seed = self.layout.students, pool, recipe, seed
        self.device, self.dtype = pool.x.device, dtype
        self.follows = any(student.follow for student in self.students)
        if self.follows and pool.logits is None:
            raise InvalidInput("students follow a teacher, but the pool has no logits")
        if recipe.batch > pool.rows:
            raise InvalidInput(f"batch {recipe.batch} is larger than the {pool.rows} training rows")
        if recipe.precision in ("bf16", "fp16"):
            raise InvalidInput(f"a bank trains in float32 or tf32, not in {recipe.precision}")
        found = resolve_precision(recipe.precision, self.device)
        self.precision = "float32" if found == "fp16" else found  # a card without TF32
        self.steps_per_epoch = pool.rows // recipe.batch
        self.steps = self.steps_per_epoch * recipe.epochs
        self.epoch = 0
        self._allocate()
        self.start()
        self._graphs: dict[int, Any] = {}
        self._stream: Any = None
        self._copied: list[Any] = [None, None]
        if graph:
            self._capture()

    def _allocate(self) -> None:
        layout, batch, outputs = self.layout, self.recipe.batch, self.layout.outputs

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=self.device, dtype=self.dtype)

        self.weights, self.grads, self.mean, self.square, self.average = zeros(5, layout.size)
        rates, decays = layout.rates()
        self._inverse = (1 / rates).to(self.device, self.dtype)
        self._lr_decay = (rates * decays).to(self.device, self.dtype)
        self._x, self._h, self._dh = zeros(batch, layout.inputs), zeros(batch, layout.units), zeros(batch, layout.units)
        self._x[:, layout.features] = 1.0
        self._z = zeros(len(self.students), batch, outputs)
        self._share = self._per_student([student.follow for student in self.students])
        self._cool = self._per_student([1 / student.temperature for student in self.students])
        parts = -(-self.steps_per_epoch // _GRAPH_STEPS)
        self.chunk = -(-self.steps_per_epoch // parts)
        rows = self.chunk * batch
        self._index = torch.zeros(rows, device=self.device, dtype=torch.int64)
        self._target, self._taught = zeros(rows, outputs), zeros(rows if self.follows else 0, outputs)
        self._now = torch.ones(4, self.chunk, device=self.device, dtype=self.dtype)
        self._host = torch.zeros(
            2, self.steps_per_epoch * batch, dtype=torch.int64, pin_memory=self.device.type == "cuda"
        )
        self._table = self._schedule()
        mask = layout.mask()
        self._mask = None if mask is None else self._spread(mask)

    def _spread(self, mask: Tensor) -> Tensor:
        return self.layout.per_unit(mask.to(self.device)).to(self.dtype)

    def _per_student(self, values: list[float]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=self.dtype)[:, None, None]

    def _schedule(self) -> Tensor:
        """Return [4, steps]: rate, rate with AdamW's bias correction, corrected eps, weight of the new average."""
        rate, _, fresh = self.recipe.with_(lr=1.0).tables(self.steps).astype(np.float64)
        step = np.arange(1, self.steps + 1)
        root = np.sqrt(1 - _BETAS[1] ** step)
        table = np.stack([rate, rate * root / (1 - _BETAS[0] ** step), _EPS * root, fresh])
        return torch.from_numpy(table).to(self.device, self.dtype)

    # ---- start and result ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Draw every student's first weights and forget the optimiser's state."""
        self.weights.copy_(self.layout.draw())
        self.average.copy_(self.weights)
        self.mean.zero_()
        self.square.zero_()
        self.epoch = 0

    def state(self) -> dict[str, Array]:
        """Return what `restore` takes: copies in host memory."""
        tensors = {"weights": self.weights, "mean": self.mean, "square": self.square, "average": self.average}
        return {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}

    def restore(self, state: dict[str, Array], epoch: int) -> None:
        """Go on from a `state` that was taken after `epoch` epochs."""
        for name in ("weights", "mean", "square", "average"):
            getattr(self, name).copy_(torch.from_numpy(state[name]))
        self.epoch = epoch

    def keep(self, mask: Tensor) -> None:
        """Let the students read other features from now on: `mask` bool [students, features].

        Only for a bank one of whose students has `columns`. Weights of features that are no longer read become 0.
        """
        if self._mask is None:
            raise InvalidInput("no student of this bank has columns: it was built to read whole rows")
        self._mask.copy_(self._spread(mask))
        for tensor in (self.weights, self.average, self.mean, self.square):
            self.layout.first(tensor).mul_(self._mask)

    def networks(self) -> list[tuple[Layer, ...]]:
        """Return each student's averaged layers; they read the pool's scaled rows."""
        return self.layout.networks(self.average.cpu())

    # ---- one step --------------------------------------------------------------------------------------------------

    def _forward(self, flat: Tensor, x: Tensor, h: Tensor, z: Tensor) -> dict[int, list[Tensor]]:
        """Write the first layers' outputs into `h`, logits into `z`; return the later hidden layers of each group."""
        torch.mm(x, self.layout.first(flat).t(), out=h)
        torch.relu_(h)
        kept: dict[int, list[Tensor]] = {}
        for group, layers in self.layout.later(flat):
            inner = [group.first(h)]
            for weight, bias in layers[:-1]:
                inner.append(torch.baddbmm(bias[:, None, :], inner[-1], weight.transpose(1, 2)).relu_())
            weight, bias = layers[-1]
            out = z[group.student : group.student + group.count]
            torch.baddbmm(bias[:, None, :], inner[-1], weight.transpose(1, 2), out=out)
            kept[group.unit] = inner
        return kept

    def loss_gradient(self, z: Tensor, target: Tensor, taught: Tensor) -> Tensor:
        """Return the gradient of the mean loss for logits `z` [students, batch, outputs]."""
        delta = torch.softmax(z, 2).sub_(target)
        if self.follows:
            delta.mul_(1 - self._share)
            wanted = torch.softmax(taught * self._cool, 2)
            delta.addcmul_(torch.softmax(z * self._cool, 2).sub_(wanted), self._share / self._cool)
        return delta.div_(z.shape[1])

    def gradient(self, at: int) -> None:
        """Write the gradient of the `at`-th gathered batch."""
        batch = self.recipe.batch
        part = slice(at * batch, (at + 1) * batch)
        self.pool.write(self.pool.x.index_select(0, self._index[part]), self._x[:, : self.pool.features])
        kept = self._forward(self.weights, self._x, self._h, self._z)
        deltas = self.loss_gradient(self._z, self._target[part], self._taught[part] if self.follows else self._taught)
        layers = self.layout.later(self.weights)
        for (group, views), (_, grads) in zip(layers, self.layout.later(self.grads), strict=True):
            delta = deltas[group.student : group.student + group.count]
            for depth in range(len(views) - 1, -1, -1):
                inner = kept[group.unit][depth]
                torch.bmm(delta.transpose(1, 2), inner, out=grads[depth][0])
                torch.sum(delta, 1, out=grads[depth][1])
                if depth:
                    delta = torch.bmm(delta, views[depth][0])
                    _aten.threshold_backward.grad_input(delta, inner, 0, grad_input=delta)
                else:
                    torch.bmm(delta, views[0][0], out=group.first(self._dh))
        _aten.threshold_backward.grad_input(self._dh, self._h, 0, grad_input=self._dh)
        first = self.layout.first(self.grads)
        torch.mm(self._dh.t(), self._x, out=first)
        if self._mask is not None:
            first.mul_(self._mask)

    def update(self, at: int) -> None:
        """Do AdamW's step and the average's; the gradient is used up."""
        rate, corrected, eps, fresh = self._now[:, at]
        self.mean.lerp_(self.grads, 1 - _BETAS[0])
        self.square.mul_(_BETAS[1]).addcmul_(self.grads, self.grads, value=1 - _BETAS[1])
        root = torch.sqrt(self.square, out=self.grads)
        # p -= lr m / (sqrt(v) + eps): lr goes into the denominator, which saves a pass over all parameters
        inverse = self._inverse / corrected
        small = inverse * eps
        keep = 1 - self._lr_decay * rate
        units, head = self.layout.units, self.layout.head
        rows = self.layout.first(root)
        torch.addcmul(small[:units, None], rows, inverse[:units, None], out=rows)
        torch.addcmul(small[units:], root[head:], inverse[units:], out=root[head:])
        self.layout.first(self.weights)[:, : self.pool.features].mul_(keep[:units, None])
        self.weights[head:].mul_(keep[units:])
        self.weights.addcdiv_(self.mean, root, value=-1)
        self.average.lerp_(self.weights, fresh) if self.recipe.ema else self.average.copy_(self.weights)

    def run_steps(self, steps: int) -> None:
        """Gather labels and do `steps` steps: what a graph holds."""
        rows = steps * self.recipe.batch
        index = self._index[:rows]
        self._target[:rows].copy_(self.pool.targets(index))
        if self.pool.logits is not None and self.follows:
            self._taught[:rows].copy_(self.pool.logits.index_select(0, index))
        for at in range(steps):
            self.gradient(at)
            self.update(at)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self, plan: Sequence[int], on_epoch: Callable[[int], None] | None = None, until: int | None = None) -> None:
        """Train on to the end, or `until` that many epochs are done; `plan[e]` is the pool's copy that epoch `e` reads.

        `on_epoch` is called with the number of epochs done, after each. On CUDA nothing waits for the device.
        """
        with torch.no_grad(), matmul_precision("tf32" if self.precision == "tf32" else "ieee"), self._own_stream():
            while self.epoch < (self.recipe.epochs if until is None else until):
                self._epoch(plan[self.epoch])
                self.epoch += 1
                if on_epoch is not None:
                    on_epoch(self.epoch)

    def _epoch(self, copy: int) -> None:
        side, batch = self.epoch % 2, self.recipe.batch
        if self._copied[side] is not None:
            self._copied[side].synchronize()  # the buffer's last copy must be done before it is written again
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.pool.rows)
        self._host[side].numpy()[:] = order[: self._host.shape[1]] + copy * self.pool.rows
        for begin in range(0, self.steps_per_epoch, self.chunk):
            steps = min(self.chunk, self.steps_per_epoch - begin)
            first = self.epoch * self.steps_per_epoch + begin
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
        """Within the block, work runs on the bank's own stream once it has graphs; the caller's stream waits for it."""
        if self.device.type != "cuda":
            with cpu_threads(self.recipe.batch * self.weights.numel()):
                yield
            return
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream(self.device)
            stream = self._stream or caller
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                yield
            caller.wait_stream(stream)

    def _capture(self) -> None:
        lengths = sorted({self.chunk, self.steps_per_epoch % self.chunk or self.chunk}, reverse=True)
        memory = torch.cuda.graph_pool_handle()
        state = (self.weights, self.mean, self.square, self.average)
        saved = [tensor.clone() for tensor in state]
        with torch.no_grad(), matmul_precision("tf32" if self.precision == "tf32" else "ieee"):
            for steps in lengths:
                graph, _, self._stream = capture(
                    self.device,
                    lambda steps=steps: self.run_steps(steps),  # type: ignore[misc]
                    pool=memory,
                    stream=self._stream,
                    warm=lambda: self.run_steps(1),
                )
                self._graphs[steps] = graph
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        torch.cuda.synchronize(self.device)

    def score(self, x: Tensor, target: Tensor, hide: tuple[int, int] | None = None) -> Score:
        """Return how good the averaged students are on raw rows, in IEEE float32.

        Parameters
        ----------
        x : Tensor [n, features]
            Rows of the pool's kind.
        target : Tensor int64 [n]
        hide : (start, stop), optional
            A run of features that takes its mean over the training rows instead of its value.
        """
        count = len(self.students)
        right = torch.zeros(count, device=self.device, dtype=torch.float64)
        loss = torch.zeros_like(right)
        step = max(1, _EVALUATE_BYTES // (4 * (self.layout.units + self.layout.inputs + count * self.layout.outputs)))
        with torch.no_grad(), matmul_precision("ieee"), self._own_stream():
            for begin in range(0, len(x), step):
                rows, truth = x[begin : begin + step], target[begin : begin + step]
                scaled = torch.zeros(len(rows), self.layout.inputs, device=self.device, dtype=self.dtype)
                self.pool.write(rows, scaled[:, : self.pool.features])
                scaled[:, self.pool.features] = 1.0
                if hide is not None:
                    scaled[:, hide[0] : hide[1]] = 0.0  # the pool's rows are centred
                h = scaled.new_empty(len(rows), self.layout.units)
                z = scaled.new_empty(count, len(rows), self.layout.outputs)
                self._forward(self.average, scaled, h, z)
                right += (z.argmax(2) == truth).double().sum(1)
                own = z.gather(2, truth[None, :, None].expand(count, -1, 1))[..., 0]
                loss += (torch.logsumexp(z, 2) - own).double().sum(1)
        result = Score((right / len(x)).cpu().numpy(), (loss / len(x)).cpu().numpy())
        if not np.isfinite(result.loss).all():
            which = self.students[int(np.flatnonzero(~np.isfinite(result.loss))[0])]
            raise TrainingError(f"training became non-finite: {which}; use a smaller lr")
        return result

    def check(self) -> None:
        """Raise `TrainingError` if a parameter is no longer finite."""
        if not bool(torch.isfinite(self.weights).all()):
            raise TrainingError("training became non-finite; use a smaller lr, or scale the features to a size near 1")

    def close(self) -> None:
        """Free the graphs, after the device has finished with them. Closing twice is fine."""
        if self._graphs:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()

    def __enter__(self) -> Bank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

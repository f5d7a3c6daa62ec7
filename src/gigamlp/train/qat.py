"""Fine-tune for narrow first layers: int8, int4, ternary or binary codes, by the straight-through estimator.

The forward pass computes with rounded weights; the gradient goes through the rounding as if it were not there (Bengio,
Léonard and Courville, *Estimating or propagating gradients through stochastic neurons*, 2013). Codes and scales are
stored in the model's scheme ``w8`` as int8, so that every int8 engine runs them; narrower codes are no faster for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gigamlp.cascade import one_mlp
from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.layers import Layer, Scheme
from gigamlp.mlp import MLP
from gigamlp.train.network import unpack
from gigamlp.train.problem import Pair, Problem, prepare
from gigamlp.train.recipe import Recipe
from gigamlp.train.rows import Array
from gigamlp.train.settings import matmul_precision

__all__ = ["WIDTHS", "QatFit", "finetune_quantised", "fit_quantised", "rounded"]

# name -> (default epochs, default peak rate): the fewer the codes, the more there is to learn anew
WIDTHS: dict[str, tuple[int, float]] = {
    "int8": (10, 1e-3),
    "int4": (15, 2e-3),
    "ternary": (20, 4e-3),
    "binary": (20, 4e-3),
}
_INT4_CLIP = 3.0  # root mean squares; chosen with `docs/accuracy.md`'s experiment
_TERNARY_CUT = 0.7  # means; Li, Zhang and Liu, *Ternary weight networks*, 2016
_ROWS = 8192

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


@dataclass(frozen=True)
class QatFit:
    """What fine-tuning for narrow codes gave.

    Parameters
    ----------
    mlp : MLP
        With scheme ``w8``: ``codes.0`` int8 and ``scale.0``. Its float weights are the codes times the scales.
    width : str
    loss_before, loss_after : float
        On the validation rows (training rows without any): of the start, rounded without fine-tuning, and of `mlp`.
    accuracy_before, accuracy_after : float or None
        The same; None for ``regression``.
    epoch : int
        The epoch that was kept; 0 is the start.
    """

    mlp: MLP
    width: str
    loss_before: float
    loss_after: float
    accuracy_before: float | None
    accuracy_after: float | None
    epoch: int


def rounded(weight: Tensor, width: str) -> tuple[Tensor, Tensor]:
    """Return codes (of the weight's dtype) [out, in] and scales [out, 1]; outputs of zeros get codes 0 and scale 1.

    int8: the largest weight is 127. int4: three root mean squares are 7, what is beyond is clipped. ternary: weights
    below 0.7 of the mean are 0, the scale is the mean of the others. binary: signs, the scale is the mean.

    Examples
    --------
    >>> rounded(torch.tensor([[1.0, -0.1, -0.9]]), "ternary")
    (tensor([[ 1.,  0., -1.]]), tensor([[0.9500]]))
    """
    size = weight.abs()
    if width == "int8":
        scale, top = size.amax(1, keepdim=True) / 127, 127
    elif width == "int4":
        scale, top = _INT4_CLIP / 7 * weight.square().mean(1, keepdim=True).sqrt(), 7
    elif width == "ternary":
        kept = (size >= _TERNARY_CUT * size.mean(1, keepdim=True)) & (size > 0)
        scale = (size * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
        codes = torch.where(kept, torch.sign(weight), torch.zeros_like(weight))
        return codes, torch.where(scale > 0, scale, torch.ones_like(scale))
    elif width == "binary":
        scale = size.mean(1, keepdim=True)
        codes = torch.where(weight < 0, -torch.ones_like(weight), torch.ones_like(weight)) * (scale > 0)
        return codes, torch.where(scale > 0, scale, torch.ones_like(scale))
    else:
        raise InvalidInput(f"unknown width {width!r}; known: {', '.join(WIDTHS)}")
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(weight / scale).clamp(-top, top), scale


def finetune_quantised(mlp: MLP, x: Any, y: Any, width: str = "int8", **options: Any) -> MLP:
    """Fine-tune `mlp` for a first layer of narrow codes: `fit_quantised` without the report.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> rng = np.random.default_rng(0)
    >>> x = rng.integers(0, 256, (300, 6), dtype=np.uint8)
    >>> y = (x[:, 0] > x[:, 1]).astype(int)
    >>> mlp = gm.train.finetune(None, x, y, hidden=16, epochs=20, device="cpu")
    >>> np.unique(finetune_quantised(mlp, x, y, "ternary", epochs=2, device="cpu").scheme.arrays["codes.0"]).tolist()
    [-1, 0, 1]
    """
    one_mlp(mlp, "finetune_quantised")
    return fit_quantised(mlp, x, y, width, **options).mlp


def fit_quantised(
    mlp: MLP,
    x: Any,
    y: Any,
    width: str = "int8",
    *,
    epochs: int | None = None,
    batch: int = 256,
    lr: float | None = None,
    seed: int = 0,
    device: str = "auto",
    validation: Pair | int | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> QatFit:
    """Fine-tune all layers while the first one's weights are rounded, keeping the epoch best on held-out rows.

    Parameters
    ----------
    mlp : MLP
        A trained one, of any head, activations and columns. A scheme that it carries is left behind.
    x : array_like of uint8, shape [n, features]
    y : array_like
        See `gigamlp.train.fit_finetune`.
    width : {"int8", "int4", "ternary", "binary"}
    epochs, lr : optional
        Default: more for fewer codes, see `WIDTHS`.
    batch : int
    seed : int
        Orders the rows and draws the validation rows.
    device : {"auto", "cpu", "cuda", "cuda:N"}
    validation : (x, y) or int, optional
        See `gigamlp.train.fit_finetune`.
    progress : callable, optional
        Called after every epoch as ``progress(done, total, text)``.

    Raises
    ------
    InvalidInput
        If the width is unknown, or the rows are not bytes.
    TrainingError
        If the loss becomes non-finite.
    """
    from gigamlp.measure.telemetry import resolve_device

    if width not in WIDTHS:
        raise InvalidInput(f"unknown width {width!r}; known: {', '.join(WIDTHS)}")
    if np.asarray(x).dtype != np.uint8:
        raise InvalidInput(f"integer weights multiply bytes: rows must be uint8, got {np.asarray(x).dtype}")
    place = torch.device(resolve_device(device))
    start = mlp.with_(scheme=None)
    problem = prepare(start, x, y, seed=seed, device=place, validation=validation, name=f"{mlp.name}-{width}")
    own_epochs, own_lr = WIDTHS[width]
    recipe = Recipe(epochs=own_epochs, batch=batch, lr=own_lr, weight_decay=0.0, ema=0, warmup=0.1)
    recipe = recipe.with_(epochs=epochs, lr=lr, batch=min(batch, len(problem.data.x)))
    network = _Network(problem, width)
    watched = problem.validation or problem.sample()
    with matmul_precision("ieee"):
        first = best = network.score(watched)
        kept, epoch = network.copy(), 0
        steps = len(problem.data.x) // recipe.batch
        rates = recipe.tables(steps * recipe.epochs)[0]
        optimiser = torch.optim.AdamW(network.parameters, lr=own_lr, weight_decay=0.0)
        for done in range(recipe.epochs):
            order = np.random.default_rng([seed, done]).permutation(len(problem.data.x))
            for step in range(steps):
                optimiser.param_groups[0]["lr"] = float(rates[done * steps + step])
                index = torch.from_numpy(order[step * recipe.batch : (step + 1) * recipe.batch]).to(place)
                optimiser.zero_grad()
                network.loss(problem.data.x[index], problem.data.target[index]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            score = network.score(watched)
            if not math.isfinite(score[0]):
                raise TrainingError(f"the loss became {score[0]} in epoch {done + 1}; use a smaller lr")
            if _better(score, best):
                best, kept, epoch = score, network.copy(), done + 1
            if progress is not None:
                progress(done + 1, recipe.epochs, f"loss {score[0]:.4f}")
    return QatFit(_export(problem, kept, width), width, first[0], best[0], first[1], best[1], epoch)


_Score = tuple[float, float | None]  # loss, accuracy


def _better(score: _Score, best: _Score) -> bool:
    if score[1] is None or best[1] is None:
        return score[0] < best[0]
    return (score[1], -score[0]) > (best[1], -best[0])


class _Network:
    """The layers as parameters, and the forward pass with a rounded first one."""

    def __init__(self, problem: Problem, width: str) -> None:
        self.problem, self.width = problem, width
        data = problem.data
        device = data.x.device
        self.scale = data.scale if isinstance(data.scale, Tensor) else torch.tensor(float(data.scale), device=device)
        self.layers: list[tuple[Tensor, Tensor | None]] = []
        self.parameters: list[Tensor] = []
        for weight, bias in unpack(problem.layout, problem.start):
            pair = [None if each is None else torch.from_numpy(each).to(device) for each in (weight, bias)]
            self.parameters += [each.requires_grad_() for each in pair if each is not None]
            assert pair[0] is not None
            self.layers.append((pair[0], pair[1]))

    def copy(self) -> list[tuple[Array, Array | None]]:
        return [
            (weight.detach().cpu().numpy().copy(), None if bias is None else bias.detach().cpu().numpy().copy())
            for weight, bias in self.layers
        ]

    def logits(self, rows: Tensor) -> Tensor:
        # in raw units, as the codes will be: what multiplies a byte is the weight times its input's scale
        h = rows.float() * self.scale + self.problem.data.offset
        for index, (weight, bias) in enumerate(self.layers):
            used = weight
            if index == 0:
                raw = (weight * self.scale).detach()
                codes, scale = rounded(raw, self.width)
                exact = torch.where(self.scale == 0, torch.zeros_like(raw), codes * scale / self.scale)
                used = weight + (exact - weight).detach()
            h = functional.linear(h, used, bias)
            h = _ACTIVATIONS[self.problem.layout.activations[index]](h)
        return h

    def loss(self, rows: Tensor, target: Tensor) -> Tensor:
        out = self.logits(rows)
        if self.problem.layout.head == "softmax":
            return functional.cross_entropy(out, target)
        if self.problem.layout.head == "regression":
            return functional.mse_loss(out, target)
        return functional.binary_cross_entropy_with_logits(out, target)

    def score(self, data: Any) -> _Score:
        head, loss, right = self.problem.layout.head, 0.0, 0.0
        with torch.no_grad():
            for begin in range(0, len(data.x), _ROWS):
                rows, target = data.x[begin : begin + _ROWS], data.target[begin : begin + _ROWS]
                loss += float(self.loss(rows, target)) * len(rows)
                out = self.logits(rows)
                if head == "softmax":
                    right += float((out.argmax(1) == target).sum())
                elif head != "regression":
                    right += float(((out > 0) == (target > 0.5)).all(1).sum())
        return loss / len(data.x), None if head == "regression" else right / len(data.x)


def _export(problem: Problem, layers: list[tuple[Array, Array | None]], width: str) -> MLP:
    """Return the MLP whose first layer is its codes times their scales, and which carries both."""
    scale = np.asarray(problem.template.input_scale, np.float64)
    raw = torch.from_numpy(layers[0][0].astype(np.float64) * scale)
    codes, scales = (each.numpy() for each in rounded(raw, width))
    kept = np.maximum(scales.astype(np.float32), np.finfo(np.float32).tiny)
    exact = np.divide(codes * kept.astype(np.float64), scale, out=np.zeros(codes.shape), where=scale != 0)
    made = []
    for index, (weight, bias) in enumerate(layers):
        used = exact if index == 0 else weight
        if index == 0 and bias is not None:
            bias = bias.astype(np.float64) - exact.astype(np.float32).astype(np.float64) @ problem.shift
        made.append(Layer(used, bias, problem.layout.activations[index]))
    scheme = Scheme("w8", {"codes.0": codes.astype(np.int8), "scale.0": kept[:, 0]})
    return problem.template.with_(layers=tuple(made), scheme=scheme)

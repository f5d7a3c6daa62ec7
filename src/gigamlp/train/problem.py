"""From an MLP, rows and labels to a `Problem` that a trainer can run, and back to an MLP that reads raw rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from gigamlp.data.split import hold_out
from gigamlp.errors import DataError, InvalidInput
from gigamlp.labels import encode_labels
from gigamlp.mlp import MLP, Layer
from gigamlp.train.network import Layout, layout_of, pack, unpack
from gigamlp.train.rows import Array, check_finite, check_pair, open_source, scan
from gigamlp.train.trainer import Resident

__all__ = ["Pair", "Problem", "prepare", "random_layers"]

Pair: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True)
class Problem:
    """A network and its rows, ready for a `Trainer`.

    Parameters
    ----------
    template : MLP
        The start: everything of it but weights and biases goes into the result.
    layout : Layout
    start : ndarray float32 [layout.size]
    shift : ndarray float64 [features read]
        The network was trained on rows that lie this much below the MLP's inputs.
    data : Resident
    validation : Resident or None
    """

    template: MLP
    layout: Layout
    start: Array
    shift: Array
    data: Resident
    validation: Resident | None

    def export(self, flat: Array) -> MLP:
        """Return the MLP for trained parameters: it reads raw rows."""
        layers = []
        for index, (weight, bias) in enumerate(unpack(self.layout, flat)):
            if index == 0 and bias is not None:
                bias = bias.astype(np.float64) - weight.astype(np.float64) @ self.shift
            layers.append(Layer(weight, bias, self.layout.activations[index]))
        return self.template.with_(layers=tuple(layers))

    def sample(self) -> Resident:
        """Return up to 5,000 training rows, to watch the loss on where there are no validation rows."""
        data = self.data
        return Resident(data.x[:5000], data.target[:5000], data.scale, data.offset)

    def random_start(self, seed: int) -> Array:
        """Return other random parameters for the same network: float32 [layout.size]."""
        return pack(self.layout, [(layer.weight, layer.bias) for layer in random_layers(self.layout.widths, seed)])


def prepare(
    mlp: MLP | None,
    x: Any,
    y: Any,
    *,
    hidden: int | Sequence[int] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    validation: Pair | int | None = None,
    name: str | None = None,
) -> Problem:
    """Check rows, labels and network, put them on the device, and return the `Problem`. See `fit_finetune`."""
    place = torch.device(device)
    if mlp is None:
        mlp = _random_mlp(x, y, _hidden_widths(hidden), seed, name)
    elif hidden is not None:
        raise InvalidInput(f"hidden={hidden!r} is for a new network; {mlp.name!r} has its own widths {mlp.hidden}")
    else:
        mlp = mlp.with_(name=name or "finetuned-" + "x".join(str(width) for width in mlp.hidden or (0,)))
    if mlp.scheme is not None:
        raise InvalidInput(f"{mlp.name!r} carries the scheme {mlp.scheme.name!r}; train mlp.with_(scheme=None) instead")
    rows, target = _rows_and_targets(mlp, x, y, "training")
    if len(rows) == 0:
        raise DataError("there are no training rows")
    held: tuple[Array, Array] | None = None
    if isinstance(validation, tuple | list):
        if len(validation) != 2:
            raise InvalidInput("validation must be a pair (x, y) or a number of rows")
        held = _rows_and_targets(mlp, *validation, "validation")
        if len(held[0]) == 0:
            raise DataError("there are no validation rows")
    else:
        count = _held_rows(validation, len(rows))
        if count:
            rows, target, *pair = hold_out(rows, target, count, seed)
            held = (pair[0], pair[1])
    layout = layout_of(mlp.layers, mlp.head, pad_outputs=place.type == "cuda")
    scale, offset = np.asarray(mlp.input_scale, np.float64), np.asarray(mlp.input_offset, np.float64)
    width = mlp.features_read
    if mlp.layers[0].bias is None:  # nowhere to fold a mean into
        centre, shift = np.broadcast_to(offset, (width,)).copy(), np.zeros(width)
    else:
        mean = _column_means(rows)
        centre, shift = -mean * scale, offset + mean * scale
    data = _resident(rows, target, scale, centre, place)
    kept = None if held is None else _resident(*held, scale, centre, place)
    return Problem(mlp, layout, _pack(layout, mlp, shift), shift, data, kept)


def _hidden_widths(hidden: int | Sequence[int] | None) -> tuple[int, ...]:
    if hidden is None:
        raise InvalidInput("a new network needs hidden=..., for example hidden=40; or pass an MLP to start from")
    widths = tuple(hidden) if isinstance(hidden, Sequence) else (hidden,)
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 1:
            raise InvalidInput(f"hidden must hold whole numbers >= 1, got {width!r}")
    return tuple(int(width) for width in widths)


def _random_mlp(x: Any, y: Any, hidden: tuple[int, ...], seed: int, name: str | None) -> MLP:
    found = scan(open_source(x, y))
    scaling = found.scaling()
    scalar = isinstance(scaling.scale, float)
    layers = random_layers((found.features, *hidden, len(found.classes)), seed)
    if scalar:
        # the network starts centred: its bias is 0 for rows less their mean
        first = layers[0]
        layers[0] = Layer(first.weight, first.weight.astype(np.float64) @ scaling.offset, first.activation)
    return MLP(
        tuple(layers),
        input_scale=scaling.scale,
        input_offset=0.0 if scalar else scaling.offset,
        classes=found.classes,
        name=name or "mlp-" + "x".join(str(width) for width in hidden),
    )


def random_layers(widths: Sequence[int], seed: int) -> list[Layer]:
    """Return layers with normal weights as in He et al., *Delving deep into rectifiers*, 2015; biases are 0."""
    draws = np.random.default_rng(seed)
    layers = []
    for index, (inputs, out) in enumerate(pairwise(widths)):
        last = index == len(widths) - 2  # no relu behind it, so half the variance
        weight = draws.standard_normal((out, inputs)) * np.sqrt((1 if last else 2) / inputs)
        layers.append(Layer(weight, np.zeros(out), "identity" if last else "relu"))
    return layers


def _rows_and_targets(mlp: MLP, x: Any, y: Any, what: str) -> tuple[Array, Array]:
    """Return the features that `mlp` reads and its targets: int64 [n] class ids, or float32 [n, outputs]."""
    if mlp.head == "softmax":
        rows, labels = check_pair(x, y)
        target: Array = encode_labels(labels, np.asarray(mlp.classes))
    elif mlp.head == "sigmoid":
        rows, labels = check_pair(x, y)
        target = encode_labels(labels, np.asarray(mlp.classes)).astype(np.float32)[:, None]
    else:
        rows, target = np.asarray(x), np.asarray(y)
        if target.dtype.kind not in "buif":
            raise DataError(f"{what} targets must be numbers, got dtype {target.dtype}")
        target = target.astype(np.float32)
        target = target[:, None] if target.ndim == 1 and mlp.outputs == 1 else target
        if target.shape != (len(rows), mlp.outputs):
            raise DataError(f"{what} targets must have shape [{len(rows)}, {mlp.outputs}], got {list(target.shape)}")
        if not np.isfinite(target).all():
            raise DataError(f"{what} targets hold NaN or infinite values")
        if mlp.head == "multilabel" and not np.isin(target, (0, 1)).all():
            raise DataError(f"{what} targets of a multilabel head must be 0 or 1")
    rows = mlp.check_rows(rows)
    check_finite(rows)
    return mlp.read_columns(rows), target


def _held_rows(validation: Any, rows: int) -> int:
    if validation is None:
        return min(5000, rows // 12) if rows >= 600 else 0
    if isinstance(validation, bool) or not isinstance(validation, int | np.integer) or validation < 0:
        raise InvalidInput(f"validation must be a pair (x, y) or a number of rows >= 0, got {validation!r}")
    return int(validation)


def _column_means(rows: Array) -> Array:
    if rows.dtype == np.uint8:
        total = np.zeros(rows.shape[1])  # sums of bytes are whole numbers: exact up to 2^53
        for begin in range(0, len(rows), 65536):
            total += rows[begin : begin + 65536].sum(axis=0, dtype=np.uint32)
        return total / len(rows)
    return np.asarray(rows.mean(axis=0, dtype=np.float64))


def _resident(rows: Array, target: Array, scale: Array, centre: Array, device: torch.device) -> Resident:
    goal = torch.from_numpy(np.ascontiguousarray(target)).to(device)
    offset = torch.from_numpy(centre.astype(np.float32)).to(device)
    if rows.dtype == np.uint8:
        x = torch.from_numpy(np.require(rows, requirements=["C", "W"])).to(device)
        if scale.ndim == 0:
            return Resident(x, goal, float(scale), offset)
        return Resident(x, goal, torch.from_numpy(scale.astype(np.float32)).to(device), offset)
    scaled = np.empty(rows.shape, np.float32)
    for begin in range(0, len(rows), 8192):
        part = slice(begin, begin + 8192)
        scaled[part] = rows[part] * scale + centre
    return Resident(torch.from_numpy(scaled).to(device), goal, 1.0, torch.zeros_like(offset))


def _pack(layout: Layout, mlp: MLP, shift: Array) -> Array:
    pairs: list[tuple[Array, Array | None]] = []
    for index, layer in enumerate(mlp.layers):
        bias = layer.bias
        if index == 0 and bias is not None:
            bias = bias.astype(np.float64) + layer.weight.astype(np.float64) @ shift
        pairs.append((layer.weight, bias))
    return pack(layout, pairs)

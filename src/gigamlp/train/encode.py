"""From rows and labels to `Encoded` rows on the device, and from a student's layers to an MLP that reads raw rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gigamlp.data.split import hold_out
from gigamlp.errors import DataError, InvalidInput
from gigamlp.labels import encode_labels
from gigamlp.mlp import MLP, Layer
from gigamlp.train.augment import Shape
from gigamlp.train.pool import Encoded
from gigamlp.train.problem import Pair
from gigamlp.train.rows import Array, Scaling, check_finite, check_pair, open_source, scan
from gigamlp.train.window import Runs

__all__ = ["ImageShape", "Problem", "encode"]

ImageShape = Shape | Literal["auto", "square"] | None


@dataclass(frozen=True)
class Problem:
    """Training and validation rows on the device, and what makes MLPs of what was trained on them.

    Parameters
    ----------
    rows : Encoded
    x_val : Tensor [m, features] or None
    y_val : Tensor int64 [m] or None
    classes : ndarray
        Labels in logit order.
    scaling : Scaling
    scaled : bool
        Whether `rows` holds scaled rows.
    """

    rows: Encoded
    x_val: Tensor | None
    y_val: Tensor | None
    classes: Array
    scaling: Scaling
    scaled: bool

    def mlp(self, layers: Sequence[Layer], name: str, columns: Runs | None = None) -> MLP:
        """Return the MLP for layers that take `columns` of scaled rows: it reads raw rows."""
        scale, offset = self.scaling.scale, self.scaling.offset
        read: dict[str, Any] = {"classes": self.classes, "name": name}
        if columns is not None:
            index = np.concatenate([np.arange(start, stop) for start, stop in columns])
            read |= {"columns": columns, "features": len(offset)}
            scale, offset = (scale if isinstance(scale, float) else scale[index]), offset[index]
        if not isinstance(scale, float):
            return MLP(tuple(layers), input_scale=scale, input_offset=offset, **read)
        first = layers[0]
        assert first.bias is not None
        bias = first.bias.astype(np.float64) + first.weight.astype(np.float64) @ offset
        return MLP((Layer(first.weight, bias, first.activation), *layers[1:]), input_scale=scale, **read)


def encode(
    x: Any, y: Any, *, validation: Pair | int | None, image_shape: ImageShape, seed: int, device: torch.device
) -> Problem:
    """Check rows and labels, hold validation rows out, and put all on the device. See `distill`."""
    rows, shape = _flat(x, image_shape, "training")
    rows, labels = check_pair(rows, y)
    if isinstance(validation, tuple | list):
        if len(validation) != 2:
            raise InvalidInput("validation must be a pair (x, y) or a number of rows")
        held_rows, _ = _flat(validation[0], image_shape, "validation")
        held: tuple[Array, Array] | None = check_pair(held_rows, validation[1])
        assert held is not None
        if held[0].shape[1] != rows.shape[1] or len(held[0]) == 0:
            raise DataError(f"validation rows have shape {list(held[0].shape)}, training rows {list(rows.shape)}")
    else:
        count = _held_rows(validation, len(rows))
        held = None
        if count:
            rows, labels, *pair = hold_out(rows, labels, count, seed)
            held = (pair[0], pair[1])
    found = scan(open_source(rows, labels))
    classes = found.classes
    if held is not None:
        if held[1].dtype.kind != labels.dtype.kind:
            raise DataError(f"validation labels are {held[1].dtype}, training labels {labels.dtype}; use one kind")
        check_finite(held[0])
        classes = np.union1d(classes, held[1])
    scaling = found.scaling()
    images = shape is not None
    scaled = not found.bytes_only and not images
    if held is not None and found.bytes_only and held[0].dtype != np.uint8:
        raise DataError(f"validation rows are {held[0].dtype}, training rows uint8; use one kind")
    spread = np.sqrt(found.variance)

    def put(array: Array) -> Tensor:
        if found.bytes_only:
            return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(device)
        made = (array.astype(np.float64) - scaling.centre) * scaling.scale if scaled else array
        return torch.from_numpy(np.ascontiguousarray(made, np.float32)).to(device)

    def vector(values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(device)

    scale: float | Tensor = scaling.scale if isinstance(scaling.scale, float) else vector(scaling.scale)
    encoded = Encoded(
        put(rows),
        _ids(labels, classes, device),
        len(classes),
        1.0 if scaled else scale,
        torch.zeros(rows.shape[1], device=device) if scaled else vector(scaling.offset),
        vector(spread * scaling.scale if scaled else spread),
        shape,
    )
    if held is None:
        return Problem(encoded, None, None, classes, scaling, scaled)
    return Problem(encoded, put(held[0]), _ids(held[1], classes, device), classes, scaling, scaled)


def _ids(labels: Array, classes: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(encode_labels(labels, classes))).to(device)


def _flat(x: Any, image_shape: ImageShape, what: str) -> tuple[Array, Shape | None]:
    """Return rows [n, features], and their height and width if they are images."""
    rows = np.asarray(x)
    if rows.ndim == 3 and image_shape is not None:
        own = (int(rows.shape[1]), int(rows.shape[2]))
        if image_shape not in ("auto", "square", own):
            raise InvalidInput(f"{what} rows are images of {own}, but image_shape is {image_shape}")
        return rows.reshape(len(rows), -1), own
    if rows.ndim != 2 or image_shape in ("auto", None):
        return rows, None
    if image_shape == "square":
        side = math.isqrt(rows.shape[1])
        if side * side != rows.shape[1]:
            raise InvalidInput(
                f"rows of {rows.shape[1]} features are no square images; give image_shape=(height, width)"
            )
        return rows, (side, side)
    if (
        not isinstance(image_shape, tuple | list)
        or len(image_shape) != 2
        or any(isinstance(side, bool) or not isinstance(side, int | np.integer) or side < 1 for side in image_shape)
    ):
        raise InvalidInput(f"image_shape must be (height, width), 'auto', 'square' or None, got {image_shape!r}")
    height, width = (int(side) for side in image_shape)
    if height * width != rows.shape[1]:
        raise InvalidInput(f"image_shape {height} x {width} is {height * width} pixels, rows have {rows.shape[1]}")
    return rows, (height, width)


def _held_rows(validation: Any, rows: int) -> int:
    if validation is None:
        return min(5000, rows // 12) if rows >= 600 else rows // 6
    if isinstance(validation, bool) or not isinstance(validation, int | np.integer) or validation < 0:
        raise InvalidInput(f"validation must be a pair (x, y) or a number of rows >= 0, got {validation!r}")
    return int(validation)

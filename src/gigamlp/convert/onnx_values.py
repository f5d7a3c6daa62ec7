"""What flows through an ONNX graph of an MLP, and which activation an elementwise formula is.

Exporters write GELU and SiLU out as formulas with several uses of one value. Such a formula is followed by its values
on a fixed grid, and recognised by them: in whatever order it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.activations import ACTIVATIONS, apply_activation, erf, logistic
from gigamlp.convert.chain import Float64

__all__ = ["ELEMENTWISE", "GRID", "Answers", "Dimensions", "Rows", "recognised"]

# dense where activations bend, and far out, where something else might hide
GRID: Float64 = np.concatenate([np.linspace(-9, 9, 145), [s * 10.0**e for s in (-1, 1) for e in (1.5, 2, 3, 4, 6)]])

ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "Relu": lambda x: np.maximum(x, 0),
    "Tanh": np.tanh,
    "Sigmoid": logistic,
    "Erf": erf,
    "Neg": np.negative,
}


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows on their way: the end of the chain when it had `chain` steps, or a formula of that on `GRID`."""

    chain: int
    grid: Float64 | None = None


@dataclass(frozen=True, eq=False)
class Answers:
    """What is made of the last step's outputs: ``ids``, ``labels``, ``complement``, ``both`` or ``zipmap``."""

    kind: str


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the rows that the graph computes with; None stands for how many rows there are."""

    sizes: tuple[int | None, ...]


def recognised(grid: Float64) -> tuple[str, float, float] | None:
    """Return the activation, factor and term that give the values `grid`, ``factor * activation(GRID) + term``.

    Examples
    --------
    >>> recognised(2 * GRID / (1 + np.exp(-GRID.clip(-700))) + 3)
    ('silu', 2.0, 3.0)
    """
    for name in ACTIVATIONS:
        base = apply_activation(name, GRID)
        # two points that tell factor and term apart, both where activations are neither flat nor cancelled
        one, two = int(np.searchsorted(GRID[:145], 1.0)), int(np.searchsorted(GRID[:145], 2.0))
        factor = float(grid[two] - grid[one]) / float(base[two] - base[one])
        term = grid[one] - factor * base[one]
        factor, term = _rounded(factor), _rounded(term)
        close: NDArray[np.bool_] = np.abs(factor * base + term - grid) <= 2e-6 * np.maximum(1, np.abs(grid))
        if factor != 0 and close.all():
            return name, factor, term
    return None


def _rounded(value: float) -> float:
    """Return the whole number next to `value` if float32 constants may have kept it from that."""
    whole = float(np.rint(value))
    return whole if abs(value - whole) < 1e-6 else float(value)

"""Random MLPs and rows for property-based tests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gigamlp import MLP, Layer, Scheme
from gigamlp.activations import ACTIVATIONS
from gigamlp.mlp import HEADS

__all__ = ["mlps", "rows_for"]


@st.composite
def mlps(draw: st.DrawFn, max_depth: int = 4, max_width: int = 5) -> MLP:
    """Draw an MLP of any depth, head, classes, columns, scales and scheme."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    widths = draw(st.lists(st.integers(1, max_width), min_size=2, max_size=max_depth + 1))
    head = draw(st.sampled_from(HEADS))
    if head == "sigmoid":
        widths[-1] = 1
    layers = []
    for width, out in pairwise(widths):
        bias = rng.normal(size=out) if draw(st.booleans()) else None
        layers.append(Layer(rng.normal(size=(out, width)), bias, draw(st.sampled_from(list(ACTIVATIONS)))))
    columns, features = None, 0
    if draw(st.booleans()):
        columns, features = _columns(draw, widths[0])
    return MLP(
        tuple(layers),
        input_scale=_input(draw, rng, widths[0]),
        input_offset=_input(draw, rng, widths[0]),
        head=head,
        classes=_classes(draw, head, widths[-1]),
        columns=columns,
        features=features,
        scheme=_scheme(draw, rng, layers),
        name=draw(st.text(min_size=1, max_size=8)),
    )


def _columns(draw: st.DrawFn, width: int) -> tuple[tuple[tuple[int, int], ...], int]:
    runs, position, left = [], 0, width
    while left:
        start = position + draw(st.integers(0, 3))
        length = draw(st.integers(1, left))
        runs.append((start, start + length))
        position, left = start + length, left - length
    return tuple(runs), position + draw(st.integers(0, 3))


def _input(draw: st.DrawFn, rng: np.random.Generator, width: int) -> Any:
    if draw(st.booleans()):
        return float(rng.normal())
    return rng.normal(size=width)


def _classes(draw: st.DrawFn, head: str, outputs: int) -> list[int] | list[str] | None:
    if head == "regression" or draw(st.booleans()):
        return None
    count = 2 if head == "sigmoid" else outputs
    # NumPy strips trailing NULs from strings, so labels do not end in one
    text = st.text(max_size=5).filter(lambda label: not label.endswith("\0"))
    labels = st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9)
    return draw(st.one_of(*(st.lists(kind, min_size=count, max_size=count, unique=True) for kind in (labels, text))))


def _scheme(draw: st.DrawFn, rng: np.random.Generator, layers: list[Layer]) -> Scheme | None:
    name = draw(st.sampled_from([None, "w8", "w8a8", "w7"]))
    if name is None:
        return None
    arrays: dict[str, Any] = {}
    for index, layer in enumerate(layers):
        out = len(layer.weight)
        if draw(st.booleans()):
            arrays[f"scale.{index}"] = rng.uniform(0.1, 1, out)
        if draw(st.booleans()):
            arrays[f"hidden_scale.{index}"] = rng.uniform(0.1, 1, out if draw(st.booleans()) else 1)
        if draw(st.booleans()):
            arrays[f"codes.{index}"] = rng.integers(-64, 64, layer.weight.shape)
    return Scheme(name, arrays)


@st.composite
def rows_for(draw: st.DrawFn, mlp: MLP, max_rows: int = 5) -> np.ndarray[Any, Any]:
    """Draw rows that `mlp` takes, of a random dtype."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(0, max_rows)), mlp.features)
    dtype = draw(st.sampled_from([np.uint8, np.int8, np.int64, np.float16, np.float32, np.float64]))
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 100, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)

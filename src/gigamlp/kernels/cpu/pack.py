"""Pack a network for the native kernels: a header of whole numbers, and weights in the order that they are read in.

The layout is that of ``net.h``. A vector holds ``lanes / span`` outputs times ``span`` groups of four inputs; a chunk
of vectors is computed at a time, so weights lie as [chunk][group of inputs][vector of the chunk].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.byteform import ByteForm
from gigamlp.integer import Integer
from gigamlp.kernels.cpu.native import InstructionSet
from gigamlp.mlp import HEADS, MLP
from gigamlp.spec import OUTPUTS

__all__ = ["INPUTS", "ZEROS", "Packed", "pack"]

INPUTS = ("uint8", "int8", "float32", "float16")
ZEROS = ("dense", "auto", "skip")
BREAK_EVEN = 0.6  # share of non-zero groups above which rows take the dense form, until it is measured
_ACTIVATIONS = ("identity", "relu", "tanh", "logistic", "gelu", "gelu_tanh", "silu")
_VERSION = 1
_SLACK = 64
_MOST_UNITS = 5
_BLOCK_BYTES = 24 << 10  # rows of a block: they share the first cache with a chunk of weights

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Packed:
    """What the constructor of the extension's ``Net`` takes.

    Attributes
    ----------
    header : ndarray of int64
    blob : ndarray of uint8
    """

    header: Array
    blob: Array


def pack(
    form: Integer | ByteForm | MLP, isa: InstructionSet, *, input_dtype: str, output: str, zeros: str = "dense"
) -> Packed:
    """Pack `form` (an MLP: its float32 weights) for `isa`.

    Parameters
    ----------
    form : Integer, ByteForm or MLP
    isa : InstructionSet
    input_dtype : {"uint8", "int8", "float32", "float16"}
        float32 and float16 with an MLP only.
    output : {"class", "margin", "logits", "proba"}
    zeros : {"dense", "auto", "skip"}
        Whether groups of four input bytes that are all 0 are skipped; ``auto`` decides for each block of rows.
    """
    blob = _Blob()
    mlp = form if isinstance(form, MLP) else form.mlp
    if isinstance(form, MLP):
        layers = _float_layers(form, isa, blob)
    elif isinstance(form, ByteForm):
        layers = _byte_layers(form, isa, blob, zeros)
    else:
        layers = _w8_layers(form, isa, blob, zeros)
    windows = mlp.columns or ((0, mlp.features),)
    size = 4 if isinstance(form, MLP) else 1
    block = 60 if mlp.features_read * size * 60 <= _BLOCK_BYTES else 24 if isinstance(form, MLP) else 30
    if isa.step == 64 and not isinstance(form, MLP):
        block = 64 if block == 60 else 32
    header = [
        _VERSION,
        INPUTS.index(input_dtype),
        mlp.features,
        HEADS.index(mlp.head),
        OUTPUTS.index(output),
        ZEROS.index(zeros),
        block,
        len(windows),
        len(layers),
        round(BREAK_EVEN * 1000),
    ]
    header += [edge for window in windows for edge in window]
    header += [number for layer in layers for number in layer.numbers()]
    return Packed(np.array(header, np.int64), blob.array())


class _Blob:
    """Sections of bytes, each at a multiple of 64."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, array: Array) -> int:
        data = np.ascontiguousarray(array).tobytes()
        data += bytes(-len(data) % 64)
        at = self._size
        self._parts.append(data)
        self._size += len(data)
        return at

    def array(self) -> Array:
        return np.frombuffer(b"".join(self._parts), np.uint8)


@dataclass
class _Layer:
    """The fields of ``Layer`` in net.h, in its order."""

    is_float: bool
    inputs: int
    outputs: int
    pad: int
    chunk: int
    skip_chunk: int = 0
    skip_span: int = 0
    writes_bytes: bool = False
    activation: str = "identity"
    half: bool = False
    weights: int = -1
    skip_weights: int = -1
    init: int = -1
    scale: int = -1
    bias: int = -1
    inverse: int = -1
    zero: int = -1

    def numbers(self) -> list[int]:
        values = {**vars(self), "activation": _ACTIVATIONS.index(self.activation)}
        return [int(value) for value in values.values()]


# ---- the three forms ------------------------------------------------------------------------------------------------


def _float_layers(mlp: MLP, isa: InstructionSet, blob: _Blob) -> list[_Layer]:
    first = mlp.layers[0]
    weight = first.weight.astype(np.float64)
    offset = np.broadcast_to(np.asarray(mlp.input_offset, np.float64), (weight.shape[1],))
    bias = weight @ offset + (0.0 if first.bias is None else first.bias.astype(np.float64))
    weights = [weight * np.asarray(mlp.input_scale, np.float64), *(layer.weight for layer in mlp.layers[1:])]
    biases = [bias, *(np.zeros(len(e.weight)) if e.bias is None else e.bias for e in mlp.layers[1:])]
    last = len(mlp.layers) - 1
    return [
        _float_layer(w, b, layer.activation, isa, blob, last=index == last)
        for index, (w, b, layer) in enumerate(zip(weights, biases, mlp.layers, strict=True))
    ]


def _w8_layers(form: Integer, isa: InstructionSet, blob: _Blob, zeros: str) -> list[_Layer]:
    last = len(form.layers)
    init = -128 * form.code_sums.astype(np.int64) if form.input_dtype == "int8" else np.zeros(len(form.codes))
    first = _integer_layer(form.codes, (init, form.scale, form.bias), isa, blob, last=last == 0)
    first.activation, first.half = form.activation, last > 0
    _add_skipping(first, form.codes, isa, blob, zeros)
    layers = [first]
    for index, layer in enumerate(form.layers, start=1):
        assert layer.bias is not None
        halves = layer.weight.astype(np.float16).astype(np.float32)
        layers.append(_float_layer(halves, layer.bias, layer.activation, isa, blob, last=index == last))
        layers[-1].half = index < last
    return layers


def _byte_layers(form: ByteForm, isa: InstructionSet, blob: _Blob, zeros: str) -> list[_Layer]:
    layers = []
    for index, layer in enumerate(form.layers):
        init = layer.correction.astype(np.int64)
        if index == 0 and form.input_dtype == "int8":
            init = init - 128 * layer.codes.sum(axis=1, dtype=np.int64)
        last = index == len(form.layers) - 1
        made = _integer_layer(layer.codes, (init, layer.scale, layer.bias), isa, blob, last=last)
        made.activation, made.writes_bytes = layer.activation, not last
        if layer.inverse is not None and layer.zero is not None:
            made.inverse = blob.add(_padded(layer.inverse, np.float32, made.pad))
            made.zero = blob.add(_padded(layer.zero, np.float32, made.pad))
        if index == 0:
            _add_skipping(made, layer.codes, isa, blob, zeros)
        layers.append(made)
    return layers


# ---- one layer ------------------------------------------------------------------------------------------------------


def _float_layer(
    weight: Array, bias: Array, activation: str, isa: InstructionSet, blob: _Blob, *, last: bool
) -> _Layer:
    out, width = weight.shape
    units = -(-out // isa.lanes)
    chunk = 3 if units == 3 else min(units, 2)  # four bytes a weight: a wider chunk would leave the first cache
    padded = np.zeros((units * isa.lanes, width), np.float32)
    padded[:out] = weight
    by_unit = padded.reshape(units, isa.lanes, width)
    parts = [by_unit[a : a + chunk].transpose(2, 0, 1).ravel() for a in range(0, units, chunk)]
    layer = _Layer(True, width, out, units * isa.lanes, chunk, activation=activation)
    layer.weights = blob.add(np.concatenate(parts))
    layer.bias = blob.add(_padded(bias, np.float32, layer.pad, -np.inf if last else 0.0))
    return layer


def _integer_layer(
    codes: Array, rescale: tuple[Array, Array, Array], isa: InstructionSet, blob: _Blob, *, last: bool
) -> _Layer:
    """Add a layer of bytes times `codes`; `rescale` is what is added to its sums, their scale and bias."""
    init, scale, bias = rescale
    out, width = codes.shape
    unit = isa.lanes // isa.dense_span
    units = -(-out // unit)
    tiles = isa.step > 4 * isa.dense_span
    layer = _Layer(False, width, out, units * unit, 1 if tiles else _chunk(units))
    layer.weights = blob.add(arrange(codes, isa.lanes, isa.dense_span, layer.chunk, isa.step))
    if np.any(init):
        wrapped = (np.asarray(init, np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)  # sums wrap, and come back
        layer.init = blob.add(_padded(wrapped, np.int32, layer.pad))
    layer.scale = blob.add(_padded(scale, np.float32, layer.pad))
    # outputs that do not exist are never the largest
    layer.bias = blob.add(_padded(bias, np.float32, layer.pad, -np.inf if last else 0.0))
    return layer


def _add_skipping(layer: _Layer, codes: Array, isa: InstructionSet, blob: _Blob, zeros: str) -> None:
    if zeros == "dense" or not isa.skips:
        return
    layer.skip_span, layer.skip_chunk = _skip_shape(len(codes), isa)
    if (layer.skip_span, layer.skip_chunk, isa.step) == (isa.dense_span, layer.chunk, 4 * isa.dense_span):
        layer.skip_weights = layer.weights
    else:
        layer.skip_weights = blob.add(arrange(codes, isa.lanes, layer.skip_span, layer.skip_chunk))


def _chunk(units: int) -> int:
    """Return how many vectors of outputs a tile computes: at most 5, the chunks of a layer as even as can be."""
    even = [n for n in (5, 4, 3) if units % n == 0]
    if even:
        return even[0]
    count = -(-units // _MOST_UNITS)
    return -(-units // count)


def _skip_shape(outputs: int, isa: InstructionSet) -> tuple[int, int]:
    """Return the span and chunk of the zero-skipping form.

    Two groups to a vector make half as many, but less empty, list entries: better as long as all outputs fit one chunk.
    """
    if isa.dense_span == 2 and outputs <= _MOST_UNITS * isa.lanes // 2:
        return 2, -(-outputs // (isa.lanes // 2))
    units = -(-outputs // isa.lanes)
    if isa.lanes == 16 and units % 8 == 0:  # a twentieth faster than 4 on Ice Lake
        return 1, 8
    return 1, 4 if units % 4 == 0 else _chunk(units)


def arrange(codes: Array, lanes: int, span: int, chunk: int, step: int = 1) -> Array:
    """Return int8 codes [out, in] as a kernel reads them: [chunk][group][vector][output][group of the vector][4].

    Inputs are padded to a multiple of `step`.

    Examples
    --------
    >>> arrange(np.arange(8, dtype=np.int8).reshape(2, 4), lanes=2, span=1, chunk=1).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    out, width = codes.shape
    unit, group = lanes // span, 4 * span
    units, groups = -(-out // unit), -(-width // group)
    groups = max(groups, -(-width // step) * step // group)
    padded = np.zeros((units * unit, groups * group), np.int8)
    padded[:out, :width] = codes
    by_unit = padded.reshape(units, unit, groups, span, 4)
    parts = [by_unit[a : a + chunk].transpose(2, 0, 1, 3, 4).ravel() for a in range(0, units, chunk)]
    return np.concatenate(parts)


def _padded(values: Array | Sequence[float], dtype: Any, pad: int, fill: float = 0.0) -> Array:
    out = np.full(pad + _SLACK, fill, dtype)
    out[: len(values)] = values
    return out

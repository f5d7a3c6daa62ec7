"""Weights in the order in which the lanes of a warp read them: the kernel's `packed` argument, in NumPy.

In the fragments of ``mma.m16n8k32`` lane (g, t) = (lane // 4, lane % 4) holds words of output g. Which features those
words are is free as long as rows and codes agree, since sums do not care about their order: `units` says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.integer import Integer
from gigamlp.kernels.cuda.shape import Network

__all__ = ["Layout", "Unit", "layout_of", "pack", "pack_slices", "units"]


@dataclass(frozen=True)
class Unit:
    """A piece of a row that the four lanes of a group read with one access each.

    Attributes
    ----------
    width : {16, 8, 4}
        Bytes of a lane.
    starts : tuple of int
        Where the bytes of lanes t = 0 .. 3 begin.
    """

    width: int
    starts: tuple[int, int, int, int]


def units(padded: int, wide: bool) -> tuple[Unit, ...]:
    """Return the units of a row of `padded` bytes, a multiple of 16: those of 64 bytes, then one of 32, then one of 16.

    With `wide`, two units share 128 bytes, of which a lane has 32 in a row: eight lanes that read 16 bytes each from
    two rows of shared memory then use all 32 banks.

    Examples
    --------
    >>> [(u.width, u.starts) for u in units(144, True)]
    [(16, (0, 32, 64, 96)), (16, (16, 48, 80, 112)), (4, (128, 132, 136, 140))]
    """
    full, rest = divmod(padded, 64)
    found = []
    for unit in range(full):
        if wide and unit < full // 2 * 2:
            begin = unit // 2 * 128 + unit % 2 * 16
            found.append(Unit(16, (begin, begin + 32, begin + 64, begin + 96)))
        else:
            found.append(_unit(unit * 64, 16))
    if rest & 32:
        found.append(_unit(full * 64, 8))
    if rest & 16:
        found.append(_unit(padded - 16, 4))
    return tuple(found)


def _unit(begin: int, width: int) -> Unit:
    return Unit(width, (begin, begin + width, begin + 2 * width, begin + 3 * width))


@dataclass(frozen=True)
class Layout:
    """Where the sections of the packed weights begin, in bytes. Each begins at a multiple of 16.

    Attributes
    ----------
    affine : int
        Pairs (scale, bias) of the first layer; the codes are before it, from 0 on.
    biases, weights : tuple of int
        Of the later layers.
    total : int
    """

    affine: int
    biases: tuple[int, ...]
    weights: tuple[int, ...]
    total: int


def layout_of(network: Network, step: int = 16) -> Layout:
    """Return where the sections of `network`'s packed weights begin; codes are for a multiple of `step` features."""
    affine = -(-network.padded // step) * step * network.blocks * 8
    end = affine + network.blocks * 64
    biases, weights, inputs = [], [], network.hidden
    for width in network.later:
        blocks = -(-width // 8)
        biases.append(end)
        weights.append(end + blocks * 32)
        end = weights[-1] + -(-inputs // 16) * blocks * 256
        inputs = width
    return Layout(affine, tuple(biases), tuple(weights), end)


def pack(integer: Integer, network: Network, wide: bool) -> NDArray[np.uint8]:
    """Return the packed weights of `integer`, uint8 [``layout_of(network).total``].

    Parameters
    ----------
    integer : Integer
    network : Network
        What ``network_of(integer, …)`` gave.
    wide : bool
        Which order of features the path reads: ``Config.wide``.
    """
    if (network.hidden, *network.later) != (len(integer.codes), *(len(layer.weight) for layer in integer.layers)):
        raise InvalidInput("the network is another one than the integer form's")
    layout = layout_of(network)
    sections = [_codes(integer, network, wide), _affine(integer, network)]
    for layer in integer.layers:
        assert layer.bias is not None
        sections += [_padded(layer.bias, 8), _fragments(layer.weight)]
    packed = np.concatenate([np.ascontiguousarray(section).reshape(-1).view(np.uint8) for section in sections])
    assert packed.size == layout.total
    return packed


def pack_slices(integer: Integer, network: Network, outputs: int) -> NDArray[np.uint8]:
    """Return the packed weights for ``wgmma``, uint8: one slice after the other, each a whole network of its own.

    Slice i has the outputs i * `outputs` … of the first layer and the columns of the second layer's weights that follow
    from them, and all else as every other slice; outputs beyond the last are 0. In it the first layer's codes come as
    core matrices: for each 32 features, for each 8 outputs, two halves of [8 outputs][16 features]; the second layer's
    weights likewise, [8 outputs][8 inputs].

    Parameters
    ----------
    integer : Integer
    network : Network
        What ``network_of(integer, …)`` gave.
    outputs : int
        First-layer outputs of a slice, a multiple of 16.
    """
    codes = _placed(integer, network)
    steps = [places for unit in units(network.padded, False) for places in _core_steps(unit)]
    count = -(-network.hidden // outputs)
    codes = np.pad(codes[: network.hidden], ((0, count * outputs - network.hidden), (0, 1)))  # a column of 0 at the end
    affine = np.zeros((count * outputs, 2), np.float32)
    affine[: network.hidden, 0], affine[: network.hidden, 1] = integer.scale, integer.bias
    parts = []
    for first in range(0, count * outputs, outputs):
        own = slice(first, first + outputs)
        by_block = codes[own].reshape(outputs // 8, 8, -1)
        sections: list[NDArray[Any]] = [
            by_block[:, :, places].transpose(0, 2, 1, 3) for places in steps
        ]  # [block, half, output, feature]
        sections.append(affine[own])
        for index, layer in enumerate(integer.layers):
            assert layer.bias is not None
            weight = layer.weight
            if index == 0:
                weight = np.zeros((len(layer.weight), outputs), np.float32)
                columns = layer.weight[:, own]
                weight[:, : columns.shape[1]] = columns
            sections += [_padded(layer.bias, 8), _fragments(weight) if index else _cores(weight)]
        parts += [np.ascontiguousarray(section).reshape(-1).view(np.uint8) for section in sections]
    return np.concatenate(parts)


def _core_steps(unit: Unit) -> list[NDArray[np.int64]]:
    """Return for each 32 features of a unit where they are in a row, [half, 16]; -1 where there is none."""
    words = np.array(unit.starts)[:, None, None] + np.arange(unit.width).reshape(-1, 4)  # [t, word, byte]
    if unit.width == 4:
        words = np.concatenate([words, np.full_like(words, -1)], axis=1)
    halves = words.transpose(1, 0, 2).reshape(-1, 16)  # a half is one word of each lane
    return [halves[at : at + 2] for at in range(0, len(halves), 2)]


def _placed(integer: Integer, network: Network) -> NDArray[np.int8]:
    """Return the codes of the bytes that are read, [outputs, padded]; 0 for padding and what the MLP does not read."""
    codes = np.zeros((network.blocks * 8, network.padded), np.int8)
    begin = 0
    for start, stop in network.columns:
        width = stop - start
        at = start - network.offset
        codes[: network.hidden, at : at + width] = integer.codes[:, begin : begin + width]
        begin += width
    return codes


def _codes(integer: Integer, network: Network, wide: bool) -> NDArray[np.int8]:
    codes = _placed(integer, network)
    by_block = codes.reshape(network.blocks, 8, network.padded)
    parts = []
    for unit in units(network.padded, wide):
        places = np.array(unit.starts)[:, None] + np.arange(unit.width)  # [t, byte]
        parts.append(by_block[:, :, places].reshape(-1))  # [block, g, t, byte]
    return np.concatenate(parts)


def _affine(integer: Integer, network: Network) -> NDArray[np.float32]:
    pairs = np.zeros((network.blocks * 8, 2), np.float32)
    pairs[: network.hidden, 0], pairs[: network.hidden, 1] = integer.scale, integer.bias
    return pairs


def _fragments(weight: NDArray[Any]) -> NDArray[np.float16]:
    """Return a later layer's weights, float16, as B fragments of ``mma.m16n8k16``: [k block, block, g, t, half, 2]."""
    outputs, inputs = -(-weight.shape[0] // 8), -(-weight.shape[1] // 16)
    padded = np.zeros((outputs * 8, inputs * 16), np.float16)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.reshape(outputs, 8, inputs, 2, 4, 2).transpose(2, 0, 1, 4, 3, 5)


def _cores(weight: NDArray[Any]) -> NDArray[np.float16]:
    """Return a later layer's weights, float16, as core matrices of ``wgmma``: [k block, block, half, output, input]."""
    outputs, inputs = -(-weight.shape[0] // 8), -(-weight.shape[1] // 16)
    padded = np.zeros((outputs * 8, inputs * 16), np.float16)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.reshape(outputs, 8, inputs, 2, 8).transpose(2, 0, 3, 1, 4)


def _padded(values: NDArray[Any], step: int) -> NDArray[np.float32]:
    out = np.zeros(-(-len(values) // step) * step, np.float32)
    out[: len(values)] = values
    return out

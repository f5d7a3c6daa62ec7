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

__all__ = ["Layout", "Unit", "layout_of", "pack", "units"]


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


def layout_of(network: Network) -> Layout:
    """Return where the sections of `network`'s packed weights begin."""
    affine = network.padded * network.blocks * 8
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


def _codes(integer: Integer, network: Network, wide: bool) -> NDArray[np.int8]:
    codes = np.zeros((network.blocks * 8, network.padded), np.int8)
    begin = 0
    for start, stop in network.columns:
        width = stop - start
        at = start - network.offset
        codes[: network.hidden, at : at + width] = integer.codes[:, begin : begin + width]
        begin += width
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


def _padded(values: NDArray[Any], step: int) -> NDArray[np.float32]:
    out = np.zeros(-(-len(values) // step) * step, np.float32)
    out[: len(values)] = values
    return out

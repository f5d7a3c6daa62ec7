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
from gigamlp.kernels.cuda.shape import Form, Network
from gigamlp.rounded import round_tf32

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


def units(padded: int, order: int) -> tuple[Unit, ...]:
    """Return the units of a row of `padded` bytes, a multiple of 16: those of 64 bytes, then one of 32, then one of 16.

    With an `order` other than 0, two units share 128 bytes, so that eight lanes that read 16 bytes each from two rows
    of shared memory use all 32 banks: 1 gives a lane 32 bytes in a row (for rows an odd number of 16 bytes apart), 2
    gives two lanes 16 bytes each in turn (for rows twice an odd number of 16 bytes apart). At four times an odd number,
    order 0 does.

    Examples
    --------
    >>> [(u.width, u.starts) for u in units(144, 1)]
    [(16, (0, 32, 64, 96)), (16, (16, 48, 80, 112)), (4, (128, 132, 136, 140))]
    >>> [u.starts for u in units(128, 2)]
    [(0, 16, 64, 80), (32, 48, 96, 112)]
    """
    full, rest = divmod(padded, 64)
    found = []
    for unit in range(full):
        if order and unit < full // 2 * 2:
            begin = unit // 2 * 128 + unit % 2 * 16 * order
            steps = (0, 32, 64, 96) if order == 1 else (0, 16, 64, 80)
            found.append(Unit(16, (begin, begin + steps[1], begin + steps[2], begin + steps[3])))
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
    mask : int
        What is read of each unit, if the network is `masked`; the codes are before it, from 0 on.
    affine : int
        Pairs (scale, bias) of the first layer.
    biases, weights : tuple of int
        Of the later layers.
    total : int
    """

    mask: int
    affine: int
    biases: tuple[int, ...]
    weights: tuple[int, ...]
    total: int


def layout_of(network: Network, step: int = 16) -> Layout:
    """Return where the sections of `network`'s packed weights begin. Codes are for a multiple of `step` bytes."""
    mask = -(-network.padded // step) * step * network.blocks * 8 * network.parts
    affine = mask + (network.padded if network.masked else 0)
    end = affine + network.blocks * 64
    biases, weights, inputs = [], [], network.hidden
    for width in network.later:
        blocks = -(-width // 8)
        biases.append(end)
        weights.append(end + blocks * 32)
        end = weights[-1] + -(-inputs // later_inputs(network)) * blocks * 256
        inputs = width
    return Layout(mask, affine, tuple(biases), tuple(weights), end)


def later_inputs(network: Network) -> int:
    """Return how many inputs of a later layer one matrix instruction takes."""
    return 8 if network.later_compute == "tf32" else 16


def pack(integer: Form, network: Network, order: int) -> NDArray[np.uint8]:
    """Return the packed weights of `integer`, uint8 [``layout_of(network).total``].

    Parameters
    ----------
    integer : Integer or Rounded
    network : Network
        What ``network_of(integer, …)`` gave.
    order : {0, 1, 2}
        The order in which the path reads features: ``paths.order(network, config)``.
    """
    if (network.hidden, *network.later) != tuple(len(layer.weight) for layer in integer.mlp.layers):
        raise InvalidInput("the network is another one than the integer form's")
    layout = layout_of(network)
    sections: list[NDArray[Any]] = [_codes(integer, network, order)]
    if network.masked:
        sections.append(_mask(network, order))
    sections.append(_affine(integer, network))
    fragments = _tf32_fragments if network.later_compute == "tf32" else _fragments
    for layer in integer.layers:
        assert layer.bias is not None
        sections += [_padded(layer.bias, 8), fragments(layer.weight)]
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
    codes = _placed(integer.codes, network)
    steps = [places for unit in units(network.padded, 0) for places in _core_steps(unit)]
    count = -(-network.hidden // outputs)
    codes = np.pad(codes[: network.hidden], ((0, count * outputs - network.hidden), (0, 1)))  # a column of 0 at the end
    affine = np.zeros((count * outputs, 2), np.float32)
    affine[: network.hidden, 0], affine[: network.hidden, 1] = integer.scale, integer.bias
    parts = []
    for first in range(0, count * outputs, outputs):
        own = slice(first, first + outputs)
        by_block = codes[own].reshape(outputs // 8, 8, -1)
        sections: list[NDArray[Any]] = [by_block[:, :, places].transpose(0, 2, 1, 3) for places in steps]
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


def _placed(numbers: NDArray[Any], network: Network) -> NDArray[Any]:
    """Return first-layer weights [outputs, items that are read]; 0 for padding and what the MLP does not read."""
    codes = np.zeros((network.blocks * 8, network.padded // network.item), numbers.dtype)
    begin, offset = 0, network.offset // network.item
    for start, stop in network.columns:
        width = stop - start
        codes[: network.hidden, start - offset : stop - offset] = numbers[:, begin : begin + width]
        begin += width
    return codes


def _codes(integer: Form, network: Network, order: int) -> NDArray[np.uint8]:
    terms = []
    for numbers in _numbers(integer):
        # a byte of a row has `expand` bytes of codes, which lie side by side for the bytes of a lane
        size = numbers.dtype.itemsize
        codes = _placed(numbers, network).view(np.uint8)
        terms.append(codes.reshape(network.blocks, 8, network.padded, size // network.item))
    parts = []
    for unit in units(network.padded, order):
        places = np.array(unit.starts)[:, None] + np.arange(unit.width)  # [t, byte]
        for term in terms:
            lanes = term[:, :, places].reshape(network.blocks, 32, network.expand, unit.width)
            parts.append(lanes.transpose(2, 0, 1, 3).reshape(-1))  # [part, block, g and t, byte]
    return np.concatenate(parts)


def _numbers(integer: Form) -> tuple[NDArray[Any], ...]:
    """Return the terms of the first layer's weights [out, in] as they lie in memory."""
    if isinstance(integer, Integer):
        return (integer.codes,)
    if integer.format == "float16":
        return tuple(term.astype(np.float16) for term in integer.terms)
    if integer.format == "bfloat16":  # the upper halves of float32
        return tuple((term.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for term in integer.terms)
    return integer.terms


def _mask(network: Network, order: int) -> NDArray[np.uint8]:
    mask = np.zeros(network.padded, np.uint8)
    for start, stop in network.columns:
        mask[start * network.item - network.offset : stop * network.item - network.offset] = 0xFF
    places = [np.array(unit.starts)[:, None] + np.arange(unit.width) for unit in units(network.padded, order)]
    return np.concatenate([mask[each].reshape(-1) for each in places])


def _affine(integer: Form, network: Network) -> NDArray[np.float32]:
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


def _tf32_fragments(weight: NDArray[Any]) -> NDArray[np.float32]:
    """Return a later layer's weights as B fragments of ``mma.m16n8k8``: [k block, block, g, t, 2].

    Rows t and t + 4 of B meet columns t and t + 4 of A, where lane t puts hidden values 2 t and 2 t + 1.
    """
    outputs, inputs = -(-weight.shape[0] // 8), -(-weight.shape[1] // 8)
    padded = np.zeros((outputs * 8, inputs * 8), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = round_tf32(weight)
    return padded.reshape(outputs, 8, inputs, 4, 2).transpose(2, 0, 1, 3, 4)


def _padded(values: NDArray[Any], step: int) -> NDArray[np.float32]:
    out = np.zeros(-(-len(values) // step) * step, np.float32)
    out[: len(values)] = values
    return out

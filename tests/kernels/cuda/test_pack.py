"""The packed weights against the fragment tables of the PTX manual, multiplied out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamlp.errors import InvalidInput
from gigamlp.kernels.cuda import paths
from gigamlp.kernels.cuda.pack import layout_of, pack, pack_slices, units
from gigamlp.rounded import round_tf32
from tests.kernels.cuda import cases


@given(st.integers(1, 3000), st.sampled_from([0, 1, 2]))
def test_units_cover_a_row_once(features, order):
    padded = -(-features // 16) * 16
    covered = [s + b for unit in units(padded, order) for s in unit.starts for b in range(unit.width)]
    assert sorted(covered) == list(range(padded))
    for unit in units(padded, order):
        assert all(start % unit.width == 0 for start in unit.starts)  # one aligned access each


def test_units_read_all_banks():
    # 8 lanes of one phase of a 16-byte access: rows g and g + 1 of a pitch in units of 16 bytes, t = 0 .. 3
    for pitch, order in ((49, 1), (25, 1), (1, 1), (98, 2), (50, 2), (2, 2), (196, 0), (4, 0)):
        features = pitch * 16
        network = cases.form(cases.make([features, 8, 4]))[1]
        assert paths.order(network, paths.Config("ring", 1, 4, 1)) == order
        assert paths.order(network, paths.Config("window", 1, 4, 1)) == 1
        assert paths.order(network, paths.Config("direct", 1, 4, 1)) == 0
        for unit in units(128, order):
            groups = {(g * pitch + start // 16) % 8 for g in (0, 1) for start in unit.starts}
            assert len(groups) == 8


@st.composite
def networks(draw):
    features = draw(st.integers(2, 150))
    columns = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(0, features), min_size=2, max_size=6)))
        columns = list(zip(cuts[::2], cuts[1::2], strict=False))
    read = features if columns is None else sum(b - a for a, b in columns)
    widths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    return cases.make([read, *widths], features=features, columns=columns, seed=draw(st.integers(0, 99)))


@settings(deadline=None, max_examples=60)
@given(networks(), st.sampled_from([0, 1, 2]), st.sampled_from(["uint8", "int8"]))
def test_the_fragments_multiply_out_to_the_reference(mlp, order, rows):
    integer, network = cases.form(mlp, rows=rows)
    packed, layout = pack(integer, network, order), layout_of(network)
    assert packed.size == layout.total
    x = cases.rows_for(mlp, 20, rows)
    np.testing.assert_array_equal(first_sums(packed, network, order, x), integer.reference_accumulators(x))
    # scales and biases: pairs, in the order of the outputs
    pairs = packed[layout.affine :][: network.blocks * 64].view(np.float32).reshape(-1, 2)
    np.testing.assert_array_equal(pairs[: network.hidden], np.stack([integer.scale, integer.bias], 1))
    assert (pairs[network.hidden :] == 0).all()
    for index, layer in enumerate(integer.layers):
        out, inputs = layer.weight.shape
        bias = packed[layout.biases[index] :][: -(-out // 8) * 32].view(np.float32)
        np.testing.assert_array_equal(bias[:out], layer.bias)
        weight = later_weight(packed[layout.weights[index] :], out, inputs)
        np.testing.assert_array_equal(weight[:out, :inputs], layer.weight.astype(np.float16))
        weight[:out, :inputs] = 0
        assert (weight == 0).all()  # padding must add nothing, whatever it meets


def first_sums(packed, network, order, x):
    """Multiply as mma.m16n8k32 and m16n8k16 do: lane (g, t) of B holds column g, lane (g, t) of A row g."""
    run = np.full((len(x), network.padded), 99, np.int64)  # what follows the row may be anything
    run[:, : network.reads] = x[:, network.offset : network.offset + network.reads]
    sums = np.zeros((len(x), network.blocks * 8), np.int64)
    at = 0
    for unit in units(network.padded, order):
        size = network.blocks * 32 * unit.width
        codes = packed[at : at + size].view(np.int8).reshape(network.blocks, 8, 4, unit.width)
        for t, start in enumerate(unit.starts):
            sums += np.einsum(
                "nk,jgk->njg", run[:, start : start + unit.width], codes[:, :, t].astype(np.int64)
            ).reshape(sums.shape)
        at += size
    assert at == layout_of(network).affine
    return sums[:, : network.hidden]


KINDS = [
    ("float16", "float16"),
    ("float16", "float16x2"),
    ("bfloat16", "bfloat16x2"),
    ("float32", "tf32"),
    ("uint8", "float16"),
    ("int8", "float16x2"),
]


@settings(deadline=None, max_examples=60)
@given(networks(), st.sampled_from([0, 1, 2]), st.sampled_from(KINDS))
def test_float_fragments_multiply_out_to_the_reference(mlp, order, kind):
    rows, compute = kind
    form, network = cases.rounded(mlp, rows, compute)
    packed, layout = pack(form, network, order), layout_of(network)
    assert packed.size == layout.total
    x = cases.rows_for(mlp, 5, rows)
    if rows == "float32":
        x = round_tf32(x).astype(np.float32)
    weight = np.sum([term.astype(np.float64) for term in form.terms], axis=0)
    want = mlp.read_columns(x).astype(np.float64) @ weight.T
    got = first_float_sums(packed, network, order, cases.as_bytes(x, rows))
    # few products of few digits each: float64 sums them almost exactly, in any order
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-9 * np.abs(want).max())
    for index, layer in enumerate(form.layers):
        out, inputs = layer.weight.shape
        blocks, steps = -(-out // 8), -(-inputs // 8)
        values = packed[layout.weights[index] :][: blocks * steps * 256].view(np.float32).reshape(steps, blocks, 32, 2)
        weight = np.zeros((blocks * 8, steps * 8), np.float32)
        for step, block, lane, i in np.ndindex(values.shape):
            g, t = divmod(lane, 4)
            # row t + 4 i of B meets column t + 4 i of A, where lane t has put column 2 t + i of C
            weight[block * 8 + g, step * 8 + 2 * t + i] = values[step, block, lane, i]
        np.testing.assert_array_equal(weight[:out, :inputs], round_tf32(layer.weight))
        weight[:out, :inputs] = 0
        assert (weight == 0).all()


def first_float_sums(packed, network, order, data):
    """Multiply words as the float instructions do: word i of lane (g, t) of A meets word i of lane (g, t) of B."""
    run = np.full((len(data), network.padded), 0xFF, np.uint8)  # what follows the row may be NaN
    run[:, : network.reads] = data[:, network.offset : network.offset + network.reads]
    sums = np.zeros((len(data), network.blocks * 8))
    at, mask_at = 0, layout_of(network).mask
    number = {"float16": np.float16, "bfloat16": np.uint16, "tf32": np.float32}[network.compute.removesuffix("x2")]

    def numbers(raw):
        found = np.ascontiguousarray(raw).view(number)
        return (
            (found.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            if number == np.uint16
            else found.astype(np.float64)
        )

    for unit in units(network.padded, order):
        size = network.blocks * 32 * unit.width * network.parts
        codes = packed[at : at + size].reshape(network.terms, network.expand, network.blocks, 8, 4, unit.width)
        codes = np.moveaxis(codes, 1, 4)  # a lane's bytes of all parts in a row
        for t, start in enumerate(unit.starts):
            row = run[:, start : start + unit.width]
            if network.masked:
                row = row & packed[mask_at + t * unit.width : mask_at + (t + 1) * unit.width]
            if network.expand == 2:
                values = row.view(np.int8 if network.signed else np.uint8).astype(np.float64)
            else:
                values = numbers(row)
            own = numbers(codes[:, :, :, t].reshape(network.terms, network.blocks, 8, -1)).sum(axis=0)
            sums += np.einsum("nk,jgk->njg", values, own).reshape(sums.shape)
        mask_at += 4 * unit.width
        at += size
    assert at == layout_of(network).mask
    assert (sums[:, network.hidden :] == 0).all()
    return sums[:, : network.hidden]


def later_weight(data, outputs, inputs):
    """Read B of mma.m16n8k16 back: register i, half h of lane (g, t) is row 2 t + h + 8 i of column g."""
    blocks, steps = -(-outputs // 8), -(-inputs // 16)
    values = data[: blocks * steps * 256].view(np.float16).reshape(steps, blocks, 32, 2, 2)
    weight = np.zeros((blocks * 8, steps * 16), np.float16)
    for step, block, lane, i, h in np.ndindex(values.shape):
        g, t = divmod(lane, 4)
        weight[block * 8 + g, step * 16 + 2 * t + h + 8 * i] = values[step, block, lane, i, h]
    return weight


@settings(deadline=None, max_examples=60)
@given(networks(), st.sampled_from([16, 32, 48]), st.sampled_from(["uint8", "int8"]))
def test_the_slices_multiply_out_to_the_reference(mlp, outputs, rows):
    integer, network = cases.form(mlp, rows=rows)
    config = paths.Config("wgmma", 4, 4, 1, outputs=outputs)
    at, own = paths.layout(network, config), paths.slice_of(network, config)
    count = config.cluster(network)
    packed = pack_slices(integer, network, outputs).reshape(count, at.total)
    x = cases.rows_for(mlp, 20, rows)
    sums = np.concatenate([core_sums(each, own, at.affine, x) for each in packed], 1)
    np.testing.assert_array_equal(sums[:, : network.hidden], integer.reference_accumulators(x))
    assert (sums[:, network.hidden :] == 0).all()
    pairs = np.concatenate([each[at.affine :][: outputs * 8].view(np.float32).reshape(-1, 2) for each in packed])
    np.testing.assert_array_equal(pairs[: network.hidden], np.stack([integer.scale, integer.bias], 1))
    assert (pairs[network.hidden :] == 0).all()
    if integer.layers:
        out = len(integer.layers[0].weight)
        weight = np.concatenate([core_weight(each[at.weights[0] :], out, outputs) for each in packed], 1)
        np.testing.assert_array_equal(weight[:out, : network.hidden], integer.layers[0].weight.astype(np.float16))
        weight[:out, : network.hidden] = 0
        assert (weight == 0).all()
    for each in packed:  # what comes later, every slice has
        for index, layer in enumerate(integer.layers[1:], 1):
            found = later_weight(each[at.weights[index] :], *layer.weight.shape)[: len(layer.weight)]
            np.testing.assert_array_equal(found[:, : layer.weight.shape[1]], layer.weight.astype(np.float16))


def core_sums(packed, network, size, x):
    """Multiply as wgmma does: word i of lane t of A meets bytes 4 t .. 4 t + 3 of half i of a step's 32 features."""
    run = np.zeros((len(x), network.padded), np.int64)
    run[:, : network.reads] = x[:, network.offset : network.offset + network.reads]
    codes = packed[:size].view(np.int8).reshape(-1, network.blocks, 2, 8, 16).astype(np.int64)
    sums = np.zeros((len(x), network.blocks * 8), np.int64)
    step = 0
    for unit in units(network.padded, 0):
        words = unit.width // 4
        for word in range(words):
            for t, start in enumerate(unit.starts):
                a = run[:, start + 4 * word : start + 4 * word + 4]
                b = codes[step + word // 2, :, word % 2, :, 4 * t : 4 * t + 4].reshape(-1, 4)
                sums += a @ b.T
        step += -(-words // 2)
    assert step == len(codes)
    return sums


def core_weight(data, outputs, inputs):
    """Read wgmma's B for float16 back: core matrices of 8 outputs and 8 inputs, the two of 16 inputs side by side."""
    blocks, steps = -(-outputs // 8), inputs // 16
    values = data[: blocks * steps * 256].view(np.float16).reshape(steps, blocks, 2, 8, 8)
    return values.transpose(1, 3, 0, 2, 4).reshape(blocks * 8, inputs).copy()


def test_another_network_is_refused():
    integer, _ = cases.form(cases.make([16, 8, 4]))
    _, network = cases.form(cases.make([16, 9, 4]))
    with pytest.raises(InvalidInput, match="another one"):
        pack(integer, network, False)

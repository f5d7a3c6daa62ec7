"""The native kernels of every instruction set that this machine has, against the schemes' references.

Bytes and logits of ``w8a8`` and ``w7`` must be equal bit by bit for relu and identity; ``w8`` sums its later layers in
float32, in another order than the reference.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.activations import ACTIVATIONS
from gigamlp.kernels.cpu import native
from gigamlp.quantize import form_of, integer_form
from tests.kernels.cpu.cases import SETS, form, network, new_net, rows, run, sets_for

pytestmark = pytest.mark.skipif(not SETS, reason=str(native.native_problem()))
each_set = pytest.mark.parametrize("isa", SETS, ids=lambda isa: isa.name)
ZEROS = ("dense", "skip", "auto")

# widths around every boundary: one value, less than a group of 4 or 8 bytes, around a vector (8 or 16 outputs), around
# a chunk (up to 5 vectors; skip: 64 and 128 outputs), more groups than a byte can number (1,024 and 2,048 bytes), deep
WIDTHS = [
    (1, 1),
    (1, 1, 1),
    (3, 2),
    (4, 7, 3),
    (5, 8, 16),
    (7, 9, 17),
    (8, 15, 2),
    (9, 16, 10),
    (15, 17, 10),
    (63, 40, 10),
    (64, 41, 10),
    (65, 48, 128),
    (100, 64, 33),
    (196, 65, 5),
    (784, 40, 10),
    (784, 128, 10),
    (1021, 100, 10),
    (1024, 33, 3),
    (1030, 24, 3),
    (2047, 9, 3),
    (2056, 80, 2),
    (4100, 16, 2),
    (30, 20, 30, 10, 5),
    (33, 8, 8, 8, 8, 8, 3),
]


def size(reference: np.ndarray) -> float:
    return max(1.0, float(np.abs(reference).max(initial=0.0)))


@each_set
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_integers_are_exact(isa: native.InstructionSet, widths: tuple[int, ...]) -> None:
    mlp = network(widths)
    x = rows(mlp, 37)
    for scheme in ("w8a8", "w7"):
        if isa not in sets_for(scheme):
            continue
        made = form(mlp, scheme, x)
        reference = made.reference_logits(x)
        for zeros in ZEROS:
            np.testing.assert_array_equal(run(made, isa, x, zeros=zeros), reference, f"{scheme} {zeros}")


@each_set
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_w8_and_float32(isa: native.InstructionSet, widths: tuple[int, ...]) -> None:
    mlp = network(widths)
    x = rows(mlp, 37)
    if isa in sets_for("w8"):
        made = form(mlp, "w8", x)
        reference = made.reference_logits(x)
        for zeros in ZEROS:
            # several float layers: now and then a hidden value is one float16 step off (2**-11)
            tolerance = (1e-5 if len(widths) <= 3 else 2e-3) * size(reference)
            np.testing.assert_allclose(run(made, isa, x, zeros=zeros), reference, rtol=0, atol=tolerance)
    reference = mlp.reference_logits(x)
    for dtype in ("float32", "uint8", "float16"):
        got = run(mlp, isa, x.astype(dtype))
        np.testing.assert_allclose(got, reference, rtol=0, atol=2e-5 * size(reference))


@each_set
def test_w8_hidden_values_have_the_references_bits(isa: native.InstructionSet) -> None:
    if isa not in sets_for("w8"):
        pytest.skip("7 bits only")
    # the last layer picks each hidden value: a sum of one product, 1 * value
    rng = np.random.default_rng(0)
    layers = [gm.Layer(rng.normal(size=(48, 300)), rng.normal(size=48), "relu"), gm.Layer(np.eye(48))]
    mlp = gm.MLP(layers, input_scale=1 / 255)
    x = rows(mlp, 200)
    made = integer_form(mlp)
    hidden = made.reference_hidden(x).astype(np.float16).astype(np.float32)
    for zeros in ZEROS:
        np.testing.assert_array_equal(run(made, isa, x, zeros=zeros), hidden)


@each_set
def test_random_networks(isa: native.InstructionSet) -> None:
    rng = np.random.default_rng(7)
    for case in range(60):
        depth = int(rng.integers(1, 5))
        widths = (int(rng.integers(1, 600)), *(int(rng.integers(1, 140)) for _ in range(depth)))
        mlp = network(widths, ("relu", "identity")[case % 2], seed=case)
        share = float(rng.choice([0.0, 0.05, 0.5, 1.0]))
        x = rows(mlp, int(rng.integers(1, 130)), share=share, seed=case)
        made = form(mlp, "w7", x)
        reference = made.reference_logits(x)
        for zeros in ZEROS:
            np.testing.assert_array_equal(run(made, isa, x, zeros=zeros), reference, f"{widths} {zeros} {share}")
        for ways in ((0, 0, 9, 0), (9, 0, 0, 0)):  # a list for each row, one for several
            net = new_net(made, isa, zeros="skip")
            net.set_ways(*ways)
            np.testing.assert_array_equal(run(made, isa, x, net=net), reference, f"{widths} {ways} {share}")


@each_set
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(isa: native.InstructionSet, activation: str) -> None:
    mlp = network((50, 60, 20, 5), activation, input_scale=1 / 16)
    x = rows(mlp, 101)
    reference = mlp.reference_logits(x)
    np.testing.assert_allclose(run(mlp, isa, x), reference, rtol=0, atol=2e-5 * size(reference))
    made = form(mlp, "w7", x)
    want = made.reference_logits(x)
    got = run(made, isa, x)
    if activation in ("relu", "identity"):
        np.testing.assert_array_equal(got, want)
    else:  # a last place in the activation moves few bytes, each by one step
        assert np.mean(got == want) > 0.9
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * size(want))
    # the last layer's own activation
    last = mlp.with_(layers=[*mlp.layers[:-1], gm.Layer(mlp.layers[-1].weight, None, activation)])
    reference = last.reference_logits(x)
    np.testing.assert_allclose(run(last, isa, x), reference, rtol=0, atol=2e-5 * size(reference))


@each_set
def test_int8_rows(isa: native.InstructionSet) -> None:
    for widths in ((5, 3), (100, 33, 7), (784, 40, 10)):
        mlp = network(widths, input_offset=0.3)
        x = rows(mlp, 61, dtype="int8", share=0.8)
        made = form(mlp, "w7", x)
        np.testing.assert_array_equal(run(made, isa, x), made.reference_logits(x))


@each_set
def test_the_largest_sums(isa: native.InstructionSet) -> None:
    """All bytes 255 and all codes at their ends: where an int16 sum of two products would saturate."""
    for scheme, top in (("w7", 64), ("w8a8", 127), ("w8a8", -128)):
        if isa not in sets_for(scheme):
            continue
        codes = np.full((9, 1000), top)
        codes[1] *= -1 if top != -128 else 0
        codes[2, ::2] = -top if top != -128 else 127
        arrays = {"codes.0": codes, "scale.0": np.full(9, 1e-6)}
        mlp = gm.MLP([gm.Layer(np.ones((9, 1000)))], scheme=gm.Scheme(scheme, arrays))
        x = np.full((4, 1000), 255, np.uint8)
        made = form_of(mlp)
        for zeros in ZEROS:
            np.testing.assert_array_equal(run(made, isa, x, zeros=zeros), made.reference_logits(x))


# ---- rows in --------------------------------------------------------------------------------------------------------


@each_set
@pytest.mark.parametrize("columns", [((3, 50),), ((0, 4), (7, 8), (20, 63)), ((10, 70),)], ids=str)
def test_column_windows(isa: native.InstructionSet, columns: tuple[tuple[int, int], ...]) -> None:
    width = sum(stop - start for start, stop in columns)
    mlp = network((width, 24, 5), columns=columns, features=70)
    x = rows(mlp, 45)
    made = form(mlp, "w7", x)
    reference = made.reference_logits(x)
    for zeros in ZEROS:
        np.testing.assert_array_equal(run(made, isa, x, zeros=zeros), reference)
    exact = mlp.reference_logits(x)
    for dtype in ("float32", "float16", "int8"):
        small = (x // 2).astype(dtype)
        np.testing.assert_allclose(run(mlp, isa, small), mlp.reference_logits(small), rtol=0, atol=1e-4)
    assert np.isfinite(exact).all()


@each_set
def test_strided_and_unaligned_rows(isa: native.InstructionSet) -> None:
    mlp = network((99, 24, 5))
    wide = rows(network((150, 2)), 64)
    for x in (wide[:, 7:106], wide[::2, 1:100], wide[::-1, :99]):
        made = form(mlp, "w7", x)
        for zeros in ZEROS:
            np.testing.assert_array_equal(run(made, isa, x, zeros=zeros), made.reference_logits(x))
        floats = np.asarray(wide, np.float32)[:, 7:106]
        np.testing.assert_allclose(run(mlp, isa, floats), mlp.reference_logits(floats), rtol=0, atol=1e-4)


def guarded(size: int) -> tuple[mmap.mmap, np.ndarray]:
    """Return `size` bytes that end where a page begins that must not be touched, and another before them."""
    page = mmap.PAGESIZE
    body = -(-size // page) * page
    memory = mmap.mmap(-1, body + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for at in (address, address + page + body):
        assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    start = page + body - size
    return memory, np.frombuffer((ctypes.c_uint8 * size).from_address(address + start), np.uint8)


@pytest.mark.skipif(sys.platform == "win32", reason="no mprotect")
@each_set
@pytest.mark.parametrize("features", [1, 3, 4, 5, 8, 63, 64, 65, 127, 196, 784, 1025])
def test_nothing_outside_the_rows_is_read(isa: native.InstructionSet, features: int) -> None:
    for count in (1, 2, 31):
        for dtype in ("uint8", "float32", "float16"):
            mlp = network((features, 9, 3))
            x = rows(mlp, count).astype(dtype)
            memory, place = guarded(x.nbytes)
            inside = place.view(dtype).reshape(x.shape)
            inside[...] = x
            for scheme in ("w7", "float32") if dtype == "uint8" else ("float32",):
                made = form(mlp, scheme, x)
                for zeros in ZEROS if scheme == "w7" else ("dense",):
                    got = run(made, isa, inside, zeros=zeros)
                    np.testing.assert_array_equal(got, run(made, isa, x, zeros=zeros))
            del memory


@pytest.mark.skipif(sys.platform == "win32", reason="no mprotect")
@each_set
def test_a_window_reads_its_own_bytes_only(isa: native.InstructionSet) -> None:
    mlp = network((70, 9, 3), columns=((30, 100),), features=4096)
    memory, place = guarded(70)
    place[...] = rows(network((70, 2)), 1)[0]
    start = place.ctypes.data - 30  # the row's other bytes lie in pages that must not be touched
    row = np.frombuffer((ctypes.c_uint8 * 4096).from_address(start), np.uint8).reshape(1, 4096)
    copy = np.zeros((1, 4096), np.uint8)
    copy[0, 30:100] = place
    made = form(mlp, "w7", copy)
    for zeros in ZEROS:
        np.testing.assert_array_equal(run(made, isa, row, zeros=zeros), made.reference_logits(copy))
    del memory


# ---- answers out ----------------------------------------------------------------------------------------------------


@each_set
@pytest.mark.parametrize("outputs", [2, 3, 7, 8, 9, 10, 15, 16, 17, 24, 128, 200])
def test_classes_margins_and_probabilities(isa: native.InstructionSet, outputs: int) -> None:
    mlp = network((40, 20, outputs))
    x = rows(mlp, 95)
    made = form(mlp, "w7", x)
    z = made.reference_logits(x)
    ids = run(made, isa, x, output="class")
    np.testing.assert_array_equal(ids, z.argmax(axis=1))
    found, margin = run(made, isa, x, output="margin")
    np.testing.assert_array_equal(found, ids)
    top = np.sort(z, axis=1)
    np.testing.assert_array_equal(margin, top[:, -1] - top[:, -2])
    np.testing.assert_allclose(run(made, isa, x, output="proba"), mlp.probabilities(z), rtol=1e-5, atol=1e-7)


@each_set
def test_other_heads(isa: native.InstructionSet) -> None:
    for head, outputs in (("sigmoid", 1), ("multilabel", 5), ("regression", 3), ("regression", 1)):
        mlp = network((40, 20, outputs), head=head)
        x = rows(mlp, 50)
        z = run(mlp, isa, x)
        np.testing.assert_allclose(z, mlp.reference_logits(x), atol=1e-5)
        if head != "regression":
            np.testing.assert_allclose(run(mlp, isa, x, output="proba"), mlp.probabilities(z), rtol=1e-5, atol=1e-7)
        if head == "sigmoid":
            np.testing.assert_array_equal(run(mlp, isa, x, output="class"), z[:, 0] > 0)
            np.testing.assert_array_equal(run(mlp, isa, x, output="margin")[1], np.abs(z[:, 0]))


@each_set
def test_ties_go_to_the_lowest_index(isa: native.InstructionSet) -> None:
    for outputs in (2, 10, 16, 40):
        mlp = gm.MLP([gm.Layer(np.zeros((outputs, 5)), np.zeros(outputs))])
        ids, margin = run(mlp, isa, np.ones((40, 5), np.float32), output="margin")
        assert ids.tolist() == [0] * 40
        assert margin.tolist() == [0.0] * 40


@each_set
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 29, 30, 31, 59, 60, 61, 121, 997])
def test_any_number_of_rows_and_threads(isa: native.InstructionSet, count: int) -> None:
    mlp = network((60, 40, 10))
    x = rows(mlp, count)
    made = form(mlp, "w7", rows(mlp, 50))
    want = made.reference_logits(x)
    for threads in (1, 2, 3, 8):
        np.testing.assert_array_equal(run(made, isa, x, threads=threads), want)


@each_set
def test_blocks_decide_for_themselves(isa: native.InstructionSet) -> None:
    """Runs of empty, full and mixed rows: blocks of both forms, and each change between them."""
    mlp = network((200, 40, 10))
    shares = np.repeat([0.0, 1.0, 0.1, 1.0, 0.5, 0.0], 75)
    rng = np.random.default_rng(3)
    x = rng.integers(1, 256, (len(shares), 200)).astype(np.uint8)
    x[rng.random(x.shape) >= shares[:, None]] = 0
    made = form(mlp, "w7", x)
    net = new_net(made, isa, zeros="auto")
    # dense; a list for each row; one for several; and each where it is the quickest
    for ways in (
        (9, 0, 9, 0),
        (0, 0, 9, 0),
        (9, 0, 0, 0),
        (0.2, 1.5, 0.1, 1.2),
        (0.1, 3.0, 0.1, 1.2),
        (0.1, 1.2, 0.3, 1.2),
    ):
        net.set_ways(*ways)
        np.testing.assert_array_equal(run(made, isa, x, net=net), made.reference_logits(x))


@each_set
def test_what_is_measured_is_plausible(isa: native.InstructionSet) -> None:
    net = new_net(form(network((200, 40, 10)), "w7", rows(network((200, 40, 10)), 50)), isa, zeros="auto")
    apiece, together, block_us, least = net.measure()
    for fixed, slope in (apiece, together):
        assert -2 < fixed < 100
        assert 0 <= slope < 1000
    assert 0 < block_us < 1e5
    assert least >= 30


# ---- what is refused ------------------------------------------------------------------------------------------------


@each_set
def test_rows_and_answers_of_another_kind_are_refused(isa: native.InstructionSet) -> None:
    mlp = network((6, 4, 3))
    net = new_net(mlp, isa, "float32", "class")
    ids = np.empty(2, np.int64)
    good = np.zeros((2, 6), np.float32)
    net.run(good, ids, None, 1)
    for x in (good[:, :5], good.astype(np.float64), good[0], np.asfortranarray(np.zeros((2, 6), np.float32))):
        with pytest.raises(ValueError, match="rows of another type"):
            net.run(x, ids, None, 1)
    with pytest.raises(ValueError, match="another size"):
        net.run(good, np.empty(3, np.int64), None, 1)
    ids.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        net.run(good, ids, None, 1)
    with pytest.raises(ValueError, match="another type or length"):
        net.one(good[0, :5])


@each_set
def test_numbers_that_lead_outside_the_weights_are_refused(isa: native.InstructionSet) -> None:
    from gigamlp.kernels.cpu.pack import pack

    mlp = network((9, 5, 3))
    packed = pack(form(mlp, "w7", rows(mlp, 9)), isa, input_dtype="uint8", output="class", zeros="auto")
    load = native.load()
    rng = np.random.default_rng(0)
    load.Net(isa.name, packed.header, packed.blob, None)
    with pytest.raises(ValueError, match="outside the blob"):
        load.Net(isa.name, packed.header, packed.blob[:-64], None)
    with pytest.raises(ValueError, match="unknown instruction set"):
        load.Net("mmx", packed.header, packed.blob, None)
    x, ids = rows(mlp, 40), np.empty(40, np.int64)
    refused = 0
    for _ in range(2000):  # whatever the numbers, it is refused or runs inside its memory
        header = packed.header.copy()
        header[rng.integers(len(header))] = rng.choice([-1, 0, 1, 2, 3, 5, 8, 63, 64, 1 << 20, 1 << 40, -(1 << 62)])
        try:
            load.Net(isa.name, header, packed.blob, None).run(x, ids, np.empty(40, np.float32), 1)
        except ValueError:
            refused += 1
    assert refused > 500

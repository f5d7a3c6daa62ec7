"""The kernel's own text, run on the host: every path equals the integer reference on awkward networks and rows.

Each case compiles a program (2 s), so they are few and each is awkward in several ways. Reads and writes past a buffer,
unaligned accesses and lanes that part ways end the program. See host.h.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.kernels.cuda.pack import pack
from gigamlp.kernels.cuda.paths import Config
from gigamlp.kernels.cuda.source import generate
from tests.kernels.cuda import cases, fuzz
from tests.kernels.cuda.host import HostKernel, needs_compiler
from tests.reference_int8 import reference_mlp

pytestmark = needs_compiler

# name: (widths, options of the MLP, rows' dtype, output, dtype of the answers, configuration[, whether packets])
CASES = {
    # the shapes of the benchmark's table
    "ring": ([784, 40, 10], {}, "uint8", "class", None, Config("ring", 1, 2, 2)),
    "ring of two tiles, odd bytes": ([99, 40, 10], {}, "uint8", "margin", "int32", Config("ring", 2, 2, 1)),
    "ring, bytes in words, codes in L2": (
        [140, 24, 12, 5],
        {},
        "int8",
        "logits",
        None,
        Config("ring", 1, 2, 3, "later"),
    ),
    "window": (
        [384, 40, 10],
        {"features": 784, "columns": [(208, 592)]},
        "uint8",
        "class",
        None,
        Config("window", 1, 2, 2),
    ),
    "window, rounded outwards, with a gap": (
        [60, 17, 3],
        {"features": 160, "columns": [(37, 77), (90, 110)], "seed": 1},
        "int8",
        "margin",
        None,
        Config("window", 2, 3, 1),
    ),
    "direct": ([784, 40, 10], {}, "uint8", "class", "int32", Config("direct", 2, 2, 4)),
    "direct, odd bytes, wide layers": (
        [75, 128, 128, 128],
        {"activation": "gelu", "seed": 3},
        "uint8",
        "logits",
        "float16",
        Config("direct", 1, 2, 3, "global"),
    ),
    "direct, many features": ([1300, 9, 2], {"seed": 2}, "uint8", "proba", None, Config("direct", 1, 1, 3, "later")),
    "split": ([784, 40, 10], {}, "uint8", "class", None, Config("split", 1, 12, 1, "later")),
    "split of two tiles, odd bytes": ([333, 33, 11], {}, "int8", "margin", None, Config("split", 2, 3, 1, "later")),
    "split, few features": (
        [3, 5, 1],
        {"head": "sigmoid"},
        "uint8",
        "margin",
        None,
        Config("split", 1, 1, 1, "global"),
    ),
    # the sizes of the benchmark's table are too slow here
    "wgmma": ([208, 64, 10], {}, "uint8", "class", None, Config("wgmma", 4, 8, 3, outputs=64)),
    "wgmma, a window in words, three groups": (
        [60, 33, 3],
        {"features": 164, "columns": [(37, 77), (90, 110)], "seed": 1},
        "int8",
        "margin",
        None,
        Config("wgmma", 4, 12, 2, outputs=48),
    ),
    "wgmma, odd bytes, shared by three blocks": (
        [245, 130, 20, 10],
        {"activation": "tanh", "seed": 5},
        "uint8",
        "logits",
        None,
        Config("wgmma", 4, 8, 3, outputs=48),
    ),
    "wgmma, shared, a wide second layer": (
        [64, 100, 128, 90, 3],
        {"seed": 4},
        "uint8",
        "logits",
        None,
        Config("wgmma", 4, 8, 1, outputs=64),
    ),
    "wgmma, shared by two blocks of one group, few features": (
        [40, 60, 40, 1],
        {"head": "sigmoid", "seed": 2},
        "int8",
        "proba",
        None,
        Config("wgmma", 4, 4, 6, outputs=32),
    ),
    "wgmma, two teams of two blocks": (
        [336, 96, 10],
        {},
        "uint8",
        "class",
        None,
        Config("wgmma", 4, 8, 3, outputs=48, teams=2),
    ),
    "wgmma, four teams of one block": (
        [260, 64, 40, 3],
        {"seed": 3},
        "int8",
        "logits",
        None,
        Config("wgmma", 4, 4, 6, outputs=64, teams=4),
    ),
    "packets": ([784, 40, 10], {}, "uint8", "class", None, Config("split", 1, 12, 1, "later"), True),
    "packets of ids and margins": (
        [333, 33, 11],
        {},
        "int8",
        "margin",
        "int32",
        Config("split", 2, 3, 1, "global"),
        True,
    ),
    "packets of logits": (
        [75, 12, 7],
        {"activation": "gelu"},
        "uint8",
        "logits",
        "float16",
        Config("split", 1, 2, 1),
        True,
    ),
    "packets of two probabilities": (
        [16, 8, 1],
        {"head": "sigmoid"},
        "uint8",
        "proba",
        None,
        Config("split", 1, 1, 1, "later"),
        True,
    ),
    "split, overlapping": ([240, 40, 10], {}, "uint8", "class", None, Config("split", 1, 2, 1, "later", overlap=True)),
    "split, overlapping, odd bytes": (
        [333, 9, 4],
        {},
        "uint8",
        "margin",
        None,
        Config("split", 2, 3, 1, "later", overlap=True),
    ),
    "ring, overlapping, odd bytes": ([99, 24, 10], {}, "uint8", "class", None, Config("ring", 1, 2, 2, overlap=True)),
    "window, overlapping": (
        [64, 16, 10],
        {"features": 160, "columns": [(48, 112)]},
        "uint8",
        "class",
        None,
        Config("window", 1, 2, 2, "later", overlap=True),
    ),
    "direct, overlapping": ([100, 16, 10], {}, "uint8", "class", None, Config("direct", 1, 2, 3, overlap=True)),
    "no hidden layer, multilabel": (
        [50, 21],
        {"head": "multilabel"},
        "uint8",
        "proba",
        None,
        Config("split", 2, 2, 1, "later"),
    ),
    "four hidden layers": (
        [48, 30, 20, 10, 9, 1],
        {"activation": "tanh", "head": "sigmoid"},
        "int8",
        "proba",
        None,
        Config("direct", 2, 1, 2),
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request, tmp_path_factory):
    widths, options, rows, output, dtype, config, *packets = CASES[request.param]
    mlp = cases.make(widths, **options)
    integer, network = cases.form(mlp, output, dtype, rows)
    made = generate(network, config, packets=bool(packets))
    kernel = HostKernel(made, tmp_path_factory.mktemp("host"))
    return mlp, integer, network, config, kernel, rows


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rows", [1, 15, 17, 101])
def test_answers_are_the_references(case, rows, late):
    mlp, integer, network, config, kernel, dtype = case
    cases.run(kernel, integer, network, config, [cases.rows_for(mlp, rows, dtype, seed=rows)], late=late)


def test_rows_may_lie_apart(case):
    mlp, integer, network, config, kernel, dtype = case
    stride = network.features + 3 * network.align
    if not kernel.made.stride_fits(stride):
        assert config.path == "ring"
        pytest.skip("a ring copies rows that lie side by side")
    cases.run(kernel, integer, network, config, [cases.rows_for(mlp, 37, dtype)], stride=stride)


def test_many_batches_in_one_launch(case):
    mlp, integer, network, config, kernel, dtype = case
    xs = [cases.rows_for(mlp, count, dtype, seed=count) for count in (33, 0, 70, 1, 16)]
    cases.run(kernel, integer, network, config, xs)
    cases.run(kernel, integer, network, config, xs[2:3], table=True, late=True)


@pytest.mark.parametrize("path", ["direct", "split"])
def test_turings_instructions(path, tmp_path):
    mlp = cases.make([112, 20, 9, 4])
    integer, network = cases.form(mlp, "logits")
    config = Config(path, 2, 2, 2, "later")
    kernel = HostKernel(generate(network, config), tmp_path, arch=750)
    cases.run(kernel, integer, network, config, [cases.rows_for(mlp, 37)])


@pytest.mark.parametrize("activation", ["relu", "identity"])
def test_the_first_layers_bits_are_the_references(activation, tmp_path):
    mlp = cases.make([200, 50], last=activation, seed=7)
    integer, network = cases.form(mlp, "logits")
    config = Config("direct", 1, 2, 2)
    x = cases.rows_for(mlp, 100)
    (got,) = HostKernel(generate(network, config), tmp_path)(pack(integer, network, False), [x])
    np.testing.assert_array_equal(got, integer.reference_hidden(x))


def test_ties_go_to_the_lowest_class_and_padding_never_wins(tmp_path):
    mlp = cases.make([16, 8, 11])
    layers = list(mlp.layers)
    weight, bias = np.zeros((11, 8)), np.full(11, -5.0)
    bias[[3, 7, 10]] = -1.0  # below the 0 that padding has
    layers[1] = dataclasses.replace(layers[1], weight=weight, bias=bias)
    integer, network = cases.form(mlp.with_(layers=layers), "margin")
    config = Config("direct", 1, 1, 1)
    ids, margin = HostKernel(generate(network, config), tmp_path)(
        pack(integer, network, False), [cases.rows_for(mlp, 20)]
    )[0]
    assert (ids == 3).all()
    assert (margin == 0).all()


def test_the_trained_network_answers_as_its_reference(tmp_path):
    mlp = reference_mlp(40)
    integer, network = cases.form(mlp)
    config = Config("ring", 1, 2, 1)
    x = cases.rows_for(mlp, 64)
    cases.run(HostKernel(generate(network, config), tmp_path), integer, network, config, [x])


def test_the_check_sees_a_wrong_kernel(tmp_path):
    mlp = cases.make([64, 16, 10])
    integer, network = cases.form(mlp, "logits")
    config = Config("split", 1, 1, 1, "later")
    made = generate(network, config)
    right = "multiply(sums[m][j], low, high, w[s][j])"
    assert right in made.source
    wrong = dataclasses.replace(made, source=made.source.replace(right, right.replace("high", "low")))
    with pytest.raises(AssertionError):
        cases.run(HostKernel(wrong, tmp_path), integer, network, config, [cases.rows_for(mlp, 20)])


def test_the_host_sees_rows_that_are_read_before_earlier_launches_have_ended(tmp_path):
    mlp = cases.make([64, 16, 10])
    integer, network = cases.form(mlp)
    for path in ("split", "ring", "direct"):
        made = generate(network, Config(path, 1, 2, 1, overlap=True))
        wait = "void wait_for_earlier() {\n#if OVERLAP"
        assert wait in made.source
        wrong = dataclasses.replace(made, source=made.source.replace(wait, wait.replace("OVERLAP", "0")))
        with pytest.raises(AssertionError, match="exit"):
            HostKernel(wrong, tmp_path)(pack(integer, network, path == "ring"), [cases.rows_for(mlp, 17)])


@pytest.mark.parametrize(
    ("widths", "output", "dtype"),
    [
        ([784, 40, 10], "class", None),
        ([75, 12, 7], "logits", "float32"),
        ([20, 9, 3], "margin", None),
        ([1, 1, 2], "class", None),
    ],
)
def test_rows_that_travel_with_the_launch(widths, output, dtype, tmp_path):
    mlp = cases.make(widths)
    integer, network = cases.form(mlp, output, dtype, "uint8")
    config = Config("split", 1, 3 if widths[0] > 64 else 1, 1, "later")
    made = generate(network, config, packets=True, carried=5 * mlp.features)
    kernel = HostKernel(made, tmp_path)
    for rows in (1, 2, 5):
        cases.run(kernel, integer, network, config, [cases.rows_for(mlp, rows, "uint8", seed=rows)])


def test_rows_travel_on_the_split_path_only():
    _, network = cases.form(cases.make([784, 40, 10]), "class", None, "uint8")
    with pytest.raises(InvalidInput, match="travel with the launch on the path 'split' only"):
        generate(network, Config("ring", 1, 2, 1), carried=784)


def test_packets_are_for_the_split_path_only():
    _, network = cases.form(cases.make([64, 16, 10]))
    with pytest.raises(InvalidInput, match="'split' only, not on 'ring'"):
        generate(network, Config("ring", 1, 2, 1), packets=True)


def test_the_host_sees_reads_past_the_rows(tmp_path):
    mlp = cases.make([64, 16, 10])
    integer, network = cases.form(mlp)
    made = generate(network, Config("direct", 1, 1, 1))
    assert "at.rows - 1) * stride + K_OFFSET;" in made.source
    wrong = dataclasses.replace(
        made, source=made.source.replace("at.rows - 1) * stride + K_OFFSET;", "at.rows + 999) * stride + K_OFFSET;")
    )
    with pytest.raises(AssertionError, match="exit"):
        HostKernel(wrong, tmp_path)(pack(integer, network, False), [cases.rows_for(mlp, 17)])


def test_the_most_features_with_the_largest_sums(tmp_path):
    """Sums reach 255 x 127 x 66,311 = 2,147,481,735, 1,912 below what an int32 holds; one feature more is refused."""
    features = 66_311
    weight = np.ones((3, features))
    weight[1] = -1.0
    weight[2, ::2] = -1.0
    mlp = gm.MLP([gm.Layer(weight, activation="identity"), gm.Layer(np.eye(3))])
    integer, network = cases.form(mlp, "logits")
    config = Config("direct", 1, 2, 4, "later")
    x = np.full((17, features), 255, np.uint8)
    x[3], x[16] = 0, 254
    cases.run(HostKernel(generate(network, config), tmp_path), integer, network, config, [x])
    with pytest.raises(Unsupported, match="66,312 features"):
        cases.form(gm.MLP([gm.Layer(np.ones((3, features + 1)))]))


@pytest.mark.parametrize("path", ["direct", "ring", "split"])
def test_a_launch_of_empty_batches_writes_nothing(path, tmp_path):
    mlp = cases.make([64, 16, 10])
    integer, network = cases.form(mlp)
    config = Config(path, 1, 1, 1, "later")
    empty = np.empty((0, 64), np.uint8)
    kernel = HostKernel(generate(network, config), tmp_path)
    assert [len(got) for got in kernel(pack(integer, network, config.wide), [empty, empty])] == [0, 0]


# seeds of each path, several batches, odd widths, all kinds of layers
@pytest.mark.parametrize("seed", [3, 9, 49, 4, 20, 22])
def test_random_networks(seed, tmp_path):
    """More of them: ``python -m tests.kernels.cuda.fuzz --seconds 600``."""
    assert fuzz.play(seed, str(tmp_path)) is not None


def test_the_fuzzers_check_sees_a_wrong_answer():
    drawn = fuzz.draw(22)
    x = drawn.batches[0]
    want, error = fuzz.bound(drawn.integer, x)
    fuzz.check(drawn, x, want)
    assert (error < 1e-4 * np.abs(want).max()).all()
    for row, column in ((0, 0), (len(x) - 1, 8)):
        wrong = want.copy()
        wrong[row, column] += 2 * error.max()
        with pytest.raises(AssertionError):
            fuzz.check(drawn, x, wrong)

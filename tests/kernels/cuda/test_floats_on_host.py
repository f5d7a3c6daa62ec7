"""The kernel's own text on float rows, and on bytes with float weights, run on the host: see test_on_host.py.

Answers are within the bound of `Rounded.reference`. Features that are not read, gaps between rows and shared memory
hold NaN: none of them may reach an answer.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gigamlp.kernels.cuda.pack import pack
from gigamlp.kernels.cuda.paths import Config
from gigamlp.kernels.cuda.source import generate
from tests.kernels.cuda import cases
from tests.kernels.cuda.host import HostKernel, needs_compiler

pytestmark = needs_compiler

# name: (widths, options of the MLP, rows' dtype, compute, output, dtype of the answers, configuration)
CASES = {
    "float16, ring": ([784, 40, 10], {}, "float16", "float16", "class", None, Config("ring", 1, 2, 1)),
    "float16, ring, odd width": ([99, 40, 10], {}, "float16", "float16x2", "margin", "int32", Config("ring", 2, 2, 1)),
    "float16, window with a gap": (
        [60, 17, 3],
        {"features": 160, "columns": [(37, 77), (90, 110)], "seed": 1},
        "float16",
        "float16",
        "logits",
        None,
        Config("window", 2, 3, 1),
    ),
    "float16, direct, odd width": (
        [75, 33, 20, 12],
        {},
        "float16",
        "float16",
        "logits",
        None,
        Config("direct", 2, 2, 2),
    ),
    "float16, split": ([300, 40, 10], {}, "float16", "float16", "class", None, Config("split", 1, 5, 1, "later")),
    "bfloat16, ring": ([120, 24, 5], {}, "bfloat16", "bfloat16x2", "logits", None, Config("ring", 1, 2, 2, "later")),
    "bfloat16, direct, one class": (
        [13, 9, 1],
        {"head": "sigmoid", "activation": "gelu"},
        "bfloat16",
        "bfloat16",
        "margin",
        None,
        Config("direct", 1, 1, 2, "global"),
    ),
    "float32, ring": ([144, 24, 10], {}, "float32", "tf32", "class", None, Config("ring", 1, 2, 2)),
    "float32, direct, columns": (
        [70, 21, 6],
        {"features": 90, "columns": [(3, 33), (41, 81)], "activation": "tanh"},
        "float32",
        "tf32",
        "logits",
        "float16",
        Config("direct", 2, 1, 3),
    ),
    "float32, split of two tiles": (
        [37, 9, 8, 4],
        {},
        "float32",
        "tf32",
        "proba",
        None,
        Config("split", 2, 2, 1, "later"),
    ),
    "float32, smallest": ([1, 1], {}, "float32", "tf32", "logits", None, Config("split", 1, 1, 1, "global")),
    "uint8 with float16 weights, ring": ([784, 40, 10], {}, "uint8", "float16", "class", None, Config("ring", 1, 2, 1)),
    "int8 with float16 weights, direct": (
        [75, 33, 9],
        {"seed": 1},
        "int8",
        "float16x2",
        "logits",
        None,
        Config("direct", 2, 2, 2),
    ),
    "uint8 with float16 weights, split": (
        [333, 33, 11],
        {},
        "uint8",
        "float16x2",
        "margin",
        None,
        Config("split", 2, 3, 1, "later"),
    ),
    "int8 with float16 weights, window": (
        [60, 17, 3],
        {"features": 160, "columns": [(37, 77), (90, 110)], "seed": 1},
        "int8",
        "float16",
        "logits",
        None,
        Config("window", 1, 2, 1),
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request, tmp_path_factory):
    widths, options, rows, compute, output, dtype, config = CASES[request.param]
    mlp = cases.make(widths, **options)
    form, network = cases.rounded(mlp, rows, compute, output, dtype)
    kernel = HostKernel(generate(network, config), tmp_path_factory.mktemp("host"))
    return mlp, form, network, config, kernel, rows


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 101])
def test_answers_are_the_references(case, rows, late):
    mlp, form, network, config, kernel, dtype = case
    cases.run(kernel, form, network, config, [cases.rows_for(mlp, rows, dtype, seed=rows)], late=late)


def test_rows_may_lie_apart(case):
    mlp, form, network, config, kernel, dtype = case
    stride = network.features + 3 * max(network.align, network.item)
    if not kernel.made.stride_fits(stride):
        assert config.path == "ring"
        pytest.skip("a ring copies rows that lie side by side")
    cases.run(kernel, form, network, config, [cases.rows_for(mlp, 37, dtype)], stride=stride)


def test_many_batches_in_one_launch(case):
    mlp, form, network, config, kernel, dtype = case
    xs = [cases.rows_for(mlp, count, dtype, seed=count) for count in (33, 0, 70, 1)]
    cases.run(kernel, form, network, config, xs)


@pytest.mark.parametrize(("path", "rows"), [("direct", "float16"), ("split", "uint8")])
def test_turings_instructions(path, rows, tmp_path):
    mlp = cases.make([112, 20, 9, 4])
    form, network = cases.rounded(mlp, rows, "float16", "logits", later="float16")
    config = Config(path, 2, 2, 2, "later")
    kernel = HostKernel(generate(network, config), tmp_path, arch=750)
    cases.run(kernel, form, network, config, [cases.rows_for(mlp, 37, rows)])


def test_a_nan_stays_in_its_row(tmp_path):
    mlp = cases.make([50, 20, 4])
    form, network = cases.rounded(mlp, "float16", "float16", "logits")
    config = Config("direct", 1, 1, 1)
    x = cases.rows_for(mlp, 40, "float16")
    x[7, 49] = np.nan
    packed = pack(form, network, 0)
    (got,) = HostKernel(generate(network, config), tmp_path)(packed, [cases.as_bytes(x, "float16")])
    assert np.flatnonzero(np.isnan(got).any(axis=1)).tolist() in ([7], [])  # relu makes 0 of NaN
    keep = np.arange(40) != 7
    cases.check(form, network, x[keep], got[keep])


def test_the_check_sees_a_kernel_that_does_not_mask(tmp_path):
    mlp = cases.make([20, 16, 10], features=40, columns=[(3, 10), (20, 33)], activation="identity")
    form, network = cases.rounded(mlp, "float16", "float16", "logits")
    config = Config("direct", 1, 1, 1)
    made = generate(network, config)
    assert "row.w[i] &= mask.w[i];" in made.source
    wrong = dataclasses.replace(made, source=made.source.replace("row.w[i] &= mask.w[i];", ""))
    with pytest.raises(AssertionError):
        cases.run(HostKernel(wrong, tmp_path), form, network, config, [cases.rows_for(mlp, 20, "float16")])


def test_the_check_sees_rows_that_are_not_rounded(tmp_path):
    mlp = cases.make([64, 16, 10])
    form, network = cases.rounded(mlp, "float32", "tf32", "logits")
    config = Config("direct", 1, 1, 1)
    made = generate(network, config)
    right = "tf32_of(__uint_as_float(row.w[i]))"
    assert right in made.source
    for instead in ("row.w[i]", "row.w[i] & ~0x1FFFu"):
        wrong = dataclasses.replace(made, source=made.source.replace(right, instead))
        with pytest.raises(AssertionError):
            cases.run(HostKernel(wrong, tmp_path), form, network, config, [cases.rows_for(mlp, 20, "float32")])

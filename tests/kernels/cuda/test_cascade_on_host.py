"""Stages of a cascade, the kernels' own text, on the host: equal to the whole stage run alone, and to NumPy's merge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gigamlp.cascade import goes_on
from gigamlp.kernels.cuda.paths import Config
from gigamlp.kernels.cuda.source import generate
from tests.kernels.cuda import cases
from tests.kernels.cuda.host import HostKernel, needs_compiler

pytestmark = needs_compiler
WERE, ALL, RUNS = 2, 4, 6

# name: (widths, options of the MLP, rows' dtype, output, configuration)
STAGES = {
    "window": ([64, 24, 10], {"features": 160, "columns": [(48, 112)]}, "uint8", "class", Config("window", 1, 2, 2)),
    "window, overlapping": (
        [144, 40, 10],
        {},
        "uint8",
        "margin",
        Config("window", 2, 2, 1, overlap=True),
    ),
    "direct, odd bytes": ([75, 12, 3], {}, "int8", "margin", Config("direct", 2, 2, 3, "later")),
    "direct, one feature": ([1, 3, 1], {"head": "sigmoid"}, "uint8", "margin", Config("direct", 1, 2, 2)),
    "wgmma": ([208, 64, 10], {}, "uint8", "class", Config("wgmma", 4, 8, 3, outputs=64, overlap=True)),
    "wgmma, odd bytes, three groups": (
        [61, 33, 3],
        {},
        "uint8",
        "margin",
        Config("wgmma", 4, 12, 2, outputs=48, overlap=True),
    ),
    "wgmma, shared by three blocks": (
        [128, 130, 10],
        {"seed": 5},
        "uint8",
        "margin",
        Config("wgmma", 4, 8, 3, outputs=48, overlap=True),
    ),
    "wgmma, shared, a wide second layer": (
        [64, 100, 128, 3],
        {"seed": 4},
        "uint8",
        "class",
        Config("wgmma", 4, 8, 1, outputs=64, overlap=True),
    ),
}
FIRST = {
    "ring, odd bytes": ([99, 24, 10], {}, "uint8", "margin", Config("ring", 1, 2, 2)),
    "split": ([240, 40, 10], {}, "uint8", "class", Config("split", 2, 3, 1, "later")),
    "split, overlapping, sigmoid": (
        [33, 9, 1],
        {"head": "sigmoid"},
        "uint8",
        "margin",
        Config("split", 1, 2, 1, "later", overlap=True),
    ),
}


class Stage:
    """A stage in both forms: alone, and as part of a cascade."""

    def __init__(self, case, folder, *, sift, gather):
        widths, options, self.dtype, output, config = case
        self.mlp = cases.make(widths, **options)
        self.integer, network = cases.form(self.mlp, output, None, self.dtype)
        _, both = cases.form(self.mlp, "margin", None, self.dtype)
        plain = dataclasses.replace(config, overlap=False)
        made = generate(network, config, sift=sift, gather=gather)
        self.packed, self.margin = made.pack(self.integer), output == "margin"
        self.alone, self.kernel = HostKernel(generate(both, plain), folder), HostKernel(made, folder)

    def rows(self, count):
        return cases.rows_for(self.mlp, count, self.dtype, seed=count)

    def whole(self, x):
        """Classes and margins of all rows."""
        (answers,) = self.alone(self.packed, [x])
        return answers

    def parts(self, answers):
        return answers if self.margin else (answers, None)


@pytest.fixture(scope="module", params=[*FIRST, *STAGES])
def first(request, tmp_path_factory):
    return Stage({**FIRST, **STAGES}[request.param], tmp_path_factory.mktemp("first"), sift=True, gather=False)


@pytest.fixture(scope="module", params=list(STAGES))
def last(request, tmp_path_factory):
    return Stage(STAGES[request.param], tmp_path_factory.mktemp("last"), sift=False, gather=True)


@pytest.fixture(scope="module", params=["direct, odd bytes", "wgmma, odd bytes, three groups", "window, overlapping"])
def middle(request, tmp_path_factory):
    return Stage(STAGES[request.param], tmp_path_factory.mktemp("middle"), sift=True, gather=True)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "rows", [pytest.param(1, marks=pytest.mark.soak), 33, pytest.param(300, marks=pytest.mark.soak)]
)
def test_a_first_stage_lists_what_it_is_unsure_of(first, rows, share):
    x = first.rows(rows)
    ids, margins = first.whole(x)
    threshold = 0.0 if share == 0 else np.inf if share == 1 else float(np.sort(margins)[int(share * rows)])
    answers, _, cells, listed = first.kernel.stage(first.packed, x, threshold=threshold, late=rows == 33)
    got_ids, got_margins = first.parts(answers)
    np.testing.assert_array_equal(got_ids, ids)
    if got_margins is not None:
        np.testing.assert_array_equal(got_margins, margins)
    np.testing.assert_array_equal(np.sort(listed), np.flatnonzero(goes_on(margins, threshold)))
    assert cells[0] == len(listed)


@pytest.mark.parametrize(
    "count", [0, pytest.param(1, marks=pytest.mark.soak), 17, pytest.param(250, marks=pytest.mark.soak)]
)
def test_a_last_stage_answers_the_listed_rows_and_no_others(last, count):
    x = last.rows(300)
    listed = np.random.default_rng(count).permutation(300)[:count]
    ids, margins = last.whole(x)
    answers, cells, _, _ = last.kernel.stage(last.packed, x, listed=listed, late=count == 17)
    got_ids, got_margins = last.parts(answers)
    want = np.full(300, 0xCD, np.uint8)
    want[listed] = ids[listed]
    np.testing.assert_array_equal(got_ids, want)
    if got_margins is not None:
        np.testing.assert_array_equal(got_margins[listed], margins[listed])
    # the list is empty for the next run, and the host can read how long it was
    assert cells[:3].tolist() == [0, 0, count]
    assert cells[4:].view(np.uint64).tolist() == [count, 1]


def test_a_stage_in_between_does_both(middle):
    x = middle.rows(300)
    listed = np.random.default_rng(1).permutation(300)[:211]
    ids, margins = middle.whole(x)
    threshold = float(np.median(margins))
    answers, cells, following, onwards = middle.kernel.stage(middle.packed, x, listed=listed, threshold=threshold)
    np.testing.assert_array_equal(middle.parts(answers)[0][listed], ids[listed])
    np.testing.assert_array_equal(np.sort(onwards), np.sort(listed[goes_on(margins[listed], threshold)]))
    assert (cells[WERE], following[0]) == (211, len(onwards))


def test_many_blocks_clear_the_counter_once(last):
    x = last.rows(300)
    made = last.kernel.made
    grid = made.cluster * 3
    answers, cells, _, _ = last.kernel.stage(last.packed, x, listed=np.arange(0, 300, 7), grid=grid)
    assert cells[:3].tolist() == [0, 0, 43]
    np.testing.assert_array_equal(last.parts(answers)[0][::7], last.whole(x)[0][::7])

"""Rows and labels: what is refused, and that scaling does what it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gigamlp.errors import DataError, InvalidInput
from gigamlp.labels import encode_labels
from gigamlp.train.rows import check_pair, open_source, scan


def labels(count: int) -> np.ndarray:
    return np.arange(count) % 2


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (np.zeros((3, 2)), np.zeros(4, int), DataError, "3 rows but 4 labels"),
        (np.zeros((3, 2)), np.zeros((3, 2), int), DataError, "one-hot"),
        (np.zeros((3, 2)), np.zeros(3), DataError, "integers or strings"),
        (np.zeros((3, 2)), np.array([1, "a", None], object), DataError, "integers or strings"),
        (np.zeros(3), np.zeros(3, int), InvalidInput, "shape"),
        (np.zeros((3, 2, 2)), np.zeros(3, int), InvalidInput, "reshape"),
        (np.zeros((3, 0)), np.zeros(3, int), InvalidInput, "no features"),
        (np.array([["a"], ["b"], ["c"]]), np.zeros(3, int), InvalidInput, "numbers"),
    ],
)
def test_rows_and_labels_that_do_not_fit_are_refused(x, y, error, words):
    with pytest.raises(error, match=words):
        check_pair(x, y)


def test_python_strings_in_an_object_array_are_labels():
    assert check_pair(np.zeros((2, 1)), np.array(["a", "bb"], object))[1].dtype.kind == "U"


def test_nan_rows_are_named_by_their_number_across_chunks():
    x = np.zeros((100, 3))
    x[71, 2] = np.nan
    with pytest.raises(InvalidInput, match="row 71"):
        scan(open_source(x, labels(100)), chunk_rows=16)
    with pytest.raises(InvalidInput, match="row 71"):
        scan(open_source([(x[:50], labels(50)), (x[50:], labels(50))]), chunk_rows=16)


def test_a_source_is_refused_that_cannot_be_read_twice_or_has_no_labels():
    with pytest.raises(InvalidInput, match="read once"):
        open_source(iter([(np.zeros((2, 1)), labels(2))]))
    with pytest.raises(InvalidInput, match="labels are missing"):
        open_source(np.zeros((2, 1)))
    with pytest.raises(InvalidInput, match="labels are missing"):
        open_source(7)


def test_empty_and_one_class_data_are_refused():
    with pytest.raises(DataError, match="no training rows"):
        scan(open_source(np.zeros((0, 4)), np.zeros(0, int)))
    with pytest.raises(DataError, match="no training rows"):
        scan(open_source([]))
    with pytest.raises(DataError, match="two classes"):
        scan(open_source(np.zeros((5, 4)), np.full(5, 3)))


def test_chunks_must_agree_with_each_other():
    with pytest.raises(DataError, match="features"):
        scan(open_source([(np.zeros((2, 3)), labels(2)), (np.zeros((2, 4)), labels(2))]))
    with pytest.raises(DataError, match="integers in some"):
        scan(open_source([(np.zeros((2, 3)), labels(2)), (np.zeros((2, 3)), np.array(["a", "b"]))]))


def test_a_function_is_called_again_for_every_pass():
    calls = []

    def chunks():
        calls.append(1)
        yield np.zeros((2, 1)), labels(2)

    source = open_source(chunks)
    assert scan(source).rows == scan(source).rows == 2
    assert len(calls) == 2


@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("kind", ["uint8", "float32", "int16"])
def test_scan_equals_numpy_for_any_chunk_size(chunk_rows, kind):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (200, 5)).astype(kind)
    y = rng.integers(3, 6, 200)
    found = scan(open_source(x, y), chunk_rows)
    assert found.rows == 200
    assert found.bytes_only == (kind == "uint8")
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found.mean, wide.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.variance, wide.var(0), rtol=1e-11)
    np.testing.assert_array_equal(found.minimum, wide.min(0))
    np.testing.assert_array_equal(found.maximum, wide.max(0))
    assert found.classes.tolist() == [3, 4, 5]


def test_the_mean_of_bytes_does_not_depend_on_the_chunks_at_all():
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (3001, 7), dtype=np.uint8), labels(3001)
    one, other = scan(open_source(x, y), 17), scan(open_source(x, y), 3001)
    assert np.array_equal(one.mean, other.mean)
    assert np.array_equal(one.variance, other.variance)


def test_variance_survives_features_far_from_zero():
    x = 1e9 + np.random.default_rng(3).standard_normal((500, 2))
    np.testing.assert_allclose(scan(open_source(x, labels(500))).variance, x.var(0), rtol=1e-6)


def test_scaling_bounds_rare_features_and_silences_constant_ones():
    x = np.zeros((1000, 3), np.float32)
    x[0, 0] = 200  # almost never on
    x[:, 1] = np.random.default_rng(0).standard_normal(1000)
    found = scan(open_source(x, labels(1000)))
    scaling = found.scaling()
    moved = x * scaling.scale + scaling.offset
    assert np.abs(moved).max() <= 8
    assert moved[:, 1].std() == pytest.approx(1, abs=0.01)
    assert not moved[:, 2].any()
    assert scan(open_source(x.astype(np.uint8), labels(1000))).scaling().scale == np.float32(1 / 255)


def test_a_feature_that_varies_too_little_for_float32_is_refused():
    x = np.zeros((10, 1))
    x[0] = 1e-42
    with pytest.raises(DataError, match="feature 0"):
        scan(open_source(x, labels(10))).scaling()


@given(
    arrays(np.int64, st.integers(1, 30), elements=st.integers(-5, 5)),
    st.permutations([-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5]),
)
def test_encode_labels_inverts_indexing_for_any_order_of_classes(y, order):
    classes = np.array(order)
    assert np.array_equal(classes[encode_labels(y, classes)], y)


def test_encode_labels_names_a_stranger():
    with pytest.raises(DataError, match=r"9.*row 2"):
        encode_labels(np.array([1, 2, 9]), np.array([1, 2, 3]))
    with pytest.raises(DataError, match="use one kind"):
        encode_labels(np.array(["1"]), np.array([1]))
    with pytest.raises(DataError, match="use one kind"):
        encode_labels(np.array([1, None]), np.array([1]))

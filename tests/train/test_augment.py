"""Augmentation against SciPy's interpolation, exact where it must be exact, and odd shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from gigamlp.errors import InvalidInput
from gigamlp.train.augment import Augment, ImageDraws, TableAugment, TableDraws, distort, mix, prefetch

SHAPES = ((28, 28), (8, 8), (5, 9), (1, 7), (6, 1), (1, 1))
PLAIN = np.array([[[1, 0, 0], [0, 1, 0]]], np.float32)


def images(shape, rows=6, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)


def moved(x, shape, matrix, rows=None):
    rows = len(x) if rows is None else rows
    draws = ImageDraws(np.repeat(np.asarray(matrix, np.float32), rows, 0), None, None)
    return distort(torch.from_numpy(x.reshape(rows, -1)), shape, draws).numpy().reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_changes_at_strength_0(shape):
    x = images(shape)
    draws = Augment().draw(len(x), shape, 0.0, np.random.default_rng(0))
    assert (distort(torch.from_numpy(x.reshape(len(x), -1)), shape, draws).numpy() == x.reshape(len(x), -1)).all()
    assert (moved(x, shape, PLAIN) == x).all()


def test_a_shift_by_whole_pixels_is_exact():
    x = images((5, 9))
    matrix = PLAIN.copy()
    matrix[0, :, 2] = 2, -1  # reads 2 to the right and 1 above
    wanted = np.zeros_like(x)
    wanted[:, 1:, :-2] = x[:, :-1, 2:]
    assert (moved(x, (5, 9), matrix) == wanted).all()


def test_a_quarter_turn_is_exact():
    x = images((7, 7))
    assert (moved(x, (7, 7), [[[0, -1, 0], [1, 0, 0]]]) == np.rot90(x, 1, (1, 2))).all()


@pytest.mark.parametrize("shape", [(28, 28), (8, 8), (5, 9), (1, 7)])
def test_it_is_what_scipy_interpolates(shape):
    x = images(shape).astype(np.float32)
    draws = Augment(smoothness=0.3).draw(len(x), shape, 1.0, np.random.default_rng(1))
    got = distort(torch.from_numpy(x.reshape(len(x), -1)), shape, draws).numpy()
    down, across = np.meshgrid(*(np.arange(side) - (side - 1) / 2 for side in shape), indexing="ij")
    places = np.stack([across.ravel(), down.ravel(), np.ones(across.size)])
    for index, image in enumerate(x):
        read = draws.matrix[index].astype(float) @ places + draws.field[index].astype(float) @ draws.basis
        at = np.stack([read[1] + (shape[0] - 1) / 2, read[0] + (shape[1] - 1) / 2])
        np.testing.assert_allclose(got[index], map_coordinates(image, at, order=1, mode="grid-constant"), atol=0.02)


def test_bytes_are_rounded_to_the_nearest():
    x = images((8, 8))
    draws = Augment().draw(len(x), (8, 8), 1.0, np.random.default_rng(1))
    flat = torch.from_numpy(x.reshape(len(x), -1))
    assert torch.equal(distort(flat, (8, 8), draws), distort(flat.float(), (8, 8), draws).round().to(torch.uint8))
    assert distort(flat, (8, 8), draws).dtype == torch.uint8


def test_strengths_mean_what_they_say():
    shape, rows = (28, 28), 20_000
    draws = Augment(scale=0, shear=0).draw(rows, shape, 1.0, np.random.default_rng(0))
    angle = np.degrees(np.arctan2(draws.matrix[:, 1, 0], draws.matrix[:, 0, 0]))
    assert 14.5 < np.abs(angle).max() <= 15
    assert 0.98 * 0.07 * 28 < np.abs(draws.matrix[:, :, 2]).max() <= 0.07 * 28 + 1e-5
    still = Augment(rotation=0, scale=0, shear=0, shift=0).draw(rows, shape, 1.0, np.random.default_rng(0))
    np.testing.assert_array_equal(still.matrix, np.repeat(PLAIN, rows, 0))
    rms = math.sqrt(np.mean((still.field[:2000].reshape(-1, still.field.shape[2]) @ still.basis) ** 2))
    # a strength that is uniform in 0..1 has a root mean square of 1 / sqrt(3)
    assert rms == pytest.approx(0.05 * 28 / math.sqrt(3), rel=0.05)
    half = Augment().draw(rows, shape, 0.5, np.random.default_rng(0))
    assert np.abs(half.matrix[:, :, 2]).max() <= 0.5 * 0.07 * 28 + 1e-5
    assert Augment(elastic=0).draw(3, shape, 1.0, np.random.default_rng(0)).field is None
    assert Augment(smoothness=0).draw(3, (2, 3), 1.0, np.random.default_rng(0)).basis.shape == (6, 6)


def test_rows_in_several_pieces_are_the_same(monkeypatch):
    x = torch.from_numpy(images((8, 8), rows=50).reshape(50, -1))
    draws = Augment().draw(50, (8, 8), 1.0, np.random.default_rng(2))
    whole = distort(x, (8, 8), draws)
    monkeypatch.setattr("gigamlp.train.augment._ROWS_AT_ONCE", {"cpu": 7})
    assert torch.equal(distort(x, (8, 8), draws), whole)


def test_a_table_without_noise_and_mixing_stays():
    random = np.random.default_rng(0)
    x, y = torch.from_numpy(random.standard_normal((9, 4))).float(), torch.eye(3)[random.integers(0, 3, 9)]
    draws = TableAugment(noise=0, mixup=0).draw(9, 4, 1.0, np.random.default_rng(0))
    rows, labels = mix(x, y, torch.ones(4), draws)
    assert torch.equal(rows, x)
    assert torch.equal(labels, y)


def test_mixing_is_the_weighted_mean_and_noise_has_the_features_spread():
    x, y = torch.tensor([[0.0, 0.0], [10.0, 20.0]]), torch.eye(2)
    draws = TableDraws(np.float32([[1, 0], [0, -1]]), np.array([1, 0]), np.float32([[0.25], [0.5]]))
    rows, labels = mix(x, y, torch.tensor([2.0, 3.0]), draws)
    assert rows.tolist() == [[4.5, 5.0], [5.0, 7.0]]
    assert labels.tolist() == [[0.75, 0.25], [0.5, 0.5]]
    bytes_, _ = mix(
        torch.tensor([[0, 255]], dtype=torch.uint8),
        y[:1],
        torch.tensor([9.0, 9.0]),
        TableDraws(np.float32([[-1, 1]]), np.array([0]), np.float32([[0]])),
    )
    assert bytes_.tolist() == [[0, 255]]  # clamped, not wrapped
    many = TableAugment(noise=0.1, mixup=0.4).draw(50_000, 1, 1.0, np.random.default_rng(0))
    assert many.noise.std() == pytest.approx(0.1 / math.sqrt(3), rel=0.03)
    assert 0.19 < many.share.max() <= 0.2
    assert sorted(many.partner) == list(range(50_000))


def test_prefetch_keeps_the_order():
    assert list(prefetch(lambda i: i * i, 7, 3)) == [i * i for i in range(7)]
    assert list(prefetch(lambda i: i, 0, 2)) == []
    with pytest.raises(ZeroDivisionError):
        list(prefetch(lambda i: 1 // (2 - i), 5, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Augment(rotation=-1), "rotation must be a number >= 0, got -1"),
        (lambda: Augment(elastic=math.nan), "elastic must be"),
        (lambda: Augment(shift=True), "shift must be"),
        (lambda: TableAugment(noise="much"), "noise must be"),
        (lambda: TableAugment(mixup=1.5), "mixup is a share"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, text):
    with pytest.raises(InvalidInput, match=text):
        make()


@pytest.mark.gpu
def test_a_gpu_makes_the_same_rows():
    x = torch.from_numpy(images((28, 28), rows=500).reshape(500, -1))
    draws = Augment().draw(500, (28, 28), 0.7, np.random.default_rng(3))
    here, there = distort(x, (28, 28), draws), distort(x.cuda(), (28, 28), draws).cpu()
    difference = (here.int() - there.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.01

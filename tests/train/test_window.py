"""Networks that read a part of each row: what it costs, how it is chosen, and that the rest is not read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import gigamlp as gm
from gigamlp.cli import main
from gigamlp.errors import InvalidInput
from gigamlp.train import Crop, Recipe, Segments, Window, bytes_moved, choose_window, distill
from gigamlp.train.bank import Bank
from gigamlp.train.bank_layout import Student
from gigamlp.train.encode import encode
from gigamlp.train.pool import make_pool
from gigamlp.train.window import Given, merged, requests

CPU = torch.device("cpu")


def noisy(rows=600, features=96, first=50, second=70, seed=0):
    """Bytes of which two decide; everything else is noise."""
    x = np.random.default_rng(seed).integers(0, 256, (rows, features), dtype=np.uint8)
    return x, (x[:, first] > x[:, second]).astype(np.int64)


# ---- what it costs --------------------------------------------------------------------------------------------------


def by_hand(columns, pitch, line, rows):
    touched = {
        (row * pitch + at) // line for row in range(rows) for start, stop in columns for at in range(start, stop)
    }
    return len(touched) * line / rows


@pytest.mark.parametrize("pitch", [784, 800, 100, 7, 64])
@pytest.mark.parametrize("line", [1, 32, 64, 128])
def test_bytes_moved_are_the_lines_that_are_touched(pitch, line):
    random = np.random.default_rng(pitch + line)
    for _ in range(5):
        ends = np.sort(random.choice(pitch + 1, 4, replace=False))
        columns = ((int(ends[0]), int(ends[1])), (int(ends[2]), int(ends[3])))
        assert bytes_moved(columns, pitch, line=line) == by_hand(columns, pitch, line, line)


def test_bytes_moved_by_features_of_several_bytes():
    assert bytes_moved(((4, 8),), 64, line=32, itemsize=4) == 32
    assert bytes_moved(((4, 9),), 64, line=32, itemsize=4) == 64
    assert bytes_moved(None, 784, line=128) == 784
    with pytest.raises(InvalidInput, match="does not lie within a row of 64 bytes"):
        bytes_moved(((0, 17),), 64, itemsize=4)


# ---- what can be asked for ------------------------------------------------------------------------------------------


def test_windows_begin_where_they_are_aligned():
    assert Window(384).candidates(784, None) == [((begin, begin + 384),) for begin in range(0, 401, 32)]
    assert Window(10, align=1).candidates(10, None) == [((0, 10),)]


def test_crops_are_in_the_middle():
    (runs,) = Crop(20, 20).candidates(784, (28, 28))
    mask = np.zeros(784, bool)
    for start, stop in runs:
        mask[start:stop] = True
    assert mask.reshape(28, 28)[4:24, 4:24].all()
    assert mask.sum() == 400
    assert Crop(2, 3).candidates(6, (2, 3)) == [((0, 6),)]
    assert Crop(1, 2, top=1, left=0).candidates(6, (2, 3)) == [((3, 5),)]


def test_runs_that_touch_are_joined():
    assert merged([(5, 6), (0, 2), (2, 5)]) == ((0, 6),)


def test_requests_for_all_and_for_some_widths():
    assert requests(None, [(4,), (8, 3)]) == {(4,): (None,), (8, 3): (None,)}
    assert requests(((0, 2), (4, 6)), [(4,)]) == {(4,): (Given(((0, 2), (4, 6))),)}
    assert requests([None, ((0, 2),)], [(4,)]) == {(4,): (None, Given(((0, 2),)))}
    assert requests({(8, 3): Crop(2, 2)}, [(4,), (8, 3)]) == {(4,): (None,), (8, 3): (Crop(2, 2),)}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (Window(97), "a window of 97 features does not fit into rows of 96"),
        (Crop(2, 2), "a crop is cut from images"),
        (Segments(7), "have 6 segments of 16, not 7"),
        (((0, 97),), "disjoint runs within 0..96"),
        (((4, 8), (6, 9)), "disjoint runs"),
        (((4, 4),), "disjoint runs"),
        ((), "columns must be runs"),
        (384, "columns must be runs"),
        ([Window(32), Window(32)], "the same twice"),
        ({5: Window(32)}, "not among"),
    ],
)
def test_what_does_not_fit_is_refused(columns, text):
    x, y = noisy()
    with pytest.raises(InvalidInput, match=text):
        distill(x, y, 4, seeds=1, epochs=1, device="cpu", columns=columns)


@pytest.mark.parametrize(
    "make", [lambda: Window(0), lambda: Window(4, align=0), lambda: Segments(True), lambda: Crop(2, -1)]
)
def test_sizes_are_whole_numbers(make):
    with pytest.raises(InvalidInput, match="must be a whole number"):
        make()


# ---- the bank -------------------------------------------------------------------------------------------------------


def bank_of(x, y, students, recipe):
    problem = encode(x, y, validation=0, image_shape=None, seed=0, device=CPU)
    return Bank(students, make_pool(problem.rows, None, (0.0,)), recipe, dtype=torch.float64)


def test_a_student_of_some_columns_is_one_of_rows_that_have_no_others():
    x, y = noisy(200, 24, 9, 20)
    columns = ((4, 12), (18, 22))
    index = np.r_[4:12, 18:22]
    recipe = Recipe(epochs=3, batch=50)
    students = [Student((5,), seed, columns=columns) for seed in (0, 1)]
    with bank_of(x, y, students, recipe) as bank:
        start = bank.weights.clone()
        assert not bank.layout.first(start)[:, 0].any()
        bank.run([0] * 3)
        wide = bank.networks()
    with bank_of(x[:, index], y, [Student((5,), 0), Student((5,), 1)], recipe) as narrow:
        narrow.layout.first(narrow.weights)[:10, :12] = bank.layout.first(start)[:10, index]
        narrow.weights[narrow.layout.head :] = start[bank.layout.head :]
        narrow.average.copy_(narrow.weights)
        narrow.run([0] * 3)
        made = (wide, narrow.networks())
    for wide, narrow in zip(*made, strict=True):
        for a, b in zip(wide, narrow, strict=True):
            np.testing.assert_allclose(a.weight, b.weight, rtol=1e-5, atol=1e-7)


def test_features_that_are_left_out_later_stay_out():
    x, y = noisy(200)
    problem = encode(x, y, validation=0, image_shape=None, seed=0, device=CPU)
    pool = make_pool(problem.rows, None, (0.0,))
    with Bank([Student((5,), columns=((0, 96),))], pool, Recipe(epochs=4, batch=50)) as bank:
        bank.run([0] * 4, until=2)
        mask = torch.zeros(1, 96, dtype=torch.bool)
        mask[0, 48:80] = True
        bank.keep(mask)
        bank.run([0] * 4)
        first = bank.layout.first(bank.average)[:5, :96]
        assert not first[:, ~mask[0]].any()
        assert first[:, mask[0]].all()
        hidden = bank.score(problem.rows.x, problem.rows.y, hide=(0, 48)).loss
        assert hidden == bank.score(problem.rows.x, problem.rows.y).loss  # nothing read there
        assert bank.score(problem.rows.x, problem.rows.y, hide=(48, 80)).loss > hidden
    with (
        Bank([Student((5,))], pool, Recipe(epochs=1, batch=50)) as whole,
        pytest.raises(InvalidInput, match="built to read whole rows"),
    ):
        whole.keep(mask)


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_the_window_holds_what_decides():
    x, y = noisy()
    found = choose_window(x, y, Window(32, align=16), hidden=6, epochs=200, device="cpu")
    assert found.columns in (((48, 80),), ((40, 72),))
    assert len(found.tried) == 5
    assert found.features == 32
    assert found.moved == bytes_moved(found.columns, 96)
    assert dict(found.tried)[found.columns] == min(loss for _, loss in found.tried)


def test_the_segments_that_decide_stay():
    x, y = noisy(3000, first=20, second=90)
    found = choose_window(x, y, Segments(2), hidden=6, epochs=300, batch=64, device="cpu", validation=500)
    assert found.columns == ((16, 32), (80, 96))
    assert len(found.tried) == 4  # one segment a round
    assert choose_window(x, y, Segments(6), hidden=4, epochs=2, device="cpu").columns == ((0, 96),)
    quick = choose_window(x, y, Segments(1), hidden=4, epochs=10, device="cpu")
    assert len(quick.tried) == 2  # five segments in two rounds
    assert quick.features == 16


def test_rows_of_an_odd_width_and_without_validation_rows():
    x, y = noisy(600, 19, 1, 2)
    found = choose_window(x, y, Segments(1), hidden=3, epochs=300, batch=32, device="cpu", validation=0)
    assert found.columns == ((0, 16),)


def test_a_single_feature():
    x = np.arange(100, dtype=np.uint8)[:, None]
    assert choose_window(x, x[:, 0] // 50, Window(1), hidden=1, epochs=2, device="cpu").columns == ((0, 1),)


# ---- distill --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_distilled_networks_read_what_was_chosen_and_no_more(kind):
    x, y = noisy(900)
    if kind == "floats":
        x = (x * 3.5 + np.arange(96)).astype(np.float32)
    x_val, y_val = x[600:], y[600:]
    found = distill(
        x[:600],
        y[:600],
        (6, 3),
        seeds=2,
        epochs=40,
        device="cpu",
        teacher=None,
        augment=None,
        validation=(x_val, y_val),
        columns={6: [None, Window(32, align=16), ((50, 51), (70, 71))]},
    )
    assert [(each.hidden, each.reads) for each in found.students[::2]] == [
        ((3,), None),
        ((6,), None),
        ((6,), "w32"),
        ((6,), "r2"),
    ]
    (window, given) = found.chosen
    assert window.columns == ((48, 80),)
    assert given.columns == ((50, 51), (70, 71))
    best = found.best(6, "w32").mlp
    assert best.columns == ((48, 80),)
    assert best.features == 96
    assert best.name == "distilled-6-w32"
    assert found.best(6, None).mlp.columns is None
    other = x_val.copy()
    other[:, :48] = 0
    other[:, 80:] = 7
    assert (best.predict(other) == best.predict(x_val)).all()
    for student in found.students:
        right = float(np.mean(student.mlp.predict(x_val) == y_val))
        assert student.validation_accuracy == pytest.approx(right, abs=2 / 300)
    assert found.best(6, "r2").validation_accuracy > 0.9
    assert {moment.reads for moment in found.history} == {None, "w32", "r2"}
    with pytest.raises(InvalidInput, match="and reads c20"):
        found.best(6, "c20")


def test_choosing_is_resumed(tmp_path):
    x, y = noisy(300)
    state = tmp_path / "state"
    options = {"seeds": 1, "epochs": 20, "device": "cpu", "teacher": None, "columns": [Window(32), Segments(2)]}
    whole = distill(x, y, 4, **options)

    def stop(done, total, text):
        if text.startswith("students") and done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(x, y, 4, **options, checkpoint=state, progress=stop)
    told = []
    again = distill(x, y, 4, **options, checkpoint=state, resume=True, progress=lambda *what: told.append(what[2]))
    assert not [text for text in told if text.startswith("choosing")]
    assert again.chosen == whole.chosen
    assert [each.mlp.digest() for each in again.students] == [each.mlp.digest() for each in whole.students]


def test_finetune_goes_on_within_the_columns():
    x, y = noisy()
    mlp = distill(x, y, 4, seeds=1, epochs=5, device="cpu", teacher=None, columns=Window(32, align=16)).best(4).mlp
    tuned = gm.train.finetune(mlp, x, y, epochs=2, device="cpu")
    assert tuned.columns == mlp.columns


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "read"), [(["--window", "32"], 32), (["--segments", "3"], 48), (["--crop", "6x4"], 24)]
)
def test_the_command_trains_networks_that_read_a_part(words, read, tmp_path, capsys):
    x, y = noisy(300)
    np.savez(tmp_path / "rows.npz", x=x.reshape(-1, 8, 12), y=y)
    out = tmp_path / "m.safetensors"
    command = ["train", "--recipe", "distill", "--hidden", "4", "--seeds", "1", "--epochs", "2", "--teacher", "none"]
    command += ["--data", str(tmp_path / "rows.npz"), "--device", "cpu", "--out", str(out), "--json", *words]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"][0]["features_read"] == read == gm.load(out).features_read
    assert [list(run) for run in gm.load(out).columns] == found["models"][0]["columns"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--recipe", "distill", "--window", "32", "--crop", "2x2"], "exclude each other"),
        (["--recipe", "distill", "--crop", "20"], "as in 20x20"),
        (["--segments", "12"], "only with --recipe distill"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, text, capsys):
    assert main(["train", *words]) == 2
    assert text in capsys.readouterr().err

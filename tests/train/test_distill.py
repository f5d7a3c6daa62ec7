"""`distill`: images and tables, teachers of all kinds, resuming, and that held-out rows stay held out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

import gigamlp as gm
from gigamlp.cli import main
from gigamlp.errors import DataError, FileFormatError, InvalidInput, TrainingError
from gigamlp.train import Augment, Choice, ConvTeacher, MLPTeacher, Recipe, TableAugment, distill, fit_finetune
from gigamlp.train.checkpoint import Checkpoint
from gigamlp.train.choices import choose, copies, default_epochs
from gigamlp.train.encode import encode
from gigamlp.train.pool import epoch_plan, make_pool
from gigamlp.train.teacher import fit_conv, fit_mlps, restore_conv, restore_mlps

CPU = torch.device("cpu")
NOISE = 0.01  # one binomial standard error of these test sets; records/ has the full comparison over five splits


def digits(seed=0):
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x * 15).astype(np.uint8).reshape(-1, 8, 8)[order], y[order]
    return x[:1300], y[:1300], x[1300:], y[1300:]


def table(rows=300, seed=0, labels=("less", "more")):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 4)) * [1, 10, 100, 1000] + [0, 0, 5000, 0]
    return x, np.where(x[:, 0] > x[:, 1] / 10, *labels[::-1])


def accuracy(mlp, x, y):
    return float(np.mean(mlp.predict(x.reshape(len(x), -1)) == y))


# ---- no worse than plain cross-entropy ------------------------------------------------------------------------------


def test_images_are_no_worse_than_plain_cross_entropy():
    x, y, x_test, y_test = digits()
    found = distill(x, y, 16, seeds=2, epochs=120, device="cpu")
    assert found.settings.image_shape == (8, 8)
    assert isinstance(found.settings.augment, Augment)
    mean = np.mean([accuracy(student.mlp, x_test, y_test) for student in found.students])
    flat = x.reshape(len(x), -1)
    plain = [fit_finetune(None, flat, y, hidden=16, seed=s, device="cpu", validation=108).mlp for s in range(2)]
    assert mean >= np.mean([accuracy(mlp, x_test, y_test) for mlp in plain]) - NOISE


def test_tables_are_no_worse_than_plain_cross_entropy():
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    fit, test = order[:380], order[380:]
    found = distill(x[fit], y[fit], 8, seeds=3, epochs=60, device="cpu")
    assert found.settings.image_shape is None
    assert isinstance(found.settings.teacher, MLPTeacher)
    mean = np.mean([accuracy(student.mlp, x[test], y[test]) for student in found.students])
    plain = [fit_finetune(None, x[fit], y[fit], hidden=8, seed=s, device="cpu", validation=63).mlp for s in range(3)]
    assert mean >= np.mean([accuracy(mlp, x[test], y[test]) for mlp in plain]) - NOISE


# ---- what it takes and gives ----------------------------------------------------------------------------------------


def test_every_width_and_seed_comes_back_and_the_best_is_chosen():
    x, y = table()
    told = []
    found = distill(
        x, y, (8, (6, 3), 1), seeds=3, epochs=8, device="cpu", seed=5, progress=lambda *what: told.append(what)
    )
    assert [(each.hidden, each.seed) for each in found.students] == [
        (widths, seed) for widths in ((1,), (6, 3), (8,)) for seed in (5, 6, 7)
    ]
    assert list(found.models) == [(1,), (6, 3), (8,)]
    for widths, mlp in found.models.items():
        own = [each for each in found.students if each.hidden == widths]
        best = found.best(widths)
        assert best.validation_accuracy == max(each.validation_accuracy for each in own)
        assert mlp.hidden == widths
        assert set(mlp.predict(x)) <= {"less", "more"}
        assert mlp.name == f"distilled-{'x'.join(map(str, widths))}"
    assert found.best(8) is found.best((8,))
    assert {moment.epoch for moment in found.history} == set(range(1, 9))
    assert 0 < found.teacher_accuracy <= 1
    assert all(0 < done <= total and text for done, total, text in told)
    with pytest.raises(InvalidInput, match="no student has the hidden widths"):
        found.best(9)


def test_the_reported_accuracy_is_that_of_the_mlp():
    x, y = table(400)
    x_val, y_val = table(97, seed=1)
    found = distill(x, y, (5,), seeds=2, epochs=5, device="cpu", validation=(x_val, y_val))
    assert found.settings.rows == 400
    assert found.settings.validation_rows == 97
    for student in found.students:
        assert student.validation_accuracy == pytest.approx(accuracy(student.mlp, x_val, y_val))
    bytes_, labels, *_ = digits()
    found = distill(bytes_, labels, (5,), seeds=2, epochs=3, device="cpu", teacher=None, validation=(bytes_, labels))
    for student in found.students:
        assert student.mlp.input_scale == pytest.approx(1 / 255)
        assert not student.mlp.input_offset
        assert student.validation_accuracy == pytest.approx(accuracy(student.mlp, bytes_, labels), abs=2 / 1300)


def test_without_validation_rows_the_first_seed_is_kept():
    x, y = table()
    found = distill(x, y, (4,), seeds=2, epochs=3, device="cpu", validation=0)
    assert found.best(4).seed == 0
    assert found.best(4).validation_accuracy is None
    assert found.history == ()
    assert found.settings.rows == 300


@pytest.mark.parametrize(("features", "classes"), [(1, 2), (3, 5)])
def test_small_shapes(features, classes):
    random = np.random.default_rng(0)
    x = random.normal(size=(60, features))
    found = distill(x, np.arange(60) % classes, 3, seeds=1, epochs=2, device="cpu")
    assert found.best(3).mlp.outputs == classes
    assert found.best(3).mlp.features == features


def test_a_seed_gives_one_result():
    x, y = table()
    one, same, other = (
        distill(x, y, 4, seeds=1, epochs=4, device="cpu", seed=seed).best(4).mlp.digest() for seed in (0, 0, 1)
    )
    assert one == same != other


def test_a_budget_shortens_the_training():
    x, y = table()
    found = distill(x, y, 4, seeds=1, epochs=20_000, device="cpu", teacher=None, augment=None, budget_s=0.5)
    assert 1 <= found.settings.recipe.epochs < 20_000


def test_choices_replace_the_defaults():
    x, y = table()
    own = Choice(lr=1e-3, weight_decay=0.0, follow=0.0, temperature=1.0, phases=((0.0, 1.0), (0.5, 0.0)))
    found = distill(x, y, (4,), seeds=1, epochs=4, device="cpu", choices={(4,): own})
    assert found.settings.choices == {(4,): own}
    assert found.settings.teacher is None  # nobody follows it
    assert found.settings.strengths == (1.0, 1.0, 0.0)


# ---- teachers -------------------------------------------------------------------------------------------------------


def test_a_callable_teaches_from_raw_rows():
    x, _ = table()
    y = np.where(x[:, 0] > 0, "p", "n")
    wrong_labels = np.random.default_rng(0).permutation(y)
    seen = []

    def teacher(rows):
        seen.append(rows)
        return np.stack([-5 * rows[:, 0], 5 * rows[:, 0]], 1)  # columns are the sorted labels

    strict = Choice(lr=1e-2, weight_decay=0.0, follow=1.0, temperature=1.0, phases=((0.0, 0.0),))
    found = distill(
        x, wrong_labels, 8, seeds=1, epochs=60, device="cpu", teacher=teacher, augment=None, choices={(8,): strict}
    )
    assert accuracy(found.best(8).mlp, x, y) > 0.95  # the labels say nothing
    pool = np.concatenate(seen[-1:])
    assert pool.shape[1] == 4
    assert np.abs(pool[:, 2].mean() - 5000) < 100
    assert found.settings.teacher == "callable"


@pytest.mark.parametrize(
    ("teacher", "error", "text"),
    [
        (lambda rows: np.zeros((len(rows), 3)), InvalidInput, "logits of shape"),
        (lambda rows: np.full((len(rows), 2), np.nan), TrainingError, "not finite"),
        (lambda rows: np.array([["a", "b"]] * len(rows)), InvalidInput, "must give numbers"),
        ("big", InvalidInput, "teacher must be"),
        ("conv", InvalidInput, "no square images|not known to be"),
    ],
)
def test_teachers_that_cannot_teach_are_refused(teacher, error, text):
    x, y = table()
    x = np.concatenate([x, x], 1)[:, :7]
    with pytest.raises(error, match=text):
        distill(x, y, 4, seeds=1, epochs=2, device="cpu", teacher=teacher)


def test_a_conv_teacher_learns_and_comes_back_from_its_state(monkeypatch):
    monkeypatch.setattr("gigamlp.train.teacher._LEAST_STEPS", 60)
    x, y, *_ = digits()
    problem = encode(x, y, validation=100, image_shape="auto", seed=0, device=CPU)
    pool = make_pool(problem.rows, Augment(), (0.5, 0.5))
    settings = ConvTeacher(nets=2, channels=(8, 16), epochs=1, batch=64)
    teacher = fit_conv(pool, settings, seed=1, strength=0.5)
    logits = teacher(problem.x_val)
    assert (logits.argmax(1) == problem.y_val).float().mean() > 0.5
    assert torch.equal(restore_conv(problem.rows, settings, teacher.state())(problem.x_val), logits)
    inputs = problem.rows.inputs(problem.x_val)
    plain = torch.stack([net(inputs) for net in teacher.nets]).mean(0)
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)  # folding the normalisation changes nothing
    assert not torch.equal(*(net(inputs) for net in teacher.nets))


@pytest.mark.parametrize("shape", [(1, 7), (2, 3), (40, 9), (33, 64)])
def test_conv_teachers_for_images_of_any_shape(shape, monkeypatch):
    monkeypatch.setattr("gigamlp.train.teacher._LEAST_STEPS", 2)
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (40, *shape), dtype=np.uint8)
    problem = encode(x, np.arange(40) % 3, validation=0, image_shape="auto", seed=0, device=CPU)
    pool = make_pool(problem.rows, None, (0.0,))
    teacher = fit_conv(pool, ConvTeacher(1, (2, 4, 8), 1, 40, 1e-3), strength=0.0)
    assert teacher(problem.rows.x).shape == (40, 3)


def test_an_ensemble_of_mlps_comes_back_from_its_state():
    x, y = table()
    problem = encode(x, y, validation=50, image_shape="auto", seed=0, device=CPU)
    pool = make_pool(problem.rows, TableAugment(), (1.0, 1.0))
    teacher = fit_mlps(pool, MLPTeacher(nets=3, hidden=(16,)), Recipe(epochs=30, batch=32), strength=1.0)
    logits = teacher(problem.x_val)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(50))  # the logarithm of a mean of probabilities
    assert (logits.argmax(1) == problem.y_val).float().mean() > 0.9
    assert torch.equal(restore_mlps(problem.rows, teacher.state())(problem.x_val), logits)


# ---- resuming -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("stage", ["teacher", "students, 1 of 2", "students, 2 of 2"])
def test_resuming_gives_what_an_uninterrupted_training_gives(tmp_path, stage):
    x, y = table()
    light = choose((6,), image=False, augmented=True)
    other = Choice(1e-2, 0.1, 0.5, 1.0, ((0.0, 1.0), (0.5, 0.0)))
    options = {"seeds": 2, "epochs": 12, "device": "cpu", "choices": {(6,): light, (3, 2): other}}
    options["teacher"] = MLPTeacher(nets=2, hidden=(8,))
    straight = distill(x, y, (6, (3, 2)), **options)
    path = tmp_path / "state"

    def stop(done, total, text):
        if text.startswith(stage) and (done % 12 == 7 or stage == "teacher"):
            raise Stop

    with pytest.raises(Stop):
        distill(x, y, (6, (3, 2)), **options, checkpoint=path, progress=stop)
    assert path.exists() == (stage != "teacher")
    stages = []
    resumed = distill(
        x, y, (6, (3, 2)), **options, checkpoint=path, resume=True, progress=lambda *what: stages.append(what)
    )
    if stage != "teacher":
        assert not any(text == "teacher" for _, _, text in stages)  # it is not trained again
        assert min(done for done, _, text in stages if text.startswith("students")) >= 7
    for one, two in zip(straight.students, resumed.students, strict=True):
        assert one.mlp.digest() == two.mlp.digest()
        assert one.validation_accuracy == two.validation_accuracy
    assert resumed.history == straight.history
    again = distill(x, y, (6, (3, 2)), **options, checkpoint=path, resume=True)
    assert [each.mlp.digest() for each in again.students] == [each.mlp.digest() for each in straight.students]


def test_only_the_same_training_is_resumed(tmp_path):
    x, y = table()
    path = tmp_path / "state"
    options = {"seeds": 1, "device": "cpu", "teacher": None, "checkpoint": path}
    distill(x, y, 4, epochs=3, resume=True, **options)  # nothing to resume: starts
    for changed in ({"epochs": 4}, {"epochs": 3, "seed": 1}, {"epochs": 3, "augment": None}):
        with pytest.raises(InvalidInput, match="other rows or settings"):
            distill(x, y, 4, resume=True, **changed, **options)
    with pytest.raises(InvalidInput, match="other rows or settings"):
        distill(x + 1, y, 4, epochs=3, resume=True, **options)
    path.write_bytes(b"what is this")
    with pytest.raises(FileFormatError, match="not a checkpoint"):
        distill(x, y, 4, epochs=3, resume=True, **options)
    gm.train.finetune(None, x, y, hidden=2, epochs=1, device="cpu").save(path)
    with pytest.raises(FileFormatError, match="not a checkpoint"):
        distill(x, y, 4, epochs=3, resume=True, **options)
    with pytest.raises(InvalidInput, match="resume=True needs checkpoint"):
        distill(x, y, 4, resume=True)


# ---- held-out rows --------------------------------------------------------------------------------------------------


def test_validation_rows_are_in_no_pool_and_decide_no_scale():
    x = np.arange(1200, dtype=float).reshape(400, 3)
    y = np.arange(400) % 2
    problem = encode(x, y, validation=60, image_shape="auto", seed=3, device=CPU)
    pool = make_pool(problem.rows, None, (0.0,))
    raw = pool.x.double().numpy() / problem.scaling.scale + problem.scaling.centre
    held = problem.x_val.double().numpy() / problem.scaling.scale + problem.scaling.centre
    fitted, kept = set(raw[:, 0].round().astype(int)), set(held[:, 0].round().astype(int))
    assert len(fitted) == 340
    assert len(kept) == 60
    assert not fitted & kept
    np.testing.assert_allclose(problem.scaling.centre, x[sorted(row // 3 for row in fitted)].mean(0))


class Sealed:
    """Test rows that nobody may look at before they are released."""

    def __init__(self, values):
        self.values, self.released = values, False
        self.shape, self.dtype = values.shape, values.dtype

    def __array__(self, dtype=None, copy=None):
        assert self.released, "test rows were read before training and selection were over"
        return self.values


def test_the_command_reads_test_rows_only_after_everything_is_chosen(tmp_path, monkeypatch, capsys):
    x, y, x_test, y_test = digits()
    rows, labels = Sealed(x_test.reshape(len(x_test), -1)), Sealed(y_test)
    dataset = gm.data.Dataset(x.reshape(len(x), -1), y, rows, labels, "sealed", (8, 8))
    monkeypatch.setattr("gigamlp.cli.rows.load_dataset", lambda data, labels: dataset)

    def released(*args, **kwargs):
        found = distill(*args, **kwargs)
        assert found.models  # the choice is made
        rows.released = labels.released = True
        return found

    monkeypatch.setattr(gm.train, "distill", released, raising=False)
    out = tmp_path / "m.safetensors"
    line = f"train --recipe distill --hidden 4,6 --seeds 2 --epochs 2 --device cpu --json --out {out}"
    assert main(line.split()) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [each["test_accuracy"] is not None for each in models] == [True, True]


def test_other_test_rows_change_no_model(tmp_path, capsys):
    x, y, x_test, y_test = digits()
    found = []
    for name, rows, labels in (("a", x_test, y_test), ("b", 255 - x_test[:50], y_test[:50][::-1])):
        path = tmp_path / f"{name}.npz"
        np.savez(path, x=x, y=y, x_test=rows, y_test=labels)
        out = tmp_path / f"{name}.safetensors"
        line = f"train --recipe distill --data {path} --hidden 4,6 --seeds 2 --epochs 2 --device cpu --json --out {out}"
        assert main(line.split()) == 0
        found.append(json.loads(capsys.readouterr().out)["models"])
    one, other = found
    assert [(m["digest"], m["seed"], m["validation_accuracies"]) for m in one] == [
        (m["digest"], m["seed"], m["validation_accuracies"]) for m in other
    ]
    assert [m["test_accuracy"] for m in one] != [m["test_accuracy"] for m in other]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    x, y = table()
    path = tmp_path / "rows.npz"
    np.savez(path, x=x, y=y)
    return path


def test_one_width_is_one_file_and_several_are_several(rows, tmp_path, capsys):
    out = tmp_path / "m.safetensors"
    line = f"train --recipe distill --data {rows} --seeds 2 --epochs 2 --device cpu --json --out {out}"
    assert main([*line.split(), "--hidden", "5"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["models"][0]["out"] == str(tmp_path / "m.safetensors")
    assert "over the seeds" in printed.err
    assert gm.load(tmp_path / "m.safetensors").hidden == (5,)
    assert main([*line.split(), "--hidden", "5,3", "--teacher", "none", "--augment", "none"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["teacher"] is None
    assert facts["copies"] == 1
    assert [each["hidden"] for each in facts["models"]] == [3, 5]
    for width in (3, 5):
        assert gm.load(tmp_path / f"m-{width}.safetensors").hidden == (width,)
    assert not list(tmp_path.glob("*.checkpoint"))


def test_an_interrupted_command_is_resumed(rows, tmp_path, capsys, monkeypatch):
    def line(name, *more):
        words = f"train --recipe distill --data {rows} --hidden 5 --seeds 2 --epochs 40 --device cpu --teacher none"
        return [*words.split(), "--json", "--out", str(tmp_path / name), *more]

    assert main(line("straight.safetensors")) == 0
    wanted = json.loads(capsys.readouterr().out)["models"][0]["digest"]
    put = Checkpoint.put

    def interrupted(self, prefix, arrays, **facts):
        put(self, prefix, arrays, **facts)
        if facts.get("bank0") == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "put", interrupted)
    assert main(line("m.safetensors")) == 130
    assert (tmp_path / "m.checkpoint").exists()
    assert not (tmp_path / "m.safetensors").exists()
    monkeypatch.setattr(Checkpoint, "put", put)
    capsys.readouterr()
    assert main(line("m.safetensors", "--resume")) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["digest"] == wanted
    assert not (tmp_path / "m.checkpoint").exists()


@pytest.mark.parametrize(
    "words",
    [
        "--recipe distill --lr 0.1",
        "--recipe distill --from scratch",
        "--recipe distill --method ridge",
        "--seeds 3",
        "--resume",
        "--quick",
        "--teacher mlp",
        "--recipe distill --hidden 4,4",
        "--recipe distil",
        "--recipe distill --seeds 0",
    ],
)
def test_options_that_do_not_go_together_are_refused(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 2
    assert "error:" in capsys.readouterr().err


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hidden": ()}, "at least one network"),
        ({"hidden": (4, 4)}, "each once"),
        ({"hidden": (0,)}, "whole numbers >= 1, got 0"),
        ({"hidden": ((),)}, "at least one network"),
        ({"seeds": 0}, "seeds must be"),
        ({"seed": -1}, "seed must be"),
        ({"budget_s": 0}, "budget_s must be > 0"),
        ({"epochs": -3}, "epochs must be"),
        ({"augment": "much"}, "augment must be"),
        ({"augment": Augment(), "image_shape": None}, "image_shape"),
        ({"image_shape": (3, 3)}, "9 pixels, rows have 4"),
        ({"image_shape": "round"}, "image_shape must be"),
        ({"validation": (1, 2, 3)}, "must be a pair"),
        ({"validation": -1}, "number of rows >= 0"),
        ({"choices": {(9,): choose((9,), image=False, augmented=True)}}, "not among"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, text):
    x, y = table()
    with pytest.raises(InvalidInput, match=text):
        distill(x, y, **{"hidden": 4, "device": "cpu", "epochs": 2} | options)


def test_rows_that_do_not_fit_are_refused():
    x, y = table()
    with pytest.raises(DataError, match="validation rows have shape"):
        distill(x, y, 4, validation=(x[:, :2], y))
    with pytest.raises(DataError, match="rows but"):
        distill(x, y[:-1], 4)
    with pytest.raises(DataError, match="at least two classes"):
        distill(x, np.zeros(300, int), 4)
    x[7, 2] = np.nan
    with pytest.raises(InvalidInput, match="NaN"):
        distill(x, y, 4)


# ---- defaults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 16, 40, 64, 128, 512])
@pytest.mark.parametrize("epochs", [1, 2, 7, 60, 400])
def test_pools_have_what_the_plan_reads(width, epochs):
    choice = choose((width,), image=True, augmented=True)
    strengths = copies([choice.phases, ((0.0, 0.0),)], epochs, 30)
    assert len(strengths) <= 30 or epochs == 1
    plan = epoch_plan(strengths, choice.phases, epochs)
    assert len(plan) == epochs
    assert all(strengths[at] > 0 for at in plan)
    assert strengths[plan[0]] == choice.phases[0][1]


def test_long_epochs_mean_fewer():
    assert default_epochs(10, 10, quick=False) == 400
    assert default_epochs(55_000, 256, quick=True) == 60
    assert default_epochs(10**8, 1024, quick=True) == 20

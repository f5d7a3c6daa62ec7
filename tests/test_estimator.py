"""GigaMLPClassifier keeps scikit-learn's contract: its own checks pass, and what people build around it works."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import gigamlp as gm
from gigamlp.errors import DataError, InvalidInput
from gigamlp.modelfile import pack
from gigamlp.train import Recipe

QUICK = Recipe(epochs=60, batch=16, ema=0.9)


def model(**options):
    return gm.GigaMLPClassifier(**{"hidden": 16, "recipe": QUICK, "device": "cpu", "random_state": 0, **options})


@pytest.fixture(scope="module")
def blobs():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = rng.normal(size=(240, 5)) + 3 * rng.normal(size=(3, 5))[y]
    return x, np.array(["fig", "kiwi", "pear"])[y]


@parametrize_with_checks([model(), model(hidden=(8, 4), random_state=None)])
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_it_works_in_what_is_built_around_estimators(blobs):
    x, y = blobs
    pipeline = make_pipeline(StandardScaler(), model())
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.9
    search = GridSearchCV(pipeline, {"gigamlpclassifier__hidden": [4, (8, 8)]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.9
    assert search.predict(x).dtype == y.dtype
    assert clone(search.best_estimator_).get_params()["gigamlpclassifier__recipe"] == QUICK


def test_pickles_hold_the_network_as_safetensors_and_answer_the_same(blobs):
    x, y = blobs
    fitted = model().fit(x, y)
    fitted.predict(x)
    data = pickle.dumps(fitted)
    assert pack(fitted.mlp_) in data
    again = pickle.loads(data)
    assert again.mlp_ == fitted.mlp_
    assert np.array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert pickle.loads(pickle.dumps(model())).get_params() == model().get_params()


def test_its_answers_are_those_of_its_mlp(blobs):
    x, y = blobs
    fitted = model().fit(x, y)
    assert fitted.classes_.tolist() == ["fig", "kiwi", "pear"]
    assert np.array_equal(fitted.predict(x), fitted.classes_[fitted.mlp_.predict(x)])
    np.testing.assert_allclose(fitted.predict_proba(x), fitted.mlp_.predict_proba(x), atol=1e-6)


def test_a_random_state_means_one_result(blobs):
    x, y = blobs
    assert model(random_state=3).fit(x, y).mlp_ == model(random_state=3).fit(x, y).mlp_
    assert model(random_state=3).fit(x, y).mlp_ != model(random_state=4).fit(x, y).mlp_


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_rows_and_labels_of_any_kind(dtype):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (150, 4)).astype(dtype)
    for labels in ([False, True], [0.0, 2.0], [-7, 900], np.array(["a", "b"], object)):
        y = np.asarray(labels)[(x[:, 0] > x[:, 1]).astype(int)]
        fitted = model().fit(x, y)
        assert fitted.predict(x).dtype == y.dtype
        assert fitted.score(x, y) > 0.9


def test_partial_fit_learns_from_parts_that_lack_classes(blobs):
    x, y = blobs
    order = np.argsort(y, kind="stable")[np.r_[0:240:2, 1:240:2]]
    fitted = model(recipe=QUICK.with_(batch=8))
    with pytest.raises(InvalidInput, match="the first call of partial_fit needs classes"):
        fitted.partial_fit(x, y)
    for _ in range(8):
        for part in np.array_split(order, 4):
            fitted.partial_fit(x[part], y[part], classes=["pear", "fig", "kiwi"])
    assert fitted.score(x, y) > 0.9
    with pytest.raises(InvalidInput, match="are not those of the first call"):
        fitted.partial_fit(x, y, classes=["fig", "kiwi"])
    with pytest.raises(DataError, match="label 'plum' of row 0 is not one of"):
        fitted.partial_fit(x[:1], ["plum"])
    with pytest.raises(ValueError, match="4 features, but GigaMLPClassifier is expecting 5"):
        fitted.partial_fit(x[:, :4], y)


def test_what_cannot_be_used(blobs):
    x, y = blobs
    for hidden in (0, (), (4, -1), True, 2.5):
        with pytest.raises(InvalidInput, match="hidden must be a whole number >= 1, or a sequence"):
            model(hidden=hidden).fit(x, y)
    with pytest.raises(DataError, match="one class only"):
        model().fit(x, np.zeros(len(x)))
    with pytest.raises(ValueError, match="NaN"):
        model().fit(np.where(x > 3, np.nan, x), y)

"""from_sklearn: the answers of the estimator, and a precise refusal of anything else."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn import preprocessing
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline

import gigamlp as gm
from gigamlp.errors import ConversionError, InvalidInput, ModelError
from tests.convert.samples import networks, relative

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
ACTIVATIONS = ("identity", "logistic", "tanh", "relu")
SCALERS = {
    "none": lambda: "passthrough",
    "standard": preprocessing.StandardScaler,
    "mean only": lambda: preprocessing.StandardScaler(with_std=False),
    "spread only": lambda: preprocessing.StandardScaler(with_mean=False),
    "neither": lambda: preprocessing.StandardScaler(with_mean=False, with_std=False),
    "minmax": lambda: preprocessing.MinMaxScaler((-1, 2)),
    "maxabs": preprocessing.MaxAbsScaler,
    "robust": preprocessing.RobustScaler,
    "robust, no centre": lambda: preprocessing.RobustScaler(with_centering=False),
    "function": preprocessing.FunctionTransformer,
    "two": lambda: make_pipeline(preprocessing.MinMaxScaler(), preprocessing.StandardScaler()),
}


def fit(estimator, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x, y)


def classifier(y, x=None, **options):
    x = np.random.default_rng(1).normal(size=(len(y), 3)) if x is None else x
    return fit(MLPClassifier(**{"hidden_layer_sizes": (4,), "max_iter": 5, "random_state": 0, **options}), x, y)


def logits_of(model, x):
    """Return what goes into the last activation, in float64."""
    h = np.asarray(x, np.float64)
    act = {"identity": lambda z: z, "logistic": lambda z: 1 / (1 + np.exp(-z)), "tanh": np.tanh}
    act["relu"] = lambda z: np.maximum(z, 0)
    for index, (weight, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        h = h @ weight.astype(np.float64) + bias
        h = act[model.activation](h) if index < len(model.coefs_) - 1 else h
    return h


# ---- parity ------------------------------------------------------------------------------------------------------

KINDS = ("binary", "multiclass", "strings", "multilabel", "regression")


def planted(network, kind):
    """Return a fitted estimator with the weights of `network`: one step of training, then the weights put in."""
    outputs = len(network.weights[-1])
    rng = np.random.default_rng(0)
    options = {
        "hidden_layer_sizes": tuple(network.widths[1:-1]),
        "activation": network.activations[0] if network.activations else "relu",
    }
    n = max(2 * outputs, 4)
    x = rng.normal(size=(n, network.widths[0])).astype(network.dtype)
    if kind == "regression":
        model = MLPRegressor(max_iter=1, **options)
        y = rng.normal(size=(n, outputs)) if outputs > 1 else rng.normal(size=n)
    else:
        model = MLPClassifier(max_iter=1, **options)
        if kind == "multilabel":
            y = np.arange(n)[:, None] % 2 == np.arange(outputs) % 2
            y = y.astype(int)
        else:
            y = np.arange(n) % (2 if outputs == 1 else outputs) * 3 - 1
            y = np.array([f"class {each}" for each in y]) if kind == "strings" else y
    fit(model, x, y)
    model.coefs_ = [w.T.copy() for w in network.weights]
    model.intercepts_ = [b.copy() for b in network.biases]
    return model


def test_200_random_estimators_keep_their_logits_and_classes():
    rows = differing = near = 0
    for index, network in enumerate(networks(200, seed=11, activations=ACTIVATIONS)):
        outputs = len(network.weights[-1])
        kinds = (
            ("binary", "strings", "regression")
            if outputs == 1
            else ("multiclass", "strings", "multilabel", "regression")
        )
        kind = kinds[index % len(kinds)]
        if kind in ("multiclass", "strings") and outputs == 2:
            kind = "multilabel"  # two classes have one output
        model = planted(network, kind)
        mlp = gm.from_sklearn(model)
        x = network.rows
        logits = logits_of(model, x)
        assert relative(mlp.logits(x), logits) < 1e-5
        wanted, found = model.predict(x), mlp.predict(x)
        if kind == "regression":
            assert found.shape == wanted.shape
            assert relative(found, wanted) < 1e-5
            continue
        np.testing.assert_allclose(mlp.predict_proba(x)[:, -1], _proba(model, x)[:, -1], atol=2e-6)
        gap = (
            np.abs(logits).min(1) if kind == "multilabel" or outputs == 1 else np.diff(np.sort(logits, 1)[:, -2:])[:, 0]
        )
        tied = gap <= 1e-5 * np.abs(logits).max()
        other = (np.asarray(found) != wanted).reshape(len(x), -1).any(1)
        assert not (other & ~tied).any()
        rows, differing, near = rows + len(tied), differing + int(other.sum()), near + int(tied.sum())
    print(f"{differing} of {rows} answers differ, {near} rows have a logit within rounding of another")
    assert rows > 1500
    assert near <= rows / 50


def _proba(model, x):
    return model.predict_proba(x)


@pytest.mark.parametrize("name", SCALERS)
@pytest.mark.parametrize("kind", KINDS)
def test_pipelines(name, kind):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 5)) * [1, 20, 0.1, 3, 7] + [0, 100, 1, -5, 3]
    x[:, 4] = 2.5  # a feature that does not vary
    target = x[:, 0] + x[:, 3]
    y = {
        "binary": (target > -5).astype(int),
        "multiclass": np.digitize(target, [-7, -5, -3]),
        "strings": np.array(["low", "mid", "high"])[np.digitize(target, [-6, -4])],
        "multilabel": np.stack([target > -5, x[:, 1] > 100, x[:, 2] > 1], 1).astype(int),
        "regression": target,
    }[kind]
    model = (MLPRegressor if kind == "regression" else MLPClassifier)(
        hidden_layer_sizes=(6, 4), max_iter=20, random_state=0
    )
    pipeline = fit(make_pipeline(SCALERS[name](), model), x, y)
    mlp = gm.from_sklearn(pipeline)
    assert len(mlp.layers) == 3
    wanted = pipeline.predict(x)
    assert np.asarray(mlp.predict(x)).shape == wanted.shape
    if kind == "regression":
        np.testing.assert_allclose(mlp.predict(x), wanted, rtol=1e-4, atol=1e-4)
        return
    np.testing.assert_array_equal(mlp.predict(x), wanted)
    np.testing.assert_allclose(mlp.predict_proba(x), pipeline.predict_proba(x), atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        ([3, -1, 7], [-1, 3, 7]),
        (["b", "a", "ç"], ["a", "b", "ç"]),
        (np.array(["b", "a", "c"], object), ["a", "b", "c"]),
        ([0.0, 2.0, 1.0], [0, 1, 2]),
        (np.array([200, 3, 7], np.uint8), [3, 7, 200]),
        ([True, False], [0, 1]),
    ],
)
def test_labels(labels, kept):
    y = np.array([labels[i % len(labels)] for i in range(30)], dtype=np.asarray(labels).dtype)
    model = classifier(y)
    mlp = gm.from_sklearn(model)
    assert mlp.classes.tolist() == kept
    x = np.random.default_rng(5).normal(size=(20, 3))
    assert (mlp.predict(x) == model.predict(x)).all()


def test_no_hidden_layer_and_one_feature():
    model = classifier(np.arange(30) % 4, np.arange(30.0)[:, None], hidden_layer_sizes=())
    mlp = gm.from_sklearn(model)
    assert (mlp.features, mlp.hidden, mlp.outputs) == (1, (), 4)
    np.testing.assert_allclose(mlp.predict_proba([[3.0]]), model.predict_proba([[3.0]]), atol=1e-6)


def test_a_search_gives_its_best_estimator_and_names():
    x = np.random.default_rng(0).normal(size=(30, 3))
    pipeline = Pipeline(
        [("scale", preprocessing.StandardScaler()), ("net", MLPClassifier((3,), max_iter=5, random_state=0))]
    )
    search = fit(GridSearchCV(pipeline, {"net__alpha": [1e-4, 1.0]}, cv=2), x, np.arange(30) % 2)
    mlp = gm.from_sklearn(search, name="best")
    assert (mlp.name, gm.from_sklearn(search).name) == ("best", "MLPClassifier")
    np.testing.assert_array_equal(mlp.predict(x), search.predict(x))


def test_the_session_answers_as_the_estimator():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    model = classifier(np.array(["no", "yes"])[np.arange(40) % 2], x)
    with gm.Session(gm.from_sklearn(model), device="cpu") as session:
        np.testing.assert_array_equal(session.predict(x), model.predict(x))
        np.testing.assert_allclose(session.predict_proba(x), model.predict_proba(x), atol=1e-6)


# ---- refusals ----------------------------------------------------------------------------------------------------


class Mine(MLPClassifier):
    pass


def with_weight(value):
    model = classifier(np.arange(20) % 3)
    model.coefs_[1][0, 0] = value
    return model


X, Y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 3


def pipe(step, x=X):
    return fit(make_pipeline(step, MLPClassifier((3,), max_iter=3)), x, Y)


def poisson():
    return fit(MLPRegressor(hidden_layer_sizes=(3,), max_iter=3, loss="poisson"), X, Y + 1.0)


REFUSED = {
    "a path": (lambda: "model.pkl", InvalidInput, "got a str; pickled files are not read"),
    "not fitted": (MLPClassifier, ModelError, "MLPClassifier is not fitted: it has no coefs_; call fit first"),
    "scaler not fitted": (
        lambda: make_pipeline(preprocessing.StandardScaler(), classifier(Y)),
        ModelError,
        r"step 'standardscaler' \(StandardScaler\) is not fitted: it has no mean_",
    ),
    "pca": (lambda: pipe(PCA(2)), ConversionError, r"step 'pca' \(PCA\) is not supported; before the MLP"),
    "normalizer": (lambda: pipe(preprocessing.Normalizer()), ConversionError, r"'normalizer' \(Normalizer\) is not"),
    "polynomial": (lambda: pipe(preprocessing.PolynomialFeatures()), ConversionError, "PolynomialFeatures"),
    "function": (
        lambda: pipe(preprocessing.FunctionTransformer(np.log1p), X**2),
        ConversionError,
        "FunctionTransformer",
    ),
    "clip": (lambda: pipe(preprocessing.MinMaxScaler(clip=True)), ConversionError, "has clip=True, which is no linear"),
    "forest": (
        lambda: fit(RandomForestClassifier(2), X, Y),
        ConversionError,
        "RandomForestClassifier is not supported",
    ),
    "calibrated": (
        lambda: fit(CalibratedClassifierCV(classifier(Y), cv=2), X, Y),
        ConversionError,
        "CalibratedClassifierCV is",
    ),
    "subclass": (lambda: fit(Mine((3,), max_iter=3), X, Y), ConversionError, "Mine is not supported"),
    "base": (BaseEstimator, ConversionError, "BaseEstimator is not supported"),
    "poisson": (poisson, ConversionError, r"MLPRegressor\(loss='poisson'\) ends in 'exp'"),
    "nan": (lambda: with_weight(np.nan), ModelError, "MLPClassifier, layer 1: coefs_ holds NaN or infinite values"),
    "too large": (lambda: with_weight(1e300), ModelError, "MLPClassifier, layer 1: layer weight holds NaN or infinite"),
    "no last step": (
        lambda: Pipeline([("a", preprocessing.StandardScaler()), ("b", "passthrough")]),
        ConversionError,
        "the pipeline's last step 'b' is 'passthrough', not an MLP",
    ),
    "far from zero": (
        lambda: pipe(preprocessing.StandardScaler(), X + np.array([0, 1e6, 0])),
        ConversionError,
        "feature 1 is scaled by a shift of -.*float32 rows lose the digits",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(which):
    make, error, message = REFUSED[which]
    with pytest.raises(error, match=message):
        gm.from_sklearn(make())

"""scikit-learn's multilayer perceptrons, and pipelines of scalers that end in one, to MLPs."""

from __future__ import annotations

from typing import Any

import numpy as np

from gigamlp.convert.chain import Activation, Affine, Dense, Step, fold, numbers
from gigamlp.errors import ConversionError, InvalidInput, ModelError, Unsupported
from gigamlp.mlp import MLP

__all__ = ["from_sklearn"]

_ACTIVATIONS = ("identity", "logistic", "tanh", "relu")


def from_sklearn(estimator: Any, *, name: str | None = None) -> MLP:
    """Return the MLP that answers as a fitted scikit-learn estimator does.

    Parameters
    ----------
    estimator : MLPClassifier, MLPRegressor, or Pipeline
        Fitted. A pipeline may hold StandardScaler, MinMaxScaler (without ``clip``), MaxAbsScaler, RobustScaler and
        ``"passthrough"`` before its MLP; they become the MLP's input scale and offset. A fitted GridSearchCV or the
        like gives its best estimator.
    name : str, optional
        Of the MLP. Default: the class of the estimator.

    Returns
    -------
    MLP
        Its `predict` and `predict_proba` are the estimator's, in float32. Float class labels that are whole numbers
        become integers, and booleans 0 and 1. If it was fitted on a table, the MLP knows the columns' names.

    Raises
    ------
    ConversionError
        If a step or a setting has no counterpart. The message names it.
    ModelError
        If the estimator is not fitted, or weights are not finite.
    InvalidInput
        If it is no estimator; files are not read, as unpickling executes what they hold.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> from sklearn.neural_network import MLPClassifier
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> x, y = np.arange(12.0).reshape(6, 2), ["a", "a", "a", "b", "b", "b"]
    >>> pipeline = make_pipeline(StandardScaler(), MLPClassifier((4,), solver="lbfgs", random_state=0)).fit(x, y)
    >>> gm.from_sklearn(pipeline).predict(x)
    array(['a', 'a', 'a', 'b', 'b', 'b'], dtype='<U1')
    """
    try:
        from sklearn.base import BaseEstimator
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise Unsupported("this needs scikit-learn, which is not installed: pip install 'gigamlp[sklearn]'") from error
    if not isinstance(estimator, BaseEstimator):
        raise InvalidInput(
            f"from_sklearn takes a fitted estimator, got a {type(estimator).__name__}; pickled files are not read, as "
            "that executes what they hold: load them yourself if you trust them"
        )
    before, last = _flat(estimator)
    steps: list[Step] = []
    for where, scaler in before:
        steps += _scaler(scaler, where)
    model_steps, head, classes = _model(last)
    _fitted(last, "n_features_in_", type(last).__name__)
    mlp_name = name or type(last).__name__
    mlp = fold([*steps, *model_steps], head=head, classes=classes, name=mlp_name, features=int(last.n_features_in_))
    names = getattr(getattr(estimator, "best_estimator_", estimator), "feature_names_in_", None)
    return mlp if names is None else mlp.with_(feature_names=tuple(names))


def _flat(estimator: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the named steps before the last one, nested pipelines opened, and the last one."""
    from sklearn.pipeline import Pipeline

    if type(estimator).__name__.endswith("SearchCV") or hasattr(estimator, "best_estimator_"):
        return _flat(_fitted(estimator, "best_estimator_", type(estimator).__name__))
    if type(estimator) is not Pipeline:
        return [], estimator
    before: list[tuple[str, Any]] = []
    for index, (name, step) in enumerate(estimator.steps):
        last = index == len(estimator.steps) - 1
        if step is None or isinstance(step, str):  # "passthrough"
            if last:
                raise ConversionError(f"the pipeline's last step {name!r} is {step!r}, not an MLP")
            continue
        inner, final = _flat(step)
        before += [(f"{name!r}, {where}", each) for where, each in inner]
        if last:
            return before, final
        before.append((f"step {name!r} ({type(final).__name__})", final))
    raise ConversionError("the pipeline has no steps")


def _fitted(estimator: Any, attribute: str, where: str) -> Any:
    if not hasattr(estimator, attribute):
        raise ModelError(f"{where} is not fitted: it has no {attribute}; call fit first")
    return getattr(estimator, attribute)


# ---- scalers --------------------------------------------------------------------------------------------------------


def _scaler(scaler: Any, where: str) -> list[Step]:
    from sklearn import preprocessing

    kind = type(scaler)
    if kind is preprocessing.StandardScaler:
        mean = _fitted(scaler, "mean_", where) if scaler.with_mean else None
        return _divided(mean, _fitted(scaler, "scale_", where) if scaler.with_std else None, where)
    if kind is preprocessing.RobustScaler:
        centre = _fitted(scaler, "center_", where) if scaler.with_centering else None
        return _divided(centre, _fitted(scaler, "scale_", where) if scaler.with_scaling else None, where)
    if kind in (preprocessing.MinMaxScaler, preprocessing.MaxAbsScaler) and getattr(scaler, "clip", False):
        raise ConversionError(f"{where} has clip=True, which is no linear scaling; fit it with clip=False")
    if kind is preprocessing.MinMaxScaler:
        scale, shift = _fitted(scaler, "scale_", where), _fitted(scaler, "min_", where)
        return [Affine(numbers(scale, where), numbers(shift, where), where)]
    if kind is preprocessing.MaxAbsScaler:
        return _divided(None, _fitted(scaler, "scale_", where), where)
    if kind is preprocessing.FunctionTransformer and scaler.func is None:
        return []
    raise ConversionError(
        f"{where} is not supported; before the MLP a pipeline may hold StandardScaler, MinMaxScaler, MaxAbsScaler and "
        "RobustScaler"
    )


def _divided(centre: Any, scale: Any, where: str) -> list[Step]:
    factor = np.ones(()) if scale is None else 1 / numbers(scale, where)
    shift = np.zeros(()) if centre is None else -numbers(centre, where) * factor
    return [Affine(factor, shift, where)]


# ---- the MLP --------------------------------------------------------------------------------------------------------


def _model(model: Any) -> tuple[list[Step], str, Any]:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    kind = type(model)
    if kind not in (MLPClassifier, MLPRegressor):
        raise ConversionError(f"{kind.__name__} is not supported; MLPClassifier and MLPRegressor are")
    weights = _fitted(model, "coefs_", kind.__name__)
    if model.activation not in _ACTIVATIONS:
        raise ConversionError(f"{kind.__name__}: unknown activation {model.activation!r}")
    steps: list[Step] = []
    for index, (weight, bias) in enumerate(zip(weights, model.intercepts_, strict=True)):
        where = f"{kind.__name__}, layer {index}"
        steps.append(Dense(numbers(weight, f"{where}: coefs_").T, numbers(bias, f"{where}: intercepts_"), where))
        if index < len(weights) - 1:
            steps.append(Activation(model.activation, where))
    out = model.out_activation_
    if kind is MLPRegressor:
        if out != "identity":
            raise ConversionError(f"MLPRegressor(loss={model.loss!r}) ends in {out!r}; supported is 'identity'")
        return steps, "regression", None
    if out == "softmax":
        return steps, "softmax", _labels(model.classes_)
    if out != "logistic":
        raise ConversionError(f"MLPClassifier ends in {out!r}; supported are 'softmax' and 'logistic'")
    if model.n_outputs_ == 1:
        return steps, "sigmoid", _labels(model.classes_)
    return steps, "multilabel", None


def _labels(classes: Any) -> Any:
    """Return class labels as an MLP holds them: integers or strings."""
    found = np.asarray(classes)
    if found.dtype.kind == "f" and (found == np.trunc(found)).all() and (np.abs(found) < 2.0**53).all():
        return found.astype(np.int64)
    if found.dtype.kind == "O" and all(isinstance(label, str) for label in found):
        return found.astype(str)
    if found.dtype.kind not in "iubU":
        raise ConversionError(f"class labels of dtype {found.dtype} are not supported; use integers or strings")
    return found

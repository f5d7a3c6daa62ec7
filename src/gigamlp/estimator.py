"""A classifier with scikit-learn's contract: trained by `gigamlp.train`, run by a Session.

Importing this module imports scikit-learn; `gigamlp` itself does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import DataError, InvalidInput, Unsupported

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "sklearn":
        raise
    raise Unsupported(
        "this needs scikit-learn >= 1.6, and it is not installed: pip install 'gigamlp[sklearn]'"
    ) from error

if TYPE_CHECKING:
    from gigamlp.mlp import MLP
    from gigamlp.session import Session
    from gigamlp.train import Recipe

__all__ = ["GigaMLPClassifier"]

Array = NDArray[Any]


class _Runner:
    """Opens the Session of a fitted estimator when it is first asked: `predict` must not change the estimator."""

    def __init__(self, mlp: MLP, device: str) -> None:
        self.mlp, self.device = mlp, device
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        from gigamlp.session import Session

        if self._session is None:
            self._session = Session(self.mlp, device=self.device)
        return self._session


class GigaMLPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A multilayer perceptron for classification, as an estimator of scikit-learn.

    Parameters
    ----------
    hidden : int or sequence of int
        Widths of the hidden layers, with relu between them.
    recipe : gigamlp.train.Recipe, optional
        How long and how fast to train. Default: `gigamlp.train.default_recipe` for the widths and rows.
    device : {"auto", "cpu", "cuda", "cuda:N"}
        Where to train and run.
    random_state : int, RandomState or None
        Draws the start, the order of the rows and the held-out rows.

    Attributes
    ----------
    mlp_ : gigamlp.MLP
        The trained network; its classes are indices into `classes_`. Everything of gigamlp works on it.
    classes_ : ndarray [classes]
        The labels.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Only if the rows that it was fitted on had named columns.

    Notes
    -----
    Rows are used as they are: bytes stay bytes, and integer engines take them. Of 600 rows and more, `fit` holds some
    out and keeps the epoch that was best on them. A pickle holds the network as bytes of a safetensors file.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(200, 3))
    >>> y = np.where(x[:, 0] > 0, "right", "left")
    >>> model = gm.GigaMLPClassifier(hidden=8, device="cpu", random_state=0).fit(x, y)
    >>> bool(model.score(x, y) > 0.95)
    True
    """

    def __init__(
        self,
        hidden: int | Sequence[int] = 512,
        *,
        recipe: Recipe | None = None,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.recipe = recipe
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> GigaMLPClassifier:
        """Train on rows `X` [n, features] and labels `y` [n], from a random start.

        Raises
        ------
        ValueError
            If rows or labels cannot be used.
        gigamlp.errors.TrainingError
            If the loss becomes non-finite.
        """
        from gigamlp.train import finetune

        x, labels = self._rows_and_labels(X, y, reset=True)
        self.classes_, ids = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError("the labels hold one class only; a classifier needs at least 2")
        seed = self._seed()
        self._keep(finetune(None, x, ids, hidden=self._widths(), seed=seed, device=self.device, recipe=self.recipe))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> GigaMLPClassifier:
        """Train for one pass over `X` and `y`, from where the last call left off.

        Parameters
        ----------
        X : array_like [n, features]
        y : array_like [n]
        classes : array_like, optional
            All labels that any call may bring; needed in the first call.

        Notes
        -----
        The first call's rows decide the input's scale. The learning rate stays at the recipe's, and nothing is held
        out or averaged.
        """
        from gigamlp.train import Recipe, finetune

        first = not hasattr(self, "mlp_")
        x, labels = self._rows_and_labels(X, y, reset=first)
        if first:
            if classes is None:
                raise InvalidInput("the first call of partial_fit needs classes=, all labels that there will be")
            self.classes_ = np.unique(classes)
            if len(self.classes_) < 2:
                raise DataError("classes hold one class only; a classifier needs at least 2")
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise InvalidInput(f"classes={classes!r} are not those of the first call, {self.classes_.tolist()}")
        ids = np.minimum(np.searchsorted(self.classes_, labels), len(self.classes_) - 1)
        unknown = np.flatnonzero(self.classes_[ids] != labels)
        if unknown.size:
            label, known = labels[unknown[:1]].tolist()[0], self.classes_.tolist()[:20]
            raise DataError(f"label {label!r} of row {unknown[0]} is not one of {known}")
        start = self._start(x) if first else self.mlp_
        recipe = (self.recipe or Recipe()).with_(epochs=1, schedule="constant", warmup=0.0, ema=0.0)
        self._keep(finetune(start, x, ids, seed=self._seed(), device=self.device, recipe=recipe, validation=0))
        return self

    def predict(self, X: Any) -> Array:
        """Return the label [n] of each row of `X` [n, features]."""
        rows = self._rows(X)  # first, as it checks that there is a fit
        ids = self._runner.session.class_ids(rows)
        return np.asarray(self.classes_[ids])

    def predict_proba(self, X: Any) -> Array:
        """Return the probability float32 [n, classes] of each class, in the order of `classes_`."""
        rows = self._rows(X)
        return np.asarray(self._runner.session.predict_proba(rows))

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _rows_and_labels(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        x, labels = validate_data(self, X, y, reset=reset, dtype="numeric")
        check_classification_targets(labels)
        return _narrow(x), np.asarray(labels)

    def _rows(self, X: Any) -> Array:
        check_is_fitted(self, "mlp_")
        return _narrow(validate_data(self, X, reset=False, dtype="numeric"))

    def _widths(self) -> tuple[int, ...]:
        widths = tuple(self.hidden) if isinstance(self.hidden, Sequence | np.ndarray) else (self.hidden,)
        if not widths or any(isinstance(w, bool) or not isinstance(w, int | np.integer) or w < 1 for w in widths):
            raise InvalidInput(f"hidden must be a whole number >= 1, or a sequence of them, got {self.hidden!r}")
        return tuple(int(width) for width in widths)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _start(self, x: Array) -> MLP:
        from gigamlp.mlp import MLP
        from gigamlp.train.problem import random_layers

        mean, spread = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
        scale = 1 / np.where(spread > 0, spread, 1.0)
        layers = random_layers((x.shape[1], *self._widths(), len(self.classes_)), self._seed())
        return MLP(tuple(layers), input_scale=scale, input_offset=-mean * scale)

    def _keep(self, mlp: MLP) -> None:
        self.mlp_ = mlp.with_(name=type(self).__name__)
        self._runner = _Runner(self.mlp_, self.device)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_runner", None)
        if "mlp_" in state:
            from gigamlp.modelfile import pack

            state["mlp_"] = pack(state["mlp_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "mlp_" in state:
            from gigamlp.mlp import MLP
            from gigamlp.modelfile import unpack

            mlp = unpack(state["mlp_"], "the pickled classifier")
            assert isinstance(mlp, MLP)
            self._keep(mlp)


def _narrow(x: Array) -> Array:
    """Return rows in a dtype that sessions and training take without copies of copies."""
    return x.astype(np.float32) if x.dtype.kind == "f" and x.dtype.itemsize > 8 else x

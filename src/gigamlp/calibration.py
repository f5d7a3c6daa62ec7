"""Thresholds for a cascade, from rows that no stage was trained on, with a bound on what they cost.

The bound needs nothing of the models or the data, but that validation rows and later rows are drawn alike and
independently. When later rows differ, `gigamlp.unsure.drift` tells by the share of rows that go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.cascade import Calibration, Cascade, goes_on
from gigamlp.errors import DataError, InvalidInput
from gigamlp.integer import RANGES
from gigamlp.labels import encode_labels
from gigamlp.mlp import MLP
from gigamlp.quantize import form_of

__all__ = ["calibrate", "losses_allowed", "scheme_logits", "thresholds_for"]

Array = NDArray[Any]


def calibrate(
    stages: Sequence[MLP],
    x_val: ArrayLike,
    y_val: ArrayLike | None = None,
    *,
    max_loss: float = 0.001,
    confidence: float = 0.95,
    name: str = "",
) -> Cascade:
    """Return the cascade of `stages` that stops as early as `max_loss` allows.

    With probability `confidence` over the draw of the validation rows, at most a share `max_loss` of all rows of their
    kind is lost: answered right by the last stage, and wrong by the cascade. So its accuracy is at most `max_loss`
    below the last stage's (rows that it answers right and the last stage wrong are not set against them). Without
    labels a row is lost if the two differ at all, which bounds the same.

    Parameters
    ----------
    stages : sequence of MLP
        The cheapest first; see `Cascade`.
    x_val : array_like, shape [n, features]
        Rows that no stage was trained on. Byte rows (uint8, int8) go through stages that carry a scheme in its
        arithmetic, which engines equal; else through float32.
    y_val : array_like, shape [n], optional
        Their labels.
    max_loss : float
        A fraction.
    confidence : float
        A fraction.
    name : str
        The cascade's; see `Cascade`.

    Returns
    -------
    Cascade
        With a `Calibration`, which its file keeps.

    Raises
    ------
    ModelError
        If the stages do not fit each other.
    InvalidInput
        If a fraction is none, or there are too few rows for any threshold to be proven; it says how many it takes.
    DataError
        If the labels do not fit.

    Notes
    -----
    A lower threshold only ever adds lost rows to those that stop at a stage, so their share falls with the threshold,
    and the lowest one whose Clopper-Pearson upper bound (Biometrika 26, 1934) is within `max_loss` keeps the promise,
    with no grid and no correction for having looked at all of them (Bates, Angelopoulos, Lei, Malik, Jordan:
    Distribution-free, risk-controlling prediction sets, Journal of the ACM 68(6), 2021, theorem 1). With more than
    two stages each gets an equal part of `max_loss` and of ``1 - confidence``, over all rows, also those that stopped
    before: their sum bounds the whole.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2000, 2)); y = (x[:, 0] + x[:, 1] > 0).astype(int)
    >>> rough = gm.MLP([gm.Layer([[0.0, 0.0], [1.0, 0.8]])]); exact = gm.MLP([gm.Layer([[0.0, 0.0], [1.0, 1.0]])])
    >>> cascade = gm.calibrate([rough, exact], x, y, max_loss=0.01)
    >>> cascade.calibration.rows, cascade.calibration.unsure[0] < 300
    (2000, True)
    """
    whole = Cascade(tuple(stages), (math.inf,) * (len(tuple(stages)) - 1), name=name)
    rows = whole.check_rows(x_val)
    targets = None
    if y_val is not None:
        labels = np.asarray(y_val)
        if labels.shape != (len(rows),):
            raise DataError(f"{len(rows)} validation rows need labels of shape [{len(rows)}], got {list(labels.shape)}")
        targets = encode_labels(labels, whole.classes)
    logits = [scheme_logits(stage, rows) for stage in whole.stages]
    ids = [whole.class_ids(z) for z in logits]
    margins = [whole.margins(z).astype(np.float32) for z in logits[:-1]]
    thresholds = thresholds_for(ids, margins, targets, max_loss=max_loss, confidence=confidence)
    on = np.ones(len(rows), np.bool_)
    unsure = []
    for margin, threshold in zip(margins, thresholds, strict=True):
        on &= goes_on(margin, threshold)
        unsure.append(int(on.sum()))
    return whole.with_(
        thresholds=thresholds,
        calibration=Calibration(len(rows), tuple(unsure), max_loss, confidence, targets is not None),
    )


def scheme_logits(mlp: MLP, rows: Array) -> Array:
    """Return the float32 logits [n, outputs] that an engine in the MLP's scheme equals; without a scheme, float32's."""
    if mlp.scheme is None or rows.dtype.name not in RANGES:
        return mlp.logits(rows)
    return np.asarray(form_of(mlp, rows.dtype.name).reference_logits(rows))


def thresholds_for(
    class_ids: Sequence[Array],
    margins: Sequence[Array],
    targets: Array | None,
    *,
    max_loss: float,
    confidence: float,
) -> tuple[float, ...]:
    """Return the thresholds that `calibrate` chooses, from the answers of all stages for all validation rows.

    Parameters
    ----------
    class_ids : sequence of ndarray [n], one per stage
    margins : sequence of ndarray of float32 [n], one per stage but the last
    targets : ndarray [n] or None
        True class indices.
    max_loss, confidence : float
    """
    for what, value in (("max_loss", max_loss), ("confidence", confidence)):
        if not 0 < value < 1:
            raise InvalidInput(f"{what} is a fraction between 0 and 1, got {value}")
    last, count = class_ids[-1], len(margins)
    own_loss, own_doubt = max_loss / count, (1 - confidence) / count
    allowed = losses_allowed(len(last), own_loss, own_doubt)
    if allowed < 0:
        least = math.ceil(math.log(own_doubt) / math.log1p(-own_loss))
        raise InvalidInput(
            f"{len(last)} validation rows cannot show with confidence {confidence} that at most {max_loss:.4%} are "
            f"lost, even if none is: that takes {least} rows, or a larger max_loss"
        )
    lost_by_last = np.ones(len(last), np.bool_) if targets is None else last == targets
    found = []
    for ids, margin in zip(class_ids[:-1], margins, strict=True):
        lost = np.sort(margin[(ids != last) & lost_by_last & ~np.isnan(margin)])[::-1]
        threshold = np.float32(0) if len(lost) <= allowed else np.nextafter(lost[allowed], np.float32(np.inf))
        if np.isinf(threshold) and np.isinf(lost[: allowed + 1]).all():
            raise InvalidInput("a stage is infinitely sure of wrong answers: its logits overflow float32")
        found.append(float(threshold))
    return tuple(found)


def losses_allowed(rows: int, share: float, doubt: float) -> int:
    """Return the largest number of losses among `rows` whose upper bound for the true share is at most `share`.

    The bound is Clopper's and Pearson's one-sided one with confidence ``1 - doubt``: the number is the largest k with
    P(Binomial(rows, share) <= k) <= doubt. -1 if there is none.

    Examples
    --------
    >>> losses_allowed(5000, 0.001, 0.05), losses_allowed(2995, 0.001, 0.05), losses_allowed(2994, 0.001, 0.05)
    (1, 0, -1)
    """
    below, k = 0.0, 0
    while k <= rows:
        choose = math.lgamma(rows + 1) - math.lgamma(k + 1) - math.lgamma(rows - k + 1)
        below += math.exp(choose + k * math.log(share) + (rows - k) * math.log1p(-share))
        if below > doubt:
            return k - 1
        k += 1
    return rows

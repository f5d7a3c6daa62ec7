"""`gigamlp frontier`: which networks are worth having on this device, by accuracy and by measured speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gigamlp.bench import bench, limits_of
from gigamlp.cascade import Model
from gigamlp.cascades import measure_cascades
from gigamlp.engines.registry import engine
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.mlp import MLP
from gigamlp.quantize import form_of, quantise
from gigamlp.record import Record, Row
from gigamlp.train.window import bytes_moved

__all__ = ["Frontier", "Point", "frontier", "pick"]

Progress = Callable[[int, int, str], None]
Pair = tuple[ArrayLike, ArrayLike]

_ITEM = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
_CALIBRATION = 5000


@dataclass(frozen=True)
class Point:
    """One way to run one network.

    Parameters
    ----------
    name : str
    hidden : tuple of int
    bytes_read : int
        Of each row, by the network.
    bytes_moved : float
        Of each row, by memory with lines of 64 bytes, for rows that lie one behind the other.
    scheme : str or None
        What it was computed in; ``int8`` for an engine's own integer arithmetic, None for float weights.
    engine, variant : str
    batch : int
    input_dtype, residence : str
    samples_per_s : float
        Measured here.
    validation_accuracy : float
        What points are compared and picked by: that of the reference of `scheme` (of float32 for ``int8``).
    test_accuracy : float or None
        Of the timed answers.
    dominated : bool
        Whether another point is at least as good in both and better in one.
    """

    name: str
    hidden: tuple[int, ...]
    bytes_read: int
    bytes_moved: float
    scheme: str | None
    engine: str
    variant: str | None
    batch: int
    input_dtype: str
    residence: str
    samples_per_s: float
    validation_accuracy: float
    test_accuracy: float | None
    dominated: bool = False


@dataclass(frozen=True)
class Frontier:
    """All points, the fastest first, and the record of their measurement."""

    points: tuple[Point, ...]
    record: Record

    @property
    def best(self) -> tuple[Point, ...]:
        """Points that no other one dominates, the fastest first."""
        return tuple(point for point in self.points if not point.dominated)

    @classmethod
    def of(cls, record: Record) -> Frontier:
        """Return the frontier that a saved record holds.

        Raises
        ------
        InvalidInput
            If the record is of another command.
        """
        if "frontier" not in record.extra:
            raise InvalidInput("the record holds no frontier; `gigamlp frontier --out FILE` writes one that does")
        points = tuple(Point(**{**each, "hidden": tuple(each["hidden"])}) for each in record.extra["frontier"])
        return cls(points, record)


def frontier(
    models: Sequence[MLP],
    validation: Pair,
    *,
    test: Pair | None = None,
    calibration: ArrayLike | None = None,
    precision: Sequence[str] = ("w8", "float"),
    engines: Sequence[str] | None = None,
    batch: Sequence[int] = (65536,),
    input_dtype: Sequence[str] = ("uint8",),
    residence: Sequence[str] = ("hot",),
    threads: int | None = None,
    device: str = "auto",
    repeats: int = 7,
    max_disagreement: float = 0.01,
    cascades: int = 0,
    command: str = "gigamlp.frontier.frontier",
    progress: Progress | None = None,
) -> Frontier:
    """Measure every model in every precision on this device, and mark what is dominated.

    Parameters
    ----------
    models : sequence of MLP
        Of different names: of different widths, or reading different columns.
    validation : (x, y)
        Rows that the models were not trained on; what is compared.
    test : (x, y), optional
        Rows for the accuracy that is reported; nothing is chosen by them.
    calibration : array_like, optional
        Training rows for integer schemes that need some; the validation rows otherwise.
    precision : sequence of str
        ``w8``, or another scheme of `gigamlp.quantise`; ``float``: the weights as they are.
    engines, batch, input_dtype, residence, threads, device, repeats, command
        See `gigamlp.bench.bench`; the answers are classes.
    max_disagreement : float
        Variants are timed that give another class than the float32 model for at most this share of the validation rows.
    cascades : int
        How many cascades of the models are measured too: those that `gigamlp.propose.propose` finds by the speeds of
        the models alone. Their thresholds come from the validation rows, so their validation accuracy is a little too
        good.
    progress : callable, optional
        Called with (done, total, text).

    Raises
    ------
    InvalidInput
        If names repeat or there is nothing to measure.
    Unsupported
        If nothing can run here.
    """
    from gigamlp.measure.telemetry import resolve_device

    names = [mlp.name for mlp in models]
    if not names or not precision:
        raise InvalidInput("name at least one model and one precision")
    if len(set(names)) != len(names):
        raise InvalidInput(f"models need different names, got {', '.join(names)}; mlp.with_(name=...) gives one")
    place = resolve_device(device)
    for each in engines or ():
        reason = engine(each).unavailable(place)
        if reason is not None:
            raise Unsupported(f"engine {each!r} cannot run on {place}: {reason}")
    x_val, y_val = np.asarray(validation[0]), np.asarray(validation[1])
    data = (x_val, y_val) if test is None else test
    limits = limits_of(place)
    rows: list[Row] = []
    points: list[Point] = []
    skipped: list[dict[str, str]] = []
    records: list[tuple[MLP, str, Record]] = []
    for index, mlp in enumerate(models):
        for turn, kind in enumerate(precision):
            if progress is not None:
                progress(index * len(precision) + turn, len(models) * len(precision), f"{mlp.name}, {kind}")
            try:
                made = _in_precision(mlp, kind, x_val if calibration is None else calibration)
            except Unsupported as error:
                skipped.append({"model": mlp.name, "precision": kind, "reason": str(error)})
                continue
            for name in engines or (None,):  # one by one: that one cannot run this is no reason to skip the others
                try:
                    record = bench(
                        made,
                        engines=None if name is None else [name],
                        batch=batch,
                        input_dtype=input_dtype,
                        residence=residence,
                        threads=threads,
                        data=data,
                        validation=x_val,
                        device=place,
                        repeats=repeats,
                        max_disagreement=max_disagreement,
                        command=command,
                        limits=limits,
                    )
                except Unsupported as error:
                    skipped.append(
                        {"model": mlp.name, "precision": kind, "engine": name or "any", "reason": str(error)}
                    )
                    continue
                records.append((made, kind, record))
                skipped += [{"model": mlp.name, "precision": kind, **each} for each in record.extra["skipped"]]
    known: dict[tuple[str, str | None], float] = {}
    for made, kind, record in records:
        for measured in record.rows:
            row = replace(measured, scheme=computed_in(measured, made))
            own = row.scheme or "float"
            if own != kind and own in precision:
                continue  # an engine that does it otherwise: that has its own turn
            if (made.name, row.scheme) not in known:
                known[made.name, row.scheme] = _accuracy(made, row.scheme, x_val, y_val, calibration)
            rows.append(row)
            points.append(_point(made, row, known[made.name, row.scheme], tested=test is not None))
    if not points:
        raise Unsupported("nothing could be timed:\n  " + "\n  ".join(dict.fromkeys(s["reason"] for s in skipped)))
    alike: dict[str, Any] = {
        "batch": batch[:1],
        "residence": residence[:1],
        "input_dtype": ["uint8"],
        "threads": threads,
        "device": place,
        "repeats": repeats,
        "max_disagreement": max_disagreement,
        "command": command,
        "limits": limits,
    }
    timed = ((made, row) for made, _, record in records for row in record.rows)
    more = measure_cascades(list(timed), cascades, (x_val, y_val), data, options=alike, skipped=skipped)
    rows += [row for _, row, _ in more]
    points += [_point(cascade, row, accuracy, tested=test is not None) for cascade, row, accuracy in more]
    facts = {key: value for key, value in records[0][2].extra.items() if key in ("roofs", "no_roofs")}
    extra = {
        **facts,
        "frontier": [{**asdict(each), "hidden": list(each.hidden)} for each in _marked(points)],
        "skipped": skipped,
        "validation_rows": len(x_val),
    }
    return Frontier(_marked(points), Record(records[0][2].device, records[0][2].versions, command, rows, extra))


def computed_in(row: Row, mlp: MLP) -> str | None:
    """Return what a row was computed in: a scheme, ``int8`` for an engine's own arithmetic, or None for float weights.

    A record's `scheme` is what the model carries; float engines run such a model in float all the same.
    """
    options = dict(part.split("=", 1) for part in (row.variant or "").split() if "=" in part)
    named = options.get("scheme")
    if named is not None:
        return None if named == "float32" else named
    own = "w8" if mlp.scheme is None else mlp.scheme.name
    if options.get("compute") == "int8":
        return own if options.get("hidden") in ("float", "scheme") else "int8"
    if "compute" in options or row.engine is None or not engine(row.engine).integer:
        return None
    return own if row.input_dtype in ("uint8", "int8") else None


def _in_precision(mlp: MLP, kind: str, calibration: ArrayLike) -> MLP:
    plain = mlp.with_(scheme=None)
    if kind == "float":
        return plain
    if mlp.scheme is not None and mlp.scheme.name == kind:
        return quantise(mlp, kind)
    return quantise(plain, kind, calibration=None if kind == "w8" else np.asarray(calibration)[:_CALIBRATION])


def _accuracy(mlp: MLP, scheme: str | None, x: Any, y: Any, calibration: ArrayLike | None) -> float:
    """Return the share of right answers of the reference: the integer one of `scheme`, or float32."""
    if scheme in (None, "int8") or x.dtype not in (np.uint8, np.int8):
        answers = mlp.predict(x)
    else:
        own = (
            mlp
            if mlp.scheme is not None
            else _in_precision(mlp, str(scheme), x if calibration is None else calibration)
        )
        answers = mlp.answers(form_of(own, x.dtype.name).reference_logits(x))
    return float(np.mean(answers == y))


def _point(mlp: Model, row: Row, accuracy: float, *, tested: bool) -> Point:
    item = _ITEM[row.input_dtype or "uint8"]
    assert row.engine is not None
    assert row.batch is not None
    assert row.samples_per_s is not None
    return Point(
        name=mlp.name,
        hidden=mlp.hidden,
        bytes_read=mlp.features_read * item,
        bytes_moved=bytes_moved(mlp.columns, mlp.features * item, itemsize=item),
        scheme=row.scheme,
        engine=row.engine,
        variant=row.variant,
        batch=row.batch,
        input_dtype=row.input_dtype or "uint8",
        residence=row.residence or "hot",
        samples_per_s=row.samples_per_s,
        validation_accuracy=accuracy,
        test_accuracy=row.accuracy if tested else None,
    )


def _marked(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points, the fastest first, with what is dominated marked."""
    made = []
    reached = (-1.0, 0.0)  # the best accuracy among those that are faster or as fast, and the speed it was reached at
    for point in sorted(points, key=lambda each: (-each.samples_per_s, -each.validation_accuracy)):
        equal = reached == (point.validation_accuracy, point.samples_per_s)
        dominated = point.validation_accuracy <= reached[0] and not equal
        made.append(replace(point, dominated=dominated))
        if not dominated:
            reached = (point.validation_accuracy, point.samples_per_s)
    return tuple(made)


def pick(found: Frontier, *, min_accuracy: float | None = None, min_share_of_fastest: float | None = None) -> Point:
    """Return the fastest point that is accurate enough, or the most accurate one that is fast enough.

    Accuracy is that on the validation rows.

    Parameters
    ----------
    found : Frontier
    min_accuracy : float, optional
        A fraction: the fastest point of at least this accuracy.
    min_share_of_fastest : float, optional
        A fraction: the most accurate point of at least this share of the fastest point's speed.

    Raises
    ------
    InvalidInput
        If not exactly one limit is given, it is no fraction, or no point reaches it.
    """
    if (min_accuracy is None) == (min_share_of_fastest is None):
        raise InvalidInput("give either min_accuracy or min_share_of_fastest")
    limit = min_accuracy if min_accuracy is not None else min_share_of_fastest
    if limit is None or not 0 <= limit <= 1:
        raise InvalidInput(f"a limit is a fraction between 0 and 1, got {limit!r}")
    if min_accuracy is not None:
        good = [each for each in found.points if each.validation_accuracy >= min_accuracy]
        if not good:
            best = max(each.validation_accuracy for each in found.points)
            raise InvalidInput(f"no point has a validation accuracy of {min_accuracy:.4f}; the best has {best:.4f}")
        return max(good, key=lambda each: (each.samples_per_s, each.validation_accuracy))
    fastest = max(each.samples_per_s for each in found.points)
    quick = [each for each in found.points if each.samples_per_s >= limit * fastest]
    return max(quick, key=lambda each: (each.validation_accuracy, each.samples_per_s))

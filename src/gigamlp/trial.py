"""One trial: rows through a runner, its answers judged against the MLP, its time taken. Shared by tune and bench."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.cascade import Cascade, Model
from gigamlp.engines.base import Engine, Runner
from gigamlp.errors import DataError, InvalidInput, MeasurementError
from gigamlp.labels import encode_labels
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant
from gigamlp.staging import fill as copy_rows

__all__ = ["Gate", "Verdict", "fetch", "fill", "judge", "launch", "launch_cold", "make_gate", "probe_rows", "run_rows"]

Array = NDArray[Any]
LOGIT_TOLERANCE = 1e-3  # relative; DESIGN.md, "What `auto` may do"
MAX_COLD_INPUTS = 4096
_ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


# ---- rows in, answers out -------------------------------------------------------------------------------------------


def fill(runner: Runner, rows: Array) -> None:
    """Copy `rows` [n <= batch, features] into the runner's static input; rows past `n` repeat the first ones."""
    batch, target = runner.spec.batch, runner.input
    count = min(len(rows), batch)
    copy_rows(target[:count], rows[:count])
    while count < batch:  # on the device, by doubling: two million rows need not exist on the host
        more = min(count, batch - count)
        target[count : count + more] = target[:more]
        count += more


def fetch(y: Any) -> Array | tuple[Array, ...]:
    """Return an output of `Runner.run` as owned NumPy arrays (float32 or integers)."""
    if isinstance(y, tuple):
        return tuple(np.asarray(fetch(part)) for part in y)
    if isinstance(y, np.ndarray):
        return y.copy()
    host = y.detach().cpu()
    copied: Array = (host.float() if host.is_floating_point() else host).numpy().copy()
    return copied


def run_rows(runner: Runner, rows: Array) -> Array:
    """Return the runner's answers for all of `rows`, through its static input, in batches with the tail padded.

    For output ``margin`` the class indices only.
    """
    batch = runner.spec.batch
    parts = []
    for begin in range(0, len(rows), batch):
        block = rows[begin : begin + batch]
        fill(runner, block)
        y = fetch(runner.run(runner.input))
        parts.append((y[0] if isinstance(y, tuple) else y)[: len(block)])
    return np.concatenate(parts)


def row_bytes(mlp: Model, spec: Spec) -> int:
    """Bytes of one row that the MLP reads, in the Spec's input dtype."""
    return mlp.features_read * _ITEM_BYTES[spec.input_dtype]


def answer_bytes(runner: Runner) -> int:
    """Bytes of the answers of one run, as the runner writes them."""
    y = runner.run(runner.input)
    return sum(int(part.nbytes) for part in (y if isinstance(y, tuple) else (y,)))


def cold_count(mlp: Model, spec: Spec, cache_bytes: int) -> int:
    """Return how many inputs together exceed 3x `cache_bytes`.

    Raises
    ------
    InvalidInput
        If that takes more than 4,096 inputs (a batch so small says nothing about memory), or the size is unknown.
    """
    if cache_bytes <= 0:
        raise InvalidInput("the size of the last-level cache is unknown here, so no rows can be called cold")
    count = max(1, math.ceil(3 * cache_bytes / (mlp.features * _ITEM_BYTES[spec.input_dtype] * spec.batch)))
    if count > MAX_COLD_INPUTS:
        least = math.ceil(spec.batch * count / MAX_COLD_INPUTS)
        raise InvalidInput(f"cold rows in batches of {spec.batch} need {count} inputs; use a batch of {least} or more")
    return count


def launch_cold(mlp: Model, runner: Runner, rows: Array, cache_bytes: int) -> Callable[[], object]:
    """Return a callable that runs each time on the next of several inputs, together more than 3x `cache_bytes`.

    All hold `rows`. What an engine does to rows that are not in its static input (a CUDA Graph copies them there) is
    part of the run, as it is for a caller whose rows lie somewhere in memory. Binding a graph to each input instead
    measures something else: switching between many graphs costs up to three times the run itself (784-512-10 at 1,024
    rows on the H200: 9.8 us with 2 graphs, 16.1 with 32, 27.6 with 118).
    """
    from gigamlp.measure.timing import rotating

    fill(runner, rows)
    count = cold_count(mlp, runner.spec, cache_bytes)
    copy = runner.input.copy if isinstance(runner.input, np.ndarray) else runner.input.clone
    inputs = [runner.input] if count == 1 else [copy() for _ in range(count)]
    run = runner.run
    return rotating([functools.partial(run, x) for x in inputs])


# ---- the accuracy gate ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """The rows and limits that decide whether a runner's answers are good enough to compete.

    Attributes
    ----------
    x : ndarray [n, features]
    ids : ndarray of int64 [n] or None
        The MLP's own float32 class indices; None if the head has no single class.
    targets : ndarray of int64 [n] or None
        The true class indices, if labels were given.
    logits : ndarray of float64 [n, outputs]
        The reference.
    given : bool
        Whether the rows are the user's validation rows. Otherwise they were drawn, and logits decide.
    min_accuracy, max_disagreement : float or None
    ranges : dict or None
        The hidden ranges that given rows reach, for candidates in a byte scheme; see `gigamlp.quantize.calibrate`.
    """

    x: Array
    logits: Array
    ids: Array | None
    targets: Array | None = None
    given: bool = False
    min_accuracy: float | None = None
    max_disagreement: float | None = 0.001
    ranges: dict[str, Array] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a gate found: see `Candidate` for the fields."""

    accuracy: float | None = None
    disagreement: float | None = None
    logit_error: float | None = None
    rejected: str | None = None


def probe_rows(mlp: Model, input_dtype: str, rows: int = 512, seed: int = 0) -> Array:
    """Draw rows to check an engine with when no validation rows are given: bytes, or numbers of the model's scale."""
    rng = np.random.default_rng(seed)
    if input_dtype in ("uint8", "int8"):
        info = np.iinfo(input_dtype)
        return rng.integers(info.min, info.max + 1, (rows, mlp.features)).astype(input_dtype)
    x = rng.standard_normal((rows, mlp.features))
    network = mlp if isinstance(mlp, MLP) else mlp.stages[-1]
    scale = np.asarray(network.input_scale, np.float64)
    offset = np.asarray(network.input_offset, np.float64)
    safe = np.where(scale == 0, 1.0, scale)
    runs = network.columns or ((0, network.features),)
    read = np.concatenate([np.arange(start, stop) for start, stop in runs])
    x[:, read] = (x[:, read] - offset) / safe
    return x.astype(np.float16).astype(np.float32) if input_dtype != "float32" else x.astype(np.float32)


def class_indices(mlp: Model, y: ArrayLike) -> NDArray[np.int64]:
    """Turn labels into class indices of `mlp`.

    Raises
    ------
    DataError
        If a label is not one of the MLP's classes.
    """
    labels = np.asarray(y)
    if mlp.classes is None or labels.ndim != 1:
        raise DataError(f"head {mlp.head!r} takes no class labels of shape {list(labels.shape)}")
    return encode_labels(labels, mlp.classes)


def as_input(x: Array, input_dtype: str, what: str) -> Array:
    """Return `x` as an integer input dtype if that loses nothing; rows for a float input are returned as they are.

    Raises
    ------
    InvalidInput
        If a value would change.
    """
    if input_dtype not in ("uint8", "int8") or x.dtype == np.dtype(input_dtype):
        return x
    with np.errstate(invalid="ignore"):
        cast = x.astype(input_dtype)
    if not np.array_equal(cast, x):
        raise InvalidInput(f"{what} ({x.dtype}) hold values that {input_dtype} cannot; use input dtype float32")
    return cast


def make_gate(
    mlp: Model,
    input_dtype: str,
    validation: tuple[ArrayLike, ArrayLike | None] | None = None,
    *,
    min_accuracy: float | None = None,
    max_disagreement: float | None = None,
) -> Gate:
    """Make the gate for `mlp`: validation rows ``(x, y)`` or ``(x, None)``, or drawn rows if there are none.

    Raises
    ------
    InvalidInput
        If a limit is outside 0..1, or `min_accuracy` is asked for without labels.
    DataError
        If the rows and labels do not fit the MLP.
    """
    for name, limit in (("min_accuracy", min_accuracy), ("max_disagreement", max_disagreement)):
        if limit is not None and not 0 <= limit <= 1:
            raise InvalidInput(f"{name} is a fraction in 0..1, got {limit}")
    if max_disagreement is None and min_accuracy is None:
        max_disagreement = 0.001
    if validation is None:
        if min_accuracy is not None:
            raise InvalidInput("min_accuracy needs validation=(x, y) with labels")
        x, y = probe_rows(mlp, input_dtype), None
    else:
        x, y = mlp.check_rows(validation[0]), validation[1]
        if len(x) == 0:
            raise DataError("validation holds no rows")
        x = as_input(x, input_dtype, "the validation rows")
        if y is not None and len(np.asarray(y)) != len(x):
            raise DataError(f"validation has {len(x)} rows, but {len(np.asarray(y))} labels")
        if y is None and min_accuracy is not None:
            raise InvalidInput("min_accuracy needs validation=(x, y) with labels")
    single = mlp.head in ("softmax", "sigmoid")
    return Gate(
        x=x,
        logits=mlp.reference_logits(x),
        ids=mlp.class_ids(mlp.logits(x)) if single else None,
        targets=None if y is None or not single else class_indices(mlp, y),
        given=validation is not None,
        min_accuracy=min_accuracy,
        max_disagreement=max_disagreement,
    )


def judge(engine: Engine, mlp: Model, runner: Runner, gate: Gate, *, carried: bool | None = None) -> Verdict:
    """Run the gate's rows through `runner` and say whether its answers are good enough.

    With validation rows, accuracy or disagreement decides. Without, the logits must agree with float64 within 1e-3
    relative, for which a second runner with output ``logits`` is built if this one gives something else. A model that
    carries a scheme is spared that; `carried` says so where `mlp` was given its scheme for this trial only.
    """
    spec = runner.spec
    excused = (isinstance(mlp, Cascade) or mlp.scheme is not None) if carried is None else carried
    y = run_rows(runner, gate.x)
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        return Verdict(rejected="answers hold NaN or infinite values")
    ids = _ids(mlp, spec, y)
    error = _relative(y, gate.logits) if spec.output == "logits" else None
    disagreement = None if ids is None or gate.ids is None else float(np.mean(ids != gate.ids))
    accuracy = None if ids is None or gate.targets is None else float(np.mean(ids == gate.targets))
    if error is None and isinstance(mlp, MLP) and (not gate.given or disagreement is None):
        error = _logit_error(engine, mlp, spec, runner.variant, gate)
    if isinstance(mlp, Cascade) and not gate.given:
        return Verdict(rejected=_reject_cascade(mlp, runner.variant, gate, disagreement), disagreement=disagreement)
    return Verdict(accuracy, disagreement, error, _reject(excused, gate, accuracy, disagreement, error))


def _ids(mlp: Model, spec: Spec, y: Array) -> Array | None:
    if mlp.head not in ("softmax", "sigmoid"):
        return None
    if spec.output in ("class", "margin"):
        return y
    return mlp.class_ids(y) if spec.output == "logits" else np.argmax(y, axis=1)


def _relative(y: Array, reference: Array) -> float:
    norm = float(np.linalg.norm(reference))
    return float(np.linalg.norm(y - reference)) / norm if norm else float(np.abs(y).max(initial=0.0))


def _logit_error(engine: Engine, mlp: Model, spec: Spec, variant: Variant, gate: Gate) -> float:
    other = engine.build(mlp, replace(spec, output="logits"), variant)
    try:
        return _relative(run_rows(other, gate.x), gate.logits)
    finally:
        other.close()


def _reject(
    excused: bool, gate: Gate, accuracy: float | None, disagreement: float | None, error: float | None
) -> str | None:
    if gate.given and disagreement is not None:
        if gate.min_accuracy is not None and (accuracy is None or accuracy < gate.min_accuracy):
            return f"accuracy {accuracy:.4f} on the validation rows is below {gate.min_accuracy:.4f}"
        if gate.max_disagreement is not None and disagreement > gate.max_disagreement:
            share = f"{disagreement:.4%} of the validation rows get another class than in float32"
            return f"{share}, more than {gate.max_disagreement:.4%}"
        return None
    if error is not None and not excused and not error <= LOGIT_TOLERANCE:
        return f"logits differ from float64 by {error:.2e} relative, more than {LOGIT_TOLERANCE:.0e}"
    return None


def _reject_cascade(cascade: Cascade, variant: Variant, gate: Gate, disagreement: float | None) -> str | None:
    """Judge a cascade without validation rows: its rows' logits are those of different networks, so classes decide."""
    exact = "float32" in (variant.get("scheme"), variant.get("compute"))
    if not exact and any(stage.scheme is None for stage in cascade.stages):
        return "without validation rows only float32 and stages that carry a scheme compete"
    if exact and disagreement is not None and disagreement > (limit := gate.max_disagreement or 0.001):
        return f"{disagreement:.4%} of drawn rows get another class than in NumPy's float32, more than {limit:.4%}"
    return None


def accuracy_of(mlp: Model, runner: Runner, x: Array, targets: Array) -> float:
    """Return the share of right classes among the runner's own answers for `x`."""
    ids = _ids(mlp, runner.spec, run_rows(runner, x))
    if ids is None:
        raise MeasurementError(f"head {mlp.head!r} has no accuracy")
    return float(np.mean(ids == targets))


def launch(runner: Runner) -> Callable[[], object]:
    """Return a callable that launches `runner` once on its static input.

    Where rows are to come from host memory, on a copy of it: rows of a caller are not where a runner wants them.
    """
    run, x = runner.run, runner.input
    if runner.spec.input_on == "host" and isinstance(x, np.ndarray):
        x = x.copy()
    return lambda: run(x)

"""Ridge-ELM: a random, fixed first layer and a second layer by ridge regression, in one or two passes over the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gigamlp.activations import ACTIVATIONS
from gigamlp.errors import InvalidInput
from gigamlp.labels import encode_labels
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP, Layer
from gigamlp.train.gram import GramStats, default_alpha, empty_stats, solve_ridge
from gigamlp.train.network import ACTIVATE
from gigamlp.train.rows import Array, RowStats, Scaling, Source, open_source, scan
from gigamlp.train.settings import matmul_precision

__all__ = ["RidgeFit", "fit_ridge", "fit_ridge_widths", "random_layer", "ridge"]

BIAS_RATIO = 0.25  # spread of the random biases against that of the pre-activations; docs/training.md
_CHUNK_BYTES = 256 << 20
Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class RidgeFit:
    """A fitted ridge-ELM and how it came about.

    Parameters
    ----------
    mlp : MLP
    solver : {"cholesky", "eigh"}
        What solved the normal equations.
    jitter : float
        What had to be added to the diagonal beside `alpha`; 0 as a rule.
    alpha : float
        The ridge penalty used.
    weight_scale : float
        The spread of the pre-activations used.
    seconds : float
        Wall seconds of the whole fit. Where one Gram matrix served several widths, each fit counts it in full.
    gram_seconds, solve_seconds : float
        Parts of `seconds`: the passes over the rows, and the solve.
    rows : int
    device : str
    """

    mlp: MLP
    solver: str
    jitter: float
    alpha: float
    weight_scale: float
    seconds: float
    gram_seconds: float
    solve_seconds: float
    rows: int
    device: str


def ridge(
    x: Any,
    y: Any = None,
    hidden: int = 512,
    *,
    alpha: float | None = None,
    weight_scale: float | None = None,
    activation: str = "relu",
    seed: int = 0,
    device: str = "auto",
    chunk_rows: int | None = None,
    name: str | None = None,
) -> MLP:
    """Fit a ridge-ELM and return it: `fit_ridge` without the report.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.integers(0, 256, (200, 6), dtype=np.uint8)
    >>> y = np.where(x[:, 0] > x[:, 1], "more", "less")
    >>> mlp = ridge(x, y, hidden=32, device="cpu")
    >>> mlp.predict(x[:4]).tolist() == y[:4].tolist()
    True
    """
    return fit_ridge(
        x,
        y,
        hidden,
        alpha=alpha,
        weight_scale=weight_scale,
        activation=activation,
        seed=seed,
        device=device,
        chunk_rows=chunk_rows,
        name=name,
    ).mlp


def fit_ridge(
    x: Any,
    y: Any = None,
    hidden: int = 512,
    *,
    alpha: float | None = None,
    weight_scale: float | None = None,
    activation: str = "relu",
    seed: int = 0,
    device: str = "auto",
    chunk_rows: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> RidgeFit:
    """Fit a classifier whose first layer is random and fixed, and whose second layer is a ridge regression.

    An extreme learning machine (Huang, Zhu and Siew, *Extreme learning machine: theory and applications*, 2006) as the
    article has it. The rows are read in chunks and only sums over them are kept, so memory does not grow with the rows.

    Parameters
    ----------
    x : array_like [n, features], or chunks
        uint8 or any other numbers, memory-mapped if you like. Or, with `y` None, a function that returns a fresh
        iterable of ``(x, y)`` chunks (it is called twice), or a list of chunks.
    y : array_like [n] of int or str
    hidden : int
        Width of the random layer. For one seed, narrower layers are the first units of wider ones.
    alpha : float, optional
        Ridge penalty on the weights, not on the bias, as scikit-learn's ``Ridge(alpha)`` on one-hot targets. Default:
        1e-4 of the mean diagonal of the centred Gram matrix.
    weight_scale : float, optional
        Standard deviation of the pre-activations over the training rows; biases spread a quarter of it. Default 1.
        For relu it changes nothing but the size of the second layer.
    activation : str
        Of the hidden layer: see `gigamlp.Layer`.
    seed : int
        Draws come from NumPy's PCG64: a seed means the same first layer on every machine.
    device : {"auto", "cpu", "cuda", "cuda:N"}
    chunk_rows : int, optional
        Rows at a time. Default: what keeps a chunk of hidden activations within 256 MB.
    name : str, optional
        Name of the MLP. Default ``ridge-HIDDEN``.
    progress : callable, optional
        Called as ``progress(done, total, info)``; total is 0 where the rows are not counted beforehand.

    Returns
    -------
    RidgeFit

    Raises
    ------
    InvalidInput
        If an argument is out of range, a value is NaN, or the Gram matrix does not fit in memory.
    DataError
        If rows and labels do not match, or there is one class only.
    TrainingError
        If no solver copes.
    """
    fits = fit_ridge_widths(
        x,
        y,
        (hidden,),
        alpha=alpha,
        weight_scale=weight_scale,
        activation=activation,
        seed=seed,
        device=device,
        chunk_rows=chunk_rows,
        name=name,
        progress=progress,
    )
    return fits[hidden]


def fit_ridge_widths(
    x: Any,
    y: Any,
    widths: Iterable[int],
    *,
    alpha: float | None = None,
    weight_scale: float | None = None,
    activation: str = "relu",
    seed: int = 0,
    device: str = "auto",
    chunk_rows: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> dict[int, RidgeFit]:
    """Fit ridge-ELMs of several widths from the statistics of the widest.

    The random features are nested, so a narrower network's Gram matrix is a slice; each result equals, to rounding,
    what `fit_ridge` gives for that width. See there for the parameters.

    Parameters
    ----------
    widths : iterable of int
    name : str, optional
        Prefix of the names: ``NAME-HIDDEN`` for several widths, ``NAME`` itself for one. Default ``ridge-HIDDEN``.

    Returns
    -------
    dict of int to RidgeFit
        In the order of `widths`.
    """
    chosen = _check(
        tuple(widths),
        alpha=alpha,
        weight_scale=weight_scale,
        activation=activation,
        seed=seed,
        chunk_rows=chunk_rows,
    )
    from gigamlp.measure.telemetry import resolve_device

    place = torch.device(resolve_device(device))
    watch = stopwatch()
    source = open_source(x, y)
    found = scan(source)
    widest = max(chosen)
    chunk = chunk_rows or max(256, min(16384, _CHUNK_BYTES // (4 * widest)))
    _check_memory(widest, len(found.classes), min(chunk, found.rows), place)
    spread = 1.0 if weight_scale is None else float(weight_scale)
    scaling = found.scaling()
    first = random_layer(found, widest, weight_scale=spread, activation=activation, seed=seed)
    stats = _accumulate(source, found, first, chunk_rows=chunk, device=place, progress=progress)
    gram_seconds = watch.seconds
    fits = {}
    for number, hidden in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen), f"solving for {hidden}")
        with stopwatch() as solve_watch:
            narrow = stats.narrow(hidden)
            penalty = default_alpha(narrow) if alpha is None else float(alpha)
            solution = solve_ridge(narrow, penalty)
            second = Layer(solution.weight.cpu().numpy(), solution.bias.cpu().numpy())
        label = f"{name or 'ridge'}-{hidden}" if name is None or len(chosen) > 1 else name
        scale, offset = _mlp_input(scaling)
        layer = Layer(first.weight[:hidden], None if first.bias is None else first.bias[:hidden], activation)
        mlp = MLP(
            (layer, second),
            input_scale=scale,
            input_offset=offset,
            classes=found.classes,
            name=label,
        )
        seconds = gram_seconds + solve_watch.seconds
        fits[hidden] = RidgeFit(
            mlp,
            solution.solver,
            solution.jitter,
            penalty,
            spread,
            seconds,
            gram_seconds,
            solve_watch.seconds,
            found.rows,
            str(place),
        )
    if progress is not None:
        progress(len(chosen), len(chosen), "solved")
    return fits


def random_layer(
    found: RowStats, hidden: int, *, weight_scale: float = 1.0, activation: str = "relu", seed: int = 0
) -> Layer:
    """Return the random layer: normal weights of which unit ``i`` takes the ``i``-th row of draws.

    Weights are scaled so that pre-activations have the standard deviation `weight_scale` over rows like the training
    rows with independent features, and lie around 0: the rows' mean is folded into the bias, for uint8 rows, or into
    the MLP's input offset otherwise.
    """
    scaling = found.scaling()
    draws = np.random.default_rng(seed).standard_normal((hidden, found.features + 1))
    scale = np.asarray(scaling.scale, np.float64)
    # fsum: exact, so that the weights do not depend on the order in which a machine adds
    variance = math.fsum((found.variance * scale**2).tolist())
    weight = draws[:, :-1] * (weight_scale / math.sqrt(variance) if variance > 0 else weight_scale)
    bias = draws[:, -1] * (weight_scale * BIAS_RATIO)
    weight = weight.astype(np.float32)
    if scale.ndim == 0:
        bias = bias + weight.astype(np.float64) @ scaling.offset
    return Layer(weight, bias, activation)


def _mlp_input(scaling: Scaling) -> tuple[Any, Any]:
    """Return an MLP's `input_scale` and `input_offset`; a scalar scale has its centring in the bias."""
    if isinstance(scaling.scale, float):
        return scaling.scale, 0.0
    return scaling.scale, scaling.offset


def _accumulate(
    source: Source,
    found: RowStats,
    layer: Layer,
    *,
    chunk_rows: int,
    device: torch.device,
    progress: Progress | None,
) -> GramStats:
    scale, offset = (torch.as_tensor(np.asarray(part, np.float32)).to(device) for part in _mlp_input(found.scaling()))
    weight = torch.from_numpy(layer.weight.T.copy(order="C")).to(device)
    bias = torch.from_numpy(np.array(layer.bias)).to(device)
    activation = ACTIVATE[layer.activation]
    stats = empty_stats(weight.shape[1], len(found.classes), device)
    # one block of memory for all chunks; half of a CPU fit of wide layers would otherwise go into page faults
    room = torch.empty(min(chunk_rows, found.rows), weight.shape[1], device=device)
    with torch.no_grad(), matmul_precision("ieee"):
        for x, y in source.chunks(chunk_rows):
            ids = torch.from_numpy(encode_labels(y, found.classes)).to(device)
            h = room[: len(x)]
            torch.addmm(bias, _to(x, device) * scale + offset, weight, out=h)
            activation.apply(h)
            stats = stats.add(h, torch.nn.functional.one_hot(ids, len(found.classes)).to(h.dtype))
            if progress is not None:
                progress(stats.rows, source.rows or found.rows, "Gram statistics")
    return stats


def _to(x: Array, device: torch.device) -> Tensor:
    """Return rows on the device as float32; uint8 rows travel as bytes."""
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
    return torch.from_numpy(np.require(x, requirements=["C", "W"])).to(device).float()


def _check(
    widths: tuple[int, ...],
    *,
    alpha: float | None,
    weight_scale: float | None,
    activation: str,
    seed: int,
    chunk_rows: int | None,
) -> tuple[int, ...]:
    if not widths:
        raise InvalidInput("no widths given; for example widths=(512, 1024)")
    for what, value, least in [("hidden", w, 1) for w in widths] + [
        ("chunk_rows", chunk_rows or 1, 1),
        ("seed", seed, 0),
    ]:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InvalidInput(f"{what} must be a whole number >= {least}, got {value!r}")
    if alpha is not None and not (math.isfinite(alpha) and alpha >= 0):
        raise InvalidInput(f"alpha must be a finite number >= 0, got {alpha!r}")
    if weight_scale is not None and not (math.isfinite(weight_scale) and weight_scale > 0):
        raise InvalidInput(f"weight_scale must be a finite number > 0, got {weight_scale!r}")
    if activation not in ACTIVATIONS:
        raise InvalidInput(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return tuple(int(width) for width in dict.fromkeys(widths))


def _check_memory(hidden: int, classes: int, chunk_rows: int, device: torch.device) -> None:
    """Refuse a fit that cannot fit: three float64 matrices [hidden, hidden] at the solve, or one beside a chunk."""
    need = 8 * hidden * (hidden + 3 * classes) + max(16 * hidden * hidden, 4 * chunk_rows * hidden)
    have = _available_bytes(device)
    if have is not None and need > have:
        raise InvalidInput(
            f"hidden={hidden} needs about {need / 2**30:.1f} GiB on {device} for its Gram matrix, "
            f"{have / 2**30:.1f} GiB are free; use fewer hidden units"
        )


def _available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None

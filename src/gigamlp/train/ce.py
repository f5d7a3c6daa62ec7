"""Fine-tune all layers of an MLP by gradient descent: cross-entropy, or the loss that its head stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gigamlp.cascade import one_mlp
from gigamlp.errors import DeviceError, InvalidInput, TrainingError
from gigamlp.measure.clock import clock_for, stopwatch
from gigamlp.mlp import MLP
from gigamlp.train.problem import Pair, Problem, prepare
from gigamlp.train.recipe import Recipe, default_recipe
from gigamlp.train.rows import Array
from gigamlp.train.trainer import Score, Trainer, evaluate

__all__ = ["Epoch", "FinetuneFit", "finetune", "fit_finetune"]

_MOST_EVALUATIONS = 40
Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class Epoch:
    """Loss and accuracy after `epoch` epochs, on the validation rows, or on training rows where there are none."""

    epoch: int
    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class FinetuneFit:
    """A trained MLP and how it came about.

    Parameters
    ----------
    mlp : MLP
        From the epoch that was best on the validation rows; from the last where there are none.
    seconds : float
        Wall seconds of the training loop with its evaluations.
    compile_s : float
        Wall seconds of allocation and graph capture before it.
    history : tuple of Epoch
    validation_accuracy : float or None
        Accuracy of `mlp` on the validation rows; None without such rows and for ``regression``.
    validation_loss : float or None
    best_epoch : int
    recipe : Recipe
    precision : str
        Arithmetic of the matrix products.
    graph : bool
        Whether the steps ran from a CUDA graph.
    rows, validation_rows : int
    device : str
    """

    mlp: MLP
    seconds: float
    compile_s: float
    history: tuple[Epoch, ...]
    validation_accuracy: float | None
    validation_loss: float | None
    best_epoch: int
    recipe: Recipe
    precision: str
    graph: bool
    rows: int
    validation_rows: int
    device: str


def finetune(
    mlp: MLP | None,
    x: Any,
    y: Any,
    *,
    hidden: int | Sequence[int] | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    seed: int = 0,
    device: str = "auto",
    validation: Pair | int | None = None,
    progress: Progress | None = None,
    graph: bool | Literal["auto"] = "auto",
    recipe: Recipe | None = None,
    name: str | None = None,
) -> MLP:
    """Train all layers and return the MLP: `fit_finetune` without the report.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.integers(0, 256, (300, 6), dtype=np.uint8)
    >>> y = np.where(x[:, 0] > x[:, 1], "more", "less")
    >>> mlp = finetune(None, x, y, hidden=16, epochs=30, device="cpu")
    >>> bool((mlp.predict(x) == y).mean() > 0.95)
    True
    """
    if mlp is not None:
        one_mlp(mlp, "finetune")
    return fit_finetune(
        mlp,
        x,
        y,
        hidden=hidden,
        epochs=epochs,
        batch=batch,
        lr=lr,
        weight_decay=weight_decay,
        seed=seed,
        device=device,
        validation=validation,
        progress=progress,
        graph=graph,
        recipe=recipe,
        name=name,
    ).mlp


def fit_finetune(
    mlp: MLP | None,
    x: Any,
    y: Any,
    *,
    hidden: int | Sequence[int] | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    seed: int = 0,
    device: str = "auto",
    validation: Pair | int | None = None,
    progress: Progress | None = None,
    graph: bool | Literal["auto"] = "auto",
    recipe: Recipe | None = None,
    name: str | None = None,
) -> FinetuneFit:
    """Train all layers of `mlp`, or a new network, with AdamW, keeping the epoch that is best on held-out rows.

    Parameters
    ----------
    mlp : MLP or None
        Where to start: any depth, activations and head; its labels, columns and input scale are kept. None starts from
        a random network with relu and softmax.
    x : array_like [n, features]
        Raw rows: what the result reads.
    y : array_like
        Labels [n]; 0/1 indicators [n, outputs] for ``multilabel``; values [n] or [n, outputs] for ``regression``.
    hidden : int or sequence of int, optional
        Hidden widths; needed if `mlp` is None, and only then.
    epochs, batch, lr, weight_decay : optional
        Replace a field of the recipe: see `Recipe`.
    seed : int
        Orders the rows, draws the start and the validation rows. On one CPU and thread count a seed gives one result.
    device : {"auto", "cpu", "cuda", "cuda:N"}
    validation : (x, y) or int, optional
        Rows to choose the epoch by: rows of your own, or how many to hold out of `x` (0: none, the last epoch is kept).
        Default: 5,000, of small data sets a twelfth, of fewer than 600 rows none.
    progress : callable, optional
        Called after every epoch as ``progress(done, total, info)``.
    graph : {"auto", True, False}
        Run the steps from a CUDA graph. ``auto``: on CUDA.
    recipe : Recipe, optional
        Default: `default_recipe` for this network and number of rows.
    name : str, optional
        Default ``finetuned-HIDDEN``, or ``mlp-HIDDEN`` from a random start.

    Returns
    -------
    FinetuneFit

    Raises
    ------
    InvalidInput, DataError
        If arguments, rows or labels cannot be used.
    TrainingError
        If the loss becomes non-finite.

    Notes
    -----
    Rows are centred by the training rows' mean while training. The mean goes into the first bias at the end, so the
    result reads raw rows.
    """
    from gigamlp.measure.telemetry import resolve_device

    place = torch.device(resolve_device(device))
    if graph not in ("auto", True, False):
        raise InvalidInput(f"graph must be 'auto', True or False, got {graph!r}")
    use_graph = place.type == "cuda" if graph == "auto" else bool(graph)
    if use_graph and place.type != "cuda":
        raise DeviceError(f"graph=True needs a CUDA device, and this run is on {place}; use graph='auto'")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput(f"seed must be a whole number >= 0, got {seed!r}")
    problem = prepare(mlp, x, y, hidden=hidden, seed=int(seed), device=place, validation=validation, name=name)
    chosen = recipe or default_recipe(problem.layout.widths[1:-1], len(problem.data.x))
    chosen = chosen.with_(epochs=epochs, batch=batch, lr=lr, weight_decay=weight_decay)
    chosen = chosen.with_(batch=min(chosen.batch, len(problem.data.x)))
    clock = clock_for(str(place))
    with stopwatch() as building:
        trainer = Trainer(problem.layout, chosen, problem.data, graph=use_graph)
        clock.synchronize()
    with trainer:
        trainer.reset(problem.start, seed=int(seed))
        with stopwatch() as training:
            kept, history, best = _train(trainer, problem, progress)
            clock.synchronize()
    return FinetuneFit(
        problem.export(kept),
        training.seconds,
        building.seconds,
        history,
        best.accuracy if problem.validation is not None else None,
        best.loss if problem.validation is not None else None,
        best.epoch,
        chosen,
        trainer.precision,
        use_graph,
        len(problem.data.x),
        0 if problem.validation is None else len(problem.validation.x),
        str(place),
    )


def _train(trainer: Trainer, problem: Problem, progress: Progress | None) -> tuple[Array, tuple[Epoch, ...], Epoch]:
    """Run the loop; return the parameters to keep, what was seen, and the epoch they are of."""
    epochs = trainer.recipe.epochs
    every = -(-epochs // _MOST_EVALUATIONS)
    watched = problem.validation or problem.sample()
    history: list[Epoch] = []
    kept = trainer.result().clone()
    best: tuple[Score, Epoch] | None = None

    def look(done: int) -> None:
        nonlocal best
        if done % every == 0 or done == epochs:
            trainer.check()
            score = evaluate(problem.layout, trainer.result(), watched)
            if not np.isfinite(score.loss):
                raise TrainingError(f"the loss became {score.loss} in epoch {done}; use a smaller lr")
            history.append(Epoch(done, score.loss, score.accuracy))
            if problem.validation is None or score.better_than(best[0] if best else None):
                best = (score, history[-1])
                kept.copy_(trainer.result())
        if progress is not None:
            progress(done, epochs, _describe(history))

    trainer.run(look)
    assert best is not None  # the last epoch is always looked at
    return kept.cpu().numpy(), tuple(history), best[1]


def _describe(history: Sequence[Epoch]) -> str:
    if not history:
        return ""
    last = history[-1]
    return f"loss {last.loss:.4f}" + ("" if last.accuracy is None else f", accuracy {100 * last.accuracy:.2f} %")

"""The experiments behind the training defaults: every choice by accuracy on 5,000 held-out training rows of MNIST.

The test rows are never read. Prints tables and writes all figures to --out. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from gigamlp import Record
from gigamlp.data import hold_out, load_mnist
from gigamlp.measure.clock import stopwatch, timestamp
from gigamlp.measure.telemetry import device_info, resolve_device, versions
from gigamlp.train import FAST, Recipe, elm, fit_finetune, fit_ridge, fit_ridge_widths, gram
from gigamlp.train.problem import prepare
from gigamlp.train.trainer import Trainer, evaluate

Row = dict[str, Any]


def score(mlp: Any, rows: tuple[Any, ...]) -> float:
    return float((mlp.predict(rows[2]) == rows[3]).mean())


def show(part: str, settings: Row, accuracies: list[float]) -> Row:
    row = {"part": part, **settings, "accuracies": accuracies, "mean": float(np.mean(accuracies))}
    text = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )
    print(
        f"{part}: {text}: {100 * row['mean']:.2f} % (worst {100 * min(accuracies):.2f}, {len(accuracies)} seeds)",
        flush=True,
    )
    return row


def ridge_bias(rows: tuple[Any, ...], device: str) -> list[Row]:
    """Spread of the random biases against that of the pre-activations, H=512."""
    found = []
    for ratio in (0.0, 0.1, 0.25, 0.5, 1.0):
        with mock.patch.object(elm, "BIAS_RATIO", ratio):
            fits = [fit_ridge(rows[0], rows[1], 512, seed=seed, device=device) for seed in range(5)]
        found.append(show("ridge-512", {"bias_ratio": ratio}, [score(fit.mlp, rows) for fit in fits]))
    return found


def ridge_scale(rows: tuple[Any, ...], device: str) -> list[Row]:
    """Spread of the pre-activations where it matters: a saturating activation."""
    found = []
    for scale in (0.25, 0.5, 1.0, 2.0):
        fits = [
            fit_ridge(rows[0], rows[1], 512, activation="tanh", weight_scale=scale, seed=seed, device=device)
            for seed in range(3)
        ]
        found.append(
            show("ridge-512", {"activation": "tanh", "weight_scale": scale}, [score(f.mlp, rows) for f in fits])
        )
    return found


def ridge_alpha(rows: tuple[Any, ...], device: str) -> list[Row]:
    """The penalty, at the article's narrowest and widest networks; one Gram matrix serves all."""
    taken: list[gram.GramStats] = []
    default = gram.default_alpha

    def keep(stats: gram.GramStats) -> float:
        taken.append(stats)
        return default(stats)

    with mock.patch.object(elm, "default_alpha", keep):
        fits = fit_ridge_widths(rows[0], rows[1], (512, 2048, 6144), device=device)
    found = []
    for (width, fit), stats in zip(fits.items(), taken, strict=True):
        for ratio in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
            solved = gram.solve_ridge(stats, default(stats) * ratio / gram.ALPHA_RATIO)
            second = elm.Layer(solved.weight.cpu().numpy(), solved.bias.cpu().numpy())
            mlp = fit.mlp.with_(layers=(fit.mlp.layers[0], second))
            found.append(show(f"ridge-{width}", {"alpha_ratio": ratio}, [score(mlp, rows)]))
    return found


def fast(rows: tuple[Any, ...], device: str) -> list[Row]:
    """784-40-10 in few steps: the shortest recipe whose every seed reaches 96.91 % on the held-out rows."""
    base = FAST.with_(weight_decay=0.0)
    tried = [
        base.with_(epochs=8, lr=1.6e-2),
        base.with_(epochs=12),
        FAST.with_(epochs=6),
        FAST.with_(epochs=8),
        FAST,
        FAST.with_(epochs=12),
        FAST.with_(epochs=12, batch=1024, lr=3.2e-2, ema=0.98),
    ]
    found = []
    for recipe in tried:
        problem = prepare(None, rows[0], rows[1], hidden=40, device=device, validation=rows[2:])
        assert problem.validation is not None
        accuracies = []
        with Trainer(problem.layout, recipe, problem.data, graph=device != "cpu") as trainer:
            for seed in range(4):
                trainer.reset(problem.random_start(seed), seed)
                trainer.run()
                accuracies.append(evaluate(problem.layout, trainer.result(), problem.validation).accuracy or 0.0)
        settings = {name: getattr(recipe, name) for name in ("epochs", "batch", "lr", "weight_decay", "ema")}
        found.append(show("fast-40", {**settings, "steps": trainer.steps}, accuracies))
    return found


def finetunes(rows: tuple[Any, ...], device: str) -> list[Row]:
    """784-512-10 from its ridge solution, and from a random start; 784-40-10 from a random start."""
    start = fit_ridge(rows[0], rows[1], 512, device=device).mlp
    tried: list[tuple[str, Any, Recipe]] = [
        ("finetuned-512", start, Recipe(epochs=10)),
        ("finetuned-512", start, Recipe(epochs=20)),
        ("finetuned-512", start, Recipe(epochs=20, lr=5e-3)),
        ("finetuned-512", start, Recipe(epochs=20, weight_decay=0.3)),
        ("finetuned-512", start, Recipe(epochs=20, batch=512)),
        ("scratch-512", None, Recipe(epochs=20)),
        ("reader-40", None, Recipe(epochs=20, weight_decay=0.3)),
        ("reader-40", None, Recipe(epochs=40, weight_decay=0.1)),
        ("reader-40", None, Recipe(epochs=40, weight_decay=0.3)),
    ]
    found = []
    for name, mlp, recipe in tried:
        hidden = None if mlp is not None else int(name.rpartition("-")[2])
        fit = fit_finetune(mlp, rows[0], rows[1], hidden=hidden, recipe=recipe, validation=rows[2:], device=device)
        assert fit.validation_accuracy is not None
        settings = {field: getattr(recipe, field) for field in ("epochs", "batch", "lr", "weight_decay")}
        found.append(show(name, settings, [fit.validation_accuracy]) | {"best_epoch": fit.best_epoch})
    return found


PARTS = {"bias": ridge_bias, "scale": ridge_scale, "alpha": ridge_alpha, "fast": fast, "finetune": finetunes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is named")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    rows = hold_out(*load_mnist()[:2])
    found: list[Row] = []
    with stopwatch() as watch:
        for part in options.parts or PARTS:
            found += PARTS[part](rows, device)
    extra = {"made": timestamp(), "seconds": watch.seconds, "held_out_rows": len(rows[2]), "train_choices": found}
    record = Record(device_info(device), versions(), shlex.join(["python", *sys.argv]), [], extra)
    if options.out is not None:
        record.save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The trained networks of `reproduce`: ridge-ELMs, their fine-tuned survivors, the reader's network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.measure.clock import Clock, clock_for
from gigamlp.mlp import MLP
from gigamlp.reproduce_settings import Settings

__all__ = ["Data", "Progress", "Training"]

Array = NDArray[Any]
Progress = Callable[[int, int, str], None]
Data = tuple[Array, Array, Array, Array]


class Training:
    """The data, the models and how they are trained."""

    def __init__(
        self, device: str, settings: Settings, seed: int, progress: Progress | None, data: Data | None
    ) -> None:
        from gigamlp.data import hold_out, load_mnist

        self.device, self.settings, self.seed = device, settings, seed
        self.clock: Clock = clock_for(device)
        self.began = self.clock.now()
        self.deadline = self.began + settings.budget_s
        self._progress = progress
        self.say(0, "reading MNIST")
        x, y, x_test, y_test = load_mnist() if data is None else data
        self.x_test: Array = x_test
        self.y_test: Array = y_test
        rows = min(settings.holdout, len(x) // 6)
        self.x_fit, self.y_fit, self.x_val, self.y_val = hold_out(x, y, rows=rows, seed=seed)
        self.models: dict[str, MLP] = {}
        self.notes: dict[str, Any] = {}

    def say(self, percent: int, text: str) -> None:
        """Report progress."""
        if self._progress is not None:
            self._progress(percent, 100, text)

    def fit_ridge(self) -> None:
        """Fit a ridge-ELM of every width from one Gram."""
        from gigamlp.train import fit_ridge_widths

        widths = self.settings.widths
        self.say(2, f"ridge-ELM at {len(widths)} widths")
        fits = fit_ridge_widths(self.x_fit, self.y_fit, widths, seed=self.seed, device=self.device)
        self.notes["ridge"] = []
        for width, fit in fits.items():
            mlp = fit.mlp.with_(name=f"ridge-{width}")
            self.models[mlp.name] = mlp
            self.notes["ridge"].append(
                {
                    "hidden": width,
                    "validation_accuracy": self.accuracy(mlp, self.x_val, self.y_val),
                    "test_accuracy": self.accuracy(mlp, self.x_test, self.y_test),
                    "solver": fit.solver,
                    "jitter": fit.jitter,
                    "alpha": fit.alpha,
                    "seconds": fit.seconds,
                }
            )

    def accuracy(self, mlp: MLP, x: Array, y: Array) -> float:
        """Return the share of right labels, by the MLP's own float32 forward pass."""
        return float(np.mean(mlp.predict(x) == y))

    def finetune(self, survivors: Sequence[int]) -> str:
        """Fine-tune the survivors from their ridge solution; return the best by held-out accuracy.

        One that misses the accuracy target is only returned if all do.
        """
        from gigamlp.train import fit_finetune

        self.notes["finetune"] = []
        scores: dict[str, float] = {}
        for index, width in enumerate(survivors):
            text = f"fine-tuning 784-{width}-10 ({index + 1} of {len(survivors)})"
            self.say(25 + 20 * index // len(survivors), text)
            if index and self.clock.now() >= self.deadline:
                self.notes["finetune"].append({"hidden": [width], "skipped": "the budget had ended"})
                continue
            fit = fit_finetune(
                self.models[f"ridge-{width}"],
                self.x_fit,
                self.y_fit,
                epochs=self.settings.epochs,
                seed=self.seed,
                device=self.device,
                validation=(self.x_val, self.y_val),
            )
            mlp = fit.mlp.with_(name=f"finetuned-{width}")
            self.models[mlp.name] = mlp
            scores[mlp.name] = self.note_training(mlp, fit)
        good = {name: score for name, score in scores.items() if score >= self.settings.accuracy_min}
        self.notes["accuracy_target"] = {
            "accuracy_min": self.settings.accuracy_min,
            "missed": sorted(set(scores) - set(good)),
        }
        return max(good or scores, key=lambda name: scores[name])

    def finetuned(self) -> list[str]:
        """The fine-tuned survivors of the guard-rail, the baseline first."""
        return [name for name in self.models if name.startswith("finetuned-")]

    def train_reader(self) -> None:
        """Train the reader's 784-40-10 from scratch."""
        from gigamlp.train import fit_finetune

        self.say(50, "training the reader's 784-40-10")
        fit = fit_finetune(
            None,
            self.x_fit,
            self.y_fit,
            hidden=40,
            epochs=self.settings.epochs,
            seed=self.seed,
            device=self.device,
            validation=(self.x_val, self.y_val),
        )
        self.models["reader-40"] = fit.mlp.with_(name="reader-40")
        self.note_training(self.models["reader-40"], fit)

    def note_training(self, mlp: MLP, fit: Any) -> float:
        """Keep what a training gave; return the accuracy on the held-out rows."""
        score = self.accuracy(mlp, self.x_val, self.y_val)
        self.notes.setdefault("finetune", []).append(
            {
                "name": mlp.name,
                "hidden": list(mlp.hidden),
                "validation_accuracy": score,
                "test_accuracy": self.accuracy(mlp, self.x_test, self.y_test),
                "seconds": fit.seconds,
                "compile_s": fit.compile_s,
            }
        )
        return score

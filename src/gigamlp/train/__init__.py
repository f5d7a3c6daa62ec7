"""Training: the ridge-ELM (`ridge`), fine-tuning by cross-entropy (`finetune`), and `distill`.

Importing this package does not import torch; the first use of a name in it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gigamlp.errors import Unsupported

_PUBLIC = {
    "Augment": "gigamlp.train.augment",
    "Choice": "gigamlp.train.choices",
    "ConvTeacher": "gigamlp.train.teacher",
    "Distillation": "gigamlp.train.distill_values",
    "Crop": "gigamlp.train.window",
    "FAST": "gigamlp.train.recipe",
    "FinetuneFit": "gigamlp.train.ce",
    "MLPTeacher": "gigamlp.train.teacher",
    "Recipe": "gigamlp.train.recipe",
    "RidgeFit": "gigamlp.train.elm",
    "Segments": "gigamlp.train.window",
    "TableAugment": "gigamlp.train.augment",
    "Window": "gigamlp.train.window",
    "bytes_moved": "gigamlp.train.window",
    "choose_window": "gigamlp.train.selection",
    "default_recipe": "gigamlp.train.recipe",
    "distill": "gigamlp.train.distillation",
    "finetune": "gigamlp.train.ce",
    "finetune_quantised": "gigamlp.train.qat",
    "fit_finetune": "gigamlp.train.ce",
    "fit_quantised": "gigamlp.train.qat",
    "fit_ridge": "gigamlp.train.elm",
    "fit_ridge_widths": "gigamlp.train.elm",
    "ridge": "gigamlp.train.elm",
}

__all__ = [
    "Augment",
    "Choice",
    "ConvTeacher",
    "Crop",
    "Distillation",
    "FAST",
    "FinetuneFit",
    "MLPTeacher",
    "Recipe",
    "RidgeFit",
    "Segments",
    "TableAugment",
    "Window",
    "bytes_moved",
    "choose_window",
    "default_recipe",
    "distill",
    "finetune",
    "finetune_quantised",
    "fit_finetune",
    "fit_quantised",
    "fit_ridge",
    "fit_ridge_widths",
    "ridge",
]

if TYPE_CHECKING:
    from gigamlp.train.augment import Augment, TableAugment
    from gigamlp.train.ce import FinetuneFit, finetune, fit_finetune
    from gigamlp.train.choices import Choice
    from gigamlp.train.distill_values import Distillation
    from gigamlp.train.distillation import distill
    from gigamlp.train.elm import RidgeFit, fit_ridge, fit_ridge_widths, ridge
    from gigamlp.train.qat import finetune_quantised, fit_quantised
    from gigamlp.train.recipe import FAST, Recipe, default_recipe
    from gigamlp.train.selection import choose_window
    from gigamlp.train.teacher import ConvTeacher, MLPTeacher
    from gigamlp.train.window import Crop, Segments, Window, bytes_moved


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gigamlp.train' has no attribute {name!r}")
    try:
        value = getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise Unsupported("training needs PyTorch, which is not installed: pip install 'gigamlp[torch]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

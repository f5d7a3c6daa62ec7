"""`gigamlp train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, UsageError, check_out
from gigamlp.cli.options import DataPath, Device, LabelsPath, Seed, Widths
from gigamlp.cli.tables import values_table
from gigamlp.report.layout import percent

if TYPE_CHECKING:
    from gigamlp.mlp import MLP

__all__ = ["train"]

_Count = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
_Size = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]


def train(
    *,
    recipe: Literal["distill"] | None = None,
    method: Literal["finetune", "ridge"] = "finetune",
    hidden: Widths = (512,),
    begin: Annotated[Literal["ridge", "scratch"] | None, Parameter(name="--from")] = None,
    epochs: _Count = None,
    batch: _Count = None,
    lr: _Size = None,
    weight_decay: Annotated[float | None, Parameter(validator=validators.Number(gte=0))] = None,
    alpha: _Size = None,
    seeds: _Count = None,
    teacher: Literal["auto", "conv", "mlp", "none"] | None = None,
    augment: Literal["auto", "none"] | None = None,
    window: Annotated[int | None, Parameter(validator=validators.Number(gte=1), metavar="BYTES")] = None,
    crop: Annotated[str | None, Parameter(metavar="HxW")] = None,
    segments: Annotated[int | None, Parameter(validator=validators.Number(gte=1), metavar="N")] = None,
    quick: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
    validation: Annotated[int, Parameter(validator=validators.Number(gte=0), metavar="ROWS")] = 5000,
    data: DataPath = None,
    labels: LabelsPath = None,
    seed: Seed = 0,
    name: str | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    out: Annotated[Path, Parameter(metavar="FILE")] = Path("model.safetensors"),
    device: Device = "auto",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Train an MLP on MNIST or on your own rows, and save it.

    First a ridge-ELM (random first layer, second layer by ridge regression), then all layers by cross-entropy.
    With --recipe distill: networks of several widths and seeds at once, on augmented rows that a larger network has
    answered; the seed of each width is chosen on held-out rows.

    Parameters
    ----------
    recipe
        distill: --hidden names one network a width, --out what their files' names begin with.
    method
        finetune: ridge, then cross-entropy. ridge: the ridge-ELM alone.
    begin
        Where cross-entropy starts. Default: ridge for one hidden layer, scratch for more.
    epochs
        Passes over the rows. Default: chosen on held-out rows of MNIST.
    batch
        Rows per step.
    lr
        Learning rate at its highest.
    weight_decay
        Of AdamW.
    alpha
        Ridge penalty. Default: chosen on held-out rows of MNIST.
    seeds
        Networks per width, with --recipe distill. Default: 4.
    teacher
        The larger network, with --recipe distill. auto: conv for images on CUDA, none on a CPU; mlp for other rows.
    augment
        With --recipe distill. auto: images are distorted, other rows get noise and are mixed.
    window
        With --recipe distill: read only so many contiguous bytes of each row; where they begin is chosen.
    crop
        With --recipe distill: read only the middle of each image, for example 20x20.
    segments
        With --recipe distill: read only so many segments of 16 bytes, which are chosen.
    quick
        A short training, with --recipe distill.
    resume
        Go on from where an interrupted --recipe distill with the same options stands.
    validation
        Rows that are held out of training to measure on; a sixth of the rows at most; 0 trains on all.
    name
        What tables call the model. Default: what it is.
    dtype
        How the file stores weights.
    out
        Where the model goes.
    """
    if recipe == "distill":
        others = {"--from": begin, "--lr": lr, "--weight-decay": weight_decay, "--alpha": alpha, "--name": name}
        _check_distill(method, others)
        wanted: dict[str, Any] = {
            "epochs": epochs,
            "batch": batch,
            "quick": quick,
            "validation": validation,
            "seed": seed,
        }
        wanted |= {"hidden": hidden, "seeds": seeds or 4, "device": device}
        wanted |= {"teacher": _or_none(teacher), "augment": _or_none(augment)}
        from gigamlp.cli.distill import columns_of, distill
        from gigamlp.cli.rows import load_dataset, with_labels

        wanted["columns"] = columns_of(window, crop, segments)
        distill(with_labels(load_dataset(data, labels)), wanted, out, dtype, resume=resume, context=context)
        return
    parts = {"--window": window, "--crop": crop, "--segments": segments}
    only = parts | {"--seeds": seeds, "--teacher": teacher, "--augment": augment, "--quick": quick, "--resume": resume}
    if given := [option for option, value in only.items() if value]:
        raise UsageError(f"{', '.join(given)}: only with --recipe distill")
    begin = begin or ("ridge" if len(hidden) == 1 else "scratch")
    _check(method, hidden, begin, {"--epochs": epochs, "--batch": batch, "--lr": lr, "--weight-decay": weight_decay})
    if alpha is not None and method == "finetune" and begin == "scratch":
        raise UsageError("--alpha is the ridge penalty, and --from scratch uses no ridge")
    from gigamlp.cli.rows import load_dataset, with_labels
    from gigamlp.data import hold_out
    from gigamlp.mlp import load

    check_out(out)
    dataset = with_labels(load_dataset(data, labels))
    x: Any = dataset.x
    y: Any = dataset.y
    held_out = None
    if validation:
        x, y, x_val, y_val = hold_out(x, y, rows=validation, seed=seed)
        held_out = (x_val, y_val)
    facts: dict[str, Any] = {}
    options: dict[str, Any]
    mlp: MLP | None = None
    if method == "ridge" or begin == "ridge":
        options = {"hidden": hidden[0], "alpha": alpha, "seed": seed, "device": device}
        mlp = _ridge(x, y, options, context, facts)
    if method == "finetune":
        widths = None if mlp is not None else hidden if len(hidden) > 1 else hidden[0]
        steps = {"epochs": epochs, "batch": batch, "lr": lr, "weight_decay": weight_decay}
        options = {"hidden": widths, **steps, "seed": seed, "device": device, "validation": held_out or 0}
        mlp = _finetune(mlp, (x, y), options, context, facts)
    assert mlp is not None
    mlp = mlp.with_(name=name or f"{'ridge' if method == 'ridge' else 'finetuned'}-{'-'.join(map(str, hidden))}")
    mlp.save(out, dtype)
    saved = load(out)  # what is measured is what the file holds
    scores = {
        "validation_accuracy": None if held_out is None else _accuracy(saved, *held_out),
        "test_accuracy": None if dataset.x_test is None else _accuracy(saved, dataset.x_test, dataset.y_test),
    }
    context.emit(
        {
            "schema": "gigamlp-train/1",
            "name": mlp.name,
            "out": str(out),
            "digest": saved.digest(),
            "data": dataset.name,
            "rows": len(x),
            "method": method,
            "from": begin if method == "finetune" else None,
            "hidden": list(hidden),
            "seed": seed,
            **scores,
            **facts,
        }
    )
    context.show(
        values_table(
            {
                "model": f"{mlp.name} in {out}",
                "trained on": f"{len(x):,} rows of {dataset.name}",
                "ridge": f"{facts['ridge_seconds']:.2f} s" if "ridge_seconds" in facts else None,
                "cross-entropy": _spent(facts),
                "validation accuracy": None if held_out is None else percent(scores["validation_accuracy"]),
                "test accuracy": None if dataset.x_test is None else percent(scores["test_accuracy"]),
            }
        )
    )


def _check_distill(method: str, others: dict[str, Any]) -> None:
    given = [option for option, value in others.items() if value is not None]
    if method == "ridge" or given:
        raise UsageError(f"--recipe distill takes no {', '.join(given) or '--method ridge'}")


def _or_none(word: str | None) -> str | None:
    return None if word == "none" else word or "auto"


def _check(method: str, hidden: tuple[int, ...], begin: str, cross_entropy: dict[str, Any]) -> None:
    if (method == "ridge" or begin == "ridge") and len(hidden) != 1:
        raise UsageError(f"ridge solves one hidden layer, --hidden names {len(hidden)}; use --from scratch")
    given = [option for option, value in cross_entropy.items() if value is not None]
    if method == "ridge" and given:
        raise UsageError(f"--method ridge takes no {', '.join(given)}: it has no epochs and no steps")


def _spent(facts: dict[str, Any]) -> str | None:
    if "finetune_seconds" not in facts:
        return None
    compiled = facts.get("compile_seconds")
    return f"{facts['finetune_seconds']:.2f} s" + (f", compilation {compiled:.2f} s" if compiled else "")


def _ridge(x: Any, y: Any, options: dict[str, Any], context: Context, facts: dict[str, Any]) -> MLP:
    from gigamlp.train import fit_ridge

    with context.progress(f"ridge-ELM of {options['hidden']}") as progress:
        fit = fit_ridge(x, y, progress=progress, **options)
    facts |= {"ridge_seconds": fit.seconds, "solver": fit.solver, "jitter": fit.jitter, "alpha": fit.alpha}
    return fit.mlp


def _finetune(
    mlp: MLP | None, rows: tuple[Any, Any], options: dict[str, Any], context: Context, facts: dict[str, Any]
) -> MLP:
    from gigamlp.train import fit_finetune

    with context.progress("cross-entropy") as progress:
        fit = fit_finetune(mlp, *rows, progress=progress, **options)
    facts |= {"finetune_seconds": fit.seconds, "compile_seconds": fit.compile_s}
    return fit.mlp


def _accuracy(mlp: MLP, x: Any, y: Any) -> float:
    import numpy as np

    return float(np.mean(mlp.predict(x) == np.asarray(y)))

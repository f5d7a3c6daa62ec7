"""`gigamlp convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given, UsageError, check_out
from gigamlp.cli.info import describe, words
from gigamlp.cli.options import Activations, Labels
from gigamlp.cli.tables import values_table

if TYPE_CHECKING:
    from gigamlp.mlp import MLP

__all__ = ["convert"]

_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_PICKLES = (".pkl", ".pickle", ".joblib")


def convert(
    source: Path,
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FILE")],
    activation: Activations = None,
    head: Literal["softmax", "sigmoid", "multilabel", "regression"] | None = None,
    classes: Labels = None,
    name: str | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Make a gigamlp model of a model of another framework. Nothing in the file is executed.

    Parameters
    ----------
    source
        An .onnx file, or a state dict of Linear layers: .pt, .pth, .bin, .ckpt or .safetensors.
    out
        The .safetensors file to write.
    head
        What the outputs mean. Default: what the model says of it.
    name
        What tables call the model. Default: the file's name, or what it says itself.
    dtype
        How weights are stored.
    """
    check_out(out)
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: the name must end in .safetensors")
    mlp = _read(source, activation, head, classes, name)
    mlp.save(out, dtype)
    found = describe(out)
    context.emit(found | {"schema": "gigamlp-convert/1", "source": str(source)})
    if not context.as_json:
        context.show(values_table(words(found)))


def _read(
    source: Path,
    activation: tuple[str, ...] | None,
    head: str | None,
    classes: tuple[str, ...] | tuple[int, ...] | None,
    name: str | None,
) -> MLP:
    suffix = source.suffix.lower()
    if suffix in _PICKLES:
        raise UsageError(
            f"{source}: loading a pickle executes what it holds; load it in Python if you trust it, and pass the "
            "estimator to gigamlp.from_sklearn"
        )
    if suffix == ".onnx":
        from gigamlp.convert import from_onnx

        if activation is not None:
            raise UsageError("--activation is for state dicts; an ONNX graph has its own")
        return from_onnx(source, head=head, classes=classes, name=name)
    if suffix in _TORCH:
        from gigamlp.convert import from_torch

        each = activation[0] if activation is not None and len(activation) == 1 else activation
        return from_torch(source, activation=each, head=head, classes=classes, name=name)
    raise UsageError(f"{source}: the name must end in .onnx, {', '.join(_TORCH)}")

"""`gigamlp export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Given, UsageError, check_out

if TYPE_CHECKING:
    from gigamlp.mlp import MLP

__all__ = ["export"]

_OWN = {".onnx": ("input_dtype", "output"), ".c": ("weights", "function"), ".py": (), ".pt": ()}


def export(
    model: Path,
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FILE")],
    input_dtype: Literal["float32", "uint8", "int8"] | None = None,
    output: Literal["logits", "proba", "class"] | None = None,
    weights: Literal["float32", "int8"] | None = None,
    function: Annotated[str | None, Parameter(metavar="NAME")] = None,
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Write a model for another framework, for C, or as a script. The name of --out says which.

    Parameters
    ----------
    model
        A .safetensors file that gigamlp wrote.
    out
        .onnx: opset 17. .c: C99, with a header beside it. .py: a script that needs NumPy only. .pt: a state dict of
        Linear layers that take raw rows, for PyTorch.
    input_dtype
        ONNX: what the rows are. Default: float32.
    output
        ONNX: what is answered. Default: logits.
    weights
        C: float32, or int8 with uint8 rows. Default: float32.
    function
        C: what its functions begin with. Default: the model's name.
    """
    check_out(out)
    suffix = out.suffix.lower()
    if suffix not in _OWN:
        raise UsageError(f"--out {out}: the name must end in {', '.join(_OWN)}")
    given = {"input_dtype": input_dtype, "output": output, "weights": weights, "function": function}
    for option, value in given.items():
        if value is not None and option not in _OWN[suffix]:
            raise UsageError(f"--{option.replace('_', '-')} does not go with a {suffix} file")
    from gigamlp.cli.rows import one_mlp

    mlp = one_mlp(model)
    files = _write(mlp, suffix, out, given)
    context.emit(
        {"schema": "gigamlp-export/1", "model": mlp.name, "digest": mlp.digest(), "files": [str(f) for f in files]}
    )
    if not context.as_json:
        for file in files:
            context.show(f"{file}  {file.stat().st_size:,} bytes")


def _write(mlp: MLP, suffix: str, out: Path, given: dict[str, str | None]) -> list[Path]:
    from gigamlp import convert

    if suffix == ".onnx":
        convert.to_onnx(mlp, out, input_dtype=given["input_dtype"] or "float32", output=given["output"] or "logits")
        return [out]
    if suffix == ".c":
        return list(convert.to_c(mlp, out, dtype=given["weights"] or "float32", name=given["function"]))
    if suffix == ".py":
        convert.to_numpy_script(mlp, out)
        return [out]
    module = convert.to_torch(mlp)
    import torch

    from gigamlp._atomic import atomic_write

    with atomic_write(out) as file:
        torch.save(module.state_dict(), file)
    return [out]

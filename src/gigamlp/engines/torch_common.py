"""What the three torch engines share and that needs no torch: what is offered, what is refused, and why."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product

from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = [
    "DenseOptions",
    "check_supported",
    "complete",
    "compute_dtypes",
    "dense_grid",
    "dense_options",
    "device_problem",
    "pads",
]

INSTALL_TORCH = "PyTorch is not installed; get it with: pip install 'gigamlp[torch]'"
OPS = ("linear", "mm", "fused")
DENSE_KEYS = ("op", "pad", "inplace", "compute")


@dataclass(frozen=True)
class DenseOptions:
    """How the dense layers are run.

    Parameters
    ----------
    op : {"linear", "mm", "fused"}
        ``F.linear`` with weights [out, in]; ``addmm``/``mm`` with pre-transposed contiguous weights [in, out]; or the
        latter with bias and ReLU in the matrix product's epilogue (CUDA, ReLU layers with a bias).
    pad : int
        Width of the last layer's output, at least the number of logits.
    inplace : bool
        Whether ReLU overwrites its input.
    compute : {"float16", "bfloat16", "float32"}
        Type of the weights, the hidden values and the logits.
    """

    op: str
    pad: int
    inplace: bool
    compute: str


def device_problem(device: str) -> str | None:
    """Return why torch cannot use `device` (``"cpu"`` or ``"cuda:N"``) on this machine, or None if it can."""
    if find_spec("torch") is None:
        return INSTALL_TORCH
    if device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or "none: this is a CPU build of torch"
        return f"torch {torch.__version__} sees no CUDA device (CUDA it was built for: {built})"
    index, count = int(device.partition(":")[2]), torch.cuda.device_count()
    return None if index < count else f"{device} does not exist; this machine has cuda:0 to cuda:{count - 1}"


def check_supported(mlp: MLP, spec: Spec) -> None:
    """Raise `Unsupported` if no torch engine can give what `spec` asks of `mlp`."""
    problem = device_problem(spec.device)
    if problem is not None:
        raise Unsupported(problem)
    if spec.is_cuda and spec.input_on == "host":
        raise Unsupported(
            "the torch engines take rows that are on the device already; copy them first (input_on='device')"
        )
    if mlp.head == "regression" and spec.output != "logits":
        raise Unsupported(f"head 'regression' gives logits only, not {spec.output!r}")
    if mlp.head == "multilabel" and spec.output not in ("logits", "proba"):
        raise Unsupported(f"head 'multilabel' gives logits or proba, not {spec.output!r}: a row has no single class")


def compute_dtypes(spec: Spec, full: bool = False) -> tuple[str, ...]:
    """Return the compute dtypes offered for `spec`, the most promising first.

    float16 arithmetic on a CPU is far slower than float32 (pytorch #146508), so a CPU never computes in float16: rows
    of float16 are converted to float32 inside the run.
    """
    if spec.is_cuda:
        offered = {
            "float16": ("float16", "float32"),
            "bfloat16": ("bfloat16", "float32"),
            "float32": ("float32", "float16"),
            "uint8": ("float16", "bfloat16", "float32"),
            "int8": ("float16", "bfloat16", "float32"),
        }[spec.input_dtype]
        return offered if full else offered[:1]
    offered = {
        "float16": ("float32",),
        "bfloat16": ("bfloat16", "float32"),
        "float32": ("float32", "bfloat16"),
        "uint8": ("float32", "bfloat16"),
        "int8": ("float32", "bfloat16"),
    }[spec.input_dtype]
    return offered if full or spec.input_dtype in ("uint8", "int8") else offered[:1]


def pads(mlp: MLP) -> tuple[int, ...]:
    """Return the output widths worth trying: as it is, and the next multiple of 8 (10 classes: the article's 16)."""
    width = mlp.outputs
    rounded = -(-width // 8) * 8
    if rounded == width or mlp.layers[-1].activation != "identity":  # an activation could lift a padded logit
        return (width,)
    return (width, rounded)


def dense_grid(mlp: MLP, spec: Spec, full: bool = False) -> list[Variant]:
    """Return the variants of the dense layers: compute x pad x op x inplace, the most promising first."""
    relu = [layer for layer in mlp.layers if layer.activation == "relu"]
    modes = [(op, inplace) for op in ("linear", "mm") for inplace in ((True, False) if relu else (False,))]
    if spec.is_cuda and any(layer.bias is not None for layer in relu):
        modes.append(("fused", True))
    widths = pads(mlp)[::-1] if spec.is_cuda else pads(mlp)
    return [
        Variant.of(op=op, pad=pad, inplace=inplace, compute=compute)
        for compute, pad, (op, inplace) in product(compute_dtypes(spec, full), widths, modes)
    ]


def complete(variant: Variant | None, default: Variant) -> Variant:
    """Return `variant` with every option of `default`, in its order; what `variant` does not name is taken from it.

    Raises
    ------
    InvalidInput
        If `variant` names an option that `default` does not have.
    """
    given = {} if variant is None else variant.to_json()
    known = default.to_json()
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidInput(f"unknown options {', '.join(unknown)}; known: {', '.join(known)}")
    return Variant.from_json({**known, **given})


def dense_options(mlp: MLP, spec: Spec, variant: Variant) -> DenseOptions:
    """Read the dense options of a complete `variant`.

    Raises
    ------
    InvalidInput
        If an option has a value that does not exist.
    Unsupported
        If the value exists but not for this MLP or device.
    """
    op, pad, inplace, compute = (variant.get(key) for key in DENSE_KEYS)
    if op not in OPS:
        raise InvalidInput(f"op must be one of {', '.join(OPS)}; got {op!r}")
    if compute not in ("float16", "bfloat16", "float32"):
        raise InvalidInput(f"compute must be float16, bfloat16 or float32; got {compute!r}")
    if not isinstance(inplace, bool):
        raise InvalidInput(f"inplace must be true or false, got {inplace!r}")
    if not isinstance(pad, int) or isinstance(pad, bool) or pad < mlp.outputs:
        raise InvalidInput(f"pad must be a whole number >= {mlp.outputs} (the number of logits), got {pad!r}")
    if pad > mlp.outputs and mlp.layers[-1].activation != "identity":
        raise Unsupported(f"padding needs a last layer without an activation, it has {mlp.layers[-1].activation!r}")
    if compute not in compute_dtypes(spec, full=True):
        raise Unsupported(
            f"compute={compute} is not offered for {spec.input_dtype} rows on {spec.device}; "
            f"offered: {', '.join(compute_dtypes(spec, full=True))}"
        )
    if op == "fused" and not spec.is_cuda:
        raise Unsupported("op=fused needs a CUDA device: the CPU's matrix product has no ReLU epilogue")
    return DenseOptions(op=str(op), pad=pad, inplace=inplace, compute=str(compute))

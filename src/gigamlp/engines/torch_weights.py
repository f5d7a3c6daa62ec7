"""An MLP's weights as torch tensors, ready to be multiplied: input scale folded in, classes padded, transposed, cast.

Imported only by a torch engine that builds something: this module needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gigamlp.engines.torch_common import DenseOptions
from gigamlp.errors import Unsupported
from gigamlp.folding import fold_input
from gigamlp.mlp import MLP
from gigamlp.spec import Spec

__all__ = ["Dense", "Net", "cast", "make_net"]

Float64 = NDArray[np.float64]
MAX_FLUSHED = 0.001  # share of the non-zero weights


@dataclass(frozen=True, eq=False)
class Dense:
    """One layer on the device.

    Parameters
    ----------
    weight : Tensor
        [out, in] for op ``linear``, [in, out] contiguous otherwise.
    bias : Tensor [out] or None
    activation : str
    op : str
        ``linear``, ``mm``, or ``fused`` (``mm`` with ReLU in its epilogue).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str
    op: str

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0 if self.op == "linear" else 1]


@dataclass(frozen=True, eq=False)
class Net:
    """The layers and what a forward pass needs to know besides.

    Parameters
    ----------
    layers : tuple of Dense
    columns : tuple of (start, stop) or None
    features, outputs : int
        Width of a row as it comes in; number of logits without padding.
    head, output : str
        As in `MLP` and `Spec`.
    inplace : bool
        Whether ReLU overwrites its input.
    compute, input_dtype : torch.dtype
    device : torch.device
    batch : int
    """

    layers: tuple[Dense, ...]
    columns: tuple[tuple[int, int], ...] | None
    features: int
    outputs: int
    head: str
    output: str
    inplace: bool
    compute: torch.dtype
    input_dtype: torch.dtype
    device: torch.device
    batch: int

    @property
    def width(self) -> int:
        """Number of logits with padding."""
        return self.layers[-1].width

    @property
    def features_read(self) -> int:
        """Number of features that the first layer takes."""
        return self.features if self.columns is None else sum(stop - start for start, stop in self.columns)


def make_net(mlp: MLP, spec: Spec, options: DenseOptions) -> Net:
    """Put the weights of `mlp` on the device of `spec`, in the form that `options` ask for.

    Raises
    ------
    Unsupported
        If the weights do not survive the cast to the compute dtype (see `cast`).
    """
    compute, device = getattr(torch, options.compute), torch.device(spec.device)
    layers = []
    for index, layer in enumerate(mlp.layers):
        weight = layer.weight.astype(np.float64)
        bias = None if layer.bias is None else layer.bias.astype(np.float64)
        if index == 0:
            weight, bias = fold_input(mlp)
        if index == len(mlp.layers) - 1 and options.pad > mlp.outputs:
            weight, bias = pad_classes(
                weight, bias, options.pad, cut=spec.output == "logits" or mlp.head == "multilabel"
            )
        op = options.op
        if op == "fused" and (layer.activation != "relu" or bias is None):
            op = "mm"
        tensor = cast(weight, compute, f"weights of layer {index}")
        biases = None if bias is None else cast(bias, compute, f"biases of layer {index}").to(device)
        tensor = tensor if op == "linear" else tensor.t().contiguous()
        layers.append(Dense(tensor.to(device), biases, layer.activation, op))
    if options.op == "fused" and all(layer.op != "fused" for layer in layers):
        raise Unsupported("op=fused needs a ReLU layer with a bias, and there is none; use op=mm")
    return Net(
        layers=tuple(layers),
        columns=None if mlp.columns == ((0, mlp.features),) else mlp.columns,
        features=mlp.features,
        outputs=mlp.outputs,
        head=mlp.head,
        output=spec.output,
        inplace=options.inplace,
        compute=compute,
        input_dtype=getattr(torch, spec.input_dtype),
        device=device,
        batch=spec.batch,
    )


def pad_classes(weight: Float64, bias: Float64 | None, width: int, cut: bool) -> tuple[Float64, Float64 | None]:
    """Append rows of zeros to the last layer, up to `width` outputs.

    Unless their values are cut off anyway (`cut`), their bias is minus infinity: a padded class then has probability 0
    and, coming last, loses even a tie with a row whose real logits have all overflowed to minus infinity.
    """
    extra = width - len(weight)
    padded = np.concatenate([weight, np.zeros((extra, weight.shape[1]))])
    if cut and bias is None:
        return padded, None
    real = np.zeros(len(weight)) if bias is None else bias
    return padded, np.concatenate([real, np.full(extra, 0.0 if cut else -np.inf)])


def cast(values: Float64, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return weights [out, in] or biases [out] as a CPU tensor of `dtype`, or refuse if too much would be lost.

    Raises
    ------
    Unsupported
        If a finite value overflows, or if more than 0.1 % of the non-zero weights flush to zero. A weight that flushes
        counts only if it was larger than one rounding (half a unit in the last place) of the largest weight of its
        output: a weight of 1e-9 beside one of 0.1 (a pixel that is always black, after weight decay) changes nothing.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    name, limits = str(dtype).removeprefix("torch."), torch.finfo(dtype)
    finite = np.isfinite(values)
    largest = float(np.abs(values, where=finite, out=np.zeros_like(values)).max(initial=0.0))
    if largest > limits.max:
        raise Unsupported(f"{what} reach {largest:.3g}, {name} ends at {limits.max:.3g}; use another compute dtype")
    if values.ndim == 2:
        flushed = (tensor == 0).numpy() & (values != 0)
        if flushed.any():
            magnitude = np.abs(values)
            matters = flushed & (magnitude > magnitude.max(axis=1, keepdims=True) * limits.eps / 2)
            share = matters.sum() / np.count_nonzero(values)
            if share > MAX_FLUSHED:
                raise Unsupported(
                    f"{share:.2%} of the {what} are too small for {name} (its normal numbers begin at "
                    f"{limits.smallest_normal:.1g}) and would become zero; "
                    "use bfloat16 or float32, or a larger input_scale"
                )
    return tensor

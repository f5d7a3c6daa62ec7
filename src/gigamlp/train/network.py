"""The network while it is trained: all parameters in one flat tensor, forward and gradient written out.

Each layer is a matrix ``[rows, cols]`` inside the flat tensor: its first ``inputs`` rows are the transposed weight, the
next row is the bias, and rows up to a multiple of 8 are zero. Activations carry a column of ones in the bias's place,
so that one matrix product computes weights and bias together, forwards and backwards. That makes a training step few
kernels, which is what a small network's step costs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gigamlp.mlp import Layer
from gigamlp.train.rows import Array

__all__ = ["ACTIVATE", "SILENT", "Layout", "Workspace", "forward", "gradient", "pack", "round_up", "unpack"]

_ALIGN = 8  # float32 rows then start at multiples of 32 bytes, as the tensor-core kernels want
SILENT = -1e4  # bias of a padded class: its probability is exactly 0, in float16 too

Backward: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (gradient, h or z) -> gradient, in place where possible


@dataclass(frozen=True)
class Activation:
    """An activation in torch: `apply` works in place; `backward` takes the output, or the input if `keeps_input`."""

    apply: Callable[[Tensor], Tensor]
    backward: Backward
    keeps_input: bool = False


_aten = torch.ops.aten

ACTIVATE: dict[str, Activation] = {
    "identity": Activation(lambda z: z, lambda g, h: g),
    "relu": Activation(torch.relu_, lambda g, h: _aten.threshold_backward.grad_input(g, h, 0, grad_input=g)),
    "tanh": Activation(torch.tanh_, lambda g, h: _aten.tanh_backward.grad_input(g, h, grad_input=g)),
    "logistic": Activation(torch.sigmoid_, lambda g, h: _aten.sigmoid_backward.grad_input(g, h, grad_input=g)),
    "gelu": Activation(
        lambda z: z.copy_(torch.nn.functional.gelu(z)), lambda g, z: _aten.gelu_backward(g, z, approximate="none"), True
    ),
    "gelu_tanh": Activation(
        lambda z: z.copy_(torch.nn.functional.gelu(z, approximate="tanh")),
        lambda g, z: _aten.gelu_backward(g, z, approximate="tanh"),
        True,
    ),
    "silu": Activation(lambda z: z.copy_(torch.nn.functional.silu(z)), _aten.silu_backward, True),
}


def round_up(count: int, to: int = _ALIGN) -> int:
    """Return the least multiple of `to` that is not below `count`."""
    return -(-count // to) * to


@dataclass(frozen=True)
class Layout:
    """Where each layer lies in the flat tensor.

    Parameters
    ----------
    widths : tuple of int
        Features read, hidden widths, outputs.
    activations : tuple of str
        One per layer.
    biased : tuple of bool
        One per layer.
    head : str
        An MLP's head: it decides the loss.
    pad_outputs : bool
        Whether a softmax layer gets silent classes up to a multiple of 8, which tensor cores want.
    """

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    biased: tuple[bool, ...]
    head: str = "softmax"
    pad_outputs: bool = False

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.activations)

    @property
    def outputs(self) -> int:
        """Columns of the logits, silent classes included."""
        pad = self.pad_outputs and self.head == "softmax" and self.biased[-1] and self.activations[-1] == "identity"
        return round_up(self.widths[-1]) if pad else self.widths[-1]

    def shapes(self) -> list[tuple[int, int]]:
        """Return ``(rows, cols)`` of each layer's matrix."""
        cols = [*self.widths[1:-1], self.outputs]
        return [(round_up(inputs + 1), out) for inputs, out in zip(self.widths[:-1], cols, strict=True)]

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return sum(round_up(rows * cols, 16) for rows, cols in self.shapes())

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the layers' matrices as views of `flat`."""
        found, begin = [], 0
        for rows, cols in self.shapes():
            found.append(flat[begin : begin + rows * cols].view(rows, cols))
            begin += round_up(rows * cols, 16)
        return found

    def pieces(self, flat: Tensor, most: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return flat views of all weights, in at most about `most` pieces, and of the biases of `flat`."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        total = sum(inputs * cols for inputs, (_, cols) in zip(self.widths[:-1], self.shapes(), strict=True))
        for inputs, matrix, biased in zip(self.widths[:-1], self.views(flat), self.biased, strict=True):
            weight = matrix[:inputs].view(-1)
            share = max(1, most * weight.numel() // total)
            weights += torch.split(weight, round_up(-(-weight.numel() // share), 64))
            if biased:
                biases.append(matrix[inputs])
        return weights, biases


def pack(layout: Layout, layers: Sequence[tuple[Array, Array | None]]) -> Array:
    """Return the flat float32 array of ``(weight [out, in], bias [out] or None)`` pairs."""
    flat = torch.zeros(layout.size)
    for index, (matrix, (weight, bias)) in enumerate(zip(layout.views(flat), layers, strict=True)):
        out, inputs = weight.shape
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and training refuses that
            matrix[:inputs, :out] = torch.from_numpy(weight.T.astype(np.float32))
            if bias is not None:
                matrix[inputs, :out] = torch.from_numpy(bias.astype(np.float32))
        if index == layout.depth - 1:
            matrix[inputs, out:] = SILENT
    return flat.numpy()


def unpack(layout: Layout, flat: Array) -> list[tuple[Array, Array | None]]:
    """Return the ``(weight, bias)`` pairs of a flat array: what `pack` took."""
    found: list[tuple[Array, Array | None]] = []
    for index, matrix in enumerate(layout.views(torch.from_numpy(np.ascontiguousarray(flat)))):
        inputs, out = layout.widths[index], layout.widths[index + 1]
        bias = matrix[inputs, :out].numpy().copy() if layout.biased[index] else None
        found.append((matrix[:inputs, :out].T.numpy().copy(), bias))
    return found


class Workspace:
    """The activations of one batch: reused by every step.

    Parameters
    ----------
    layout : Layout
    batch : int
    device : torch.device
    dtype : torch.dtype
        Arithmetic of the matrix products.
    """

    def __init__(self, layout: Layout, batch: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.hidden: list[Tensor] = []
        for index, width in enumerate(layout.widths[1:-1], start=1):
            h = torch.zeros(batch, round_up(width + 1), device=device, dtype=dtype)
            h[:, width] = float(layout.biased[index])
            self.hidden.append(h)


def forward(layout: Layout, matrices: Sequence[Tensor], x: Tensor, work: Workspace) -> tuple[Tensor, list[Tensor]]:
    """Return logits [batch, outputs] and what the gradient needs of each hidden layer.

    Parameters
    ----------
    layout : Layout
    matrices : sequence of Tensor
        The layers, as `Layout.views` gives them.
    x : Tensor [batch, rows of layer 0]
        Scaled features, the column of ones, zeros.
    work : Workspace
        Its hidden buffers are overwritten.
    """
    kept: list[Tensor] = []
    h = x
    for width, matrix, name, target in zip(
        layout.widths[1:-1], matrices[:-1], layout.activations[:-1], work.hidden, strict=True
    ):
        z = target[:, :width]
        torch.mm(h, matrix, out=z)
        activation = ACTIVATE[name]
        kept.append(z.clone() if activation.keeps_input else z)
        activation.apply(z)
        h = target
    return torch.mm(h, matrices[-1]), kept


def gradient(
    layout: Layout,
    matrices: Sequence[Tensor],
    x: Tensor,
    target: Tensor,
    work: Workspace,
    *,
    gradients: Sequence[Tensor],
    scale: Tensor | None = None,
) -> None:
    """Write the gradient of the mean loss over a batch into `gradients`, views like `matrices`.

    The loss is cross-entropy for ``softmax``, binary cross-entropy for ``sigmoid`` and ``multilabel``, the squared
    error for ``regression``; the mean is over all elements of the output where there are several, as in torch.

    Parameters
    ----------
    target : Tensor float32 [batch, outputs]
        One-hot rows, 0/1 indicators or values.
    scale : Tensor, optional
        Loss scale, one element: the gradients come out multiplied by it. For float16.
    """
    logits, kept = forward(layout, matrices, x, work)
    rows = x.shape[0]
    last = ACTIVATE[layout.activations[-1]]
    before = logits.clone() if last.keeps_input else logits
    out = last.apply(logits).float() if layout.activations[-1] != "identity" else logits.float()
    divisor = float(rows)
    if layout.head == "softmax":
        delta = torch.softmax(out, 1).sub_(target)
    elif layout.head == "regression":
        delta, divisor = out - target, rows * layout.widths[-1] / 2
    else:
        delta, divisor = torch.sigmoid(out).sub_(target), rows * layout.widths[-1]
    if scale is not None:
        delta.mul_(scale)
    delta = delta.to(matrices[-1].dtype)
    if layout.activations[-1] != "identity":
        delta = last.backward(delta, before)
    for index in range(layout.depth - 1, -1, -1):
        h = work.hidden[index - 1] if index else x
        # alpha carries the mean, which saves an elementwise kernel; with beta=0 the old content is not read
        torch.addmm(gradients[index], h.t(), delta, beta=0, alpha=1 / divisor, out=gradients[index])
        if index:
            width = layout.widths[index]
            delta = torch.mm(delta, matrices[index][:width].t())
            delta = ACTIVATE[layout.activations[index - 1]].backward(delta, kept[index - 1])


def layout_of(layers: Sequence[Layer], head: str, pad_outputs: bool) -> Layout:
    """Return the layout of an MLP's layers."""
    widths = (layers[0].weight.shape[1], *(layer.weight.shape[0] for layer in layers))
    return Layout(
        tuple(int(width) for width in widths),
        tuple(layer.activation for layer in layers),
        tuple(layer.bias is not None for layer in layers),
        head,
        pad_outputs,
    )

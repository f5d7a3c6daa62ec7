"""What the fused kernel is specialised to: a network's sizes, the bytes of a row that it reads, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.integer import Integer
from gigamlp.rounded import Rounded

__all__ = ["MOST", "MOST_FIRST", "Form", "Network", "network_of"]

Form = Integer | Rounded

MOST = 128  # outputs of a layer: a warp keeps a layer's sums in registers
MOST_FIRST = 1024  # outputs of the first layer, where the blocks of a cluster share them (path ``wgmma``)
_MOST_LATER = 4
_ITEM = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
_DTYPES = {
    "class": ("uint8", "int32"),
    "margin": ("uint8", "int32"),
    "logits": ("float32", "float16"),
    "proba": ("float32",),
}
_HEADS = {
    "softmax": ("class", "margin", "logits", "proba"),
    "sigmoid": ("class", "margin", "logits", "proba"),
    "multilabel": ("logits", "proba"),
    "regression": ("logits",),
}


@dataclass(frozen=True)
class Network:
    """A network as the kernel's constants.

    Attributes
    ----------
    features : int
        Width of a row in bytes.
    offset, reads : int
        The one run of bytes of a row that is read. It covers all columns of the MLP, and begins and ends at multiples
        of `align`; bytes of it that the MLP does not read have codes 0.
    hidden : int
        Outputs of the first layer.
    later : tuple of int
        Outputs of the later layers.
    activations : tuple of str
        Of all layers.
    head : str
    output : {"class", "margin", "logits", "proba"}
    dtype : str
        Of the answers; of the class ids for ``margin``.
    signed : bool
        Whether rows are int8.
    columns : tuple of (start, stop)
        The MLP's columns in a row, in features.
    item : {1, 2, 4}
        Bytes of a feature.
    compute : {"int8", "float16", "float16x2", "bfloat16", "bfloat16x2", "tf32"}
        What the first layer is multiplied in; with "x2" each weight is a sum of two.
    later_compute : {"float16", "tf32"}
        What the later layers' operands are.
    """

    features: int
    offset: int
    reads: int
    hidden: int
    later: tuple[int, ...]
    activations: tuple[str, ...]
    head: str
    output: str
    dtype: str
    signed: bool
    columns: tuple[tuple[int, int], ...]
    item: int = 1
    compute: str = "int8"
    later_compute: str = "float16"

    @property
    def expand(self) -> int:
        """Bytes of a multiplied row for each byte in memory: 2 where bytes become float16 in registers."""
        return 2 if self.item == 1 and self.compute != "int8" else 1

    @property
    def terms(self) -> int:
        """Numbers that a first-layer weight is the sum of."""
        return 2 if self.compute.endswith("x2") else 1

    @property
    def parts(self) -> int:
        """Bytes of first-layer weights of an output for each byte of a row."""
        return self.expand * self.terms

    @property
    def masked(self) -> bool:
        """Whether float features that are not read have to be cleared: a NaN there times a weight of 0 is NaN."""
        read = sum(stop - start for start, stop in self.columns) * self.item
        return self.item > 1 and read != self.padded

    @property
    def align(self) -> int:
        """What the addresses of all rows and of the run in them are multiples of, if the first row's is: 16, 4 or 1."""
        return _align(self.features)

    @property
    def padded(self) -> int:
        """`reads` rounded up to what one matrix instruction takes, 16."""
        return -(-self.reads // 16) * 16

    @property
    def blocks(self) -> int:
        """Blocks of 8 outputs in the first layer."""
        return -(-self.hidden // 8)

    @property
    def classes(self) -> int:
        """Number of logits."""
        return (self.hidden, *self.later)[-1]

    @property
    def outputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape (without the batch) and dtype of the kernel's one or two outputs."""
        if self.output == "class":
            return (((), self.dtype),)
        if self.output == "margin":
            return (((), self.dtype), ((), "float32"))
        width = 2 if self.head == "sigmoid" and self.output == "proba" else self.classes
        return (((width,), self.dtype),)


def network_of(integer: Form, output: str = "class", dtype: str | None = None) -> Network:
    """Return what the kernel is specialised to for `integer`.

    Parameters
    ----------
    integer : Integer or Rounded
    output : {"class", "margin", "logits", "proba"}
    dtype : str, optional
        uint8 or int32 for class ids (``class``, ``margin``), float32 or float16 for ``logits``, float32 for ``proba``;
        the first of these if not given.

    Raises
    ------
    InvalidInput
        If there is no such output, or it has no such dtype.
    Unsupported
        If a layer is too wide, there are too many, or the head does not give this output.

    Examples
    --------
    >>> import gigamlp as gm, numpy as np
    >>> from gigamlp.quantize import integer_form
    >>> mlp = gm.MLP([gm.Layer(np.eye(8), activation="relu"), gm.Layer(np.eye(8))], columns=[(20, 28)], features=32)
    >>> network = network_of(integer_form(mlp))
    >>> network.offset, network.reads, network.outputs
    (16, 16, (((), 'uint8'),))
    """
    if output not in _DTYPES:
        raise InvalidInput(f"output must be one of {', '.join(_DTYPES)}; got {output!r}")
    dtype = _DTYPES[output][0] if dtype is None else dtype
    if dtype not in _DTYPES[output]:
        raise InvalidInput(f"output {output!r} is {' or '.join(_DTYPES[output])}, not {dtype}")
    mlp = integer.mlp
    if output not in _HEADS[mlp.head]:
        raise Unsupported(f"head {mlp.head!r} gives {' or '.join(_HEADS[mlp.head])}, not {output!r}")
    widths = tuple(len(layer.weight) for layer in mlp.layers)
    for index, width in enumerate(widths):
        most = MOST if index or len(widths) == 1 else MOST_FIRST
        if width > most:
            raise Unsupported(f"layer {index} has {width:,} outputs; the fused kernel takes up to {most:,} there")
    if len(widths) - 1 > _MOST_LATER:
        raise Unsupported(f"there are {len(widths) - 1} hidden layers; the fused kernel takes up to {_MOST_LATER}")
    columns = mlp.columns or ((0, mlp.features),)
    item = _ITEM[integer.input_dtype]
    step = _align(mlp.features * item)
    offset = columns[0][0] * item // step * step
    return Network(
        features=mlp.features * item,
        offset=offset,
        reads=-(-columns[-1][1] * item // step) * step - offset,
        hidden=widths[0],
        later=widths[1:],
        activations=(integer.activation, *(layer.activation for layer in integer.layers)),
        head=mlp.head,
        output=output,
        dtype=dtype,
        signed=integer.input_dtype == "int8",
        columns=columns,
        item=item,
        compute=integer.compute if isinstance(integer, Rounded) else "int8",
        later_compute=integer.later if isinstance(integer, Rounded) else "float16",
    )


def _align(features: int) -> int:
    return 16 if features % 16 == 0 else 4 if features % 4 == 0 else 1

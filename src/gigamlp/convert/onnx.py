"""ONNX files to MLPs, and MLPs to ONNX files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gigamlp._atomic import write_bytes
from gigamlp.cascade import one_mlp
from gigamlp.errors import FileFormatError, Unsupported
from gigamlp.mlp import MLP

if TYPE_CHECKING:
    import onnx

__all__ = ["from_onnx", "to_onnx"]


def from_onnx(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    head: str | None = None,
    classes: Any = None,
    name: str | None = None,
) -> MLP:
    """Return the MLP that an ONNX model is.

    Parameters
    ----------
    source : path, bytes, or onnx.ModelProto
        A graph of Gemm, or MatMul and Add, Relu, Tanh, Sigmoid, Gelu, BatchNormalization, Softmax or LogSoftmax at the
        end, arithmetic with constants, Scaler, Flatten, Reshape and Cast, and what exporters make of the outputs
        (ArgMax, ZipMap, labels). GELU and SiLU that are written out are recognised. Nothing is executed.
    head, classes, name : optional
        As for `gigamlp.from_torch`. Default: what the graph says of itself.

    Returns
    -------
    MLP

    Raises
    ------
    ConversionError
        If the graph computes anything else. The message names the node.
    FileFormatError
        If it is no ONNX model, is damaged, or its external data is missing or lies outside its folder.
    ModelError
        If weights are not finite.
    """
    _onnx()
    from gigamlp.convert.chain import fold
    from gigamlp.convert.onnx_file import read_model
    from gigamlp.convert.onnx_read import Reader

    model, where = read_model(source)
    reader = Reader(model.graph, where)
    reader.read()
    own = _own_words(model, where)
    head = head or own.get("head") or ("softmax" if reader.picks_class and (reader.width or 0) > 1 else None)
    classes = classes if classes is not None else own.get("classes", reader.classes)
    if name is None:
        name = own.get("name") or (Path(source).stem if isinstance(source, str | os.PathLike) else "mlp")
    logits = own.get("output") in ("logits", "class")
    return fold(reader.steps, head=head, classes=classes, name=name, features=reader.features, logits=logits)


def to_onnx(
    mlp: MLP,
    path: str | os.PathLike[str] | None = None,
    *,
    input_dtype: str = "float32",
    output: str = "logits",
) -> onnx.ModelProto:
    """Return the MLP as an ONNX model of opset 17, and write it to `path`.

    Parameters
    ----------
    mlp : MLP
    path : path-like, optional
        Written atomically.
    input_dtype : {"float32", "uint8", "int8"}
        Of the input ``rows`` [n, features].
    output : {"logits", "proba", "class"}
        What the one output is: float32 [n, outputs], float32 [n, classes], or int64 class indices [n] (``multilabel``:
        indicators [n, outputs]). Labels are in the metadata, ``gigamlp``, as JSON.

    Returns
    -------
    onnx.ModelProto
        Checked by ``onnx.checker``. Runs in onnxruntime with the MLP's float32 answers, to rounding.

    Raises
    ------
    InvalidInput
        If the head has no such output.
    ModelError
        If the weights do not fit into one file of 2 GiB.

    Examples
    --------
    >>> import gigamlp as gm
    >>> model = gm.to_onnx(gm.MLP([gm.Layer([[1.0, 2.0]], [0.5], "relu"), gm.Layer([[1.0], [3.0]])]))
    >>> [node.op_type for node in model.graph.node]
    ['Gemm', 'Relu', 'Gemm', 'Identity']
    """
    one_mlp(mlp, "to_onnx")
    _onnx()
    from gigamlp.convert.onnx_write import build

    model = build(mlp, input_dtype, output)
    if path is not None:
        write_bytes(path, model.SerializeToString())
    return model


def _own_words(model: onnx.ModelProto, where: str) -> dict[str, Any]:
    """Return what `to_onnx` noted of name, head, classes and output."""
    props = {each.key: each.value for each in model.metadata_props}
    try:
        found = json.loads(props.get("gigamlp", "{}"))
        return {key: found[key] for key in ("name", "head", "classes", "output") if found.get(key) is not None}
    except (ValueError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{where}: its metadata 'gigamlp' is not what to_onnx writes: {error}") from error


def _onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise Unsupported("this needs onnx, which is not installed: pip install 'gigamlp[onnx]'") from error

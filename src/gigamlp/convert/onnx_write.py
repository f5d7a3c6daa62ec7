"""An MLP as an ONNX graph: the arithmetic of the float32 forward pass, node by node."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gigamlp import __version__
from gigamlp.errors import InvalidInput, ModelError
from gigamlp.mlp import MLP

__all__ = ["INPUT_DTYPES", "OPSET", "OUTPUTS", "build"]

OPSET = 17  # of the operators used, and what onnxruntime has read since 2022
IR_VERSION = 8
INPUT_DTYPES = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
OUTPUTS = ("logits", "proba", "class")


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def put(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        output = name or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=f"node_{output}", **attributes))
        return output

    def constant(self, value: Any, name: str, dtype: Any = np.float32) -> str:
        self.constants.append(numpy_helper.from_array(np.array(value, dtype=dtype, order="C"), name))
        return name

    def scalar(self, value: float) -> str:
        name = f"number_{value!r}"
        if all(each.name != name for each in self.constants):
            self.constants.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name


def build(mlp: MLP, input_dtype: str, output: str) -> onnx.ModelProto:
    """Return the model. See `gigamlp.to_onnx`."""
    if input_dtype not in INPUT_DTYPES:
        raise InvalidInput(f"input_dtype must be one of {', '.join(INPUT_DTYPES)}, got {input_dtype!r}")
    if output not in OUTPUTS:
        raise InvalidInput(f"output must be one of {', '.join(OUTPUTS)}, got {output!r}")
    if mlp.head == "regression" and output != "logits":
        raise InvalidInput(f"head 'regression' has no output {output!r}; 'logits' are its answers")
    if 4 * mlp.parameters > 2**31 - 2**20:
        raise ModelError(f"{mlp.parameters:,} parameters do not fit into one ONNX file, which ends at 2 GiB")
    writer = _Writer()
    h = "rows" if input_dtype == "float32" else writer.put("Cast", "rows", to=TensorProto.FLOAT)
    h = _columns(writer, mlp, h)
    if np.any(np.asarray(mlp.input_scale) != 1):
        h = writer.put("Mul", h, writer.constant(mlp.input_scale, "input.scale"))
    if np.any(np.asarray(mlp.input_offset)):
        h = writer.put("Add", h, writer.constant(mlp.input_offset, "input.offset"))
    for index, layer in enumerate(mlp.layers):
        tensors = [writer.constant(layer.weight, f"layers.{index}.weight")]
        if layer.bias is not None:
            tensors.append(writer.constant(layer.bias, f"layers.{index}.bias"))
        h = _activation(writer, layer.activation, writer.put("Gemm", h, *tensors, transB=1))
    kind, shape = _answer(writer, mlp, h, output)
    graph = helper.make_graph(
        writer.nodes,
        "mlp",
        [helper.make_tensor_value_info("rows", INPUT_DTYPES[input_dtype], ["n", mlp.features])],
        [helper.make_tensor_value_info(output, kind, shape)],
        writer.constants,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        producer_name="gigamlp",
        producer_version=__version__,
        ir_version=IR_VERSION,
    )
    classes = None if mlp.classes is None else mlp.classes.tolist()
    about = {"name": mlp.name, "head": mlp.head, "classes": classes, "output": output}
    helper.set_model_props(model, {"gigamlp": json.dumps(about)})
    onnx.checker.check_model(model, full_check=True)
    return model


def _columns(writer: _Writer, mlp: MLP, rows: str) -> str:
    if mlp.columns is None:
        return rows
    parts = []
    axis = writer.constant([1], "columns.axis", np.int64)
    for index, (start, stop) in enumerate(mlp.columns):
        ends = [
            writer.constant([value], f"columns.{index}.{name}", np.int64)
            for name, value in (("start", start), ("stop", stop))
        ]
        parts.append(writer.put("Slice", rows, *ends, axis))
    return parts[0] if len(parts) == 1 else writer.put("Concat", *parts, axis=1)


def _activation(writer: _Writer, name: str, x: str) -> str:
    direct = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid"}
    if name == "identity":
        return x
    if name in direct:
        return writer.put(direct[name], x)
    if name == "silu":
        return writer.put("Mul", x, writer.put("Sigmoid", x))
    half = writer.put("Mul", x, writer.scalar(0.5))
    if name == "gelu":  # 0.5 x (1 + erf(x / sqrt 2)); the operator Gelu is younger than this opset
        bent = writer.put("Erf", writer.put("Mul", x, writer.scalar(math.sqrt(0.5))))
    else:  # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
        cube = writer.put("Mul", writer.put("Mul", x, x), x)
        inner = writer.put("Add", x, writer.put("Mul", cube, writer.scalar(0.044715)))
        bent = writer.put("Tanh", writer.put("Mul", inner, writer.scalar(math.sqrt(2 / math.pi))))
    return writer.put("Mul", half, writer.put("Add", bent, writer.scalar(1.0)))


def _answer(writer: _Writer, mlp: MLP, logits: str, output: str) -> tuple[int, list[Any]]:
    """Add the nodes of the answer; return its type and shape."""
    if output == "logits":
        writer.put("Identity", logits, name=output)
        return TensorProto.FLOAT, ["n", mlp.outputs]
    if output == "proba":
        if mlp.head == "softmax":
            writer.put("Softmax", logits, axis=1, name=output)
        elif mlp.head == "multilabel":
            writer.put("Sigmoid", logits, name=output)
        else:
            p = writer.put("Sigmoid", logits)
            writer.put("Concat", writer.put("Sub", writer.scalar(1.0), p), p, axis=1, name=output)
        return TensorProto.FLOAT, ["n", 2 if mlp.head == "sigmoid" else mlp.outputs]
    if mlp.head == "softmax":
        writer.put("ArgMax", logits, axis=1, keepdims=0, name=output)
        return TensorProto.INT64, ["n"]
    positive = writer.put("Cast", writer.put("Greater", logits, writer.scalar(0.0)), to=TensorProto.INT64)
    if mlp.head == "multilabel":
        writer.put("Identity", positive, name=output)
        return TensorProto.INT64, ["n", mlp.outputs]
    writer.put("Squeeze", positive, writer.constant([1], "outputs.axis", np.int64), name=output)
    return TensorProto.INT64, ["n"]

"""An MLP as an ONNX model: what the engines ``onnxruntime`` and ``openvino`` compile.

Raw features go in; the input's scale and offset are folded into the first layer in float64, and the windows that the
MLP reads are slices. The answers (class ids, margin, logits or probabilities) are made inside the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.folding import folded_layers
from gigamlp.mlp import MLP

if TYPE_CHECKING:
    from gigamlp.engines.static_int8 import IntegerLayer, StaticInt8

__all__ = ["INPUT", "OUTPUTS", "float32_model", "integer_model", "qdq_model"]

Array = NDArray[Any]

INPUT = "rows"
# names of the model's outputs, by what a Spec asks for
OUTPUTS = {"class": ("ids",), "margin": ("ids", "margin"), "logits": ("logits",), "proba": ("proba",)}
# Gelu came with opset 20; opset 21 with IR 10 is what onnxruntime 1.20 reads, the oldest that is allowed
_OPSET, _IR = 21, 10
_LARGEST_INT32 = 2**31 - 1
_TINY = float(np.finfo(np.float32).tiny)


# ---- the three models -----------------------------------------------------------------------------------------------


def float32_model(mlp: MLP, input_dtype: str, output: str) -> bytes:
    """Return the MLP in float32, for rows of `input_dtype` (not bfloat16)."""
    g = _Graph(mlp, input_dtype)
    h = g.columns()
    if input_dtype != "float32":
        h = g.add("Cast", h, to=g.type_code("float32"))
    for index, (weight, bias, activation) in enumerate(folded_layers(mlp)):
        h = g.activation(activation, g.dense(h, index, weight, bias))
    return g.finish(h, output)


def integer_model(mlp: MLP, codes: Array, scale: Array, input_dtype: str, output: str) -> bytes:
    """Return the MLP with an integer first layer and float32 later ones: the arithmetic of scheme ``w8``.

    The first product is onnxruntime's ``MatMulIntegerToFloat``: a MatMulInteger whose scale and bias are applied while
    the sums are in registers. Other runtimes do not know it.

    Parameters
    ----------
    codes : ndarray of int8 [out, in]
    scale : ndarray of float32 [out]
    input_dtype : {"uint8", "int8"}
    """
    g = _Graph(mlp, input_dtype)
    layers = folded_layers(mlp)
    _, bias, activation = layers[0]
    names = [
        g.columns(),
        g.constant("codes.0", np.ascontiguousarray(codes.T)),
        g.constant("one", np.float32(1)),
        g.constant("scale.0", scale),
        "",
        "",
        g.constant("bias.0", np.zeros(len(codes), np.float32) if bias is None else bias),
    ]
    h = g.activation(activation, g.add("MatMulIntegerToFloat", *names, domain="com.microsoft"))
    for index, (weight, own, kind) in enumerate(layers[1:], start=1):
        h = g.activation(kind, g.dense(h, index, weight, own))
    return g.finish(h, output)


def qdq_model(form: StaticInt8, output: str) -> bytes:
    """Return `form` as QuantizeLinear/DequantizeLinear pairs around float layers: runtimes make int8 layers of them."""
    g = _Graph(form.mlp, form.input_dtype)
    h = g.columns()
    scale, zero = g.constant("one", np.float32(1)), g.constant("zero.in", np.zeros((), form.input_dtype))
    static = any(layer.out_scale is not None for layer in form.layers)
    if not static:
        # OpenVINO looks for int8 layers only in models that quantise something: the rows, then, by steps of 1. It drops
        # that again. Without it the first layer is a float product, and 5 to 8 times slower
        h = g.add("QuantizeLinear", g.add("Cast", h, to=g.type_code("float32")), scale, zero)
    for index, layer in enumerate(form.layers):
        h = g.add("DequantizeLinear", h, scale, zero)
        h = g.activation(layer.activation, _integer_layer(g, h, index, layer, static))
        if layer.gain is not None:
            h = g.add("Mul", h, g.constant(f"gain.{index}", layer.gain))
        if layer.shift is not None:
            h = g.add("Add", h, g.constant(f"shift.{index}", layer.shift))
        if layer.out_scale is not None:
            scale = g.constant(f"hidden_scale.{index}", np.float32(layer.out_scale))
            zero = g.constant(f"zero.{index}", np.uint8(layer.out_zero))
            h = g.add("QuantizeLinear", h, scale, zero)
    for index, (weight, bias, activation) in enumerate(form.rest, start=len(form.layers)):
        h = g.activation(activation, g.dense(h, index, weight, bias))
    return g.finish(h, output)


def _integer_layer(g: _Graph, h: str, index: int, layer: IntegerLayer, static: bool) -> str:
    """Return dequantised rows times dequantised codes plus bias, in the form that runtimes make one int8 kernel of.

    In a `static` network the bias is a whole number of the sums' unit, as static quantisation has it.
    """
    out = layer.codes.shape[1]
    scale = g.constant(f"scale.{index}", layer.scale)
    zeros = g.constant(f"zeros.{index}", np.zeros(out, np.int8))
    weight = g.add("DequantizeLinear", g.constant(f"codes.{index}", layer.codes), scale, zeros, axis=1)
    steps = (layer.scale * np.float32(layer.in_scale)).astype(np.float64)
    sums = np.rint(layer.bias / np.maximum(steps, _TINY))
    # onnxruntime adds the bias to the int32 sums; one that does not fit there stays float. It is subtracted, as of an
    # addition onnxruntime would make an int32 bias again, and saturate it
    if np.abs(sums).max() > _LARGEST_INT32 - 255 * 128 * len(layer.codes) or steps.min() < _TINY or not static:
        product = g.add("MatMul", h, weight)
        return g.add("Sub", product, g.constant(f"bias.{index}", -layer.bias.astype(np.float32)))
    none = g.constant(f"bias_zeros.{index}", np.zeros(out, np.int32))
    step = g.constant(f"bias_scale.{index}", steps.astype(np.float32))
    bias = g.add("DequantizeLinear", g.constant(f"bias.{index}", sums.astype(np.int32)), step, none, axis=0)
    return g.add("Gemm", h, weight, bias)


# ---- nodes ----------------------------------------------------------------------------------------------------------


class _Graph:
    """Nodes and constants in the making; `add` names a node's output and returns the name."""

    def __init__(self, mlp: MLP, input_dtype: str) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy = helper, numpy_helper
        self._mlp, self._input_dtype = mlp, input_dtype
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._opsets = {"": _OPSET}

    def type_code(self, dtype: str) -> int:
        """Return ONNX's number for a NumPy dtype."""
        return int(self._helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def add(self, op: str, *inputs: str, name: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        name = name or f"{op}.{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(op, list(inputs), [name], domain=domain, **attributes))
        if domain:
            self._opsets[domain] = 1
        return name

    def constant(self, name: str, value: Any) -> str:
        """Keep an array under `name` and return the name."""
        self._constants[name] = self._numpy.from_array(np.ascontiguousarray(value).reshape(np.shape(value)), name)
        return name

    def columns(self) -> str:
        """Return the features that the first layer reads."""
        if self._mlp.columns is None:
            return INPUT
        parts = [
            self.add("Slice", INPUT, *(self.constant(f"{key}.{i}", np.array([value], np.int64)) for key, value in run))
            for i, (start, stop) in enumerate(self._mlp.columns)
            for run in [(("start", start), ("stop", stop), ("axis", 1))]
        ]
        return parts[0] if len(parts) == 1 else self.add("Concat", *parts, axis=1)

    def dense(self, h: str, index: int, weight: Array, bias: Array | None) -> str:
        """Return ``h @ weight + bias``, weight [in, out]."""
        names = [h, self.constant(f"weight.{index}", weight)]
        if bias is not None:
            names.append(self.constant(f"bias.{index}", bias))
        return self.add("Gemm", *names)

    def activation(self, name: str, z: str) -> str:
        """Return the activation called `name` of `z`."""
        if name == "identity":
            return z
        if name == "silu":
            return self.add("Mul", z, self.add("Sigmoid", z))
        if name.startswith("gelu"):
            return self.add("Gelu", z, approximate="tanh" if name == "gelu_tanh" else "none")
        return self.add({"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid"}[name], z)

    # ---- answers ----

    def finish(self, z: str, output: str) -> bytes:
        """Add the nodes that turn logits `z` into what `output` asks for, and return the model's bytes."""
        getattr(self, f"_{output}")(z)
        widths: dict[str, tuple[str, list[Any]]] = {
            "ids": ("int64", []),
            "margin": ("float32", []),
            "logits": ("float32", [self._mlp.outputs]),
            "proba": ("float32", [2 if self._mlp.head == "sigmoid" else self._mlp.outputs]),
        }
        info, code = self._helper.make_tensor_value_info, self.type_code
        outputs = [info(name, code(widths[name][0]), ["n", *widths[name][1]]) for name in OUTPUTS[output]]
        rows = info(INPUT, code(self._input_dtype), ["n", self._mlp.features])
        graph = self._helper.make_graph(self._nodes, "mlp", [rows], outputs, list(self._constants.values()))
        opsets = [self._helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        model = self._helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
        return bytes(model.SerializeToString())

    def _logits(self, z: str) -> None:
        self.add("Identity", z, name="logits")

    def _class(self, z: str) -> None:
        if self._mlp.head == "sigmoid":
            flat = self.add("Squeeze", z, self.constant("last", np.array([1], np.int64)))
            positive = self.add("Greater", flat, self.constant("nought", np.float32(0)))
            self.add("Cast", positive, name="ids", to=self.type_code("int64"))
        else:
            self.add("ArgMax", z, name="ids", axis=1, keepdims=0)  # the first of equals, by default

    def _margin(self, z: str) -> None:
        self._class(z)
        last = self.constant("last", np.array([1], np.int64))
        if self._mlp.head == "sigmoid":
            self.add("Abs", self.add("Squeeze", z, last), name="margin")
            return
        two = self.constant("two", np.array([2], np.int64))
        self._nodes.append(self._helper.make_node("TopK", [z, two], ["top", "places"], axis=1))
        self._nodes.append(self._helper.make_node("Split", ["top"], ["first", "second"], axis=1, num_outputs=2))
        self.add("Squeeze", self.add("Sub", "first", "second"), last, name="margin")

    def _proba(self, z: str) -> None:
        if self._mlp.head == "softmax":
            self.add("Softmax", z, name="proba", axis=1)
        elif self._mlp.head == "multilabel":
            self.add("Sigmoid", z, name="proba")
        else:
            no = self.add("Sigmoid", self.add("Neg", z))  # 1 - p, without its cancellation
            self.add("Concat", no, self.add("Sigmoid", z), name="proba", axis=1)

"""An ONNX graph as a chain of steps. Each node is followed; one that no MLP can express is named."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import onnx

from gigamlp.convert.chain import Activation, Affine, Dense, Softmax, Step, numbers
from gigamlp.convert.onnx_constants import affine, constant_node, dimensions, of_constants, per_output
from gigamlp.convert.onnx_file import constant, decoded
from gigamlp.convert.onnx_values import ELEMENTWISE, GRID, Answers, Dimensions, Rows, recognised
from gigamlp.errors import ConversionError, GigaMLPError

__all__ = ["Reader"]

_DIRECT = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "logistic"}
_SIGNS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Sum": "+"}
_FORMULAS: dict[str, Any] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_WIDE = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


class Reader:
    """Follows the nodes of one graph.

    Attributes
    ----------
    steps : list of Step
    features : int or None
        Width of the input, if the graph says it.
    classes : ndarray or None
        Labels, if the graph makes them of class indices.
    picks_class : bool
        Whether it takes the index of the largest output.
    """

    def __init__(self, graph: onnx.GraphProto, where: str) -> None:
        self.graph, self.where = graph, where
        self.steps: list[Step] = []
        self.classes: Any = None
        self.picks_class = False
        self.values: dict[str, Any] = {each.name: constant(each, where) for each in graph.initializer}
        if graph.sparse_initializer:
            raise ConversionError(f"{where}: sparse constants are not supported")
        inputs = [each for each in graph.input if each.name not in self.values]
        if len(inputs) != 1:
            names = ", ".join(repr(each.name) for each in inputs)
            raise ConversionError(f"{where}: {len(inputs)} inputs ({names}); an MLP takes one table of rows")
        self.values[inputs[0].name] = Rows(0)
        dims = [d.dim_value if d.HasField("dim_value") else None for d in inputs[0].type.tensor_type.shape.dim]
        self.integers = inputs[0].type.tensor_type.elem_type not in _FLOATS
        self.batch = dims[0] if dims else None
        widths = [width for width in dims[1:] if width is not None]
        self.features: int | None = int(np.prod(widths)) if len(widths) == len(dims) - 1 > 0 else None
        uses = [name for node in graph.node for name in node.input]
        self.uses = {name: uses.count(name) for name in set(uses)}

    @property
    def width(self) -> int | None:
        """How many values a row has now, if that is known."""
        found = [len(step.weight) for step in self.steps if isinstance(step, Dense)]
        return found[-1] if found else self.features

    def read(self) -> None:
        """Follow all nodes, and check that each output is the end of the chain, or answers made of it."""
        for index, node in enumerate(self.graph.node):
            where = f"{self.where}: node {index} {node.name!r} ({node.op_type})"
            try:
                self._read(node, where)
            except GigaMLPError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise ConversionError(f"{where}: its inputs and attributes do not fit together: {error}") from error
        for each in self.graph.output:
            value = self.values.get(each.name)
            where = f"{self.where}: the output {each.name!r}"
            if isinstance(value, Rows):
                self._settled(value, where)
            elif not isinstance(value, Answers):
                raise ConversionError(f"{where} is not made of the rows")

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _read(self, node: onnx.NodeProto, where: str) -> None:
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        given = [self.values.get(name) if name else None for name in node.input]
        if node.op_type == "Constant":
            self.values[node.output[0]] = constant_node(attributes, where)
            return
        first = next((each for each in given if isinstance(each, Rows | Answers | Dimensions)), None)
        handler = getattr(self, f"_op_{node.op_type.lower()}", None)
        if first is None:
            result = of_constants(node.op_type, given, attributes, where)
        elif isinstance(first, Dimensions):
            result = dimensions(node.op_type, given, attributes, where)
        elif any(isinstance(each, Answers) for each in given):
            result = self._after_the_end(node.op_type, given, attributes, where)
        elif node.op_type in ELEMENTWISE or node.op_type in _SIGNS or node.op_type in ("Gelu", "Pow"):
            result = self._elementwise(node, given, attributes, where)
        elif handler is None:
            raise ConversionError(f"{where}: this operator is not supported")
        else:
            result = handler(given, attributes, where)
        self.values[node.output[0]] = result

    def _settled(self, value: Any, where: str) -> None:
        """Make sure that `value` is the end of the chain, adding the activation that a formula stands for."""
        if not isinstance(value, Rows):
            raise ConversionError(f"{where}: its first input must be the rows")
        if value.chain != len(self.steps):
            raise ConversionError(
                f"{where} uses an earlier value again: residual connections and branches are not supported"
            )
        if self.integers:
            raise ConversionError(
                f"{where} computes with integers, which rounds differently; Cast the rows to float first"
            )
        if value.grid is None:
            return
        found = recognised(value.grid)
        if found is None:
            raise ConversionError(f"{where}: the formula before it is none of the activations that are supported")
        name, factor, term = found
        self.steps.append(Activation(name, where))
        if (factor, term) != (1.0, 0.0):
            self.steps.append(Affine(np.array(factor), np.array(term), where))

    def _push(self, *steps: Step) -> Rows:
        self.steps += steps
        return Rows(len(self.steps))

    # ---- elementwise ----------------------------------------------------------------------------------------------

    def _elementwise(self, node: onnx.NodeProto, given: list[Any], attributes: dict[str, Any], where: str) -> Rows:
        kind = node.op_type
        rows = [each for each in given if isinstance(each, Rows)]
        if any(each.chain != rows[0].chain for each in rows):
            raise ConversionError(
                f"{where} combines values of different layers: residual connections and branches are not supported"
            )
        name = next(n for n, each in zip(node.input, given, strict=True) if isinstance(each, Rows))
        others = [each for each in given if each is not None and not isinstance(each, Rows)]
        scalars = all(np.size(each) == 1 for each in others)
        formula = rows[0].grid is not None or len(rows) > 1 or (kind not in _DIRECT and kind not in (*_SIGNS, "Gelu"))
        if scalars and (formula or self.uses[name] > 1) and self.steps and kind != "Gelu":
            return self._formula(kind, given, where)
        self._settled(rows[0], where)
        if kind in _DIRECT:
            return self._push(Activation(_DIRECT[kind], where))
        if kind == "Gelu":
            return self._push(Activation("gelu_tanh" if attributes.get("approximate") == b"tanh" else "gelu", where))
        if len(given) != 2 or len(rows) != 1:
            raise ConversionError(f"{where}: this operator is not supported here")
        return self._push(affine(_SIGNS.get(kind, kind), given, where))

    def _formula(self, kind: str, given: list[Any], where: str) -> Rows:
        chain = next(each.chain for each in given if isinstance(each, Rows))
        if chain != len(self.steps):
            raise ConversionError(
                f"{where} uses an earlier value again: residual connections and branches are not supported"
            )
        values: list[Any] = [
            (GRID if each.grid is None else each.grid)
            if isinstance(each, Rows)
            else float(numbers(each, where).ravel()[0])
            for each in given
        ]
        with np.errstate(all="ignore"):
            if kind in ELEMENTWISE:
                grid = ELEMENTWISE[kind](*values)
            elif kind == "Pow":
                grid = np.power(*values)
            else:
                grid = _FORMULAS[_SIGNS[kind]](*values)
        return Rows(chain, grid)

    # ---- layers ---------------------------------------------------------------------------------------------------

    def _op_gemm(self, given: list[Any], attributes: dict[str, Any], where: str) -> Rows:
        self._settled(given[0], where)
        if attributes.get("transA", 0) or not isinstance(given[1], np.ndarray):
            raise ConversionError(f"{where}: the rows must be its first input, not transposed, the weights constant")
        weight = numbers(given[1], where) * float(attributes.get("alpha", 1.0))
        bias = None
        if len(given) > 2 and given[2] is not None:
            bias = per_output(given[2], where) * float(attributes.get("beta", 1.0))
        return self._dense(weight if attributes.get("transB", 0) else weight.T, bias, where)

    def _op_matmul(self, given: list[Any], attributes: dict[str, Any], where: str) -> Rows:
        self._settled(given[0], where)
        if not isinstance(given[1], np.ndarray) or given[1].ndim != 2:
            raise ConversionError(f"{where}: the rows must be its first input, and the second a constant matrix")
        return self._dense(numbers(given[1], where).T, None, where)

    def _dense(self, weight: Any, bias: Any, where: str) -> Rows:
        if bias is not None:
            bias = np.broadcast_to(bias, (len(weight),)).copy() if bias.ndim == 0 or bias.size == 1 else bias
        return self._push(Dense(weight, bias, where))

    def _op_batchnormalization(self, given: list[Any], attributes: dict[str, Any], where: str) -> Rows:
        self._settled(given[0], where)
        if attributes.get("training_mode", 0) or not all(isinstance(each, np.ndarray) for each in given[1:]):
            raise ConversionError(f"{where}: only inference with constant statistics is supported")
        weight, bias, mean, var = (numbers(each, where) for each in given[1:])
        spread = var + float(attributes.get("epsilon", 1e-5))
        if (spread <= 0).any():
            raise ConversionError(f"{where}: variance + epsilon must be positive")
        scale = weight / np.sqrt(spread)
        return self._push(Affine(scale, bias - mean * scale, where))

    def _op_scaler(self, given: list[Any], attributes: dict[str, Any], where: str) -> Rows:
        self._settled(given[0], where)
        scale = numbers(attributes.get("scale", [1.0]), where)
        shift = -numbers(attributes.get("offset", [0.0]), where) * scale
        return self._push(Affine(_scalar(scale), _scalar(shift), where))

    def _op_softmax(self, given: list[Any], attributes: dict[str, Any], where: str) -> Rows:
        self._settled(given[0], where)
        if attributes.get("axis", 1) not in (1, -1):
            raise ConversionError(f"{where}: it normalises over axis {attributes['axis']}, the classes are axis 1")
        return self._push(Softmax(where))

    _op_logsoftmax = _op_softmax

    # ---- what changes nothing ---------------------------------------------------------------------------------------

    def _op_identity(self, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
        return given[0]

    def _op_dropout(self, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
        if len(given) > 2 and given[2] is not None and np.any(given[2]):
            raise ConversionError(f"{where}: it drops values when the model answers too; export it for inference")
        return given[0]

    def _op_cast(self, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
        if attributes["to"] not in _WIDE:
            kind = onnx.TensorProto.DataType.Name(attributes["to"])
            raise ConversionError(f"{where}: rounding the rows to {kind} is not supported")
        self.integers = False
        return given[0]

    def _op_flatten(self, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
        if attributes.get("axis", 1) != 1:
            raise ConversionError(f"{where}: axis {attributes['axis']} is not supported, 1 is")
        return given[0]

    def _op_squeeze(self, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
        axes = attributes.get("axes", given[1] if len(given) > 1 else None)
        if self.width != 1 or axes is None or list(np.ravel(axes)) not in ([1], [-1]):
            raise ConversionError(f"{where}: only axis 1 of a single output can be left out")
        return given[0]

    def _op_reshape(self, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
        target = given[1].sizes if isinstance(given[1], Dimensions) else given[1]
        sizes = [None if size is None else int(size) for size in target]
        flat = len(sizes) == 1 and sizes[0] in (-1, None) and self.width == 1
        if len(sizes) == 2:
            rows = sizes[0] in (None, 0) or sizes[0] == -1 or (sizes[0] == self.batch and self.batch is not None)
            if self.width is None and sizes[1] is not None and sizes[1] > 0:
                self.features = sizes[1]
            flat = rows and (sizes[1] == self.width or (sizes[1] == -1 and sizes[0] != -1))
        if not flat:
            raise ConversionError(f"{where}: the shape {sizes} is not that of rows with {self.width} values each")
        return given[0]

    def _op_shape(self, given: list[Any], attributes: dict[str, Any], where: str) -> Dimensions:
        begin, end = attributes.get("start", 0), attributes.get("end")
        return Dimensions((None, self.width or -1)[begin:end])

    # ---- answers --------------------------------------------------------------------------------------------------

    def _op_argmax(self, given: list[Any], attributes: dict[str, Any], where: str) -> Answers:
        self._settled(given[0], where)
        if attributes.get("axis", 0) not in (1, -1) or attributes.get("select_last_index", 0):
            raise ConversionError(f"{where}: only the first largest output over axis 1 is supported")
        self.picks_class = True
        return Answers("ids")

    def _op_zipmap(self, given: list[Any], attributes: dict[str, Any], where: str) -> Answers:
        self._settled(given[0], where)
        self._note_classes(attributes, where)
        return Answers("zipmap")

    def _op_binarizer(self, given: list[Any], attributes: dict[str, Any], where: str) -> Answers:
        self._settled(given[0], where)
        if not self._ends_in_logistic() or attributes.get("threshold", 0.0) != 0.5:
            raise ConversionError(f"{where}: only probabilities of at least 0.5 can be labels")
        return Answers("labels")

    def _op_greater(self, given: list[Any], attributes: dict[str, Any], where: str) -> Answers:
        self._settled(given[0], where)
        threshold = 0.5 if self._ends_in_logistic() else 0.0
        if not isinstance(given[1], np.ndarray) or given[1].size != 1 or float(given[1].ravel()[0]) != threshold:
            raise ConversionError(f"{where}: outputs can be compared with {threshold} only")
        return Answers("labels")

    def _op_concat(self, given: list[Any], attributes: dict[str, Any], where: str) -> Answers:
        both = len(given) == 2 and all(isinstance(each, Rows) for each in given)
        complement = both and given[0].grid is not None and np.allclose(given[0].grid, 1 - GRID, atol=1e-6)
        if not complement or not self._ends_in_logistic() or given[1].grid is not None:
            raise ConversionError(f"{where}: joining values is not supported")
        self._settled(given[1], where)
        return Answers("both")

    def _ends_in_logistic(self) -> bool:
        last = self.steps[-1] if self.steps else None
        return isinstance(last, Activation) and last.name == "logistic"

    def _after_the_end(self, kind: str, given: list[Any], attributes: dict[str, Any], where: str) -> Answers:
        if kind in ("Cast", "Reshape", "Identity", "Squeeze", "Unsqueeze") and isinstance(given[0], Answers):
            return given[0]
        if kind == "ArgMax" and isinstance(given[0], Answers) and given[0].kind == "both":
            return Answers("ids")
        if kind == "ZipMap" and isinstance(given[0], Answers) and given[0].kind == "both":
            self._note_classes(attributes, where)
            return given[0]
        table, ids = given[0], given[1] if len(given) > 1 else None
        picks = kind in ("ArrayFeatureExtractor", "Gather") and isinstance(ids, Answers) and ids.kind == "ids"
        if picks and isinstance(table, np.ndarray):
            self._set_classes(np.ravel(table), where)
            return Answers("labels")
        raise ConversionError(f"{where}: this operator is not supported after the last layer")

    def _note_classes(self, attributes: dict[str, Any], where: str) -> None:
        if attributes.get("classlabels_strings"):
            self._set_classes(decoded(attributes["classlabels_strings"]), where)
        elif attributes.get("classlabels_int64s"):
            self._set_classes(np.array(attributes["classlabels_int64s"], np.int64), where)

    def _set_classes(self, classes: Any, where: str) -> None:
        if self.classes is not None and self.classes.tolist() != classes.tolist():
            raise ConversionError(f"{where}: its class labels differ from those of an earlier node")
        self.classes = classes


def _scalar(value: Any) -> Any:
    return value.ravel()[0] if value.size == 1 else value

"""A torch module as a chain of steps: traced with ``torch.fx``, each node named where it cannot be expressed.

The module is read as it answers in eval mode, and is left as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from gigamlp.convert.chain import Activation, Affine, Dense, Softmax, Step, numbers
from gigamlp.convert.torch_modules import module_steps, tensor_numbers
from gigamlp.errors import ConversionError

__all__ = ["steps_of", "unwrapped"]

# what a user's forward may raise when it is called with a symbol in place of rows
_TRACE_ERRORS = (
    fx.proxy.TraceError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_ACTIVATIONS: dict[Any, str] = {
    torch.relu: "relu",
    torch.relu_: "relu",
    functional.relu: "relu",
    functional.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    torch.tanh: "tanh",
    functional.tanh: "tanh",
    "tanh": "tanh",
    torch.sigmoid: "logistic",
    functional.sigmoid: "logistic",
    torch.special.expit: "logistic",
    "sigmoid": "logistic",
    functional.silu: "silu",
}
_SOFTMAX = (functional.softmax, functional.log_softmax, torch.softmax, torch.log_softmax, "softmax", "log_softmax")
_DROPOUT = (functional.dropout, torch.dropout, functional.alpha_dropout, torch.alpha_dropout)
_SAME = ("contiguous", "detach", "clone", "float", "double")
_ARITHMETIC: dict[Any, str] = {
    operator.add: "+", operator.iadd: "+", torch.add: "+", "add": "+", "add_": "+",
    operator.sub: "-", operator.isub: "-", torch.sub: "-", "sub": "-", "sub_": "-",
    operator.mul: "*", operator.imul: "*", torch.mul: "*", "mul": "*", "mul_": "*",
    operator.truediv: "/", operator.itruediv: "/", torch.div: "/", "div": "/", "div_": "/",
}  # fmt: skip
_MATMUL = (operator.matmul, torch.matmul, torch.mm, "matmul", "mm")


class _Size:
    """The shape of the rows, or how many there are: values that only views may use."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole


_ROWS = object()  # stands for the value that flows through the chain
_GATE = object()  # sigmoid(x), whose only use is x * sigmoid(x)


def steps_of(module: nn.Module) -> tuple[list[Step], int | None]:
    """Return the steps of `module` and how many features it says it takes (None if it does not say).

    Raises
    ------
    ConversionError
        If it holds anything that no MLP can express. The message names the submodule or operation.
    """
    _refuse_what_tracing_cannot_see(module)
    own = module_steps(module, "the module")
    if own is not None:
        return own, None
    with _as_it_was(module):
        tracer = fx.Tracer()
        try:
            graph = tracer.trace(module)
        except _TRACE_ERRORS as error:
            raise ConversionError(
                f"{type(module).__name__}.forward cannot be traced: {_first_line(error)}; control flow must not depend "
                "on the rows, and forward must take them as its only argument"
            ) from error
        reader = _Reader(module)
        for node in graph.nodes:
            reader.read(node)
    return reader.steps, reader.features


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside what DataParallel and torch.compile put around it."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
            module = cast(nn.Module, module._orig_mod)  # what torch.compile returns
        else:
            return module


def _refuse_what_tracing_cannot_see(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ConversionError("a TorchScript module cannot be traced; convert the nn.Module that it was made from")
    for name, each in module.named_modules():
        where = f"{name or 'the module'!r} ({type(each).__name__})"
        if parametrize.is_parametrized(each):
            raise ConversionError(
                f"{where} is parametrized; first call torch.nn.utils.parametrize.remove_parametrizations on it"
            )
        if isinstance(each, nn.modules.lazy.LazyModuleMixin) and each.has_uninitialized_params():  # type: ignore[misc]
            raise ConversionError(f"{where} is not initialised yet; run a batch of rows through the module first")
        hooks = [each._forward_hooks, each._forward_pre_hooks]
        if any(hooks):
            raise ConversionError(f"{where} has forward hooks, which may change its answers; remove them first")


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode for the block, and take away what tracing leaves in it."""
    modes = {each: each.training for each in module.modules()}
    names = set(vars(module))
    try:
        for each in modes:
            each.training = False
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
        for name in set(vars(module)) - names:  # constants of forward, which fx keeps as attributes
            delattr(module, name)


class _Reader:
    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.steps: list[Step] = []
        self.features: int | None = None
        self.values: dict[fx.Node, Any] = {}
        self.current: fx.Node | None = None
        self.done = False

    @property
    def width(self) -> int | None:
        found = [len(step.weight) for step in self.steps if isinstance(step, Dense)]
        return found[-1] if found else self.features

    def read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "get_attr":
            self.values[node] = self._attribute(node)
        elif node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            where = f"{str(node.target)!r} ({type(module).__name__})"
            self._take(node, where)
            steps = module_steps(module, where)
            if steps is None:
                raise ConversionError(f"{where}: this kind of module is not supported")
            if len(node.args) != 1 or node.kwargs:
                raise ConversionError(f"{where} is called with more than the rows")
            self._put(node, steps)
        elif node.op == "output":
            self._output(node)
        else:
            self._call(node)

    # ---- the ends -------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        if self.current is None:
            self.current, self.values[node] = node, _ROWS
        elif node.users:
            raise ConversionError(f"forward uses a second input, {str(node.target)!r}; an MLP takes rows only")

    def _output(self, node: fx.Node) -> None:
        result = node.args[0]
        if not isinstance(result, fx.Node):
            raise ConversionError(f"forward returns a {type(result).__name__}; it must return one tensor")
        if result is not self.current:
            raise ConversionError(f"forward returns {result.name!r}, which is not where its chain of layers ends")

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = self.root
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value

    # ---- operations -----------------------------------------------------------------------------------------------

    def _where(self, node: fx.Node) -> str:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return f"{node.name!r} ({target})"

    def _take(self, node: fx.Node, where: str) -> None:
        """Check that `node` continues the chain."""
        rows = [each for each in node.all_input_nodes if self.values.get(each) is _ROWS]
        if not rows:
            raise ConversionError(f"{where} does not work on the rows, and computing with constants is not supported")
        for each in rows:
            if each is not self.current:
                raise ConversionError(
                    f"{where} uses the value of {each.name!r} again: residual connections and branches are not "
                    "supported"
                )

    def _put(self, node: fx.Node, steps: Sequence[Step] = ()) -> None:
        self.steps += steps
        self.current, self.values[node] = node, _ROWS

    def _call(self, node: fx.Node) -> None:
        target, where = node.target, self._where(node)
        if self._size(node):
            return
        if self._gate(node):
            return
        self._take(node, where)
        args = [self.values.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        kwargs = {k: self.values.get(v, v) if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()}
        if kwargs.get("input") is _ROWS:
            args.insert(0, kwargs.pop("input"))
        kwargs = {
            k: v for k, v in kwargs.items() if not (k in ("inplace", "_stacklevel") or (k == "dtype" and v is None))
        }
        steps: list[Step] | None = None
        if target in _ACTIVATIONS and (len(args) == 1 or args[1:] in ([False], [True])) and not kwargs:
            steps = [Activation(_ACTIVATIONS[target], where)]
        elif target is functional.gelu:
            kind = kwargs.pop("approximate", args[1] if len(args) > 1 else "none")
            steps = [Activation("gelu_tanh" if kind == "tanh" else "gelu", where)]
        elif target in _SOFTMAX:
            steps = self._softmax(args, kwargs, where)
        elif target in _DROPOUT:
            steps = self._dropout(args, kwargs, where)
        elif target is functional.linear:
            steps = self._linear(args, kwargs, where)
        elif target in _MATMUL and len(args) == 2 and not kwargs and args[0] is _ROWS:
            steps = [Dense(self._constant(args[1], where).T, None, where)]
        elif target in _ARITHMETIC and len(args) == 2 and not kwargs:
            steps = [self._arithmetic(_ARITHMETIC[target], args[0], args[1], where)]
        elif self._keeps_the_values(node, args, kwargs, where):
            steps = []
        if steps is None:
            raise ConversionError(f"{where}: this operation, or these arguments of it, are not supported")
        self._put(node, steps)

    def _size(self, node: fx.Node) -> bool:
        """Take note of ``x.size(0)``, ``x.shape[0]`` and the like."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return False
        value = self.values.get(source)
        if value is _ROWS and (node.target == "size" or (node.target is getattr and node.args[1] == "shape")):
            whole = node.target is getattr or (len(node.args) == 1 and not node.kwargs)
            if whole or node.args[1:] == (0,) or node.kwargs == {"dim": 0}:
                self.values[node] = _Size(whole)
                return True
        if isinstance(value, _Size) and value.whole and node.target is operator.getitem and node.args[1] == 0:
            self.values[node] = _Size(False)
            return True
        return False

    def _gate(self, node: fx.Node) -> bool:
        """Read ``x * sigmoid(x)``."""
        source = node.args[0] if node.args else None
        if _ACTIVATIONS.get(node.target) == "logistic" and source is self.current and isinstance(source, fx.Node):
            user = next(iter(node.users), None)
            times = user is not None and _ARITHMETIC.get(user.target) == "*" and len(node.users) == 1
            if times and user is not None and {*user.args} == {node, source}:
                self.values[node] = _GATE
                return True
        if _ARITHMETIC.get(node.target) == "*" and any(
            isinstance(arg, fx.Node) and self.values.get(arg) is _GATE for arg in node.args
        ):
            self._put(node, [Activation("silu", self._where(node))])
            return True
        return False

    def _softmax(self, args: list[Any], kwargs: dict[str, Any], where: str) -> list[Step] | None:
        dim = kwargs.pop("dim", args[1] if len(args) > 1 else None)
        if dim not in (None, 1, -1) or len(args) > 3 or kwargs:
            return None
        return [Softmax(where)]

    def _dropout(self, args: list[Any], kwargs: dict[str, Any], where: str) -> list[Step]:
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if training is not False and p != 0:
            raise ConversionError(
                f"{where} drops values in eval mode too, so that its answers are random; pass training=self.training"
            )
        return []

    def _linear(self, args: list[Any], kwargs: dict[str, Any], where: str) -> list[Step]:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return [Dense(self._constant(weight, where), None if bias is None else self._constant(bias, where), where)]

    def _arithmetic(self, sign: str, left: Any, right: Any, where: str) -> Step:
        if left is _ROWS and right is _ROWS:
            raise ConversionError(f"{where} combines the rows with themselves, which is not supported")
        first = left is _ROWS
        value = self._constant(right if first else left, where)
        if value.ndim == 2 and value.shape[0] == 1:
            value = value[0]
        if value.ndim > 1:
            raise ConversionError(f"{where}: a tensor of shape {list(value.shape)} is not one number per feature")
        one, zero = np.ones(()), np.zeros(())
        if sign == "+":
            return Affine(one, value, where)
        if sign == "-":
            return Affine(one, -value, where) if first else Affine(-one, value, where)
        if sign == "*":
            return Affine(value, zero, where)
        if not first or (value == 0).any():
            raise ConversionError(f"{where}: dividing by {'zero' if first else 'the rows'} is not supported")
        return Affine(1 / value, zero, where)

    def _constant(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor_numbers(value, where)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return numbers(value, where)
        raise ConversionError(f"{where}: only numbers, parameters and buffers may be combined with the rows")

    def _keeps_the_values(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any], where: str) -> bool:
        """Say whether `node` gives the same rows: a flattening, a view as [n, width], a wider dtype."""
        target, rest = node.target, args[1:]
        if target in _SAME or target == "requires_grad_":
            return True
        if target in ("to", "type"):
            kinds = [*rest, *kwargs.values()]
            return all(kind in (torch.float32, torch.float64, "cpu", "cuda") for kind in kinds)
        if target in (torch.flatten, "flatten"):
            begin = kwargs.get("start_dim", rest[0] if rest else 0)
            end = kwargs.get("end_dim", rest[1] if len(rest) > 1 else -1)
            return (begin == 1 and end in (1, -1)) or (begin in (0, None) and self.width == 1 and end == -1)
        if target in ("squeeze", torch.squeeze):
            dim = kwargs.get("dim", rest[0] if rest else None)
            return dim in (1, -1) and self.width == 1
        if target in ("view", "reshape", torch.reshape) and not kwargs:
            shape = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list | torch.Size) else rest
            shape = [self.values.get(each, each) if isinstance(each, fx.Node) else each for each in shape]
            return self._is_flat(shape, where)
        return False

    def _is_flat(self, shape: Sequence[Any], where: str) -> bool:
        if len(shape) == 1:
            return shape[0] == -1 and self.width == 1
        if len(shape) != 2:
            return False
        rows, width = shape
        by_rows = isinstance(rows, _Size) and not rows.whole
        if width == -1:
            return by_rows
        if not (by_rows or rows == -1) or not isinstance(width, int):
            return False
        if self.width is None:
            self.features = width
        return width == self.width

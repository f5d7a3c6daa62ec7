"""State dicts: read from files without executing anything, put into modules, or read as a chain of Linear layers."""

from __future__ import annotations

import copy
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from gigamlp.activations import ACTIVATIONS
from gigamlp.convert.chain import Activation, Dense, Step
from gigamlp.convert.torch_modules import tensor_numbers
from gigamlp.errors import ConversionError, FileFormatError, InvalidInput

__all__ = ["load_into", "path_name", "read_state", "state_steps"]

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net", "weights")  # where checkpoints keep them
# what torch.load raises for a file that it did not write, or that was cut
_DAMAGED = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError, zipfile.BadZipFile)
_MAX_DEPTH = 4  # of dicts around a state dict; a pickle can hold a dict that holds itself
_MAX_ORDERS = 10_000  # steps of the search for an order of layers whose widths fit

Tensors = dict[str, torch.Tensor]


def path_name(source: Any) -> str:
    """Return what to call the MLP from `source`."""
    return Path(source).name.split(".")[0] or "mlp" if isinstance(source, str | os.PathLike) else "mlp"


def read_state(source: Any, *, in_order: bool = False) -> Tensors:
    """Return the tensors of a state dict, of a checkpoint that holds one, or of a file with either.

    With `in_order` they come in the order of the layers, which a safetensors file does not keep.
    """
    if isinstance(source, Mapping):
        return _tensors(source, "the state dict")
    if not isinstance(source, str | os.PathLike):
        raise InvalidInput(f"a state is a state dict or a path, got a {type(source).__name__}")
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.suffix == ".safetensors":
        try:
            found = load_file(path)
        except (SafetensorError, ValueError, KeyError) as error:
            raise FileFormatError(f"{path}: not a safetensors file, or damaged: {error}") from error
        return _ordered(found, str(path)) if in_order else found
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"(?:GLOBAL|global:?|function|class) ([\w.]+\.[\w.]+)", str(error))
        what = f"it refers to {blocked[1]}," if blocked else "it is damaged, or holds more than tensors,"
        raise FileFormatError(
            f"{path}: not loaded, as {what} and nothing in a file is executed; save module.state_dict(), or load the "
            "module yourself and pass it"
        ) from error
    except _DAMAGED as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileFormatError(f"{path}: not a checkpoint that torch.save wrote: {said}") from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError(f"{path}: holds a {type(loaded).__name__}, not a state dict")
    return _tensors(loaded, str(path))


def _tensors(found: Mapping[Any, Any], where: str) -> Tensors:
    for _ in range(_MAX_DEPTH):
        inside = [key for key in _INSIDE if isinstance(found.get(key), Mapping)]
        if len(inside) > 1:
            raise ConversionError(f"{where} holds several state dicts ({', '.join(inside)}); pass one of them")
        if inside:
            found = found[inside[0]]
    wrong = [key for key, value in found.items() if not isinstance(key, str) or not isinstance(value, torch.Tensor)]
    if wrong or not found:
        what = f"{wrong[0]!r} is a {type(found[wrong[0]]).__name__}, not a tensor" if wrong else "it is empty"
        raise ConversionError(f"{where} is no state dict: {what}")
    return dict(found)


def load_into(module: nn.Module, state: Tensors) -> nn.Module:
    """Return a copy of `module` with the weights of `state`; every name must be there and no other."""
    for prefix in ("module.", "_orig_mod."):  # what DataParallel and torch.compile put in front
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    own = copy.deepcopy(module)
    try:
        own.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ConversionError(f"the weights do not belong to this module: {' '.join(str(error).split())}") from error
    return own


# ---- a state dict as a chain ----------------------------------------------------------------------------------------


def state_steps(state: Tensors, activation: str | Sequence[str] | None) -> list[Step]:
    """Return the steps of Linear layers in the order of `state`, with `activation` between them."""
    names = [key.removesuffix(".weight") for key in state if key.endswith(".weight")]
    for key in state:
        prefix, _, last = key.rpartition(".")
        if last not in ("weight", "bias") or prefix not in names:
            raise ConversionError(
                f"the state dict's {key!r} belongs to no Linear layer: how it is used is known to the module only; "
                "pass the module, with state="
            )
    for name in names:
        if state[f"{name}.weight"].ndim != 2:
            shape = list(state[f"{name}.weight"].shape)
            raise ConversionError(
                f"the state dict's '{name}.weight' has shape {shape}, which is no Linear layer's; "
                "pass the module, with state="
            )
    steps: list[Step] = []
    for index, (name, after) in enumerate(zip(names, _activations(activation, len(names) - 1), strict=True)):
        bias = state.get(f"{name}.bias")
        where = f"{name!r} (layer {index} of the state dict)"
        weight = tensor_numbers(state[f"{name}.weight"], f"{name}.weight")
        steps.append(Dense(weight, None if bias is None else tensor_numbers(bias, f"{name}.bias"), where))
        steps.append(Activation(after, where))
    return steps


def _activations(given: str | Sequence[str] | None, hidden: int) -> list[str]:
    if given is None:
        if hidden:
            raise InvalidInput("a state dict has no activations: pass activation=, 'relu' for example")
        return ["identity"]
    each = [given] * hidden if isinstance(given, str) else list(given)
    unknown = [name for name in each if name not in ACTIVATIONS]
    if unknown:
        raise InvalidInput(f"unknown activation {unknown[0]!r}; known: {', '.join(ACTIVATIONS)}")
    if len(each) != hidden:
        raise InvalidInput(f"{len(each)} activations for {hidden} hidden layers")
    return [*each, "identity"]


# ---- the order of layers in a safetensors file, which sorts its names ------------------------------------------------


def _ordered(found: Tensors, where: str) -> Tensors:
    """Return the tensors in the order of the layers: by number where names differ in one number, else by widths."""
    names = sorted({key.rpartition(".")[0] for key in found})
    parts = {name: re.split(r"(\d+)", name) for name in names}
    but_the_last = {(*part[:-2], part[-1]) if len(part) > 1 else name for name, part in parts.items()}
    if len(but_the_last) == 1:
        names.sort(key=lambda name: int(parts[name][-2]) if len(parts[name]) > 1 else 0)
    else:
        orders = list(_fitting(found, names))
        if len(orders) > 1:
            raise ConversionError(
                f"{where}: a safetensors file does not keep the order of layers, and {', '.join(names)} fit together "
                "in several; pass the module, with state="
            )
        names = orders[0] if orders else names
    return {key: found[key] for name in names for key in sorted(found, reverse=True) if key.rpartition(".")[0] == name}


def _fitting(found: Tensors, names: list[str]) -> Iterator[list[str]]:
    """Yield up to two orders in which each layer takes what the one before gives."""
    shapes = {name: tuple(found[f"{name}.weight"].shape) for name in names if f"{name}.weight" in found}
    if len(shapes) < len(names) or any(len(shape) != 2 for shape in shapes.values()):
        return
    stack: list[list[str]] = [[name] for name in names]
    yielded = 0
    for _ in range(_MAX_ORDERS):
        if not stack or yielded == 2:
            return
        order = stack.pop()
        if len(order) == len(names):
            yielded += 1
            yield order
            continue
        left = (name for name in names if name not in order)
        stack += [[*order, name] for name in left if shapes[name][1] == shapes[order[-1]][0]]
    raise ConversionError("too many layers of equal widths to find their order; pass the module, with state=")

"""The modules of ``torch.nn`` that a chain of steps can express. Exact types only: a subclass may compute anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from gigamlp.convert.chain import Activation, Affine, Dense, Float64, Softmax, Step, numbers
from gigamlp.errors import ConversionError

__all__ = ["module_steps", "tensor_numbers"]

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "logistic", nn.SiLU: "silu"}
_NOTHING = (nn.Identity, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d)


def tensor_numbers(tensor: torch.Tensor, where: str) -> Float64:
    """Return `tensor` as float64 NumPy."""
    if tensor.is_meta:
        raise ConversionError(f"{where} is on the meta device and holds no numbers")
    if tensor.is_quantized or tensor.is_complex() or tensor.layout != torch.strided:
        raise ConversionError(f"{where} is {tensor.dtype}, {tensor.layout}; plain real tensors are supported")
    return numbers(tensor.detach().to("cpu", torch.float64).numpy(), where)


def module_steps(module: nn.Module, where: str) -> list[Step] | None:
    """Return the steps of a module of ``torch.nn`` in eval mode, or None if it is none of those that are supported."""
    kind = type(module)
    if kind in _ACTIVATIONS:
        return [Activation(_ACTIVATIONS[kind], where)]
    if kind in _NOTHING:
        return []
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        bias = None if module.bias is None else tensor_numbers(module.bias, where)
        return [Dense(tensor_numbers(module.weight, where), bias, where)]
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return [Activation("gelu_tanh" if module.approximate == "tanh" else "gelu", where)]
    if isinstance(module, nn.Softmax | nn.LogSoftmax) and kind in (nn.Softmax, nn.LogSoftmax):
        if module.dim not in (None, 1, -1):
            raise ConversionError(f"{where}: it normalises over dimension {module.dim}, the classes are dimension 1")
        return [Softmax(where)]
    if isinstance(module, nn.Flatten) and kind is nn.Flatten:
        if module.start_dim != 1 or module.end_dim not in (1, -1):
            raise ConversionError(f"{where}: it flattens {module.start_dim}..{module.end_dim}, supported is 1..-1")
        return []
    if isinstance(module, nn.BatchNorm1d) and kind is nn.BatchNorm1d:
        return [_batch_norm(module, where)]
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return [_layer_norm(module, where)]
    return None


def _parameter(module: nn.Module, name: str, where: str) -> Float64 | None:
    value: Any = getattr(module, name)
    return None if value is None else tensor_numbers(value, f"{where}: {name}")


def _batch_norm(module: nn.BatchNorm1d, where: str) -> Affine:
    mean, var = _parameter(module, "running_mean", where), _parameter(module, "running_var", where)
    if mean is None or var is None:
        raise ConversionError(f"{where} keeps no running statistics: its answer for a row depends on the other rows")
    spread = var + module.eps
    if (spread <= 0).any():
        raise ConversionError(f"{where}: running_var + eps must be positive, its least is {spread.min():.3g}")
    scale = 1 / np.sqrt(spread)
    weight, bias = _parameter(module, "weight", where), _parameter(module, "bias", where)
    if weight is not None:
        scale = scale * weight
    return Affine(scale, -mean * scale + (0.0 if bias is None else bias), where)


def _layer_norm(module: nn.LayerNorm, where: str) -> Affine:
    weight, bias = _parameter(module, "weight", where), _parameter(module, "bias", where)
    constant = weight is not None and not weight.any()
    # over one value it gives (x - x) / sqrt(eps) = 0, with weights of 0 the same for any width
    if len(module.normalized_shape) != 1 or not (module.normalized_shape[0] == 1 or constant):
        raise ConversionError(
            f"{where}: it divides by the spread of each row, which cannot be folded into weights; BatchNorm1d can"
        )
    width = module.normalized_shape[0]
    return Affine(np.zeros(width), np.zeros(width) if bias is None else bias, where)

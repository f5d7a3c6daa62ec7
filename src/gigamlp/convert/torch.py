"""torch modules, state dicts and checkpoints to MLPs, and MLPs to torch modules."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gigamlp.cascade import one_mlp
from gigamlp.convert.chain import fold
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.mlp import MLP

if TYPE_CHECKING:
    import torch

__all__ = ["from_torch", "to_torch"]

State = Mapping[str, Any] | str | os.PathLike[str]


def from_torch(
    source: torch.nn.Module | State,
    *,
    state: State | None = None,
    activation: str | Sequence[str] | None = None,
    head: str | None = None,
    classes: Any = None,
    name: str | None = None,
) -> MLP:
    """Return the MLP that answers as a torch module does in eval mode.

    Parameters
    ----------
    source : torch.nn.Module, state dict, or path
        A module made of Linear, ReLU, Tanh, Sigmoid, GELU, SiLU, Flatten, Dropout, Identity, BatchNorm1d, a final
        Softmax or LogSoftmax, and arithmetic with constants, as `nn.Sequential` or with a ``forward`` that ``torch.fx``
        can trace. BatchNorm1d and arithmetic are folded into scales and weights. Or a state dict of Linear layers, or
        a file that holds one: ``.safetensors``, else what ``torch.save`` wrote, read with ``weights_only=True``.
    state : state dict or path, optional
        Weights to put into (a copy of) the module first.
    activation : str or sequence of str, optional
        For a state dict, which has none: the activation of the hidden layers, or of each.
    head : {"softmax", "sigmoid", "multilabel", "regression"}, optional
        What the outputs mean. Default: ``softmax`` if the module ends in Softmax or has several outputs; after a final
        Sigmoid ``sigmoid`` (one output) or ``multilabel``; ``regression`` for one output and no Sigmoid.
    classes : sequence, optional
        Class labels in the order of the outputs.
    name : str, optional
        Of the MLP. Default: the class of the module, or the file's name.

    Returns
    -------
    MLP

    Raises
    ------
    ConversionError
        If the module computes anything else. The message names the submodule or operation.
    FileFormatError
        If a file is not a state dict; nothing in it is executed.
    ModelError
        If weights are not finite.
    InvalidInput
        If the arguments do not fit together.

    Notes
    -----
    Rows of more than two dimensions are given to the MLP flat: ``x.reshape(len(x), -1)``.

    Examples
    --------
    >>> import gigamlp as gm
    >>> from torch import nn
    >>> module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> gm.from_torch(module, classes=["setosa", "versicolor", "virginica"])
    MLP('Sequential', 4-8-3, relu, head=softmax)
    """
    nn = _torch().nn
    from gigamlp.convert.torch_state import load_into, path_name, read_state, state_steps

    if isinstance(source, nn.Module):
        from gigamlp.convert.torch_trace import steps_of, unwrapped

        if activation is not None:
            raise InvalidInput("activation is for state dicts; a module has its own")
        module = unwrapped(source)
        if state is not None:
            module = load_into(module, read_state(state))
        steps, features = steps_of(module)
        return fold(steps, head=head, classes=classes, name=name or type(module).__name__, features=features)
    if not isinstance(source, Mapping | str | os.PathLike):
        raise InvalidInput(f"from_torch takes an nn.Module, a state dict or a path, got a {type(source).__name__}")
    if state is not None:
        raise InvalidInput("state goes with a module; a state dict or file has its own weights")
    steps = state_steps(read_state(source, in_order=True), activation)
    return fold(steps, head=head, classes=classes, name=name or path_name(source))


def to_torch(mlp: MLP, *, proba: bool = False) -> torch.nn.Sequential:
    """Return an ``nn.Sequential`` of Linear layers and activations, float32 on the CPU, in eval mode.

    Parameters
    ----------
    mlp : MLP
        Input scale and offset are folded into the first Linear; features that it does not read get weights of 0.
    proba : bool
        End in Softmax or Sigmoid, so that the outputs are probabilities and not logits.

    Returns
    -------
    torch.nn.Sequential
        Takes float rows [n, features]. Class labels are not a part of it: ``mlp.classes[output.argmax(1)]``.

    Examples
    --------
    >>> import gigamlp as gm
    >>> gm.to_torch(gm.MLP([gm.Layer([[1.0, 2.0]], [0.5], "relu"), gm.Layer([[1.0], [3.0]])]))
    Sequential(
      (0): Linear(in_features=2, out_features=1, bias=True)
      (1): ReLU()
      (2): Linear(in_features=1, out_features=2, bias=False)
    )
    """
    one_mlp(mlp, "to_torch")
    _torch()
    import torch
    from torch import nn

    from gigamlp.folding import whole_first_layer

    kinds: dict[str, Any] = {
        "relu": nn.ReLU,
        "tanh": nn.Tanh,
        "logistic": nn.Sigmoid,
        "gelu": nn.GELU,
        "gelu_tanh": lambda: nn.GELU("tanh"),
        "silu": nn.SiLU,
    }
    parts: list[nn.Module] = []
    for index, layer in enumerate(mlp.layers):
        weight, bias = whole_first_layer(mlp) if index == 0 else (layer.weight, layer.bias)
        # on the meta device first: no random numbers are drawn, and the caller's generator stays where it is
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
        if bias is not None:
            linear.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float32))
        parts.append(linear)
        if layer.activation != "identity":
            parts.append(kinds[layer.activation]())
    if proba:
        if mlp.head == "regression":
            raise InvalidInput("head 'regression' has no probabilities; leave out proba")
        parts.append(nn.Softmax(dim=1) if mlp.head == "softmax" else nn.Sigmoid())
    return nn.Sequential(*parts).eval()


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise Unsupported("this needs PyTorch, which is not installed: pip install 'gigamlp[torch]'") from error
    return torch

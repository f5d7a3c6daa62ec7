"""The forward pass in torch, twice: over buffers of its own (eager, graph), and as a pure function (compile).

Both give for output ``class`` int64 [batch]; ``margin`` (int64 [batch], float32 [batch], infinite if there is only one
class); ``logits`` [batch, outputs] in the compute dtype (with padding, a view of a wider buffer); ``proba`` float32
[batch, classes].

Ties go to the lowest index: torch documents that for ``argmax`` and ``max``, and Inductor's ``argmax`` does the same.

This module needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from gigamlp.engines.torch_weights import Dense, Net

__all__ = ["BufferedForward", "Output", "PureForward"]

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]
linear: Callable[..., torch.Tensor] = functional.linear  # it takes `out`, but torch's type stubs do not say so


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


# name -> function that returns a new tensor
PURE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": functional.silu,
}


def _into(name: str, x: torch.Tensor, out: torch.Tensor) -> Step:
    """Return a step that writes the activation `name` of `x` to `out`, which may be `x`."""
    if name == "relu":
        return x.relu_ if out is x else partial(torch.clamp_min, x, 0, out=out)
    if name == "tanh":
        return partial(torch.tanh, x, out=out)
    if name == "logistic":
        return partial(torch.sigmoid, x, out=out)
    if name == "silu":
        return partial(torch.ops.aten.silu.out, x, out=out)
    return partial(torch.ops.aten.gelu.out, x, approximate="tanh" if name == "gelu_tanh" else "none", out=out)


class BufferedForward:
    """The forward pass over buffers that are allocated once: a call allocates nothing and returns its own outputs.

    No buffer requires a gradient and every operation writes into one, so autograd records nothing and autocast (which
    does not touch ``out=`` operations) changes nothing.

    Parameters
    ----------
    net : Net
    scratch : sequence of Tensor, optional
        Hidden buffers of another forward pass of `net` to share, for passes that never run at the same time.
    """

    def __init__(self, net: Net, scratch: Sequence[torch.Tensor] | None = None) -> None:
        self.net = net
        self._shared = list(scratch or ())
        self.scratch: list[torch.Tensor] = []
        stage = self._stage()
        steps: list[Step] = []
        source: torch.Tensor | None = None if stage is None else stage[1]
        for index, layer in enumerate(net.layers):
            final = index == len(net.layers) - 1
            h = self._empty(layer.width) if final else self._hidden(layer.width)
            if source is None:
                self._first: Callable[[torch.Tensor], object] = self._entry(layer, h)
            else:
                steps.append(self._dense(layer, source, h))
            source = h
            if layer.activation != "identity" and layer.op != "fused":
                if layer.activation != "relu" or not net.inplace:
                    source = self._empty(layer.width) if final else self._hidden(layer.width)
                steps.append(_into(layer.activation, h, source))
        if stage is not None:
            self._first = stage[0]
        assert source is not None
        answer, self.output = self._answer(source)
        self._rest = (*steps, *answer)

    def __call__(self, x: torch.Tensor) -> Output:
        """Run on rows `x` [batch, features] and return the output buffers."""
        self._first(x)
        for step in self._rest:
            step()
        return self.output

    def twin(self) -> BufferedForward:
        """Return a forward pass with outputs of its own that shares the weights and the hidden buffers."""
        return BufferedForward(self.net, self.scratch)

    # ---- buffers ---------------------------------------------------------------------------------------------------

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(self.net.batch, *shape, dtype=dtype or self.net.compute, device=self.net.device)

    def _hidden(self, width: int) -> torch.Tensor:
        index = len(self.scratch)
        self.scratch.append(self._shared[index] if index < len(self._shared) else self._empty(width))
        return self.scratch[index]

    # ---- the way in ------------------------------------------------------------------------------------------------

    def _stage(self) -> tuple[Callable[[torch.Tensor], object], torch.Tensor] | None:
        """Return the step that gathers and converts the features, and its buffer; None if `x` can be multiplied as is.

        One run of columns is read through a view: matrix products take rows that lie apart.
        """
        runs = self.net.columns
        if self.net.input_dtype == self.net.compute and (runs is None or len(runs) == 1):
            return None
        staged = self._hidden(self.net.features_read)
        if runs is None:
            return staged.copy_, staged
        if len(runs) == 1:
            begin, end = runs[0]
            return (lambda x: staged.copy_(x[:, begin:end])), staged
        return (lambda x: torch.cat([x[:, begin:end] for begin, end in runs], 1, out=staged)), staged

    def _entry(self, layer: Dense, out: torch.Tensor) -> Callable[[torch.Tensor], object]:
        """Return the first layer as a function of the rows themselves."""
        weight, bias = layer.weight, layer.bias
        if self.net.columns is not None:
            begin, end = self.net.columns[0]
            return lambda x: self._dense(layer, x[:, begin:end], out)()
        if layer.op == "linear":
            return lambda x: linear(x, weight, bias, out=out)
        if bias is None:
            return lambda x: torch.mm(x, weight, out=out)
        if layer.op == "fused":
            return lambda x: torch._addmm_activation(bias, x, weight, out=out)
        return lambda x: torch.addmm(bias, x, weight, out=out)

    @staticmethod
    def _dense(layer: Dense, source: torch.Tensor, out: torch.Tensor) -> Step:
        """Return the step that writes ``source @ weight.T + bias`` (with ReLU, if fused) to `out`."""
        if layer.op == "linear":
            return partial(linear, source, layer.weight, layer.bias, out=out)
        if layer.bias is None:
            return partial(torch.mm, source, layer.weight, out=out)
        product = torch._addmm_activation if layer.op == "fused" else torch.addmm
        return partial(product, layer.bias, source, layer.weight, out=out)

    # ---- the way out -----------------------------------------------------------------------------------------------

    def _answer(self, z: torch.Tensor) -> tuple[list[Step], Output]:
        """Return the steps from logits `z` [batch, width] to the output buffers, and these."""
        net = self.net
        if net.output == "logits":
            return [], z if z.shape[1] == net.outputs else z[:, : net.outputs]
        if net.output == "proba":
            return self._proba(z)
        ids = self._empty(dtype=torch.int64)
        if net.head == "sigmoid":
            logit = z[:, 0]
            steps: list[Step] = [partial(torch.gt, logit, 0, out=ids)]
            if net.output == "class":
                return steps, ids
            margin = self._empty(dtype=torch.float32)
            return [*steps, partial(margin.copy_, logit), margin.abs_], (ids, margin)
        if net.output == "class" and net.device.type == "cuda":
            return [partial(torch.argmax, z, 1, out=ids)], ids
        top = self._empty()
        first = partial(torch.max, z, 1, out=(top, ids))  # on a CPU 1.5x as fast as argmax at 65,536 x 10
        if net.output == "class":
            return [first], ids
        second, margin = self._empty(), self._empty(dtype=torch.float32)
        return [
            first,
            partial(z.scatter_, 1, ids.unsqueeze(1), -torch.inf),
            partial(torch.amax, z, 1, out=second),
            partial(margin.copy_, top),
            partial(margin.sub_, second),  # in float32: the two logits are exact in it
        ], (ids, margin)

    def _proba(self, z: torch.Tensor) -> tuple[list[Step], Output]:
        net = self.net
        if net.head == "sigmoid":
            p = self._empty(2, dtype=torch.float32)
            one = torch.ones((), dtype=torch.float32, device=net.device)
            yes, no = p[:, 1], p[:, 0]
            return [partial(yes.copy_, z[:, 0]), yes.sigmoid_, partial(torch.sub, one, yes, out=no)], p
        p = self._empty(z.shape[1], dtype=torch.float32)
        view = p if z.shape[1] == net.outputs else p[:, : net.outputs]
        if net.head == "multilabel":
            return [partial(p.copy_, z), p.sigmoid_], view
        return [partial(torch.softmax, z, 1, torch.float32, out=p)], view


class PureForward(torch.nn.Module):
    """The forward pass as a function without side effects, for ``torch.compile``.

    Weights are buffers of the module, so that a compiler sees them as constants in place, not as inputs to copy.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        for index, layer in enumerate(net.layers):
            self.register_buffer(f"weight{index}", layer.weight)
            self.register_buffer(f"bias{index}", layer.bias)
        self.ops = tuple((layer.op, layer.activation) for layer in net.layers)
        self.columns, self.outputs, self.padded = net.columns, net.outputs, net.width > net.outputs
        self.head, self.output, self.inplace, self.compute = net.head, net.output, net.inplace, net.compute

    def forward(self, x: torch.Tensor) -> Output:
        """Run on rows `x` [batch, features]."""
        if self.columns is not None:
            runs = [x[:, begin:end] for begin, end in self.columns]
            x = runs[0] if len(runs) == 1 else torch.cat(runs, 1)
        h = x.to(self.compute)
        for index, (op, activation) in enumerate(self.ops):
            weight, bias = getattr(self, f"weight{index}"), getattr(self, f"bias{index}")
            if op == "linear":
                h = linear(h, weight, bias)
            else:
                h = torch.mm(h, weight) if bias is None else torch.addmm(bias, h, weight)
            if activation == "relu" and self.inplace:
                h = torch.relu_(h)
            elif activation != "identity":
                h = PURE[activation](h)
        return self._answer(h)

    def _answer(self, z: torch.Tensor) -> Output:
        if self.output == "logits":
            return z[:, : self.outputs] if self.padded else z
        if self.output == "proba":
            if self.head == "softmax":
                return torch.softmax(z.float(), 1)[:, : self.outputs]
            p = torch.sigmoid(z[:, : self.outputs].float())
            return torch.cat([1 - p, p], 1) if self.head == "sigmoid" else p
        if self.head == "sigmoid":
            ids = (z[:, 0] > 0).to(torch.int64)
            return ids if self.output == "class" else (ids, z[:, 0].float().abs())
        ids = torch.argmax(z, 1)
        if self.output == "class":
            return ids
        others = z.masked_fill(torch.arange(z.shape[1], device=z.device) == ids.unsqueeze(1), -torch.inf)
        return ids, z.amax(1).float() - others.amax(1).float()

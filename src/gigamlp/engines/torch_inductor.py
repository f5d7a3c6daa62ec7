"""Compiling a network with ``torch.compile`` so that it stays compiled. This module needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from gigamlp.engines.torch_forward import Output, PureForward
from gigamlp.engines.torch_weights import Net
from gigamlp.errors import Unsupported

__all__ = ["CompiledForward", "compile_net"]

NOTHING_COMPILED = "torch.compile is turned off and compiled nothing; unset TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE"

_serial = count()


class CompiledForward:
    """A compiled forward pass. Its outputs are new tensors at each call, or with `own_outputs` buffers of its own.

    Buffers are for code in which Inductor replays CUDA Graphs of its own: these share one memory pool, so that the
    outputs of one are overwritten when any other runs.
    """

    def __init__(self, compiled: Callable[[torch.Tensor], Output], own_outputs: bool) -> None:
        self._compiled, self._own_outputs = compiled, own_outputs
        self._output: Output | None = None

    def __call__(self, x: torch.Tensor) -> Output:
        """Run on rows `x`."""
        if not self._own_outputs:
            return self._compiled(x)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        fresh = self._compiled(x)
        if self._output is None:
            self._output = fresh.clone() if isinstance(fresh, torch.Tensor) else (fresh[0].clone(), fresh[1].clone())
        elif isinstance(fresh, torch.Tensor):
            assert isinstance(self._output, torch.Tensor)
            self._output.copy_(fresh)
        else:
            for mine, new in zip(self._output, fresh, strict=True):
                mine.copy_(new)
        return self._output

    def twin(self) -> CompiledForward:
        """Return one over the same compiled code, with outputs of its own."""
        return CompiledForward(self._compiled, self._own_outputs)


def compile_net(net: Net, mode: str, *, gemm: str = "any", threads: int | None, own_outputs: bool) -> CompiledForward:
    """Compile the forward pass of `net` for its one shape, now.

    Dynamo traces it, Inductor compiles the trace, and from then on the compiled code is called directly. Going through
    Dynamo at each call costs 60-100 us on a CPU for a choice that is already made: the runner has checked shape, dtype
    and device, and the weights do not change. It also means that no change of a global setting can set off a recompile
    of seconds in the middle of a run.

    Dynamo keeps what it compiled beside the *code object* of the function, for all its instances together, and gives up
    after 8 (pytorch #139474): so each network gets a code object of its own.

    Raises
    ------
    Unsupported
        If nothing was compiled, as when ``TORCHDYNAMO_DISABLE`` is set: running eager under this name would be a lie.
    """
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config

    if dynamo_config.disable:
        raise Unsupported(NOTHING_COMPILED)
    function = FunctionType(_own_code(PureForward.forward.__code__), PureForward.forward.__globals__)
    recorder = _Recorder(mode, gemm)
    traced = torch.compile(MethodType(function, PureForward(net)), backend=recorder, fullgraph=True, dynamic=False)
    x = torch.zeros(net.batch, net.features, dtype=net.input_dtype, device=net.device)
    previous = torch.get_num_threads()
    if threads is not None and net.device.type == "cpu":
        torch.set_num_threads(threads)  # Inductor writes the number into the code
    try:
        with config.patch(compile_threads=1):  # see _Recorder
            y = traced(x)
    finally:
        torch.set_num_threads(previous)
    return CompiledForward(recorder.direct(x, y), own_outputs)


class _Recorder:
    """A Dynamo backend: compiles the trace with Inductor and keeps the result, with the tensors that go in and out."""

    def __init__(self, mode: str, gemm: str) -> None:
        from torch._inductor import list_mode_options

        # what is compiled here is small; a pool of worker processes takes longer to start and to stop than it saves
        self._options: dict[str, Any] = {**list_mode_options(mode), "compile_threads": 1}
        if gemm == "triton":
            self._options["max_autotune_gemm_backends"] = "TRITON"
        self._code: Callable[..., Sequence[torch.Tensor]] | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: Sequence[torch.Tensor] = ()

    def __call__(self, trace: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile `trace`; called by Dynamo."""
        from torch._inductor.compile_fx import compile_fx

        code: Any = compile_fx(trace, examples, config_patches=self._options)

        def first_call(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
            self._code, self._inputs = code, inputs
            self._outputs = code(*inputs)
            return self._outputs

        return first_call

    def direct(self, x: torch.Tensor, y: Output) -> Callable[[torch.Tensor], Output]:
        """Return the compiled code as a function of the rows, given the rows and the answer of the first call."""
        code, inputs, outputs = self._code, self._inputs, self._outputs
        self._inputs, self._outputs = (), ()  # Inductor's own graphs must not find them alive
        if code is None:
            raise Unsupported(NOTHING_COMPILED)
        places = [index for index, tensor in enumerate(inputs) if tensor is x]
        if len(places) != 1:
            raise Unsupported(
                f"the compiled code takes the rows {len(places)} times; this torch is not known to gigamlp"
            )
        wanted = y if isinstance(y, tuple) else (y,)
        order = [index for part in wanted for index, tensor in enumerate(outputs) if tensor is part]
        if len(places) != 1 or len(order) != len(wanted):
            raise Unsupported(f"torch {torch.__version__} hands rows or answers to compiled code in an unknown way")
        before, after = inputs[: places[0]], inputs[places[0] + 1 :]
        if isinstance(y, torch.Tensor):
            only = order[0]
            return lambda rows: code(*before, rows, *after)[only]
        first, second = order

        def pair(rows: torch.Tensor) -> Output:
            found = code(*before, rows, *after)
            return found[first], found[second]

        return pair


def _own_code(code: CodeType) -> CodeType:
    """Return a copy of `code` that Dynamo takes for another function."""
    return code.replace(co_name=f"{code.co_name}_{next(_serial)}")

"""`gigamlp serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, UsageError
from gigamlp.cli.options import Device, Positive, Threads, one_of

if TYPE_CHECKING:
    from gigamlp.serve.repository import Repository

__all__ = ["serve"]

INPUT_DTYPES = ("uint8", "int8", "float16", "float32")
_AtLeast0 = Annotated[int, Parameter(validator=validators.Number(gte=0))]


def _engine(type_: Any, tokens: Any) -> str:
    from gigamlp.engines.registry import engine_names

    return one_of(str(tokens[0].value), engine_names())


def serve(
    *models: Annotated[str, Parameter(name="MODEL")],
    device: Device = "auto",
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8000,
    workers: Positive = 1,
    max_delay_us: _AtLeast0 = 200,
    token_file: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    plan: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    engine: Annotated[str | None, Parameter(converter=_engine, metavar="E")] = None,
    threads: Threads = None,
    input_dtype: Annotated[
        str | None,
        Parameter(converter=lambda _, t: one_of(str(t[0].value), INPUT_DTYPES), metavar="|".join(INPUT_DTYPES)),
    ] = None,
    max_rows: Positive = 65536,
    max_queue_rows: Positive = 262_144,
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Serve models over HTTP by the Open Inference Protocol, until SIGTERM or Ctrl-C.

    Parameters
    ----------
    models
        Model files, names of shipped models, or folders NAME/VERSION/model.safetensors. NAME=FILE gives a name.
    host
        Address to listen on. Other machines reach 0.0.0.0; use a token then.
    port
        Port to listen on; 0 for a free one.
    workers
        Processes that share the port. CPU only.
    max_delay_us
        Microseconds that a request waits for others to run with, at most.
    token_file
        A file with the token that callers must send as a bearer token.
    plan
        A plan that `gigamlp optimize` wrote for this model on this machine. In a folder: plan.json beside the model.
    engine
        The engine to run. Default: the plan's, else the quickest that answers as the model does.
    input_dtype
        What rows are. Default: uint8 for models with a scheme or trained on images, else float32.
    max_rows
        Rows of one request, at most.
    max_queue_rows
        Rows that wait for the engine, at most; beyond, requests are answered 503.
    """
    if not models:
        raise UsageError("name at least one MODEL: a file, a folder, or a shipped model, as mnist-40")
    from gigamlp.serve.run import serve as run
    from gigamlp.serve.settings import Settings

    settings = Settings(
        models=models,
        device=device,
        engine=engine,
        plan=None if plan is None else str(plan),
        threads=threads,
        input_dtype=input_dtype,
        host=host,
        port=port,
        workers=workers,
        max_delay_us=max_delay_us,
        max_rows=max_rows,
        max_queue_rows=max_queue_rows,
        token=None if token_file is None else _token(token_file),
    )
    run(settings, lambda address, found: _tell(address, found, context))


def _token(path: Path) -> str:
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise UsageError(f"--token-file {path} is empty")
    return token


def _tell(address: str, models: Repository, context: Context) -> None:
    for served in models:
        context.show(
            f"{served.name} version {served.version}: {served.datatype} [n, {served.features}] -> {served.first}, "
            f"by {', '.join(served.engines)} on {served.session.device}"
        )
    context.show(f"serving at {address}")
    context.emit(
        {
            "schema": "gigamlp-serve/1",
            "address": address,
            "models": [
                {
                    "name": served.name,
                    "version": served.version,
                    "engines": list(served.engines),
                    "device": served.session.device,
                    "inputs": [each.to_json() for each in served.inputs],
                    "outputs": [each.to_json() for each in served.outputs],
                }
                for served in models
            ],
        }
    )
    sys.stdout.flush()  # what waits for the address reads a pipe

"""`gigamlp score`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gigamlp.cli.context import DEFAULTS, Common, Context, Given, UsageError, check_out
from gigamlp.cli.options import INPUT_DTYPES, Device, Threads, one_of

if TYPE_CHECKING:
    from gigamlp.score import Scored

__all__ = ["score"]

# the words of score/answers.py and score/stream.py, which are not imported here: that would import NumPy for --help
OUTPUTS = ("class", "margin", "confidence", "proba", "logits")
ON_ERROR = ("fail", "skip", "quarantine")


def _names(type_: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    return tuple(word.strip() for token in tokens for word in token.value.split(",") if word.strip())


def _outputs(type_: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    return tuple(one_of(word, OUTPUTS) for word in _names(type_, tokens))


def _batch(type_: Any, tokens: Sequence[Any]) -> int | None:
    word = str(tokens[0].value)
    if word != "auto" and not (word.isdecimal() and int(word) >= 1):
        raise ValueError(f"{word!r} is neither auto nor a whole number >= 1")
    return None if word == "auto" else int(word)


def _one(known: Sequence[str]) -> Any:
    return lambda type_, tokens: one_of(str(tokens[0].value), known)


def _engine(type_: Any, tokens: Sequence[Any]) -> str:
    from gigamlp.engines.registry import engine_names

    return one_of(str(tokens[0].value), engine_names())


_Names = Annotated[
    tuple[str, ...],
    Parameter(converter=_names, negative=(), n_tokens=1, metavar="NAME[,NAME...]", show_default=False),
]


def score(
    model: Path,
    /,
    *inputs: Annotated[str, Parameter(name="INPUT", allow_leading_hyphen=True)],
    out: Annotated[str, Parameter(metavar="FILE")],
    output: Annotated[
        tuple[str, ...],
        Parameter(converter=_outputs, negative=(), n_tokens=1, metavar="O[,O...]", show_default=",".join),
    ] = ("class",),
    columns: _Names = (),
    id_columns: _Names = (),
    on_error: Annotated[str, Parameter(converter=_one(ON_ERROR), metavar="|".join(ON_ERROR))] = "fail",
    resume: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    batch: Annotated[int | None, Parameter(converter=_batch, metavar="auto|N", show_default=lambda _: "auto")] = None,
    engine: Annotated[str | None, Parameter(converter=_engine, metavar="E")] = None,
    plan: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    threads: Threads = None,
    input_dtype: Annotated[str | None, Parameter(converter=_one(INPUT_DTYPES), metavar="|".join(INPUT_DTYPES))] = None,
    device: Device = "auto",
    devices: Annotated[tuple[str, ...], Parameter(converter=_names, negative=(), n_tokens=1, metavar="all|D,D")] = (),
    ray: Annotated[str | None, Parameter(metavar="auto|local|ADDRESS")] = None,
    common: Common = DEFAULTS,
    context: Given,
) -> None:
    """Answer all rows of files of any size, in constant memory; a killed run goes on where it stopped.

    Beside FILE lie FILE.manifest.json and, if rows had no answer, FILE.rejected.jsonl.

    Parameters
    ----------
    model
        A .safetensors file that gigamlp wrote.
    inputs
        Files (.npy, IDX, CSV, Parquet, Arrow), folders and quoted patterns of them, or - for raw rows of stdin.
    out
        Where the answers go: .npy, .parquet or .arrow.
    output
        Of class, margin, confidence, proba, logits.
    columns
        Columns of a table that are features, in the model's order; patterns too: 'pixel*'. Default: found by type.
    id_columns
        Columns that go with the answers. _file and _row are always there.
    on_error
        What to do about rows without an answer (NaN, nulls, wrong widths, damage): fail, skip them and report them,
        or report them with what they hold.
    resume
        Go on from an interrupted run; start if there is none.
    batch
        Rows per run of the engine.
    engine
        The engine to run. Default: the plan's, else as a Session chooses.
    plan
        A plan that `gigamlp optimize` wrote for this model on this machine.
    input_dtype
        The dtype that rows run in, and that raw rows of stdin hold (default there: uint8).
    devices
        Several devices of this host, a process each: all GPUs, or cuda:0,cuda:2, or cpu,cpu. Instead of --device.
    ray
        Run on a Ray cluster: the one that runs here, one that is started for this, or the one at an address.
    """
    options = [each for each in inputs if each.startswith("-") and each != "-"]  # - alone is stdin
    if options:
        raise UsageError(f"unknown option {options[0]}")
    if not inputs:
        raise UsageError("name at least one INPUT: a file, a folder, a pattern, or - for stdin")
    if "://" not in out:
        check_out(Path(out))
    from gigamlp.mlp import load
    from gigamlp.plan import Plan
    from gigamlp.score import score as run

    mlp = load(model)
    with context.progress("reading") as progress:
        done = run(
            mlp,
            inputs,
            out,
            outputs=output,
            columns=columns,
            id_columns=id_columns,
            plan=None if plan is None else Plan.load(plan),
            device=device,
            devices=devices,
            ray=ray,
            engine=engine,
            batch=batch,
            threads=threads,
            input_dtype=input_dtype,
            on_error=on_error,
            resume=resume,
            progress=None if progress is None else lambda n, total, text: progress(n, total or n, text),
        )
    context.emit({"schema": "gigamlp-scored/1", "model": mlp.name, "outputs": list(output), **done.to_json()})
    _tell(done, context)


def _tell(done: Scored, context: Context) -> None:
    if done.already:
        context.note(f"{done.out} is complete already: {done.rows:,} answers")
        return
    data = done.to_json()
    text = f"{done.rows:,} answers in {done.out}"
    if data["rows_per_s"]:
        text += f"; {data['rows_per_s']:,.0f} rows/s, {data['bytes_per_s'] / 1e9:.2f} GB/s"
    context.note(text)
    busy = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in (done.busy or {}).items())
    context.note(f"busy: {busy}, last form {done.finish_s:.2f} s, of {done.seconds:.2f} s; slowest: {done.bottleneck}")
    if done.rejected:
        context.note(f"{done.rejected:,} rows without an answer, in {done.out}.rejected.jsonl", style="yellow")
        for each in done.rejects[:3]:
            context.note(f"  {each['input']}, row {each['row']:,}: {each['reason']}")

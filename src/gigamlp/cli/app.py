"""The table of commands, and `run`: parse, call, turn failures into exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError

from gigamlp import __version__
from gigamlp.cli.bench import bench
from gigamlp.cli.completion import completion
from gigamlp.cli.context import Common, Context, UsageError, console
from gigamlp.cli.convert import convert
from gigamlp.cli.doctor import doctor
from gigamlp.cli.export import export
from gigamlp.cli.frontier import frontier
from gigamlp.cli.info import info
from gigamlp.cli.optimize import optimize
from gigamlp.cli.predict import predict
from gigamlp.cli.report import report
from gigamlp.cli.reproduce import reproduce
from gigamlp.cli.score import score
from gigamlp.cli.serve import serve
from gigamlp.cli.train import train
from gigamlp.errors import GigaMLPError
from gigamlp.report.layout import clean

__all__ = ["make_app", "run"]

_HELP = "Small MLPs as fast as the hardware allows, with honest numbers."
_EXTRAS = {  # module -> the extra that brings it
    "torch": "torch",
    "matplotlib": "report",
    "onnx": "onnx",
    "pyarrow": "score",
    "starlette": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "orjson": "serve",
}

# command -> (function, its examples)
_COMMANDS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "reproduce": (
        reproduce,
        (
            "gigamlp reproduce",
            "gigamlp reproduce --device cpu --quick",
            "gigamlp reproduce --device cuda --grid full --out results/full",
            "gigamlp reproduce --json > reproduce.json",
        ),
    ),
    "train": (
        train,
        (
            "gigamlp train",
            "gigamlp train --hidden 40 --from scratch --out reader-40.safetensors",
            "gigamlp train --method ridge --hidden 1024 --dtype float16",
            "gigamlp train --data rows.npy --labels labels.npy --hidden 64,32",
            "gigamlp train --recipe distill --hidden 16,32,64 --seeds 4",
        ),
    ),
    "bench": (
        bench,
        (
            "gigamlp bench ridge",
            "gigamlp bench m.safetensors --batch 1,1024 --residence hot,cold",
            "gigamlp bench a.safetensors b.safetensors --engine torch_eager --json",
        ),
    ),
    "optimize": (
        optimize,
        (
            "gigamlp optimize model.safetensors --out plan.json",
            "gigamlp optimize m.safetensors --data rows.npz --min-accuracy 0.97",
        ),
    ),
    "frontier": (
        frontier,
        (
            "gigamlp frontier",
            "gigamlp frontier --models mnist-40 mnist-64 --batch 1024,65536 --plot frontier.svg",
            "gigamlp frontier --hidden 8,16,32 --min-accuracy 0.97 --out frontier.json",
        ),
    ),
    "predict": (
        predict,
        (
            "gigamlp predict model.safetensors rows.npy",
            "gigamlp predict model.safetensors images.idx.gz --proba --out proba.npy",
            "gigamlp predict model.safetensors rows.npz --plan plan.json --out labels.csv",
        ),
    ),
    "convert": (
        convert,
        (
            "gigamlp convert model.onnx --out model.safetensors",
            "gigamlp convert weights.pt --activation relu --classes cat,dog --out model.safetensors",
        ),
    ),
    "export": (
        export,
        (
            "gigamlp export model.safetensors --out model.onnx --input-dtype uint8 --output class",
            "gigamlp export model.safetensors --out net.c --weights int8",
            "gigamlp export model.safetensors --out net.py",
        ),
    ),
    "score": (
        score,
        (
            "gigamlp score model.safetensors rows.npy --out classes.npy",
            "gigamlp score m.safetensors 'day=*/*.parquet' --out day.parquet --id-columns id --resume",
            "gigamlp score m.safetensors rows.csv --out a.parquet --columns 'pixel*' --output class,margin",
            "gigamlp score m.safetensors - --out a.npy --on-error skip --json < rows.raw",
        ),
    ),
    "report": (
        report,
        (
            "gigamlp report results/reproduce.json",
            "gigamlp report before.json after.json --out compared.html",
            "gigamlp report bench.json plan.json --out model.html",
        ),
    ),
    "serve": (
        serve,
        (
            "gigamlp serve mnist-40",
            "gigamlp serve models/ --port 9000 --workers 2",
            "gigamlp serve digits=a.safetensors b.safetensors --host 0.0.0.0 --token-file token.txt",
            "gigamlp serve m.safetensors --device cuda --plan plan.json --max-delay-us 100",
        ),
    ),
    "info": (info, ("gigamlp info model.safetensors", "gigamlp info model.safetensors --json")),
    "doctor": (doctor, ("gigamlp doctor", "gigamlp doctor --roofs --json")),
    "completion": (
        completion,
        (
            'eval "$(gigamlp completion bash)"                    # in ~/.bashrc',
            "gigamlp completion zsh > ~/.zfunc/_gigamlp",
            "gigamlp completion fish > ~/.config/fish/completions/gigamlp.fish",
        ),
    ),
}


def make_app() -> App:
    """Return the parser with all commands."""
    app = App(
        name="gigamlp",
        help=_HELP,
        version=__version__,
        help_format="plaintext",
        help_epilogue="`gigamlp COMMAND --help` shows a command's options and examples.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted.",
    )
    for name, (function, examples) in _COMMANDS.items():
        epilogue = "Examples:\n" + "\n".join(f"  {line}" for line in examples)
        app.command(function, name=name, help_epilogue=epilogue)
    return app


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code. `KeyboardInterrupt` is the caller's."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a table is no reason to fail on an ASCII terminal
    app = make_app()
    try:
        command, bound, ignored = app.parse_args(tokens, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        return _refuse(str(error), tokens, app)
    common = bound.arguments.get("common", Common())
    context = Context.make(tokens, common)
    own = {"context": context} if "context" in ignored else {}
    try:
        command(*bound.args, **bound.kwargs, **own)
        sys.stdout.flush()
    except UsageError as error:
        return _refuse(str(error), tokens, app)
    except BrokenPipeError:
        # what read our output is gone: say nothing, and keep Python from flushing into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (GigaMLPError, OSError) as error:
        return _fail(str(error), context)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _fail(f"this needs {error.name}, which is not installed: pip install 'gigamlp[{extra}]'", context)
    return 0


def _fail(message: str, context: Context) -> int:
    if context.debug:
        traceback.print_exc()
    context.note(f"error: {_lines(message)}", style="red")
    return 1


def _refuse(message: str, tokens: Sequence[str], app: App) -> int:
    err = console(sys.stderr)
    known = next((token for token in tokens if token in app), "")
    err.print(f"error: {_lines(message)}", style="red", soft_wrap=True)
    err.print(f"see `{' '.join(filter(None, ('gigamlp', known, '--help')))}`", soft_wrap=True)
    return 2


def _lines(message: str) -> str:
    return "\n".join(clean(line) for line in message.splitlines())

"""Types of options that several commands share, with the words that ``--help`` says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

__all__ = [
    "Activations",
    "Batches",
    "Budget",
    "DataPath",
    "Device",
    "Engines",
    "Fraction",
    "InputDtype",
    "InputDtypes",
    "InputOns",
    "Labels",
    "LabelsPath",
    "Output",
    "Outputs",
    "Positive",
    "Residences",
    "Seed",
    "Threads",
    "Widths",
    "one_of",
]

# the words of spec.py and record.py, which are not imported here: that would import NumPy for --help
INPUT_DTYPES = ("uint8", "int8", "float16", "bfloat16", "float32")
OUTPUTS = ("class", "margin", "logits", "proba")
RESIDENCES = ("hot", "cold", "host-pinned", "host-pageable")

Converter = Callable[[Any, Sequence[Any]], Any]


def _words(tokens: Sequence[Any]) -> list[str]:
    return [word.strip() for token in tokens for word in token.value.split(",")]


def one_of(word: str, known: Sequence[str]) -> str:
    """Return `word` if it is in `known`, or raise ValueError with the nearest ones."""
    if word in known:
        return word
    near = get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise ValueError(f"{word!r} is not known; {hint}")


def _whole_numbers(type_: Any, tokens: Sequence[Any]) -> tuple[int, ...]:
    numbers = []
    for word in _words(tokens):
        if not re.fullmatch(r"[0-9]+(_[0-9]+)*", word) or int(word) < 1:
            raise ValueError(f"{word!r} is not a whole number >= 1")
        numbers.append(int(word))
    return tuple(numbers)


def _chosen(known: Sequence[str]) -> Converter:
    return lambda type_, tokens: tuple(one_of(word, known) for word in _words(tokens))


def _engines(type_: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    from gigamlp.engines.registry import engine_names

    return tuple(one_of(word, engine_names()) for word in _words(tokens))


def _device(type_: Any, tokens: Sequence[Any]) -> str:
    word = str(tokens[0].value)
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", word):
        raise ValueError(f"{word!r} is not known; known: auto, cpu, cuda, cuda:N")
    return word


def _list(converter: Converter, metavar: str, text: str, *, has_default: bool = True) -> Parameter:
    return Parameter(
        converter=converter,
        negative=(),
        metavar=f"{metavar}[,{metavar}...]",
        n_tokens=1,
        show_default=(lambda value: ",".join(map(str, value))) if has_default else False,
        help=text,
    )


_AT_LEAST_1 = validators.Number(gte=1)

Device = Annotated[str, Parameter(converter=_device, metavar="D", help="Where to run: auto, cpu, cuda or cuda:N.")]
Widths = Annotated[tuple[int, ...], _list(_whole_numbers, "N", "Widths of the hidden layers.")]
Batches = Annotated[tuple[int, ...], _list(_whole_numbers, "N", "Rows per run.")]
_ENGINES_HELP = "Only these engines; one that cannot run here is an error. Default: all that can."
Engines = Annotated[tuple[str, ...] | None, _list(_engines, "A", _ENGINES_HELP, has_default=False)]
InputDtypes = Annotated[tuple[str, ...], _list(_chosen(INPUT_DTYPES), "T", f"Of {', '.join(INPUT_DTYPES)}.")]
Outputs = Annotated[tuple[str, ...], _list(_chosen(OUTPUTS), "O", f"Of {', '.join(OUTPUTS)}.")]
_INPUT_ON_HELP = (
    "Where the rows are when a run begins: device, host or both. Default: both for --device auto on a GPU, which also "
    "tells from how many host rows on the GPU is quicker than the CPU; else device."
)
InputOns = Annotated[tuple[str, ...] | None, _list(_chosen(("device", "host")), "W", _INPUT_ON_HELP, has_default=False)]
Residences = Annotated[
    tuple[str, ...], _list(_chosen(RESIDENCES), "R", f"Where the rows are: {', '.join(RESIDENCES)}.")
]


def _single(known: Sequence[str], text: str) -> Parameter:
    return Parameter(
        converter=lambda type_, tokens: one_of(str(tokens[0].value), known), metavar="|".join(known), help=text
    )


def _labels(type_: Any, tokens: Sequence[Any]) -> tuple[str, ...] | tuple[int, ...]:
    words = _words(tokens)
    if all(re.fullmatch(r"-?[0-9]+", word) for word in words):
        return tuple(int(word) for word in words)
    return tuple(words)


_ACTIVATION_HELP = "For state dicts, which have none: of the hidden layers, one name or one for each."
_CLASSES_HELP = "Class labels in the order of the outputs: all whole numbers, or texts."
Activations = Annotated[
    tuple[str, ...] | None,
    _list(lambda type_, tokens: tuple(_words(tokens)), "NAME", _ACTIVATION_HELP, has_default=False),
]
Labels = Annotated[
    tuple[str, ...] | None,
    _list(_labels, "LABEL", _CLASSES_HELP, has_default=False),
    Parameter(allow_leading_hyphen=True),
]

InputDtype = Annotated[str, _single(INPUT_DTYPES, "What the rows are.")]
Output = Annotated[str, _single(OUTPUTS, "What is asked for.")]
Positive = Annotated[int, Parameter(validator=_AT_LEAST_1)]
Threads = Annotated[int | None, Parameter(validator=_AT_LEAST_1, help="CPU threads. Default: the engine's choice.")]
Seed = Annotated[int, Parameter(validator=validators.Number(gte=0), help="Of every random draw.")]
Budget = Annotated[
    float | None,
    Parameter(validator=validators.Number(gt=0), metavar="SECONDS", help="Start nothing new after so many seconds."),
]
Fraction = Annotated[float | None, Parameter(validator=validators.Number(gte=0, lte=1), metavar="FRACTION")]
DataPath = Annotated[
    Path | None,
    Parameter(metavar="PATH", help="Rows: .npy, .npz, .idx (.gz) or a folder of IDX files."),
]
LabelsPath = Annotated[Path | None, Parameter(metavar="PATH", help="Labels of --data, if they are in a file apart.")]

"""The id columns of an output, and which sink its name asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from gigamlp.errors import DataError, FileFormatError, InvalidInput
from gigamlp.score.answers import Answers, Field
from gigamlp.score.blocks import Shape
from gigamlp.score.files import open_source
from gigamlp.score.manifest import Manifest
from gigamlp.score.places import Place
from gigamlp.score.sinks import NpySink, Sink, id_fields

__all__ = ["FILE", "ROW", "Ids", "find_ids", "open_sink", "own_ids", "with_ids"]

FILE, ROW = "_file", "_row"
_ARROW = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}


@dataclass(frozen=True)
class Ids:
    """The id columns, in the order in which they were asked for.

    Attributes
    ----------
    names : tuple of str
    schema : pyarrow.Schema or None
        Of those that the inputs hold.
    """

    names: tuple[str, ...] = ()
    schema: Any = None


def own_ids(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of `names` that an input itself has to hold."""
    return tuple(name for name in names if name not in (FILE, ROW))


def find_ids(paths: Sequence[str], shape: Shape, stdin: IO[bytes] | None = None) -> Ids:
    """Return the id columns with the types that the first readable input gives them.

    Raises
    ------
    InvalidInput
        If one is named twice, or no input has it.
    """
    names = shape.ids
    if len(set(names)) < len(names):
        raise InvalidInput(f"an id column is named twice: {', '.join(names)}")
    if not own_ids(names):
        return Ids(names)
    for path in paths:
        try:
            source = open_source(path, shape, stdin)
        except FileFormatError:
            continue  # the run will say so
        schema = source.id_schema
        source.close()
        if schema is None:
            raise InvalidInput(f"{path}: holds rows only, no columns {', '.join(own_ids(names))}; _file and _row exist")
        return Ids(names, schema)
    raise InvalidInput("none of the inputs can be read")


def with_ids(answers: Answers, ids: Ids) -> Answers:
    """Return `answers` with the id columns before them."""
    if not ids.names:
        return answers
    block = answers.block
    found: dict[str, Any] = {}
    for name in ids.names:
        if name == FILE:
            found[name] = np.full(len(block.x), block.name, object)
        elif name == ROW:
            found[name] = block.row_numbers()
        elif block.ids is None:
            if len(block.x):
                raise DataError(f"{block.name}: has no column {name!r}, which other inputs have")
            import pyarrow as pa

            found[name] = pa.array([], ids.schema.field(name).type)
        else:
            found[name] = _cast(block, name, ids.schema.field(name).type)
    return replace(answers, columns={**found, **answers.columns})


def _cast(block: Any, name: str, to: Any) -> Any:
    import pyarrow as pa

    column = block.ids.column(name)
    if column.type == to:
        return column
    try:
        return column.cast(to)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{block.name}: id column {name!r} is {column.type}, in other inputs {to}: {error}") from error


def open_sink(out: Place, ids: Ids, made: Sequence[Field], manifest: Manifest) -> Sink:
    """Return what writes to `out`, which is of the kind that its name ends in.

    Raises
    ------
    InvalidInput
        If that ending is unknown, or the columns do not fit the kind.
    """
    twice = [field.name for field in made if field.name in ids.names]
    if twice:
        raise InvalidInput(f"column {twice[0]!r} would be there twice: as an id and as an answer")
    committed, finishing = manifest.bytes, manifest.state == "finishing"
    ending = out.suffix.lower()
    if ending == ".npy":
        if FILE in ids.names:
            raise InvalidInput(f"id column {FILE!r} is text: an .npy output takes numbers only; write Parquet or Arrow")
        own = {field.name: field for field in id_fields(ids.schema)}
        first = [own.get(name) or Field(name, "<i8") for name in ids.names]
        return NpySink(out, [*first, *made], committed, finishing=finishing)
    if ending in _ARROW:
        from gigamlp.score.arrow_sink import ArrowSink

        return ArrowSink(out, _ARROW[ending], ids, made, committed)
    raise InvalidInput(f"{out}: the name must end in .npy, .parquet or .arrow")

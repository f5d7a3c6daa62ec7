"""Parquet and Arrow outputs. The working file is an Arrow stream, which can be cut off after any batch."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gigamlp._atomic import atomic_write
from gigamlp.score.answers import Answers, Field
from gigamlp.score.manifest import beside
from gigamlp.score.outs import FILE, Ids
from gigamlp.score.places import Place
from gigamlp.score.sinks import open_append, sync_folder

__all__ = ["ArrowSink"]

_GROUP_ROWS = 1 << 20  # of a row group: what readers take in at once


class ArrowSink:
    """A Parquet or Arrow file.

    Parameters
    ----------
    out : Path
    kind : {"parquet", "arrow"}
    ids : Ids
    made : sequence of Field
    committed : int
        Bytes of the working file to keep.
    """

    def __init__(self, out: Place, kind: str, ids: Ids, made: Sequence[Field], committed: int = 0) -> None:
        self._out, self._kind = out, kind
        first = [pa.field(name, _id_type(name, ids)) for name in ids.names]
        self._schema = pa.schema([*first, *(pa.field(each.name, _type(each)) for each in made)])
        self._near = isinstance(out, Path)
        self._part = open_append(beside(out, "part"), committed)
        if not committed:
            self._part.write(memoryview(self._schema.serialize()))

    @property
    def size(self) -> int:
        """Bytes of the working file so far."""
        return int(self._part.size)

    def append(self, answers: Answers) -> None:
        """Write a block's answers behind the others."""
        if not len(answers.block.x):
            return
        arrays = [_array(answers.columns[field.name], field.type) for field in self._schema]
        self._part.write(memoryview(pa.RecordBatch.from_arrays(arrays, schema=self._schema).serialize()))

    def sync(self) -> None:
        """Return when all that was appended is on the disk."""
        self._part.sync()

    def finish(self, rows: int) -> None:
        """Write the output from the working file."""
        self._part.sync()
        if not self._near:
            with self._out.create() as file:
                self._write(file)
            return
        for orphan in self._out.parent.glob(f".{self._out.name}.*.part"):  # a kill came in here before
            orphan.unlink(missing_ok=True)
        with atomic_write(self._out) as file:
            self._write(file)
        sync_folder(self._out.parent)

    def _write(self, file: Any) -> None:
        if self._kind == "parquet":
            with pq.ParquetWriter(file, self._schema) as parquet:
                for group in self._groups():
                    parquet.write_table(group, row_group_size=_GROUP_ROWS)
        else:
            with pa.ipc.new_file(file, self._schema) as arrow:
                for group in self._groups():
                    arrow.write_table(group.combine_chunks())

    def _working(self) -> Any:
        if self._near:
            return pa.OSFile(str(self._part.path))
        from gigamlp.score.remote import Pieces

        return io.BufferedReader(Pieces(self._part.pieces()))

    def _groups(self) -> Iterator[pa.Table]:
        """Yield the answers in tables of exactly `_GROUP_ROWS` rows, the last aside."""
        held: list[pa.RecordBatch] = []
        count = 0
        with self._working() as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                while count + batch.num_rows >= _GROUP_ROWS:
                    take = _GROUP_ROWS - count
                    yield pa.Table.from_batches([*held, batch.slice(0, take)], self._schema)
                    batch, held, count = batch.slice(take), [], 0
                if batch.num_rows:
                    held.append(batch)
                    count += batch.num_rows
        if held:
            yield pa.Table.from_batches(held, self._schema)

    def discard(self) -> None:
        """Remove the working file, once the output is noted as complete."""
        if self._near:
            self._part.path.unlink(missing_ok=True)
        else:
            self._part.discard()

    def close(self) -> None:
        """Close the working file and leave it there."""
        self._part.close()


def _id_type(name: str, ids: Ids) -> pa.DataType:
    if ids.schema is not None and name in ids.schema.names:
        return ids.schema.field(name).type
    return pa.string() if name == FILE else pa.int64()


def _type(field: Field) -> pa.DataType:
    dtype = np.dtype(field.dtype)
    plain = pa.string() if dtype.kind == "U" else pa.from_numpy_dtype(dtype)
    return plain if field.width is None else pa.list_(plain, field.width)


def _array(column: Any, to: pa.DataType) -> pa.Array:
    if not isinstance(column, np.ndarray):
        return column
    if pa.types.is_fixed_size_list(to):
        flat = pa.array(np.ascontiguousarray(column).reshape(-1), to.value_type)
        return pa.FixedSizeListArray.from_arrays(flat, type=to)
    return pa.array(column, to)

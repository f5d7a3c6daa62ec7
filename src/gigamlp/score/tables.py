"""Inputs that are tables: Parquet and Arrow IPC (file and stream)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.score.blocks import Block, Position, Shape, reject_all
from gigamlp.score.layout import Layout, find_layout, rows_of
from gigamlp.score.outs import own_ids

__all__ = ["ArrowSource", "ParquetSource", "block_of", "plain_ids"]

_DAMAGE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, EOFError, ValueError)


def plain_ids(schema: pa.Schema, shape: Shape) -> pa.Schema | None:
    """Return the schema of the id columns, those of dictionaries as their values."""
    names = own_ids(shape.ids)
    if not names:
        return None
    fields = [schema.field(name) for name in names]
    return pa.schema(
        [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in fields]
    )


def block_of(  # noqa: PLR0917
    batch: pa.RecordBatch, layout: Layout, shape: Shape, ids: pa.Schema | None, start: Position, name: str
) -> Block:
    """Turn a batch of a table into a block that begins at `start`."""
    x, good, rejects = rows_of(batch, layout, shape)
    columns = None
    if ids is not None:
        picked = [batch.column(batch.schema.get_field_index(f.name)) for f in ids]
        plain = [c.cast(f.type) if c.type != f.type else c for c, f in zip(picked, ids, strict=True)]
        columns = pa.RecordBatch.from_arrays(plain, schema=ids)
        if good is not None:
            columns = columns.filter(pa.array(good))
    moved = tuple(replace(each, row=each.row + start.row) for each in rejects)
    kept = None if good is None else np.flatnonzero(good)
    end = Position(start.file, start.row + batch.num_rows)
    return Block(start, end, x, kept, columns, moved, name)


def _check(name: str, schema: pa.Schema, shape: Shape) -> Layout:
    twice = [n for n in schema.names if schema.names.count(n) > 1] if len(set(schema.names)) < len(schema) else []
    if twice:
        raise InvalidInput(f"{name}: has two columns named {twice[0]!r}")
    return find_layout(name, schema, shape)


def _slices(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


class ParquetSource:
    """A Parquet file. Blocks do not cross row groups: a damaged one costs no rows of another."""

    def __init__(self, name: str, shape: Shape, file: Any = None) -> None:
        self.name, self._shape = name, shape
        try:
            self._file = pq.ParquetFile(name if file is None else file, pre_buffer=file is not None)
        except _DAMAGE as error:
            if isinstance(error, PermissionError):
                raise
            raise FileFormatError(f"{name}: damaged Parquet: {error}") from error
        schema = self._file.schema_arrow
        self._layout = _check(name, schema, shape)
        self.id_schema: Any = plain_ids(schema, shape)
        self.rows: int | None = self._file.metadata.num_rows

    @property
    def cuts(self) -> Sequence[int]:
        """The rows at which `blocks` may begin to give the same blocks as from the beginning: those of row groups."""
        meta = self._file.metadata
        return [0, *accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups - 1))]

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows of each row group in blocks."""
        names = [*dict.fromkeys((*self._layout.names, *own_ids(self._shape.ids)))]
        meta, first = self._file.metadata, 0
        for group in range(meta.num_row_groups):
            end = first + meta.row_group(group).num_rows
            if end > start.row:
                yield from self._group(group, first, end, Position(start.file, max(start.row, first)), names)
            first = end

    def _group(self, group: int, first: int, end: int, at: Position, names: list[str]) -> Iterator[Block]:
        row = first
        try:
            batches = self._file.iter_batches(self._shape.rows, row_groups=[group], columns=names)
            for batch in _cut(batches, self._shape.rows):
                if row >= at.row:
                    begin = Position(at.file, row)
                    yield block_of(batch, self._layout, self._shape, self.id_schema, begin, self.name)
                row += batch.num_rows
        except _DAMAGE as error:
            reason = f"row group {group} cannot be read: {error}"
            yield reject_all(self.name, Position(at.file, row), end - row, reason, self._shape.features)
            return
        if row != end:
            reason = f"row group {group} promises {end - first:,} rows and has {row - first:,}"
            if row < end:
                yield reject_all(self.name, Position(at.file, row), end - row, reason, self._shape.features)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of exactly `rows` rows, the last aside, whatever cut pyarrow makes of nested columns."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        while count + batch.num_rows >= rows:
            take = rows - count
            yield _joined([*held, batch.slice(0, take)])
            batch, held, count = batch.slice(take), [], 0
        if batch.num_rows:
            held.append(batch)
            count += batch.num_rows
    if held:
        yield _joined(held)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.Table.from_batches(parts).combine_chunks().to_batches()[0]


class ArrowSource:
    """An Arrow IPC file or stream, mapped into memory. Blocks do not cross record batches."""

    def __init__(self, name: str, shape: Shape, file: Any = None) -> None:
        self.name, self._shape = name, shape
        self._map = pa.memory_map(name) if file is None else file
        self._map.seek(0)
        try:
            self._file: Any = None
            if self._map.read(6) == b"ARROW1":
                self._file = pa.ipc.open_file(self._map)
                schema = self._file.schema
            else:
                self._map.seek(0)
                self._stream = pa.ipc.open_stream(self._map)
                schema = self._stream.schema
        except _DAMAGE as error:
            raise FileFormatError(f"{name}: damaged Arrow IPC: {error}") from error
        self._layout = _check(name, schema, shape)
        self.id_schema: Any = plain_ids(schema, shape)
        self.rows: int | None = None

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows of each record batch in blocks."""
        row, index = 0, 0
        while True:
            begin = Position(start.file, max(row, start.row))
            try:
                batch = self._next(index)
                if batch is None:
                    return
                batch.validate()
            except _DAMAGE as error:
                reason = f"record batch {index} cannot be read, nor what follows: {error}"
                block = reject_all(self.name, begin, None, reason, self._shape.features)
                yield Block(begin, Position(start.file + 1), block.x, block.kept, None, block.rejects, self.name)
                return
            for piece in _slices(iter([batch]), self._shape.rows):
                if row >= start.row:
                    at = Position(start.file, row)
                    yield block_of(piece, self._layout, self._shape, self.id_schema, at, self.name)
                row += piece.num_rows
            index += 1

    def _next(self, index: int) -> pa.RecordBatch | None:
        if self._file is not None:
            return self._file.get_batch(index) if index < self._file.num_record_batches else None
        try:
            return self._stream.read_next_batch()
        except StopIteration:
            return None

    def close(self) -> None:
        """Close the file; batches that are still in use keep the mapping."""
        self._map.close()

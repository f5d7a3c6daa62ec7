"""CSV inputs: read in pieces of whole lines, so that a resumed run begins at a byte, not at the beginning."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.score.blocks import Block, Position, Reject, Shape
from gigamlp.score.layout import Layout, find_layout
from gigamlp.score.outs import own_ids
from gigamlp.score.places import is_uri, place
from gigamlp.score.tables import block_of, plain_ids

__all__ = ["TextSource"]

_HEAD = 1 << 22  # bytes in which the first two lines must end
_DTYPES = {"bfloat16": "float32", "float16": "float32"}


class TextSource:
    """A CSV or TSV file, gzip-compressed or not; a field has no line break in it.

    If a field of the first line is no number, that line holds the names; else they are ``c0``, ``c1`` and so on. The
    features are read as float32, or as the dtype of `shape`; id columns as what their first row looks like.
    """

    rows: int | None = None

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self._shape = name, shape
        whole = name.partition("?")[0].lower() if is_uri(name) else name.lower()
        plain = whole.removesuffix(".gz")
        self._packed = plain != whole
        with self._open() as file:
            try:
                head = file.read(_HEAD)
            except (OSError, EOFError) as error:
                raise FileFormatError(f"{name}: damaged gzip data: {error}") from error
        self._bom = 3 if head.startswith(b"\xef\xbb\xbf") else 0
        lines = [line for line in head[self._bom :].splitlines(keepends=True)[:2] if line.strip()]
        if not lines:
            raise FileFormatError(f"{name}: an empty file; an input has at least one row or a line of names")
        self._delimiter = "\t" if plain.endswith(".tsv") or (b"\t" in lines[0] and b"," not in lines[0]) else ","
        if plain.endswith(".txt") and b"," not in lines[0] and b";" in lines[0]:
            self._delimiter = ";"
        first = _fields(lines[0], self._delimiter)
        headed = not all(_is_number(field) for field in first)
        self._names = first if headed else [f"c{index}" for index in range(len(first))]
        if len(set(self._names)) < len(self._names):
            raise InvalidInput(f"{name}: two columns have the same name")
        self._begin = self._bom + (len(lines[0]) if headed else 0)
        sample = _fields(lines[-1], self._delimiter) if len(lines) > headed else []
        self._layout, self._types = self._columns(sample)
        self.id_schema: Any = plain_ids(pa.schema(self._types), shape)

    def _columns(self, sample: list[str]) -> tuple[Layout, dict[str, pa.DataType]]:
        """Return which columns are features, and the type of each column that is read."""
        shape = self._shape
        number = pa.from_numpy_dtype(np.dtype(_DTYPES.get(shape.dtype or "", shape.dtype or "float32")))
        ids = own_ids(shape.ids)
        looks = dict(zip(self._names, sample, strict=False))
        guess = {n: number if n not in ids else _id_type(looks.get(n, "")) for n in self._names}
        if not shape.columns:  # columns of words are no features
            words = {n for n, text in looks.items() if n not in ids and not _is_number(text)}
            if words and len(self._names) - len(words | set(ids)) == shape.features:
                guess |= dict.fromkeys(words, pa.string())
        layout = find_layout(self.name, pa.schema(guess), shape)
        return layout, {n: guess[n] for n in dict.fromkeys((*layout.names, *ids))}

    def _open(self) -> Any:
        if is_uri(self.name):
            file = io.BufferedReader(place(self.name).open())
            return gzip.GzipFile(fileobj=file) if self._packed else file
        return gzip.open(self.name, "rb") if self._packed else Path(self.name).open("rb")

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the lines from `start` on, `shape.rows` at a time."""
        row, byte = start.row, max(start.byte, self._begin)
        with self._open() as file:
            try:
                file.seek(byte)
                while data := _lines(file, self._shape.rows):
                    lines = sum(1 for line in data if line.strip())
                    if lines:
                        block = self._block(data, Position(start.file, row, byte))
                    byte += sum(map(len, data))
                    row += lines
                    if lines:
                        end = Position(start.file, row, byte)
                        yield Block(block.start, end, block.x, block.kept, block.ids, block.rejects, self.name)
            except (EOFError, gzip.BadGzipFile, OSError) as error:
                if not self._packed:
                    raise
                reject = Reject(row, None, f"damaged gzip data from here on: {error}")
                x = np.empty((0, self._shape.features), np.float32)
                at = Position(start.file, row, byte)
                yield Block(at, Position(start.file + 1), x, np.empty(0, np.int64), None, (reject,), self.name)

    def _block(self, data: list[bytes], start: Position) -> Block:
        try:
            return block_of(self._parse(data), self._layout, self._shape, self.id_schema, start, self.name)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return self._one_by_one([line for line in data if line.strip()], start)

    def _parse(self, data: list[bytes]) -> pa.RecordBatch:
        read = pa.csv.ReadOptions(column_names=self._names, block_size=1 << 30, use_threads=True)
        parse = pa.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=False)
        convert = pa.csv.ConvertOptions(column_types=self._types, include_columns=list(self._types))
        table = pa.csv.read_csv(pa.py_buffer(b"".join(data)), read, parse, convert)
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)

    def _one_by_one(self, data: list[bytes], start: Position) -> Block:
        """Find the lines that cannot be read by halving; keep the others."""
        good, rejects = np.ones(len(data), bool), []

        def check(begin: int, end: int) -> None:
            try:
                self._parse(data[begin:end])
            except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                if end - begin > 1:
                    middle = (begin + end) // 2
                    check(begin, middle)
                    check(middle, end)
                    return
                good[begin] = False
                text = data[begin].decode("utf-8", "replace").rstrip("\r\n")
                rejects.append(Reject(start.row + begin, 1, self._reason(text, error), text))

        check(0, len(data))
        rest = [line for line, fine in zip(data, good, strict=True) if fine]
        if rest:
            block = block_of(self._parse(rest), self._layout, self._shape, self.id_schema, start, self.name)
        else:
            block = Block(start, start, np.empty((0, self._shape.features), np.float32), np.empty(0, np.int64))
        places = np.flatnonzero(good)
        kept = places if block.kept is None else places[block.kept]
        moved = [Reject(start.row + int(places[r.row - start.row]), r.rows, r.reason, r.values) for r in block.rejects]
        merged = tuple(sorted((*rejects, *moved), key=lambda each: each.row))
        return Block(start, start, block.x, kept, block.ids, merged, self.name)

    def _reason(self, text: str, error: Exception) -> str:
        found = len(_fields(text.encode(), self._delimiter))
        if found != len(self._names):
            return f"has {found} fields, the first line has {len(self._names)}"
        return str(error).partition("\n")[0]

    def close(self) -> None:
        """Nothing is open between two calls."""


def _lines(file: IO[bytes], count: int) -> list[bytes]:
    lines = []
    for line in file:
        lines.append(line)
        if len(lines) == count:
            break
    return lines


def _fields(line: bytes, delimiter: str) -> list[str]:
    import csv

    text = io.StringIO(line.decode("utf-8", "replace").rstrip("\r\n"))
    return [field.strip() for field in next(csv.reader(text, delimiter=delimiter), [])]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text
    return True


def _id_type(text: str) -> pa.DataType:
    try:
        int(text)
    except ValueError:
        return pa.float64() if text and _is_number(text) else pa.string()
    return pa.int64()

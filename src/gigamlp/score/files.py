"""Which inputs are meant, and of which kind each is."""

from __future__ import annotations

import glob
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gigamlp.data.idx import GZIP_MAGIC
from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.score.blocks import Block, Position, Shape, Source, reject_all
from gigamlp.score.places import is_uri, place

__all__ = ["STDIN", "find_inputs", "open_source", "read_inputs", "total_rows"]

STDIN = "-"
_ENDINGS = (".npy", ".idx", "-ubyte", ".csv", ".tsv", ".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc")
_MAGIC = 8
_MANY = 256


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """Return the files that `inputs` mean, in the order in which they are answered.

    Parameters
    ----------
    inputs : sequence of str
        Files; folders, of which all files of a known ending are taken, those below too, sorted by path (names that
        begin with ``.`` or ``_`` are not); patterns such as ``rows-*.npy`` and ``**/*.parquet``, sorted; ``-`` for
        stdin.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    InvalidInput
        If a folder or a pattern holds nothing, or a file is meant twice.
    """
    found: list[str] = []
    for each in inputs:
        if is_uri(each):
            found += _remote(each)
            continue
        path = Path(each)
        if each == STDIN or path.is_file():
            found.append(each)
        elif path.is_dir():
            inside = [str(p) for p in sorted(path.rglob("*")) if p.is_file() and _is_input(p, path)]
            if not inside:
                raise InvalidInput(f"{each}: no input in this folder; known endings: {', '.join(_ENDINGS)}, also .gz")
            found += inside
        elif glob.has_magic(each):
            matches = sorted(p for p in glob.glob(each, recursive=True) if Path(p).is_file())  # noqa: PTH207  (absolute patterns)
            if not matches:
                raise InvalidInput(f"{each}: no file matches this pattern")
            found += matches
        else:
            raise FileNotFoundError(f"{each}: no such file, folder or pattern")
    named = [each if each == STDIN or is_uri(each) else str(Path(each).absolute()) for each in found]
    twice = [each for each, count in Counter(named).items() if count > 1]
    if twice:
        raise InvalidInput(f"{twice[0]}: meant twice; its rows would be answered twice")
    if not found:
        raise InvalidInput("name at least one input")
    return found


def _remote(uri: str) -> list[str]:
    where = place(uri)
    if where.is_file():
        return [uri]
    if glob.has_magic(uri.partition("?")[0]):
        inside = where.matches()
    elif where.is_dir():
        inside = [where.below(n) for n in where.files() if _is_input(Path(n), Path())]
    else:
        raise FileNotFoundError(f"{uri}: no such file, folder or pattern")
    if not inside:
        raise InvalidInput(f"{uri}: no input there")
    return [str(each) for each in inside]


def _open_uri(uri: str, shape: Shape) -> Source:
    from gigamlp.score import arrays, tables, text

    file = place(uri).open()
    head = file.read(_MAGIC)
    name = uri.partition("?")[0].lower()
    if head.startswith(b"PAR1"):
        return tables.ParquetSource(uri, shape, file)
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return tables.ArrowSource(uri, shape, file)
    if head.startswith(b"\x93NUMPY") or head[:2] == b"\0\0":
        file.seek(0)
        return arrays.open_remote(uri, file, shape)
    file.close()
    if name.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
        return text.TextSource(uri, shape)
    if not head:
        raise FileFormatError(f"{uri}: an empty file")
    raise FileFormatError(f"{uri}: neither .npy, IDX, Parquet, Arrow nor CSV (it begins with {head[:4].hex(' ')})")


def _is_input(path: Path, folder: Path) -> bool:
    if any(part.startswith((".", "_")) for part in path.relative_to(folder).parts):
        return False
    return path.name.lower().removesuffix(".gz").endswith(_ENDINGS)


def open_source(path: str, shape: Shape, stdin: IO[bytes] | None = None) -> Source:
    """Open one input. Its kind is told by its first bytes; text is CSV.

    Raises
    ------
    FileFormatError
        If it is damaged, or of no kind that is read.
    ModuleNotFoundError
        If it needs pyarrow and that is not installed.
    """
    from gigamlp.score import arrays

    if path == STDIN:
        return arrays.RawSource("stdin", sys.stdin.buffer if stdin is None else stdin, shape)
    if is_uri(path):
        return _open_uri(path, shape)
    with Path(path).open("rb") as file:
        head = file.read(_MAGIC)
    name = path.lower()
    if head.startswith(b"\x93NUMPY"):
        return arrays.open_npy(Path(path), shape)
    if head[:2] == b"\0\0" or (head[:2] == GZIP_MAGIC and not name.endswith((".csv.gz", ".tsv.gz", ".txt.gz"))):
        return arrays.open_idx(Path(path), shape)
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        from gigamlp.score import tables

        return (tables.ParquetSource if head.startswith(b"PAR1") else tables.ArrowSource)(path, shape)
    if name.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
        from gigamlp.score import text

        return text.TextSource(path, shape)
    if not head:
        raise FileFormatError(f"{path}: an empty file")
    raise FileFormatError(f"{path}: neither .npy, IDX, Parquet, Arrow nor CSV (it begins with {head[:4].hex(' ')})")


def total_rows(paths: Sequence[str], shape: Shape) -> int:
    """Return the rows of all inputs as their headers say; 0 if one does not, or there are too many to open for it."""
    if len(paths) > _MANY or STDIN in paths:
        return 0
    total = 0
    for path in paths:
        try:
            source = open_source(path, shape)
        except FileFormatError:
            continue
        rows = source.rows
        source.close()
        if rows is None:
            return 0
        total += rows
    return total


def read_inputs(paths: Sequence[str], shape: Shape, start: Position, stdin: IO[bytes] | None = None) -> Iterator[Block]:
    """Yield the rows of all inputs from `start` on, in order. What cannot be read is a reject, not an error."""
    for file in range(start.file, len(paths)):
        at = start if file == start.file else Position(file)
        source: Any = None
        try:
            source = open_source(paths[file], shape, stdin)
            yield from source.blocks(at)
        except FileFormatError as error:
            block = reject_all(paths[file], at, None, str(error), shape.features)
            yield Block(at, Position(file + 1), block.x, block.kept, None, block.rejects, block.name)
        finally:
            if source is not None:
                source.close()

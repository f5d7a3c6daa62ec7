"""Rows of every kind of input to answers in every kind of output, compared with the model itself."""

from __future__ import annotations

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.errors import DataError, InvalidInput
from gigamlp.score import score
from tests.fakes import make_mlp

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 1003  # a prime number would do as well: no multiple of a block
MLP = make_mlp((6, 8, 3))
X = np.random.default_rng(1).integers(0, 256, (ROWS, 6), dtype=np.uint8)


def run(inputs: Any, out: Path, mlp: gm.MLP = MLP, **options: Any) -> Any:
    options = {"device": "cpu", "engine": "numpy", "block_rows": 100, **options}
    return score(mlp, inputs, out, **options)


def fixed(x: np.ndarray) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])


def idx(x: np.ndarray) -> bytes:
    return struct.pack(">BBBBII", 0, 0, 8, 2, *x.shape) + x.tobytes()


def write(kind: str, path: Path, x: np.ndarray) -> Path:
    """Write rows as `kind`; the ids are `100 + row`."""
    ids = pa.array(np.arange(len(x)) + 100)
    names = [f"p{i}" for i in range(x.shape[1])]
    columns = {name: x[:, i] for i, name in enumerate(names)}
    tables = {
        "fixed": {"id": ids, "x": fixed(x)},
        "list": {"x": pa.array(list(x), pa.list_(pa.uint8())), "id": ids},
        "large-list": {"x": pa.array(list(x), pa.large_list(pa.uint8())), "id": ids},
        "binary": {"x": pa.array([r.tobytes() for r in x], pa.binary()), "id": ids},
        "large-binary": {"x": pa.array([r.tobytes() for r in x], pa.large_binary()), "id": ids},
        "fixed-binary": {"x": pa.array([r.tobytes() for r in x], pa.binary(x.shape[1])), "id": ids},
        "named": {"id": ids, **columns},
        "bool-named": {"id": ids, **columns},
    }
    file, _, content = kind.partition(" ")
    path = path / f"rows.{file}"
    if file == "npy":
        np.save(path, np.asfortranarray(x) if content == "fortran" else x)
    elif file == "idx":
        path.write_bytes(idx(x))
    elif file == "idx.gz":
        path.write_bytes(gzip.compress(idx(x)))
    elif file.startswith("csv"):
        head = "" if content == "bare" else "id," + ",".join(names) + "\n"
        lines = [",".join(map(str, ([] if content == "bare" else [100 + i]) + r.tolist())) for i, r in enumerate(x)]
        data = (head + "\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(data) if file == "csv.gz" else data)
    elif file == "parquet":
        pq.write_table(pa.table(tables[content]), path, row_group_size=301)
    else:
        table = pa.table(tables[content])
        make = pa.ipc.new_file if file == "arrow" else pa.ipc.new_stream
        with make(str(path), table.schema) as sink:
            sink.write_table(table, max_chunksize=301)
    return path


TABLES = ["fixed", "list", "large-list", "binary", "large-binary", "fixed-binary", "named"]
KINDS = [
    "npy",
    "npy fortran",
    "idx",
    "idx.gz",
    "csv bare",
    "csv headed",
    "csv.gz headed",
    *(f"{file} {content}" for file in ("parquet", "arrow", "arrows") for content in TABLES),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_input_gives_the_answers_of_its_rows(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path, X)
    has_ids = kind not in ("npy", "npy fortran", "idx", "idx.gz", "csv bare")
    ids = ("id", "_row") if has_ids else ("_row",)
    done = run(path, tmp_path / "out.parquet", id_columns=ids)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == [*ids, "class"]
    assert done.rows == ROWS
    assert done.rejected == 0
    assert table["class"].to_numpy().tolist() == MLP.predict(X).tolist()
    assert table["_row"].to_numpy().tolist() == list(range(ROWS))
    if has_ids:
        assert table["id"].to_numpy().tolist() == list(range(100, 100 + ROWS))


@pytest.mark.parametrize("ending", ["npy", "parquet", "arrow"])
@pytest.mark.parametrize("outputs", [("class",), ("proba",), ("class", "margin", "confidence", "proba", "logits")])
@pytest.mark.parametrize("head", ["softmax", "strings", "sigmoid"])
def test_every_output_of_every_head(ending: str, outputs: tuple[str, ...], head: str, tmp_path: Path) -> None:
    mlp = make_mlp((6, 8, 1), head="sigmoid") if head == "sigmoid" else MLP
    if head == "strings":
        mlp = mlp.with_(classes=np.array(["ant", "bee", "wasp"]))
    logits = mlp.logits(X)
    proba = mlp.probabilities(logits)
    top = np.sort(logits, axis=1)
    want = {
        "class": mlp.answers(logits),
        "margin": np.abs(logits[:, 0]) if head == "sigmoid" else top[:, -1] - top[:, -2],
        "confidence": proba.max(axis=1),
        "proba": proba,
        "logits": logits,
    }
    out = tmp_path / f"out.{ending}"
    run(write("npy", tmp_path, X), out, mlp, outputs=outputs)
    found = read(out, outputs)
    for name in outputs:
        if name == "class":
            assert found[name].tolist() == want[name].tolist()
        else:
            assert found[name].shape == want[name].shape
            np.testing.assert_allclose(found[name], want[name], rtol=2e-5, atol=2e-5)  # other cuts, other sums


def read(out: Path, outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    if out.suffix == ".npy":
        x = np.load(out)
        return {outputs[0]: x} if len(outputs) == 1 else {name: x[name] for name in x.dtype.names}
    table = pq.read_table(out) if out.suffix == ".parquet" else pa.ipc.open_file(str(out)).read_all()
    found = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        nested = pa.types.is_fixed_size_list(column.type)
        found[name] = np.stack(column.to_numpy(zero_copy_only=False)) if nested else column.to_numpy(False)
    return found


@pytest.mark.parametrize("mlp", [make_mlp((6, 1), head="regression"), make_mlp((6, 4, 2), head="regression")])
def test_regression(mlp: gm.MLP, tmp_path: Path) -> None:
    run(write("npy", tmp_path, X), tmp_path / "out.npy", mlp)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), mlp.predict(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidInput, match="has no proba"):
        run(tmp_path / "rows.npy", tmp_path / "out.npy", mlp, outputs="proba")


def test_multilabel_and_one_feature_and_one_class(tmp_path: Path) -> None:
    mlp = make_mlp((6, 4), head="multilabel")
    run(write("npy", tmp_path, X), tmp_path / "out.parquet", mlp, outputs=("class", "proba"))
    found = read(tmp_path / "out.parquet", ())
    np.testing.assert_array_equal(found["indicators"], mlp.predict(X))
    one = make_mlp((1, 1))
    run(write("npy", tmp_path, X[:, :1]), tmp_path / "one.npy", one, outputs="logits")
    assert np.load(tmp_path / "one.npy").shape == (ROWS, 1)
    with pytest.raises(InvalidInput, match="has no margin"):
        run(tmp_path / "rows.npy", tmp_path / "one.npy", one, outputs="margin")


def test_an_npy_output_is_what_numpy_saves(tmp_path: Path) -> None:
    run(write("npy", tmp_path, X), tmp_path / "out.npy")
    np.save(tmp_path / "want.npy", MLP.predict(X))
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "want.npy").read_bytes()
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"rows.npy", "out.npy", "out.npy.manifest.json", "want.npy"}


def test_several_inputs_are_answered_in_order(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    np.save(tmp_path / "in" / "b.npy", X[:400])
    np.save(tmp_path / "in" / "a.npy", X[400:401])
    pq.write_table(pa.table({"x": fixed(X[401:])}), tmp_path / "in" / "deep" / "c.parquet")
    (tmp_path / "in" / "notes.md").write_text("no input")
    (tmp_path / "in" / "_hidden.parquet").write_text("no input")
    order = np.concatenate([X[400:401], X[:400], X[401:]])
    done = run(tmp_path / "in", tmp_path / "out.parquet", id_columns=("_file", "_row"))
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert done.rows == ROWS
    assert table["class"] == MLP.predict(order).tolist()
    assert [Path(name).name for name in dict.fromkeys(table["_file"])] == ["a.npy", "b.npy", "c.parquet"]
    assert table["_row"][:3] == [0, 0, 1]
    run(str(tmp_path / "in" / "[ab].npy"), tmp_path / "out.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), MLP.predict(order[:401]))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_raw_rows_of_stdin(dtype: str, tmp_path: Path) -> None:
    x = X.astype(dtype)
    done = run("-", tmp_path / "out.npy", stdin=io.BytesIO(x.tobytes()), input_dtype=dtype)
    assert done.rows == ROWS
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), MLP.predict(X))
    cut = x.tobytes() + x.tobytes()[: 2 * x.itemsize]
    with pytest.raises(DataError, match="row 1,003: the stream ends"):
        run("-", tmp_path / "cut.npy", stdin=io.BytesIO(cut), input_dtype=dtype)


def test_columns_by_name_and_pattern(tmp_path: Path) -> None:
    table = {"z": np.zeros(ROWS), **{f"p{i}": X[:, i] for i in range(6)}, "name": ["n"] * ROWS}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    with pytest.raises(InvalidInput, match="name them with --columns"):
        run(tmp_path / "rows.parquet", tmp_path / "out.npy")
    run(tmp_path / "rows.parquet", tmp_path / "out.npy", columns=["p?"])
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), MLP.predict(X))
    order = [5, 4, 3, 2, 1, 0]
    run(tmp_path / "rows.parquet", tmp_path / "out.npy", columns=[f"p{i}" for i in order])
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), MLP.predict(X[:, order]))
    for columns, said in ((["q"], "no column 'q'"), (["name"], "not a number"), (["p0"], "1 columns are named")):
        with pytest.raises(InvalidInput, match=said):
            run(tmp_path / "rows.parquet", tmp_path / "out.npy", columns=columns)


def test_only_what_the_model_reads_matters(tmp_path: Path) -> None:
    mlp = gm.MLP(make_mlp((2, 3)).layers, columns=((1, 2), (4, 5)), features=6)
    x = X.astype(np.float32)
    x[:, 0] = np.nan
    np.save(tmp_path / "rows.npy", x)
    done = run(tmp_path / "rows.npy", tmp_path / "out.npy", mlp)
    assert done.rows == ROWS
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), mlp.predict(X))


def test_no_rows_at_all(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", X[:0])
    for name in ("out.npy", "out.parquet", "out.arrow"):
        assert run(tmp_path / "rows.npy", tmp_path / name).rows == 0
    assert np.load(tmp_path / "out.npy").shape == (0,)
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"out": "out.txt"}, "must end in"),
        ({"outputs": ("class", "class")}, "named twice"),
        ({"outputs": ("best",)}, "unknown output 'best'"),
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"inputs": ["rows.npy", "rows.npy"]}, "meant twice"),
        ({"inputs": "*.nothing"}, "no file matches"),
        ({"id_columns": ("_file",)}, "takes numbers only"),
        ({"id_columns": ("name",)}, "holds rows only"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("npy", tmp_path, X)
    with pytest.raises(InvalidInput, match=said):
        run(**{"inputs": "rows.npy", **arguments, "out": Path(arguments.get("out", "out.npy"))})


def test_the_result_names_the_bottleneck(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    done = run(write("npy", tmp_path, X), tmp_path / "out.npy", progress=lambda *a: seen.append(a))
    data = json.loads(json.dumps(done.to_json()))
    assert data["bottleneck"] in data["busy"]
    assert set(data["busy"]) == {"read", "compute", "write"}
    assert data["bytes_in"] == X.nbytes
    assert data["rows_per_s"] > 0


def test_a_file_of_no_bytes_and_a_file_named_in_two_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", X)
    Path("none.npy").touch()
    with pytest.raises(DataError, match=r"none\.npy: an empty file"):
        run(["rows.npy", "none.npy"], Path("out.npy"))
    with pytest.raises(InvalidInput, match="meant twice"):
        run(["rows.npy", "./rows.npy"], Path("out.npy"))
    with pytest.raises(InvalidInput, match="meant twice"):
        run(["rows.npy", str(tmp_path / "rows.npy")], Path("out.npy"))

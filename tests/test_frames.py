"""Tables as rows: every library gives the same answers by name and by order, and every fault is named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp import modelfile
from gigamlp.errors import FileFormatError, InvalidInput, ModelError

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

NAMES = ("age", "height", "wealth")
X = np.array([[30, 1.5, 7], [40, 1.75, 3], [50, 2.0, 250]])


class Stream:
    """What only speaks Arrow's C stream."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._table = pa.table(data)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


MAKERS = {
    "pandas": pd.DataFrame,
    "pandas nullable": lambda data: pd.DataFrame(data).convert_dtypes(),
    "pandas arrow": lambda data: pd.DataFrame(data).convert_dtypes(dtype_backend="pyarrow"),
    "pandas sparse": lambda data: pd.DataFrame({k: pd.arrays.SparseArray(v) for k, v in data.items()}),
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
    "record batch": pa.RecordBatch.from_pydict,
    "chunked": lambda data: pa.concat_tables([pa.table(data).slice(0, 1), pa.table(data).slice(1)]),
    "stream": Stream,
}


def columns(order: tuple[str, ...] = NAMES) -> dict[str, Any]:
    kinds = {"age": np.int16, "height": np.float64, "wealth": np.uint8}
    return {name: X[:, NAMES.index(name)].astype(kinds[name]) for name in order}


@pytest.fixture(scope="module")
def mlp() -> gm.MLP:
    weight = np.random.default_rng(0).normal(size=(5, 3))
    return gm.MLP([gm.Layer(weight)], head="regression", name="people")


@pytest.fixture(scope="module")
def named(mlp: gm.MLP) -> gm.MLP:
    return mlp.with_(feature_names=NAMES)


def answers(mlp: gm.MLP, x: Any) -> Any:
    with gm.Session(mlp, device="cpu", engine="numpy") as session:
        found = session.predict(x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(mlp.predict(x), found)
    return found


@pytest.mark.parametrize("library", MAKERS)
def test_tables_are_read_by_name_or_by_order(mlp: gm.MLP, named: gm.MLP, library: str) -> None:
    make, wanted = MAKERS[library], answers(mlp, X.astype(np.float32))
    turned = ("wealth", "age", "height")
    np.testing.assert_array_equal(answers(mlp, make(columns())), wanted)
    np.testing.assert_array_equal(answers(named, make(columns(turned))), wanted)
    by_order = answers(mlp, X[:, [2, 0, 1]].astype(np.float32))
    np.testing.assert_array_equal(answers(mlp, make(columns(turned))), by_order)
    assert not np.allclose(by_order, wanted)  # so that the order does matter here


@pytest.mark.parametrize("library", MAKERS)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "uint64", "float32"])
def test_tables_of_one_dtype(mlp: gm.MLP, library: str, dtype: str) -> None:
    x = np.array([[1, 0, 1], [0, 0, 1]]).astype(dtype)
    table = MAKERS[library]({name: x[:, i] for i, name in enumerate(NAMES)})
    np.testing.assert_array_equal(answers(mlp, table), answers(mlp, x))


@pytest.mark.parametrize("library", MAKERS)
def test_tables_without_rows(mlp: gm.MLP, library: str) -> None:
    if library == "chunked":
        pytest.skip("there is nothing to cut")
    assert answers(mlp, MAKERS[library]({name: np.zeros(0) for name in NAMES})).shape == (0, 5)


def test_columns_without_names_are_taken_by_order(named: gm.MLP) -> None:
    np.testing.assert_array_equal(answers(named, pd.DataFrame(X)), answers(named, X))


@pytest.mark.parametrize("library", MAKERS)
def test_faulty_tables_are_refused_by_name(mlp: gm.MLP, named: gm.MLP, library: str) -> None:
    make = MAKERS[library]
    with pytest.raises(InvalidInput, match=r"2 columns \('age', 'height'\), the model takes 3"):
        answers(mlp, make(columns(NAMES[:2])))
    with pytest.raises(InvalidInput, match=r"misses 'wealth'; it must have"):
        answers(named, make(columns(NAMES[:2])))
    with pytest.raises(InvalidInput, match=r"has 'town', which the model does not know"):
        answers(named, make({**columns(), "town": np.zeros(3)}))
    if library == "pandas sparse":
        return
    for bad in (["x", "y", "z"], np.array(["2020-01-01"] * 3, "datetime64[ms]")):
        with pytest.raises(InvalidInput, match=r"column 'height' is of type .*the model takes numbers"):
            answers(mlp, make({**columns(), "height": bad}))


@pytest.mark.parametrize("library", [name for name in MAKERS if name not in ("pandas", "pandas sparse")])
@pytest.mark.parametrize("values", [[1, None, 3], [1.5, None, 3.0], [True, None, False]])
def test_nulls_are_refused_with_their_row(mlp: gm.MLP, library: str, values: list[Any]) -> None:
    with pytest.raises(InvalidInput, match=r"column 'wealth' holds a null in row 1"):
        answers(mlp, MAKERS[library]({**columns(), "wealth": values}))


def test_nan_in_a_table_is_refused_as_in_an_array(mlp: gm.MLP) -> None:
    with pytest.raises(InvalidInput, match=r"row 1 holds nan in feature 2"):
        gm.Session(mlp, device="cpu", engine="numpy").predict(pd.DataFrame({**columns(), "wealth": [1.0, None, 3.0]}))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda: pl.DataFrame(columns()).lazy(), r"LazyFrame.*x\.collect\(\)"),
        (lambda: pd.DataFrame(X, columns=["age", "age", "wealth"]), "two columns named 'age'"),
        (lambda: pd.DataFrame({**columns(), "age": pd.Categorical([1, 2, 1])}), "'age' is of type category"),
        (lambda: pd.DataFrame({**columns(), "age": pd.interval_range(0, 3)}), "'age' is of type interval"),
        (lambda: pd.DataFrame({**columns(), "age": np.array([1j, 2, 3])}), "'age' is of type complex128"),
        (lambda: pa.table({**columns(), "age": pa.array([1, 2, 3], pa.decimal128(5, 1))}), "'age' is of type decimal"),
        (lambda: pl.DataFrame({**columns(), "age": [[1], [2], [3]]}), "'age' is of type List"),
        (lambda: pl.Series([1.0, 2.0]), "Series are not a table"),
        (lambda: pd.Series([1.0, 2.0, 3.0]), "Series are not a table"),
    ],
)
def test_other_faults(named: gm.MLP, table: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        answers(named, table())


def test_names_travel_with_the_model(named: gm.MLP, mlp: gm.MLP, tmp_path: Any) -> None:
    named.save(tmp_path / "m.safetensors")
    again = gm.load(tmp_path / "m.safetensors")
    assert (again, again.feature_names) == (named, NAMES)
    assert again.digest() != mlp.digest()
    assert mlp.feature_names is None


@pytest.mark.parametrize("names", [5, "abc", {"a": 1, "b": 2, "c": 3}, ["a"], ["a", "a", "b"], [["a"], ["b"], ["c"]]])
def test_hostile_names_in_a_file_are_refused(named: gm.MLP, names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written = json.dumps

    def forged(header: dict[str, Any], **options: Any) -> str:
        return written({**header, "feature_names": names}, **options)

    monkeypatch.setattr("gigamlp.modelfile.json.dumps", forged)
    data = modelfile.pack(named)
    with pytest.raises((FileFormatError, ModelError), match="feature_names"):
        modelfile.unpack(data)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a", "b"), ("a", "b", 3), "abc", ()])
def test_names_that_do_not_fit_are_refused(mlp: gm.MLP, names: Any) -> None:
    with pytest.raises(ModelError, match="feature_names"):
        mlp.with_(feature_names=names)


def test_sklearn_models_bring_their_names() -> None:
    linear = pytest.importorskip("sklearn.neural_network")
    pipeline = pytest.importorskip("sklearn.pipeline")
    scaling = pytest.importorskip("sklearn.preprocessing")
    x = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=list(NAMES))
    y = (x["age"] > x["wealth"]).to_numpy()
    model = linear.MLPClassifier((4,), solver="lbfgs", max_iter=20, random_state=0)
    fitted = pipeline.make_pipeline(scaling.StandardScaler(), model).fit(x, y)
    mlp = gm.from_sklearn(fitted)
    assert mlp.feature_names == NAMES
    np.testing.assert_array_equal(answers(mlp, x[["wealth", "age", "height"]]), fitted.predict(x).astype(np.int64))
    assert gm.from_sklearn(model.fit(x.to_numpy(), y)).feature_names is None


class Interface:
    """What only has NumPy's array interface."""

    def __init__(self, x: Any) -> None:
        self.x, self.__array_interface__ = x, x.__array_interface__


LAYOUTS = {
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "reversed": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "Fortran": np.asfortranarray,
    "every other": lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "read-only": lambda x: np.broadcast_to(x[:1], x.shape),
    "array interface": Interface,
    "array interface, reversed": lambda x: Interface(x[::-1, ::-1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "float32", "float64"])
@pytest.mark.parametrize("engine", ["numpy", None])
def test_arrays_of_every_layout(mlp: gm.MLP, layout: str, dtype: str, engine: str | None) -> None:
    x = LAYOUTS[layout](np.arange(33).reshape(11, 3).astype(dtype))
    with gm.Session(mlp, device="cpu", engine=engine) as session:
        wanted = mlp.reference_logits(np.array(x, np.float64))
        np.testing.assert_allclose(session.predict(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x", [np.array([[1, "a", 2]], object), np.zeros((2, 3), complex), np.zeros((2, 3), "M8[s]")])
def test_arrays_of_other_things_are_refused(mlp: gm.MLP, x: Any) -> None:
    with pytest.raises(InvalidInput, match="rows must be numbers, got dtype"):
        answers(mlp, x)

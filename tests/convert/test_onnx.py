# ruff: noqa: E501 - a table of graphs, one a line
"""from_onnx and to_onnx: what exporters write, what onnxruntime answers, and a precise refusal of anything else."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from hypothesis import given  # noqa: E402
from onnx import TensorProto, helper, numpy_helper, reference  # noqa: E402

import gigamlp as gm  # noqa: E402
from gigamlp.errors import ConversionError, FileFormatError, InvalidInput, ModelError  # noqa: E402
from tests.convert.samples import networks, relative  # noqa: E402
from tests.models import mlps  # noqa: E402


def run(model, x):
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


def graph(nodes, constants=None, shape=("n", 4), dtype=TensorProto.FLOAT, outputs=("y",), opset=17, **extra):
    """Return a model of `nodes`: (op, inputs, output, attributes)."""
    made = [
        helper.make_node(
            op, list(inputs), [output], name=f"{op}_{index}", domain=attributes.pop("domain", ""), **attributes
        )
        for index, (op, inputs, output, attributes) in enumerate((*n, {})[:4] for n in nodes)
    ]
    made_graph = helper.make_graph(
        made,
        "g",
        [helper.make_tensor_value_info("x", dtype, list(shape) if shape is not None else None)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "k"]) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(made_graph, opset_imports=imports, ir_version=8, **extra)


RNG = np.random.default_rng(0)
W, V, B = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 5), (5, 3), (5,)))
CONSTANTS = {"w": W, "v": V, "b": B}


# ---- parity ------------------------------------------------------------------------------------------------------


def as_nodes(network, rng):
    """Write the network as Gemm or as MatMul and Add, at random."""
    nodes, constants, h = [], {}, "x"
    names = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid"}
    for index, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        constants[f"w{index}"] = weight if (gemm := rng.integers(2)) else weight.T
        z = f"z{index}"
        if gemm:
            nodes.append(("Gemm", [h, f"w{index}"] + ([f"b{index}"] if bias is not None else []), z, {"transB": 1}))
        else:
            nodes.append(("MatMul", [h, f"w{index}"], z if bias is None else f"m{index}"))
            if bias is not None:
                nodes.append(("Add", [f"m{index}", f"b{index}"] if rng.integers(2) else [f"b{index}", f"m{index}"], z))
        if bias is not None:
            constants[f"b{index}"] = bias
        h = z
        if index < len(network.activations):
            act, h = network.activations[index], f"h{index}"
            if act in names:
                nodes.append((names[act], [z], h))
            elif act == "silu":
                nodes += [("Sigmoid", [z], f"s{index}"), ("Mul", [z, f"s{index}"], h)]
            elif act == "identity":
                nodes.append(("Identity", [z], h))
            else:
                nodes.append(("Gelu", [z], h, {"approximate": "tanh" if act == "gelu_tanh" else "none"}))
    return [*nodes, ("Identity", [h], "y")], constants


def test_200_random_graphs_keep_their_logits_and_classes():
    rows = differing = near = 0
    for index, network in enumerate(networks(200, seed=13, bias=False)):
        nodes, constants = as_nodes(network, np.random.default_rng(index))
        kind = TensorProto.FLOAT if network.dtype == "float32" else TensorProto.DOUBLE
        model = graph(nodes, constants, shape=("n", network.widths[0]), dtype=kind, opset=20)
        model.graph.output[0].type.tensor_type.elem_type = kind
        mlp = gm.from_onnx(model, head="softmax")
        # the reference of the format where it has one for float64; onnxruntime has float32 GELU only
        if network.dtype == "float32" or not {"gelu", "gelu_tanh"} & set(network.activations):
            wanted = run(model, network.rows)[0]
        else:
            wanted = reference.ReferenceEvaluator(model).run(None, {"x": network.rows})[0]
        assert relative(mlp.logits(network.rows), wanted) < 1e-5
        if mlp.outputs > 1:
            top = np.sort(wanted, axis=1)[:, -2:]
            tied = top[:, 1] - top[:, 0] <= 1e-5 * np.abs(wanted).max()
            other = mlp.class_ids(mlp.logits(network.rows)) != wanted.argmax(1)
            assert not (other & ~tied).any()
            rows, differing, near = rows + len(tied), differing + int(other.sum()), near + int(tied.sum())
    print(f"{differing} of {rows} classes differ, {near} rows have two logits within rounding")
    assert near <= rows / 100


@given(mlps())
def test_onnxruntime_answers_as_the_mlp_and_comes_back(mlp):
    mlp = mlp.with_(scheme=None, columns=None, features=0)
    x = np.random.default_rng(0).integers(0, 9, (5, mlp.features)).astype(np.float32)
    model = gm.to_onnx(mlp)
    wanted = mlp.reference_logits(x)
    np.testing.assert_allclose(run(model, x)[0], wanted, rtol=1e-4, atol=1e-4 * (1 + np.abs(wanted).max()))
    back = gm.from_onnx(model)
    assert (back.head, back.name) == (mlp.head, mlp.name)
    assert np.array_equal(back.classes, mlp.classes) if mlp.classes is not None else back.classes is None
    np.testing.assert_allclose(back.reference_logits(x), wanted, rtol=1e-6, atol=1e-6 * (1 + np.abs(wanted).max()))
    assert [layer.activation for layer in back.layers] == [layer.activation for layer in mlp.layers]


@given(mlps())
def test_every_output_and_input_type_runs_in_onnxruntime(mlp):
    x = np.random.default_rng(0).integers(0, 100, (6, mlp.features))
    reference = mlp.logits(x)
    scale = 1e-4 * (1 + np.abs(reference).max())
    for dtype in ("uint8", "int8", "float32"):
        (logits,) = run(gm.to_onnx(mlp, input_dtype=dtype), x.astype(dtype))
        np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=scale)
    if mlp.head == "regression":
        return
    (ids,) = run(gm.to_onnx(mlp, output="class"), x.astype(np.float32))
    (proba,) = run(gm.to_onnx(mlp, output="proba"), x.astype(np.float32))
    assert ids.dtype == np.int64
    near = (
        np.diff(np.sort(logits, 1)[:, -2:], axis=1)[:, 0]
        if mlp.outputs > 1 and mlp.head == "softmax"
        else np.abs(logits).min(1)
    )
    sure = near > scale if mlp.outputs > 1 or mlp.head != "softmax" else np.full(len(x), True)
    wanted = mlp.answers(reference) if mlp.head == "multilabel" else mlp.class_ids(reference)
    assert np.array_equal(ids[sure], wanted[sure])
    np.testing.assert_allclose(proba, mlp.probabilities(reference), atol=2 * scale)


def test_ties_go_to_the_lowest_index():
    mlp = gm.MLP([gm.Layer(np.zeros((4, 3)), [1.0, 2.0, 2.0, 2.0])])
    assert run(gm.to_onnx(mlp, output="class"), np.zeros((2, 3), np.float32))[0].tolist() == [1, 1]


def test_the_file_is_written_and_says_what_it_is(tmp_path):
    mlp = gm.MLP([gm.Layer(V.T)], classes=["a", "b", "ç"], name="mine")
    model = gm.to_onnx(mlp, tmp_path / "m.onnx", input_dtype="uint8")
    assert onnx.load(tmp_path / "m.onnx") == model
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 17)]
    assert gm.from_onnx(tmp_path / "m.onnx") == mlp
    assert gm.from_onnx((tmp_path / "m.onnx").read_bytes(), name="other").name == "other"


# ---- what exporters write ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("last", ["logits", "log_softmax", "sigmoid"])
@pytest.mark.filterwarnings("ignore")
def test_torch_onnx(tmp_path, dynamo, last):
    torch = pytest.importorskip("torch")
    if dynamo:
        pytest.importorskip("onnxscript")
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 5), nn.GELU("tanh"), nn.BatchNorm1d(5),
                nn.Linear(5, 4, bias=False), nn.SiLU(), nn.Dropout(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2),
            )  # fmt: skip

        def forward(self, x):
            z = self.net((x / 255 - 0.5).view(x.size(0), -1))
            return z.log_softmax(1) if last == "log_softmax" else z.sigmoid() if last == "sigmoid" else z

    torch.manual_seed(0)
    net, path = Net().eval(), tmp_path / "net.onnx"
    for each in net.net:
        if isinstance(each, nn.BatchNorm1d):
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
    sample = (torch.zeros(2, 2, 3),)
    if dynamo:
        torch.onnx.export(net, sample, path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},))
    else:
        axes = {"x": {0: "n"}}
        torch.onnx.export(net, sample, path, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes=axes)
    mlp = gm.from_onnx(path)
    assert [layer.activation for layer in mlp.layers] == ["gelu", "gelu_tanh", "silu", "tanh", "identity"]
    assert mlp.head == {"logits": "softmax", "log_softmax": "softmax", "sigmoid": "multilabel"}[last]
    x = torch.randint(0, 256, (9, 2, 3)).float()
    with torch.no_grad():
        wanted = net.net((x / 255 - 0.5).view(9, -1)).numpy()
    assert relative(mlp.logits(x.reshape(9, -1).numpy()), wanted) < 1e-5


@pytest.mark.parametrize("kind", ["binary", "multiclass", "strings", "multilabel", "regression", "plain"])
@pytest.mark.parametrize("zipmap", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_skl2onnx(kind, zipmap):
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, StandardScaler

    if zipmap and kind in ("multilabel", "regression"):
        pytest.skip("skl2onnx writes no ZipMap there")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32) * 3 + 1
    y = {
        "binary": np.arange(40) % 2,
        "multiclass": np.arange(40) % 3 * 2,
        "strings": np.array(["x", "y"])[np.arange(40) % 2],
        "multilabel": np.stack([x[:, 0] > 1, x[:, 1] > 0], 1).astype(int),
        "regression": x[:, 0],
        "plain": np.arange(40) % 4,
    }[kind]
    make = MLPRegressor if kind == "regression" else MLPClassifier
    model = make(hidden_layer_sizes=(4, 3), activation="tanh", max_iter=30, random_state=0)
    scalers = [] if kind == "plain" else [StandardScaler(), MinMaxScaler(), MaxAbsScaler()]
    pipeline = make_pipeline(*scalers, model).fit(x, y)
    options = None if kind == "regression" else {"zipmap": zipmap}
    mlp = gm.from_onnx(skl2onnx.to_onnx(pipeline, x, options=options))
    want = gm.from_sklearn(pipeline)
    assert mlp.head == want.head
    if kind != "multilabel":
        assert np.array_equal(mlp.predict(x), want.predict(x)) or kind == "regression"
    assert relative(mlp.logits(x), want.logits(x)) < 1e-5


def test_what_keras_writes_by_tf2onnx():
    # dense layers are MatMul and Add, Flatten is Reshape to a constant shape, images are divided by 255
    nodes = [
        ("Cast", ["x"], "f", {"to": TensorProto.FLOAT}),
        ("Div", ["f", "c255"], "scaled"),
        ("Reshape", ["scaled", "shape"], "flat"),
        ("MatMul", ["flat", "w"], "m"),
        ("Add", ["m", "b"], "a"),
        ("Relu", ["a"], "r"),
        ("MatMul", ["r", "v"], "z"),
        ("Softmax", ["z"], "y", {"axis": -1}),
    ]
    constants = CONSTANTS | {"c255": np.float32(255), "shape": np.array([-1, 4])}
    model = graph(nodes, constants, shape=("n", 2, 2), dtype=TensorProto.UINT8)
    x = np.random.default_rng(1).integers(0, 256, (5, 2, 2)).astype(np.uint8)
    mlp = gm.from_onnx(model)
    np.testing.assert_allclose(mlp.predict_proba(x.reshape(5, 4)), run(model, x)[0], atol=1e-6)
    assert (mlp.features, np.float32(mlp.input_scale)) == (4, np.float32(1 / 255))


@pytest.mark.parametrize("form", ["div first", "mul last", "half inside"])
def test_gelu_is_recognised_however_it_is_written(form):
    rsqrt = ("Mul", ["z", "rsqrt2"], "d") if form == "mul last" else ("Div", ["z", "sqrt2"], "d")
    tail = {
        "div first": [("Mul", ["z", "p"], "q"), ("Mul", ["q", "half"], "h")],
        "mul last": [("Mul", ["half", "z"], "q"), ("Mul", ["q", "p"], "h")],
        "half inside": [("Mul", ["p", "half"], "q"), ("Mul", ["q", "z"], "h")],
    }[form]
    nodes = [("MatMul", ["x", "w"], "z"), rsqrt, ("Erf", ["d"], "e"), ("Add", ["e", "one"], "p"), *tail]
    numbers = {"sqrt2": math.sqrt(2), "rsqrt2": math.sqrt(0.5), "one": 1, "half": 0.5}
    constants = CONSTANTS | {name: np.float32(value) for name, value in numbers.items()}
    model = graph([*nodes, ("MatMul", ["h", "v"], "y")], constants)
    mlp = gm.from_onnx(model)
    assert [layer.activation for layer in mlp.layers] == ["gelu", "identity"]
    x = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    assert relative(mlp.logits(x), run(model, x)[0]) < 1e-5


# ---- refusals ----------------------------------------------------------------------------------------------------

DENSE, LAST = ("MatMul", ["x", "w"], "z"), ("MatMul", ["h", "v"], "y")
SQUARE = {"k": np.eye(5, dtype=np.float32), "one": np.float32(1), "wide": np.ones((2, 5), np.float32)}
NAN = W.copy()
NAN[0, 0] = np.nan


def branch():
    then = helper.make_graph(
        [helper.make_node("Identity", ["z"], ["t"])], "t", [], [helper.make_tensor_value_info("t", 1, None)]
    )
    return graph(
        [DENSE, ("If", ["yes"], "h", {"then_branch": then, "else_branch": then}), LAST],
        CONSTANTS | {"yes": np.array(True)},
    )


def two_inputs():
    model = graph([DENSE, ("Identity", ["z"], "y")], CONSTANTS)
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 4]))
    return model


def sparse():
    model = graph([("Identity", ["x"], "y")])
    values, indices = numpy_helper.from_array(np.float32([1]), "s"), numpy_helper.from_array(np.array([0]), "s_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    return model


def function():
    model = graph([("Mine", ["x"], "y", {"domain": "local"})])
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("local", "Mine", ["a"], ["b"], body, [helper.make_opsetid("", 17)]))
    return model


REFUSED = {
    "conv": (lambda: graph([("Conv", ["x", "k4"], "y")], {"k4": np.ones((1, 1, 2, 2), np.float32)}, ("n", 1, 2, 2)), r"node 0 'Conv_0' \(Conv\): this operator is not"),
    "residual": (lambda: graph([DENSE, ("Relu", ["z"], "h"), ("MatMul", ["h", "k"], "g"), ("Add", ["g", "z"], "y")], CONSTANTS | SQUARE), r"node 3 'Add_3' \(Add\) combines values of different layers"),
    "used later": (lambda: graph([DENSE, ("MatMul", ["z", "k"], "h"), ("MatMul", ["z", "v"], "y")], CONSTANTS | SQUARE), "uses an earlier value again: residual"),
    "two outputs": (lambda: graph([DENSE, ("MatMul", ["z", "v"], "y")], CONSTANTS, outputs=("y", "z")), "the output 'z' uses an earlier value again"),
    "if": (branch, r"node 1 'If_1' \(If\): this operator"),
    "two inputs": (two_inputs, r"2 inputs \('x', 'mask'\)"),
    "sparse": (sparse, "sparse constants are not supported"),
    "function": (function, r"its own functions \(Mine\)"),
    "custom domain": (lambda: graph([("Fast", ["x"], "y", {"domain": "com.microsoft"})]), "Fast of the domain 'com.microsoft'"),
    "opset 6": (lambda: graph([DENSE, ("Identity", ["z"], "y")], CONSTANTS, opset=6), "opset 6 is not supported, 7 to .*newer one"),
    "opset 99": (lambda: graph([DENSE, ("Identity", ["z"], "y")], CONSTANTS, opset=99), "opset 99 is not supported, .*upgrade onnx"),
    "leaky relu": (lambda: graph([DENSE, ("LeakyRelu", ["z"], "h"), LAST], CONSTANTS), r"\(LeakyRelu\): this operator is not supported"),
    "softplus formula": (lambda: graph([DENSE, ("Sigmoid", ["z"], "s"), ("Add", ["s", "z"], "h"), LAST], CONSTANTS), "the formula before it is none of the activations"),
    "softmax inside": (lambda: graph([DENSE, ("Softmax", ["z"], "h"), LAST], CONSTANTS), "softmax is supported as the last step only"),
    "softmax axis": (lambda: graph([DENSE, ("Softmax", ["z"], "y", {"axis": 0})], CONSTANTS), "it normalises over axis 0"),
    "layer norm": (lambda: graph([("LayerNormalization", ["x", "s4"], "h"), ("MatMul", ["h", "w"], "y")], CONSTANTS | {"s4": np.ones(4, np.float32)}), "LayerNormalization"),
    "quantised": (lambda: graph([("QuantizeLinear", ["x", "one"], "q"), ("DequantizeLinear", ["q", "one"], "h"), ("MatMul", ["h", "w"], "y")], CONSTANTS | SQUARE), "QuantizeLinear"),
    "rows on the right": (lambda: graph([("MatMul", ["m", "x"], "y")], {"m": np.ones((2, 3), np.float32)}), "the rows must be its first input|first input must be the rows"),
    "both rows": (lambda: graph([("MatMul", ["x", "x"], "y")]), "the second a constant matrix"),
    "transposed rows": (lambda: graph([("Gemm", ["x", "w"], "y", {"transA": 1})], CONSTANTS), "not transposed"),
    "bias per row": (lambda: graph([DENSE, ("Add", ["z", "wide"], "y")], CONSTANTS | SQUARE), r"a constant of shape \[2, 5\] is not one number"),
    "divided by": (lambda: graph([DENSE, ("Div", ["b", "z"], "y")], CONSTANTS), "only a division of the rows by constants"),
    "cast to int": (lambda: graph([DENSE, ("Cast", ["z"], "c", {"to": TensorProto.INT32}), ("Cast", ["c"], "y", {"to": 1})], CONSTANTS), "rounding the rows to INT32"),
    "reshape": (lambda: graph([DENSE, ("Reshape", ["z", "shape"], "y")], CONSTANTS | {"shape": np.array([-1, 1])}), r"the shape \[-1, 1\] is not that of rows with 5"),
    "flatten": (lambda: graph([("Flatten", ["x"], "h", {"axis": 0}), ("MatMul", ["h", "w"], "y")], CONSTANTS), "axis 0 is not supported"),
    "dropping": (lambda: graph([DENSE, ("Dropout", ["z", "", "yes"], "h"), LAST], CONSTANTS | {"yes": np.array(True)}), "it drops values when the model answers"),
    "widths": (lambda: graph([DENSE, ("MatMul", ["z", "w"], "y")], CONSTANTS), "takes 4 values, but gets 5"),
    "features": (lambda: graph([DENSE, ("Identity", ["z"], "y")], CONSTANTS, shape=("n", 7)), "takes 4 features, but the model's rows have 7"),
    "no layer": (lambda: graph([("Relu", ["x"], "y")]), "relu before the first dense layer"),
    "nothing of the rows": (lambda: graph([("Identity", ["one"], "y")], SQUARE), "the output 'y' is not made of the rows"),
    "constants computed": (lambda: graph([("Add", ["w", "one"], "u"), ("MatMul", ["x", "u"], "y")], CONSTANTS | SQUARE), "is not supported on constants"),
    "integers": (lambda: graph([("Div", ["x", "two"], "h"), ("Cast", ["h"], "f", {"to": 1}), ("MatMul", ["f", "w"], "y")], CONSTANTS | {"two": np.uint8(2)}, dtype=TensorProto.UINT8), "computes with integers, which rounds differently"),
    "statistics that do not fit": (lambda: graph([("BatchNormalization", ["x", "n3", "n4", "n4", "n4"], "h"), ("MatMul", ["h", "w"], "y")], CONSTANTS | {"n3": np.ones(3, np.float32), "n4": np.ones(4, np.float32)}), "its inputs and attributes do not fit together"),
    "mean and spread that do not fit": (lambda: graph([("Sub", ["x", "n3"], "g"), ("Div", ["g", "n4"], "h"), ("MatMul", ["h", "w"], "y")], CONSTANTS | {"n3": np.ones(3, np.float32), "n4": np.ones(4, np.float32)}), "do not go with one row"),
    "nan": (lambda: graph([("MatMul", ["x", "w"], "y")], {"w": NAN}), r"node 0 'MatMul_0' \(MatMul\) holds NaN"),
    "last index": (lambda: graph([DENSE, ("ArgMax", ["z"], "y", {"axis": 1, "select_last_index": 1})], CONSTANTS), "only the first largest output"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_what_no_mlp_can_express_is_refused_by_node(which):
    make, message = REFUSED[which]
    with pytest.raises((ConversionError, ModelError), match=message):
        gm.from_onnx(make())


def external(tmp_path, location="weights.bin", *, write=True, **entries):
    model = graph([DENSE, ("Identity", ["z"], "y")], CONSTANTS)
    tensor = model.graph.initializer[0]
    if write:
        (tmp_path / "weights.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": location} | entries).items():
        tensor.external_data.add(key=key, value=str(value))
    path = tmp_path / "sub" / "m.onnx" if "/" in location else tmp_path / "m.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data(tmp_path):
    path = external(tmp_path)
    np.testing.assert_array_equal(gm.from_onnx(path).layers[0].weight, W.T)
    with pytest.raises(FileFormatError, match=r"'w' is in a file apart \('weights\.bin'\); pass the path"):
        gm.from_onnx(path.read_bytes())
    with pytest.raises(FileFormatError, match=r"'w' lies beyond the end of 'weights.bin'"):
        gm.from_onnx(external(tmp_path, length=10_000))
    with pytest.raises(
        FileFormatError, match=r"'w' is in '\.\./weights\.bin', outside the folder of the model: not read"
    ):
        gm.from_onnx(external(tmp_path, "../weights.bin"))
    with pytest.raises(FileFormatError, match=r"'w' is in 'gone.bin', which is missing beside the model"):
        gm.from_onnx(external(tmp_path, "gone.bin"))


def test_damaged_files(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(FileNotFoundError, match="no ONNX file at"):
        gm.from_onnx(path)
    whole = gm.to_onnx(gm.MLP([gm.Layer(V.T, None, "relu"), gm.Layer(W[:, :3])])).SerializeToString()
    rng = np.random.default_rng(0)
    refused = 0
    for index in range(150):
        data = bytearray(whole[: rng.integers(len(whole))] if index % 2 else whole)
        for _ in range(int(rng.integers(0, 6)) if data else 0):
            data[rng.integers(len(data))] = rng.integers(256)
        try:
            gm.from_onnx(bytes(data))
        except (FileFormatError, ConversionError, ModelError):
            refused += 1
    assert refused > 100
    with pytest.raises(InvalidInput, match="got a int"):
        gm.from_onnx(3)
    broken = gm.to_onnx(gm.MLP([gm.Layer(V.T)]))
    broken.metadata_props[0].value = "[1"
    with pytest.raises(FileFormatError, match="its metadata 'gigamlp' is not what to_onnx writes"):
        gm.from_onnx(broken)


def test_outputs_and_types_that_do_not_exist():
    mlp = gm.MLP([gm.Layer(V.T)], head="regression")
    for changes in ({"output": "class"}, {"output": "labels"}, {"input_dtype": "float16"}):
        with pytest.raises(InvalidInput):
            gm.to_onnx(mlp, **changes)
    assert json.loads(gm.to_onnx(mlp).metadata_props[0].value) == {
        "name": "mlp",
        "head": "regression",
        "classes": None,
        "output": "logits",
    }

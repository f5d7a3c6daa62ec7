"""from_torch and to_torch: the answers of the module, and a precise refusal of anything else."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from hypothesis import given  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

import gigamlp as gm  # noqa: E402
from gigamlp.errors import ConversionError, FileFormatError, InvalidInput, ModelError  # noqa: E402
from tests.convert.samples import networks, relative  # noqa: E402
from tests.models import mlps  # noqa: E402

MODULES = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
}


def linear(i: int, o: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(i, o, bias=bias)


def answers(module: nn.Module, x) -> np.ndarray:
    module.eval()
    with torch.no_grad():
        return module(torch.as_tensor(x)).numpy()


def as_module(network) -> nn.Sequential:
    parts: list[nn.Module] = []
    for index, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=getattr(torch, network.dtype))
        layer.weight.data = torch.from_numpy(weight)
        if bias is not None:
            layer.bias.data = torch.from_numpy(bias)
        parts.append(layer)
        if index < len(network.activations):
            parts.append(MODULES[network.activations[index]]())
    return nn.Sequential(*parts)


# ---- parity ------------------------------------------------------------------------------------------------------


def test_200_random_modules_keep_their_logits_and_classes():
    rows = differing = near = 0
    for network in networks(200, seed=7, bias=False):
        module = as_module(network)
        mlp = gm.from_torch(module, head="softmax")
        wanted = answers(module, network.rows)
        assert relative(mlp.logits(network.rows), wanted) < 1e-5
        if mlp.outputs > 1:
            top = np.sort(wanted, axis=1)[:, -2:]
            tied = top[:, 1] - top[:, 0] <= 1e-5 * np.abs(wanted).max()
            other = mlp.class_ids(mlp.logits(network.rows)) != wanted.argmax(1)
            assert not (other & ~tied).any()
            rows, differing, near = rows + len(tied), differing + int(other.sum()), near + int(tied.sum())
    print(f"{differing} of {rows} classes differ, {near} rows have two logits within rounding")
    assert near <= rows / 100  # the comparison of classes must mean something


@pytest.mark.parametrize("seed", range(12))
def test_batch_norm_is_folded_wherever_it_stands(seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    widths = [int(w) for w in rng.integers(1, 40, 4)]
    parts: list[nn.Module] = []
    for i, o in pairwise(widths):
        if rng.integers(2):
            parts.append(nn.BatchNorm1d(i, affine=bool(rng.integers(2))))
        parts.append(nn.Linear(i, o, bias=bool(rng.integers(2))))
        if rng.integers(2):
            parts.append(nn.BatchNorm1d(o))
        parts += [nn.Dropout(0.5), MODULES[str(rng.choice(list(MODULES)))]()]
        if rng.integers(2):
            parts.append(nn.BatchNorm1d(o))
    module = nn.Sequential(*parts).double()
    for each in module:
        if isinstance(each, nn.BatchNorm1d):
            each.running_mean.normal_()
            each.running_var.uniform_(0.1, 3)
            if each.affine:
                each.weight.data.normal_()
                each.bias.data.normal_()
    x = rng.normal(size=(50, widths[0]))
    mlp = gm.from_torch(module, head="regression")
    assert relative(mlp.reference_logits(x), answers(module, x)) < 1e-6
    assert [layer.weight.shape[0] for layer in mlp.layers][:1] == [widths[1]]


def test_folding_batch_norm_adds_no_layer():
    module = nn.Sequential(
        nn.BatchNorm1d(4), linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.BatchNorm1d(5), linear(5, 3)
    )
    mlp = gm.from_torch(module)
    assert (mlp.hidden, len(mlp.layers), np.shape(mlp.input_scale)) == ((5,), 2, (4,))


class Functional(nn.Module):
    """Most of what a hand-written forward does."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = nn.Linear(12, 7, dtype=dtype), nn.Linear(7, 5, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=dtype))
        self.register_buffer("mean", torch.randn(12, dtype=dtype))
        self.std = torch.rand(12, dtype=dtype) + 0.5

    def forward(self, x, mask=None):
        x = x.view(x.size(0), -1)
        x = (x.float() if self.std.dtype == torch.float32 else x.double()) / 255.0
        x = (x - self.mean) / self.std
        x = F.gelu(self.first(x), approximate="tanh")
        x = F.dropout(x, 0.5, training=self.training)
        z = F.linear(x, self.second.weight, self.second.bias)
        z = z * torch.sigmoid(z)
        z = torch.flatten(z, 1) @ self.weight
        return F.log_softmax(2 * z + 1, dim=1)


def test_a_written_forward_is_traced_and_left_as_it_was():
    torch.manual_seed(0)
    module = Functional(torch.float64)
    before = set(vars(module))
    x = np.random.default_rng(0).integers(0, 256, (9, 12)).astype(np.float64)
    mlp = gm.from_torch(module.train(), classes=list("abcd"))
    assert module.training
    assert module.first.training
    assert set(vars(module)) == before
    wanted = answers(module, x)
    assert [layer.activation for layer in mlp.layers] == ["gelu_tanh", "silu", "identity"]
    assert mlp.head == "softmax"
    assert relative(np.log(mlp.predict_proba(x)), wanted) < 1e-5
    assert mlp.predict(x).tolist() == [list("abcd")[i] for i in wanted.argmax(1)]


def test_images_are_flattened():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 6), nn.Tanh())
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            x = x.view(-1, 784).reshape(x.shape[0], 784)
            return self.last(self.net(x))

    module = Net()
    x = torch.randn(5, 1, 28, 28)
    mlp = gm.from_torch(module)
    assert relative(mlp.logits(x.reshape(5, -1).numpy()), answers(module, x)) < 1e-5


@pytest.mark.parametrize(
    ("last", "outputs", "head"),
    [
        ((), 3, "softmax"),
        ((), 1, "regression"),
        ((nn.Softmax(dim=1),), 3, "softmax"),
        ((nn.LogSoftmax(dim=-1),), 3, "softmax"),
        ((nn.Sigmoid(),), 1, "sigmoid"),
        ((nn.Sigmoid(),), 3, "multilabel"),
        ((nn.ReLU(), nn.Softmax(dim=1)), 3, "softmax"),
    ],
)
def test_heads(last, outputs, head):
    module = nn.Sequential(nn.Linear(4, outputs), *last)
    mlp = gm.from_torch(module)
    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    wanted = answers(module, x)
    assert mlp.head == head
    if head == "regression":
        found = mlp.predict(x)[:, None]
    elif last:
        found = mlp.predict_proba(x)[:, 1:] if head == "sigmoid" else mlp.predict_proba(x)
        wanted = np.exp(wanted) if isinstance(last[-1], nn.LogSoftmax) else wanted
    else:
        found = mlp.logits(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_head_that_is_named_decides():
    module = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    assert gm.from_torch(module, head="regression").layers[-1].activation == "logistic"
    assert gm.from_torch(module, head="multilabel").layers[-1].activation == "identity"
    with pytest.raises(ConversionError, match="'1' \\(Softmax\\): the model ends in softmax, which head 'regression'"):
        gm.from_torch(nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1)), head="regression")
    with pytest.raises(InvalidInput, match="unknown head 'soft'"):
        gm.from_torch(module, head="soft")


def test_one_layer_used_twice_and_wrapped_modules():
    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, nn.Tanh(), shared)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    assert relative(gm.from_torch(module).logits(x), answers(module, x)) < 1e-6
    assert gm.from_torch(nn.DataParallel(module)) == gm.from_torch(module)
    assert gm.from_torch(torch.compile(module)) == gm.from_torch(module)
    assert gm.from_torch(shared).outputs == 3


def test_half_precision_weights_are_taken_as_they_are():
    module = nn.Linear(5, 4).to(torch.bfloat16)
    mlp = gm.from_torch(module)
    np.testing.assert_array_equal(mlp.layers[0].weight, module.weight.detach().float().numpy())


def test_layer_norm_of_one_feature_is_its_bias():
    module = nn.Sequential(nn.LayerNorm(1), nn.Linear(1, 3))
    module[0].bias.data.fill_(0.7)
    x = np.float32([[3], [-2]])
    assert relative(gm.from_torch(module).logits(x), answers(module, x)) < 1e-6


# ---- back --------------------------------------------------------------------------------------------------------


@given(mlps())
def test_to_torch_gives_the_logits_of_the_mlp(mlp):
    x = np.random.default_rng(0).integers(0, 9, (5, mlp.features)).astype(np.float32)
    module = gm.to_torch(mlp)
    assert not module.training
    wanted = mlp.reference_logits(x)
    np.testing.assert_allclose(answers(module, x), wanted, rtol=1e-4, atol=1e-4 * (1 + np.abs(wanted).max()))


def test_there_and_back_keeps_every_bit():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4, bias=False), nn.SiLU(), nn.Linear(4, 3))
    mlp = gm.from_torch(module)
    assert gm.from_torch(gm.to_torch(mlp)) == mlp
    proba = gm.from_torch(gm.to_torch(mlp, proba=True))
    assert proba == mlp
    with pytest.raises(InvalidInput, match="has no probabilities"):
        gm.to_torch(mlp.with_(head="regression", classes=None), proba=True)


def test_to_torch_draws_no_random_numbers():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    gm.to_torch(gm.MLP([gm.Layer(np.eye(3))]))
    assert torch.rand(1) == wanted


# ---- state dicts and files ---------------------------------------------------------------------------------------


@pytest.fixture
def module():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("wrap", [None, "state_dict", "model"])
def test_checkpoints(module, tmp_path, wrap):
    state = module.state_dict()
    torch.save(state if wrap is None else {wrap: state, "epoch": 3}, tmp_path / "net.v1.pt")
    mlp = gm.from_torch(tmp_path / "net.v1.pt", activation="relu")
    assert (mlp.name, mlp.with_(name="Sequential")) == ("net", gm.from_torch(module))


def test_safetensors_in_the_order_of_their_numbers(tmp_path):
    torch.manual_seed(5)
    module = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 4))
    save_file(module.state_dict(), tmp_path / "net.safetensors")
    mlp = gm.from_torch(str(tmp_path / "net.safetensors"), activation=["relu"] * 6)
    assert mlp.with_(name="Sequential") == gm.from_torch(module)


def test_safetensors_in_the_order_of_their_widths(tmp_path):
    tensors = {
        "head.weight": torch.randn(2, 5),
        "encoder.weight": torch.randn(7, 3),
        "middle.weight": torch.randn(5, 7),
    }
    save_file(tensors, tmp_path / "net.safetensors")
    assert gm.from_torch(tmp_path / "net.safetensors", activation="tanh").hidden == (7, 5)
    save_file({"b.weight": torch.randn(3, 3), "a.weight": torch.randn(3, 3)}, tmp_path / "net.safetensors")
    with pytest.raises(ConversionError, match=r"does not keep the order of layers, and a, b fit together in several"):
        gm.from_torch(tmp_path / "net.safetensors", activation="tanh")


def test_weights_into_a_module(module, tmp_path):
    other = nn.Sequential(*(type(each)(4, 6) if i == 0 else each for i, each in enumerate(module)))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    save_file({f"module.{key}": value for key, value in module.state_dict().items()}, tmp_path / "w.safetensors")
    assert gm.from_torch(other, state=tmp_path / "w.safetensors") == gm.from_torch(module)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    with pytest.raises(ConversionError, match=r"do not belong to this module.*Missing key"):
        gm.from_torch(other, state={"0.weight": torch.ones(6, 4)})


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("writer", ["torch", "inside", "pickle 2", "pickle 4"])
def test_pickle_bombs_do_not_go_off(tmp_path, writer):
    file, crater = tmp_path / "net.pt", tmp_path / "crater"
    if writer == "torch":
        torch.save(Bomb(crater), file)
    elif writer == "inside":
        torch.save({"state_dict": {"0.weight": torch.ones(1, 1)}, "extra": Bomb(crater)}, file)
    else:
        file.write_bytes(pickle.dumps(Bomb(crater), protocol=int(writer[-1])))
    what = "is damaged, or holds more than tensors" if writer == "pickle 4" else "refers to posix.mkdir"
    with pytest.raises(FileFormatError, match=f"net.pt: not loaded, as it {what}, and nothing in a file is executed"):
        gm.from_torch(file, activation="relu")
    assert not crater.exists()
    pickle.loads(pickle.dumps(Bomb(crater)))  # the bomb is one
    assert crater.exists()


def test_files_that_are_no_state_dicts(module, tmp_path):
    file = tmp_path / "net.pt"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        gm.from_torch(file)
    torch.save(module, file)
    with pytest.raises(FileFormatError, match=r"it refers to torch.nn.modules.container.Sequential, and nothing"):
        gm.from_torch(file, activation="relu")
    torch.save(module.state_dict(), file)
    whole = file.read_bytes()
    for end in (0, 10, len(whole) // 2, len(whole) - 5):
        file.write_bytes(whole[:end])
        with pytest.raises(FileFormatError, match=r"net\.pt: not "):
            gm.from_torch(file, activation="relu")
    (tmp_path / "net.safetensors").write_bytes(whole)
    with pytest.raises(FileFormatError, match="not a safetensors file, or damaged"):
        gm.from_torch(tmp_path / "net.safetensors", activation="relu")
    torch.save([torch.ones(1)], file)
    with pytest.raises(FileFormatError, match="holds a list, not a state dict"):
        gm.from_torch(file, activation="relu")
    around: dict = {}
    around["model"] = around
    torch.save(around, file)
    with pytest.raises(ConversionError, match="'model' is a dict, not a tensor"):
        gm.from_torch(file, activation="relu")


TWO = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("state", "activation", "message"),
    [
        ({}, "relu", "the state dict is no state dict: it is empty"),
        ({"0.weight": 3}, "relu", "'0.weight' is a int, not a tensor"),
        ({"0.weight": torch.ones(2, 2, 3, 3)}, "relu", r"'0.weight' has shape \[2, 2, 3, 3\], which is no Linear"),
        ({"0.weight": TWO, "1.running_mean": torch.ones(2)}, "relu", "'1.running_mean' belongs to no Linear"),
        ({"0.weight": TWO, "1.weight": torch.ones(2, 3)}, "relu", r"'1' \(layer 1 .* takes 3 values, but gets 2"),
        ({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}, None, "a state dict has no activations"),
        ({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}, "elu", "unknown activation 'elu'"),
        ({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}, ["relu", "relu"], "2 activations for 1 hidden"),
        ({"0.weight": torch.full((2, 2), np.nan)}, "relu", "0.weight holds NaN or infinite values"),
        ({"state_dict": {}, "model": {}}, "relu", "holds several state dicts"),
    ],
)  # fmt: skip
def test_state_dicts_that_are_refused(state, activation, message):
    with pytest.raises((ConversionError, InvalidInput, ModelError), match=message):
        gm.from_torch(state, activation=activation)


# ---- refusals ----------------------------------------------------------------------------------------------------


class Forward(nn.Module):
    """A module whose forward is the function that it is given."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.how = forward
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.how(self, x)


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + y


class MyLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).sin()


def with_hook():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda m, i, o: o * 2)
    return module


def branch(self, x):
    return self.b(x) if x.sum() > 0 else self.a(x)


def broken(value, dtype=torch.float32):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(dtype)
    module[2].weight.data[0, 0] = value
    return module


REFUSED = {
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), r"'0' \(Conv2d\): this kind of"),
    "residual": (lambda: Forward(lambda s, x: s.b(x + s.a(x))), r"'add' \(add\) uses the value of 'x' again: residual"),
    "two branches": (
        lambda: Forward(lambda s, x: torch.cat([s.a(x), s.b(x)], 1)),
        r"'b' \(Linear\) uses the value of 'x'",
    ),
    "control flow": (lambda: Forward(branch), "Forward.forward cannot be traced: .*control flow must not depend"),
    "two inputs": (TwoInputs, "forward uses a second input, 'y'"),
    "tuple out": (lambda: Forward(lambda s, x: (s.a(x), 1)), "forward returns a tuple; it must return one tensor"),
    "hidden out": (lambda: Forward(lambda s, x: (s.b(s.a(x)), s.a(x))[1]), "uses the value of 'x' again"),
    "no layer": (lambda: nn.Sequential(nn.ReLU()), r"'0' \(ReLU\): relu before the first dense layer"),
    "empty": (nn.Sequential, "the model has no dense layer"),
    "leaky relu": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU()), r"'1' \(LeakyReLU\): this kind of module"),
    "subclass": (lambda: nn.Sequential(MyLinear(2, 2)), r"\(sin\): this operation"),
    "hook": (with_hook, r"'0' \(Linear\) has forward hooks"),
    "parametrized": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), "is parametrized"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "is not initialised yet"),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))), "TorchScript"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
    "nan": (lambda: broken(np.nan), r"'2' \(Linear\) holds NaN or infinite"),
    "inf": (lambda: broken(np.inf), r"'2' \(Linear\) holds NaN or infinite"),
    "beyond float32": (lambda: broken(1e300, torch.float64), r"'2' \(Linear\): layer weight holds NaN or infinite"),
    "layer norm": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),
        r"'0' \(LayerNorm\): it divides by the spread",
    ),
    "batch statistics": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)),
        "keeps no running statistics",
    ),
    "softmax inside": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1), nn.Linear(2, 2)),
        r"'1' \(Softmax\): softmax is supported as the last step only",
    ),
    "softmax of rows": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=0)), "it normalises over dimension 0"),
    "widths": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2)), r"'1' \(Linear\) takes 4 values, but gets 3"),
    "flatten all": (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(2, 2)), "it flattens 0..-1, supported is 1..-1"),
    "tanh of relu": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()),
        r"'2' \(Tanh\): tanh right after relu is not supported",
    ),
    "always dropping": (lambda: Forward(lambda s, x: F.dropout(s.a(x), 0.5)), "drops values in eval mode too"),
    "half": (lambda: Forward(lambda s, x: s.a(x.half())), r"'half' \(half\): this operation"),
    "inverse": (lambda: Forward(lambda s, x: s.a(1 / x)), "dividing by the rows is not supported"),
    "transposed": (lambda: Forward(lambda s, x: s.a(x.t())), r"'t' \(t\): this operation"),
    "computed weight": (lambda: Forward(lambda s, x: F.linear(x, s.a.weight * 2)), "computing with constants"),
    "loop over rows": (lambda: Forward(lambda s, x: next(s.a(row) for row in x)), "cannot be traced"),
    "square": (lambda: Forward(lambda s, x: s.a(x) * s.a.weight[0]), "computing with constants"),
    "rnn": (lambda: nn.Sequential(nn.LSTM(2, 2)), r"'0' \(LSTM\): this kind"),
    "far from zero": (lambda: Forward(lambda s, x: s.a(x - 1e6)), "float32 rows lose the digits that matter"),
    "early": (lambda: Forward(lambda s, x: s.a.weight), "forward returns 'a_weight'"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("which", REFUSED)
def test_what_no_mlp_can_express_is_refused_by_name(which):
    make, message = REFUSED[which]
    module = make()
    with pytest.raises((ConversionError, ModelError), match=message):
        gm.from_torch(module)


def test_arguments_that_do_not_fit():
    with pytest.raises(InvalidInput, match="got a int"):
        gm.from_torch(3)
    with pytest.raises(InvalidInput, match="activation is for state dicts"):
        gm.from_torch(nn.Linear(2, 2), activation="relu")
    with pytest.raises(InvalidInput, match="state goes with a module"):
        gm.from_torch({"weight": torch.ones(1, 1)}, state={})
    with pytest.raises(ModelError, match="3 classes for 2 outputs"):
        gm.from_torch(nn.Linear(2, 2), classes=[1, 2, 3])

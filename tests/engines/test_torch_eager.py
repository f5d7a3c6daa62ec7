"""torch_eager, and with it what the three torch engines share: variants, weights, heads, columns, outputs, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gigamlp.activations import ACTIVATIONS
from gigamlp.engines import Runner, engine
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.mlp import MLP, Layer
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import CUDA, assert_answers, net, rows

torch = pytest.importorskip("torch")

DEVICES = ["cpu", CUDA]
EAGER = engine("torch_eager")


def run(mlp: MLP, spec: Spec, variant: Variant | None = None, seed: int = 1) -> None:
    """Build, run on fresh rows and on the static input, compare with the reference."""
    runner = EAGER.build(mlp, spec, variant)
    for s in (seed, seed + 1):
        x = rows(mlp, spec.batch, spec.input_dtype, s)
        assert_answers(mlp, spec, runner.variant, x, runner.run(x.to(spec.device)))
    runner.input.copy_(x)
    assert_answers(mlp, spec, runner.variant, x, runner.run(runner.input))
    runner.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("output", ["class", "margin", "logits", "proba"])
def test_every_variant_agrees_with_the_reference(device, dtype, output):
    # 37 features: no multiple of any vector; 10 classes: the article's padding to 16; 7 rows: a prime
    mlp = net(37, 24, 10) if dtype in ("uint8", "int8") else net(37, 24, 10, scale=1.0, offset=0.1)
    spec = Spec(device, 7, dtype, output)
    variants = EAGER.variants(mlp, spec, full=True)
    assert len(variants) >= 8
    assert len(set(variants)) == len(variants)
    for variant in variants:
        run(mlp, spec, variant)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("classes", range(1, 18))
def test_class_counts(device, batch, classes):
    # 1 class: no second logit; 8 and 16: nothing to pad
    mlp = net(20, 6, classes, seed=classes)
    for output in ("class", "margin", "logits", "proba"):
        spec = Spec(device, batch, "uint8", output)
        padded = [v for v in EAGER.variants(mlp, spec) if v.get("op") == "linear"]
        assert {v.get("pad") for v in padded} == {classes, -(-classes // 8) * 8}
        for variant in padded:
            if batch == 1:  # one row may be undecided: there the wider test speaks
                runner = EAGER.build(mlp, spec, variant)
                x = rows(mlp, 1, "uint8")
                y = runner.run(x.to(device))
                assert (y[0] if isinstance(y, tuple) else y).shape[0] == 1
            else:
                run(mlp, spec, variant)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "widths",
    [
        (16, 10),  # depth 1: input and output layer are the same
        (33, 1, 5),  # one hidden unit (with tanh: a ReLU that is off would make all logits tie)
        (12, 9, 8, 3),
        (17, 13, 11, 7, 4),  # depth 4, odd widths throughout
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_depths_and_missing_biases(device, widths, bias):
    mlp = net(*widths, bias=bias, activation="tanh" if 1 in widths else "relu")
    for output in ("class", "logits"):
        spec = Spec(device, 64, "uint8", output)
        for variant in EAGER.variants(mlp, spec):
            run(mlp, spec, variant)
    plain = mlp.with_(input_offset=0.0)  # without bias and offset: no bias anywhere
    run(plain, Spec(device, 64, "uint8", "logits"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(device, activation):
    for mlp in (net(21, 12, 9, 4, activation=activation), net(21, 12, 4, activation=activation, last=activation)):
        spec = Spec(device, 64, "uint8", "logits")
        for variant in EAGER.variants(mlp, spec, full=True):
            run(mlp, spec, variant)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", sorted(set(ACTIVATIONS) - {"identity"}))
def test_a_last_activation_is_not_padded(device, last):
    mlp = net(21, 12, 10, last=last)
    spec = Spec(device, 64, "uint8", "proba")
    assert {v.get("pad") for v in EAGER.variants(mlp, spec)} == {10}
    run(mlp, spec)
    with pytest.raises(Unsupported, match="padding needs"):
        EAGER.build(mlp, spec, Variant.of(pad=16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("head", "outputs", "kinds"),
    [
        ("sigmoid", 1, ("class", "margin", "logits", "proba")),
        ("multilabel", 5, ("logits", "proba")),
        ("regression", 3, ("logits",)),
        ("regression", 1, ("logits",)),
    ],
)
def test_heads(device, head, outputs, kinds):
    mlp = net(21, 12, outputs, head=head)
    for kind in kinds:
        spec = Spec(device, 64, "uint8", kind)
        for variant in EAGER.variants(mlp, spec):
            run(mlp, spec, variant)
    for kind in {"class", "margin", "logits", "proba"} - set(kinds):
        for refuse in (EAGER.variants, EAGER.build):
            with pytest.raises(Unsupported, match=f"head '{head}' gives logits"):
                refuse(mlp, Spec(device, 64, "uint8", kind))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [((0, 30),), ((3, 17),), ((0, 4), (9, 10), (20, 30))])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_columns(device, columns, dtype):
    width = sum(b - a for a, b in columns)
    scale, offset = (1 / 255, -0.2) if dtype == "uint8" else (1.0, -0.2)
    mlp = net(width, 8, 10, columns=columns, features=30, scale=scale, offset=offset)
    spec = Spec(device, 64, dtype, "logits")
    for variant in EAGER.variants(mlp, spec):
        run(mlp, spec, variant)


def test_one_run_of_columns_is_not_copied():
    mlp = net(14, 8, 3, columns=((3, 17),), features=30, scale=1.0)
    runner = EAGER.build(mlp, Spec("cpu", 64, "float32"))
    x = rows(mlp, 64, "float32")
    with torch.profiler.profile() as profile:
        runner.run(x)
    names = {event.key for event in profile.key_averages()}
    assert "aten::addmm" in names
    assert not names & {"aten::contiguous", "aten::clone", "aten::cat"}


@pytest.mark.parametrize("device", DEVICES)
def test_scale_and_offset_per_feature(device):
    rng = np.random.default_rng(5)
    mlp = net(19, 8, 4, scale=rng.uniform(0.5, 2, 19) / 255, offset=rng.standard_normal(19) * 0.3)
    run(mlp, Spec(device, 64, "uint8", "logits"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("classes", [2, 10, 13])
def test_ties_go_to_the_lowest_index(device, classes):
    # every class has the same weights, except that class 0 is far lower: all others tie
    weight = np.ones((classes, 5))
    bias = np.zeros(classes)
    bias[0] = -5
    mlp = MLP([Layer(weight, bias)], input_scale=1 / 256)
    for output in ("class", "margin"):
        spec = Spec(device, 129, "uint8", output)
        for variant in EAGER.variants(mlp, spec):
            y = EAGER.build(mlp, spec, variant).run(rows(mlp, 129, "uint8").to(device))
            ids = y[0] if output == "margin" else y
            assert (ids == 1).all()
            if output == "margin":
                assert ((y[1] == 0) if classes > 2 else (y[1] - 5).abs() < 0.1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float32"])
def test_padded_classes_never_win(device, compute):
    # logits near -60,000 (float16 ends at -65,504): a padded zero would win by far
    mlp = MLP([Layer(np.full((10, 4), -55.0), -np.arange(10.0) * 64 - 3000)], input_scale=1.0)
    dtype = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float32"}[compute]
    if device == "cpu" and compute == "float16":
        pytest.skip("a CPU does not compute in float16")
    x = torch.full((8, 4), 250.0, dtype=getattr(torch, dtype), device=device)
    for output in ("class", "margin", "proba"):
        spec = Spec(device, 8, dtype, output)
        for op in ("linear", "mm"):
            y = EAGER.build(mlp, spec, Variant.of(op=op, pad=16, compute=compute)).run(x)
            if output == "proba":
                assert y.shape == (8, 10)
                assert torch.allclose(y.sum(1), torch.ones(8, device=device))
            else:
                assert ((y[0] if output == "margin" else y) < 10).all()
                if output == "margin":
                    assert torch.isfinite(y[1]).all()


def test_overflowed_rows_still_get_a_real_class():
    # all real logits are -inf: they tie with the padded ones, which come later
    mlp = MLP([Layer(np.full((10, 4), -3e38))], input_scale=1.0)
    for output in ("class", "margin"):
        runner = EAGER.build(mlp, Spec("cpu", 4, "float32", output), Variant.of(pad=16))
        y = runner.run(torch.full((4, 4), 1e5))
        assert ((y[0] if output == "margin" else y) == 0).all()


# ---- weights that do not fit ----------------------------------------------------------------------------------------


def test_casts_that_lose_too_much_are_refused():
    from gigamlp.engines.torch_weights import cast

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 1000))
    with pytest.raises(Unsupported, match=r"weights of layer 0 reach 7e\+04, float16 ends at 6.55e\+04"):
        cast(np.where(np.arange(1000) == 3, 7e4, weight), torch.float16, "weights of layer 0")
    with pytest.raises(Unsupported, match="too small for float16"):
        cast(weight * 1e-8, torch.float16, "weights of layer 0")
    assert cast(weight * 1e-8, torch.bfloat16, "weights").dtype is torch.bfloat16
    with pytest.raises(Unsupported, match="biases"):
        cast(np.array([1e39]), torch.float32, "biases of layer 0")


def test_weights_that_are_nothing_beside_their_neighbours_may_vanish():
    from gigamlp.engines.torch_weights import cast

    weight = np.random.default_rng(0).standard_normal((8, 1000)) * 0.05
    weight[:, :85] = 1e-9  # always-black pixels after weight decay
    half = cast(weight, torch.float16, "weights")
    assert (half[:, :85] == 0).all()


@pytest.mark.parametrize("head", ["softmax", "multilabel"])
def test_padding_keeps_the_cut_columns_harmless(head):
    from gigamlp.engines.torch_weights import pad_classes

    weight, bias = pad_classes(np.ones((3, 2)), None, 8, cut=False)
    assert weight.shape == (8, 2)
    assert np.isneginf(bias[3:]).all()
    assert (bias[:3] == 0).all()
    assert pad_classes(np.ones((3, 2)), None, 8, cut=True)[1] is None


# ---- the runner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_runner_keeps_its_contract(device):
    mlp = net(20, 6, 5)
    spec = Spec(device, 16, "uint8", "logits")
    runner = EAGER.build(mlp, spec)
    assert isinstance(runner, Runner)
    assert (runner.engine, runner.spec, runner.variant) == ("torch_eager", spec, EAGER.variants(mlp, spec)[0])
    assert runner.build_s > 0
    assert runner.input.shape == (16, 20)
    assert runner.input.dtype is torch.uint8
    x = rows(mlp, 16, "uint8").to(device)
    assert runner.run(x).data_ptr() == runner.run(x).data_ptr()  # its own buffer
    assert not runner.run(x).is_inference()
    assert not runner.run(x).requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_bad_rows_are_refused(device):
    mlp = net(20, 6, 5, scale=1.0)
    runner = EAGER.build(mlp, Spec(device, 16, "float32", "logits"))
    good = rows(mlp, 16, "float32").to(device)
    for bad, match in [
        (good[:15], r"shape \[16, 20\], got \[15, 20\]"),
        (good[:, :19], r"shape \[16, 20\], got \[16, 19\]"),
        (good.double(), "rows of float32, got torch.float64"),
        (good.t().contiguous().t(), "contiguous"),
        (good.cpu().numpy(), "torch tensor, got ndarray"),
        (good.to("meta"), "rows on "),
    ]:
        with pytest.raises(InvalidInput, match=match):
            runner.run(bad)
        with pytest.raises(InvalidInput, match=match):
            runner.bind(bad)


@pytest.mark.parametrize("device", DEVICES)
def test_bind_shares_weights_and_nothing_that_is_returned(device):
    mlp = net(20, 6, 5)
    spec = Spec(device, 16, "uint8", "logits")
    first = EAGER.build(mlp, spec)
    x = rows(mlp, 16, "uint8", 7).to(device)
    second = first.bind(x)
    assert second.input is x
    assert second.variant == first.variant
    mine = first.run(first.input).clone()
    theirs = second.run(x)
    assert_answers(mlp, spec, second.variant, x.cpu(), theirs)
    assert torch.equal(first.run(first.input), mine)
    assert_answers(mlp, spec, second.variant, x.cpu(), theirs)  # not overwritten by the other
    first.close()
    assert_answers(mlp, spec, second.variant, x.cpu(), second.run(x))


@pytest.mark.parametrize("device", DEVICES)
def test_closed_runners_do_not_run(device):
    runner = EAGER.build(net(20, 6, 5), Spec(device, 16))
    x = runner.input
    runner.close()
    runner.close()
    with pytest.raises(InvalidInput, match="closed"):
        runner.run(x)
    with pytest.raises(InvalidInput, match="closed"):
        runner.bind(x)


@pytest.mark.parametrize("device", DEVICES)
def test_the_callers_modes_do_not_leak_in(device):
    mlp = net(20, 6, 5, scale=1.0)
    spec = Spec(device, 16, "float32", "logits")
    x = rows(mlp, 16, "float32").to(device)
    plain = EAGER.build(mlp, spec)
    expected = plain.run(x).clone()
    with torch.inference_mode(), torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        built = EAGER.build(mlp, spec)
        assert torch.equal(built.run(x), expected)
        assert torch.equal(plain.run(x), expected)
    assert torch.equal(built.run(x.clone().requires_grad_()), expected)
    assert not built.run(x).requires_grad
    built.input.copy_(x)  # an inference tensor would refuse


@pytest.mark.parametrize("device", DEVICES)
def test_float32_is_float32_or_an_error(device):
    mlp = net(20, 6, 5, scale=1.0)
    spec = Spec(device, 16, "float32", "logits")
    runner = EAGER.build(mlp, spec)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(Unsupported, match="float32 matrix products are set to"):
            EAGER.build(mlp, spec)
        with pytest.raises(Unsupported, match="set_float32_matmul_precision"):
            runner.run(runner.input)
    finally:
        torch.set_float32_matmul_precision(before)
    runner.run(runner.input)


def test_threads_are_set_inside_and_restored():
    before = torch.get_num_threads()
    mlp = net(20, 6, 5)
    runner = EAGER.build(mlp, Spec("cpu", 16, threads=before + 1))
    seen = []
    forward = runner._forward
    runner._forward = lambda x: (seen.append(torch.get_num_threads()), forward(x))[1]
    runner.run(runner.input)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


# ---- options --------------------------------------------------------------------------------------------------------


def test_what_is_offered():
    mlp = net(20, 6, 10)
    spec = Spec("cpu", 16, "uint8")
    first = EAGER.variants(mlp, spec)[0]
    assert list(first.to_json()) == ["op", "pad", "inplace", "compute"]
    assert {v.get("compute") for v in EAGER.variants(mlp, spec)} == {"float32", "bfloat16"}
    assert {v.get("compute") for v in EAGER.variants(mlp, replace(spec, input_dtype="float16"), full=True)} == {
        "float32"
    }
    assert {v.get("inplace") for v in EAGER.variants(net(20, 6, 10, activation="tanh"), spec)} == {False}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"op": "conv"}, InvalidInput, "op must be one of"),
        ({"pad": 9}, InvalidInput, "pad must be a whole number >= 10"),
        ({"pad": True}, InvalidInput, "pad must be"),
        ({"inplace": "yes"}, InvalidInput, "inplace must be"),
        ({"compute": "int8"}, InvalidInput, "compute must be"),
        ({"compute": "float16"}, Unsupported, "compute=float16 is not offered for uint8 rows on cpu"),
        ({"op": "fused"}, Unsupported, "needs a CUDA device"),
        ({"mode": "default"}, InvalidInput, "unknown options mode; known: op, pad, inplace, compute"),
    ],
)
def test_bad_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        EAGER.build(net(20, 6, 10), Spec("cpu", 16), Variant.of(**options))


def test_missing_options_are_completed():
    runner = EAGER.build(net(20, 6, 10), Spec("cpu", 16), Variant.of(pad=16))
    assert runner.variant.label == "op=linear pad=16 inplace=yes compute=float32"


def test_unavailable_says_why(monkeypatch):
    assert EAGER.unavailable("cpu") is None
    if not torch.cuda.is_available():
        assert "sees no CUDA device" in EAGER.unavailable("cuda:0")
        with pytest.raises(Unsupported, match="sees no CUDA device"):
            EAGER.build(net(20, 6, 10), Spec("cuda:0", 16))
    monkeypatch.setattr("gigamlp.engines.torch_common.find_spec", lambda name: None)
    assert "pip install 'gigamlp[torch]'" in EAGER.unavailable("cpu")
    assert "pip install 'gigamlp[torch]'" in engine("torch_compile").unavailable("cuda:0")

"""Cascades through engines: bit for bit what the stages give alone, merged in NumPy; and what is counted meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp import MLP, Cascade, Layer
from gigamlp.cascade import merge
from gigamlp.engines import registry
from gigamlp.engines.cascades import for_model, joined, split
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.spec import Spec, Variant

NAMES = ("cpu_fused", "numpy", "onnxruntime", "openvino")


def net(seed: int, hidden: tuple[int, ...], features: int, outputs: int = 4, **own: Any) -> MLP:
    rng = np.random.default_rng(seed)
    read = sum(b - a for a, b in own["columns"]) if "columns" in own else features
    widths = (read, *hidden, outputs)
    layers = []
    for index, (i, o) in enumerate(pairwise(widths)):
        activation = "relu" if index < len(hidden) else "identity"
        layers.append(Layer(rng.normal(size=(o, i)) / np.sqrt(i), rng.normal(size=o) / 4, activation))
    return MLP(tuple(layers), features=features, input_scale=1 / 64, input_offset=-1.0, name=f"n{seed}", **own)


def cascade_of(kind: str, features: int = 37) -> Cascade:
    wide = net(3, (70,), features)
    quick = net(1, (9,), features, columns=((features // 3, features // 3 * 2 + 1),))
    if kind == "two":
        return Cascade((quick, wide), (0.5,))
    if kind == "three":
        return Cascade((quick, net(2, (16, 5), features), wide), (0.6, 0.4))
    if kind == "linear":
        return Cascade((net(5, (), features), wide), (0.5,))
    logits = {"head": "sigmoid", "classes": ["no", "yes"]}
    return Cascade((net(1, (9,), features, 1, **logits), net(2, (20,), features, 1, **logits)), (0.3,))


def rows_of(count: int, features: int = 37, dtype: str = "uint8") -> Any:
    rng = np.random.default_rng(count)
    x = rng.integers(0, 128, (count, features)).astype(np.uint8)
    x[rng.random(x.shape) < 0.4] = 0
    return x.astype(dtype)


def usable(name: str) -> Any:
    engine = registry.engine(name)
    reason = engine.unavailable("cpu")
    if reason is not None:
        pytest.skip(reason)
    return engine


def apart(engine: Any, cascade: Cascade, runner: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return ids, margins and deciding stages, from runners of the stages alone."""
    own = runner.variant.to_json()
    count = own.pop("cascade")
    ids, margins = [], []
    for index, stage in enumerate(cascade.stages):
        parts = {k: split(v, count)[index] if k in ("scheme", "zeros", "isa") else v for k, v in own.items()}
        alone = engine.build(stage, replace(runner.spec, batch=len(x), output="margin"), Variant.from_json(parts))
        answer, margin = (part.copy() for part in alone.run(x))
        alone.close()
        ids.append(answer)
        margins.append(margin)
    merged, deciding = merge(cascade.thresholds, ids, margins)
    return merged, np.choose(deciding, margins), deciding


@pytest.mark.parametrize("output", ["class", "margin"])
@pytest.mark.parametrize("kind", ["two", "three", "linear", "sigmoid"])
@pytest.mark.parametrize("name", NAMES)
def test_a_cascade_equals_its_stages_run_alone_and_merged(name: str, kind: str, output: str) -> None:
    engine, cascade = usable(name), cascade_of(kind)
    for count in (1, 2, 31, 257, 1021):  # one row, a few, less than a block, blocks with a rest, a prime
        spec = Spec("cpu", count, "uint8", output, threads=None)
        runner = for_model(engine, cascade).build(cascade, spec)
        x = rows_of(count)
        ids, margins, deciding = apart(engine, cascade, runner, x)
        found = runner.run(x)
        if output == "margin":
            # a float engine's last bits may depend on how many rows are multiplied at once; the native kernels' do not
            np.testing.assert_allclose(found[1], margins, rtol=0, atol=0 if name == "cpu_fused" else 1e-5)
            found = found[0]
        np.testing.assert_array_equal(found, ids)
        stages = len(cascade.stages)
        assert runner.totals == (count, *(int((deciding > index).sum()) for index in range(stages - 1)))
        runner.close()
        with pytest.raises(InvalidInput, match="closed"):
            runner.run(x)
    assert len(set(deciding.tolist())) == stages  # else nothing was tested


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("unsure", ["none", "one", "all", "all but one"])
def test_any_share_of_unsure_rows_is_right(unsure: str, threads: int) -> None:
    engine, cascade = usable("cpu_fused"), cascade_of("two")
    count = 5003
    x = rows_of(count)
    alone = engine.build(cascade.stages[0], Spec("cpu", count, "uint8", "margin"))
    ordered = np.unique(alone.run(x)[1])
    threshold = {"none": 0.0, "one": ordered[1], "all": np.inf, "all but one": ordered[-1]}[unsure]
    cascade = cascade.with_(thresholds=(float(threshold),))
    runner = engine.build(cascade, Spec("cpu", count, "uint8", "class", threads=threads))
    ids, _, deciding = apart(engine, cascade, runner, x)
    for _ in range(3):
        np.testing.assert_array_equal(runner.run(x), ids)
    expected = {"none": 0, "one": 1, "all": count, "all but one": count - 1}[unsure]
    assert int(deciding.sum()) == expected
    assert runner.totals == (3 * count, 3 * expected)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "float32"])
def test_every_variant_of_the_native_engine_is_right(dtype: str) -> None:
    engine, cascade = usable("cpu_fused"), cascade_of("three")
    x = rows_of(300, dtype=dtype)
    spec = Spec("cpu", 300, dtype, "class")
    variants = engine.variants(cascade, spec, full=True)
    assert len(variants) == len(set(variants)) > 1
    for variant in variants:
        runner = engine.build(cascade, spec, variant)
        assert runner.variant == variant
        np.testing.assert_array_equal(runner.run(x), apart(engine, cascade, runner, x)[0])


def test_stages_may_have_schemes_of_their_own() -> None:
    engine, cascade = usable("cpu_fused"), cascade_of("two")
    quick, wide = cascade.stages
    cascade = cascade.with_(stages=(quick, gm.quantise(wide, "w8a8", calibration=rows_of(200))))
    runner = engine.build(cascade, Spec("cpu", 500, "uint8", "class"))
    assert runner.variant.get("scheme") == "w8+w8a8"
    x = rows_of(500)
    np.testing.assert_array_equal(runner.run(x), apart(engine, cascade, runner, x)[0])


def test_rows_may_lie_apart_and_be_fewer_than_the_batch() -> None:
    engine, cascade = usable("cpu_fused"), cascade_of("two")
    runner = engine.build(cascade, Spec("cpu", 400, "uint8", "class"))
    wide = np.random.default_rng(0).integers(0, 128, (800, 50)).astype(np.uint8)
    x = wide[::2, 3:40]
    full = runner.run(np.ascontiguousarray(x)).copy()
    np.testing.assert_array_equal(runner.run(x), full)
    np.testing.assert_array_equal(runner.run(x[:123]), full[:123])
    np.testing.assert_array_equal(runner.bind(x).run(x), full)
    assert len(runner.run(x[:0])) == 0
    for wrong in (x[:, :5], np.zeros((401, 37), np.uint8), x.astype(np.float32), x[0]):
        with pytest.raises(InvalidInput, match="the runner takes"):
            runner.run(wrong)


def test_one_feature_and_one_row() -> None:
    stages = (MLP([Layer([[1.0], [-1.0]])]), MLP([Layer([[-1.0], [1.0]])]))  # type: ignore[arg-type]
    cascade = Cascade(stages, (100.0,))
    for name in ("cpu_fused", "numpy"):
        runner = for_model(usable(name), cascade).build(cascade, Spec("cpu", 1, "uint8", "class"))
        assert [runner.run(np.array([[v]], np.uint8)).tolist() for v in (10, 60)] == [[1], [0]]


def test_what_no_cascade_gives_and_no_engine_runs_is_refused() -> None:
    cascade = cascade_of("two")
    for name in ("cpu_fused", "numpy"):
        with pytest.raises(Unsupported, match="class or margin, not logits"):
            for_model(usable(name), cascade).variants(cascade, Spec("cpu", 8, "uint8", "logits"))
    torch = for_model(registry.engine("torch_eager"), cascade)
    with pytest.raises(Unsupported, match="'torch_eager' runs no cascades"):
        torch.build(cascade, Spec("cpu", 8, "uint8", "class"))
    engine = usable("cpu_fused")
    with pytest.raises(InvalidInput, match="one of 3 stages, but the cascade has 2"):
        engine.build(cascade, Spec("cpu", 8), Variant.of(cascade=3))
    with pytest.raises(InvalidInput, match="for 3 stages, but the cascade has 2"):
        engine.build(cascade, Spec("cpu", 8), Variant.of(zeros="auto+dense+skip"))


def test_options_of_stages_are_joined_and_split() -> None:
    assert joined(["w8", "w8"]) == "w8"
    assert split(joined(["w8", "w7"]), 2) == ["w8", "w7"]
    assert split("w8", 3) == ["w8"] * 3


def test_the_native_call_refuses_what_does_not_fit() -> None:
    engine = usable("cpu_fused")
    spec = Spec("cpu", 4, "uint8", "margin")
    one, other = (engine.build(net(seed, (5,), width), spec)._net for seed, width in ((1, 6), (2, 7)))
    last = engine.build(net(3, (5,), 6), replace(spec, output="class"))._net
    x, out, margin, t = (
        np.zeros((4, 6), np.uint8),
        np.zeros(4, np.int64),
        np.zeros(4, np.float32),
        np.zeros(1, np.float32),
    )
    one.cascade((last,), t, x, out, None, 1)
    for args, says in [
        (((other,), t, x, out, margin, 1), "other rows"),
        (((), t, x, out, None, 1), "at least one"),
        ((("x",), t, x, out, None, 1), "made of networks"),
        (((last, last), np.zeros(2, np.float32), x, out, None, 1), "every network"),
        (((last,), np.zeros(2, np.float32), x, out, None, 1), "one float32 threshold"),
        (((last,), np.zeros(1, np.int32), x, out, None, 1), "one float32 threshold"),
        (((last,), t, x[:, :5], out, None, 1), "another type or width"),
        (((last,), t, x, out[:3], None, 1), "another size"),
        (((last,), t, x, out, margin, 1), "a margin is given where"),
        (((one,), t, x, out, None, 1), "a margin is given where"),
        (((one,), t, x, out, margin[:3], 1), "`margin` has another size"),
    ]:
        with pytest.raises(ValueError, match=says):
            one.cascade(*args)

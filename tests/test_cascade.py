"""The cascade as a value: what fits together, which stage answers a row, and its file."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

import gigamlp as gm
from gigamlp import MLP, Cascade, Layer
from gigamlp.cascade import Calibration, merge
from gigamlp.errors import FileFormatError, InvalidInput, ModelError
from gigamlp.modelfile import pack, unpack


def net(seed: int, hidden: int = 6, features: int = 5, outputs: int = 3, **own: Any) -> MLP:
    rng = np.random.default_rng(seed)
    layers = [
        Layer(rng.normal(size=(hidden, features)), rng.normal(size=hidden), "relu"),
        Layer(rng.normal(size=(outputs, hidden)), rng.normal(size=outputs)),
    ]
    return MLP(layers, name=f"net{seed}", **own)


def three() -> Cascade:
    window = net(1, features=2, columns=[(1, 3)]).with_(features=5)
    return Cascade((window, net(2), net(3, hidden=9)), (1.5, 0.75))


def rows(count: int = 200, features: int = 5) -> Any:
    return np.random.default_rng(9).normal(size=(count, features)).astype(np.float32)


# ---- which stage answers ------------------------------------------------------------------------------------------


def test_a_row_is_answered_by_the_first_stage_that_is_sure_of_it() -> None:
    cascade, x = three(), rows()
    ids, stage = cascade.decide(x)
    assert set(stage.tolist()) == {0, 1, 2}
    for row, got, by in zip(x, ids, stage, strict=True):
        for index, mlp in enumerate(cascade.stages):
            z = np.sort(mlp.logits(row[None])[0])
            if index == 2 or z[-1] - z[-2] >= np.float32(cascade.thresholds[index]):
                break
        assert (got, by) == (mlp.class_ids(mlp.logits(row[None]))[0], index)


@pytest.mark.parametrize("count", [0, 1, 2, 97])
def test_the_answers_equal_those_of_all_stages_merged(count: int) -> None:
    cascade, x = three(), rows(count)
    logits = [mlp.logits(x) for mlp in cascade.stages]
    ids = [mlp.class_ids(z) for mlp, z in zip(cascade.stages, logits, strict=True)]
    margins = [mlp.margins(z) for mlp, z in zip(cascade.stages, logits, strict=True)]
    merged, stage = merge(cascade.thresholds, ids, margins)
    got, by = cascade.decide(x)
    np.testing.assert_array_equal(got, merged)
    np.testing.assert_array_equal(by, stage)
    np.testing.assert_array_equal(cascade.predict(x), merged)


def test_thresholds_of_zero_and_infinity_ask_the_first_and_the_last_stage() -> None:
    first, last = net(1), net(2)
    x = rows()
    np.testing.assert_array_equal(Cascade((first, last), (0.0,)).predict(x), first.predict(x))
    np.testing.assert_array_equal(Cascade((first, last), (np.inf,)).predict(x), last.predict(x))


def test_a_margin_equal_to_the_threshold_stays_and_one_that_is_nan_goes_on() -> None:
    ids, stage = merge(
        [0.5], [np.zeros(3), np.ones(3)], [np.array([0.5, np.nextafter(np.float32(0.5), 0), np.nan], np.float32)]
    )
    assert ids.tolist() == [0, 1, 1]
    assert stage.tolist() == [0, 1, 1]


def test_merging_takes_the_answers_of_every_stage() -> None:
    with pytest.raises(InvalidInput, match="2 thresholds need the answers of 3 stages"):
        merge([1.0, 2.0], [np.zeros(1)] * 2, [np.zeros(1)] * 2)


def test_thresholds_are_compared_as_float32() -> None:
    assert Cascade((net(1), net(2)), (0.1,)).thresholds == (float(np.float32(0.1)),)


def test_probabilities_and_logits_are_those_of_the_stage_that_answers() -> None:
    cascade, x = three(), rows()
    _, stage = cascade.decide(x)
    for index, mlp in enumerate(cascade.stages):
        mine = stage == index
        np.testing.assert_allclose(cascade.logits(x)[mine], mlp.logits(x)[mine], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(cascade.predict_proba(x)[mine], mlp.predict_proba(x)[mine], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cascade.reference_logits(x), cascade.logits(x), rtol=1e-4, atol=1e-4)


def test_a_sigmoid_head_has_the_margin_of_its_logit() -> None:
    one = net(1, outputs=1, head="sigmoid", classes=["no", "yes"])
    two = net(2, outputs=1, head="sigmoid", classes=["no", "yes"])
    cascade, x = Cascade((one, two), (1.0,)), rows()
    sure = np.abs(one.logits(x)[:, 0]) >= 1.0
    assert 0 < sure.sum() < len(x)
    np.testing.assert_array_equal(cascade.predict(x), np.where(sure, one.predict(x), two.predict(x)))


# ---- what it is made of -------------------------------------------------------------------------------------------


def test_shape_and_columns_are_those_of_all_stages_together() -> None:
    cascade = three()
    assert (cascade.features, cascade.outputs, cascade.head, cascade.name) == (5, 3, "softmax", "net1+net2+net3")
    assert cascade.columns is None
    assert cascade.features_read == 5
    assert cascade.hidden == (6, 6, 9)
    assert cascade.macs == sum(mlp.macs for mlp in cascade.stages)
    windows = [net(i, features=2, columns=[run]).with_(features=9) for i, run in enumerate([(4, 6), (1, 3)])]
    apart = Cascade((windows[0], windows[1]), (1.0,))
    assert apart.columns == ((1, 3), (4, 6))
    assert apart.features_read == 4
    touching = Cascade((windows[0], net(7, features=3, columns=[(2, 5)]).with_(features=9)), (1.0,))
    assert touching.columns == ((2, 6),)


@pytest.mark.parametrize(
    ("stages", "thresholds", "says"),
    [
        ([net(1)], [], "at least two stages, got 1"),
        ([net(1), "x"], [1.0], "stage 1 is a str, not an MLP"),
        ([net(1), net(2, features=4)], [1.0], "stage 0 takes 5 features and stage 1 4"),
        ([net(1), net(2, outputs=4)], [1.0], "other class labels"),
        ([net(1), net(2, classes=["a", "b", "c"])], [1.0], "other class labels"),
        ([net(1), net(2, classes=[0, 2, 1])], [1.0], "another order"),
        ([net(1, outputs=1), net(2, outputs=1)], [1.0], "two classes or more"),
        ([net(1, head="regression"), net(2, head="regression")], [1.0], "head 'regression' has none"),
        ([net(1, head="multilabel"), net(2, head="multilabel")], [1.0], "head 'multilabel' has none"),
        ([net(1, outputs=1, head="sigmoid"), net(2, outputs=2)], [1.0], "the same head"),
        ([net(1), net(2)], [1.0, 2.0], "2 stages need 1 thresholds, got 2"),
        ([net(1), net(2)], [], "2 stages need 1 thresholds, got 0"),
        ([net(1), net(2)], [float("nan")], "at least 0; got nan"),
        ([net(1), net(2)], [-1.0], "at least 0; got -1.0"),
        ([net(1), net(2)], ["much"], "thresholds must be numbers"),
    ],
)
def test_what_does_not_fit_together_is_refused(stages: Any, thresholds: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        Cascade(tuple(stages), tuple(thresholds))


def test_rows_of_another_width_are_refused_by_its_own_name() -> None:
    with pytest.raises(InvalidInput, match=r"rows have 4 features, 'net1\+net2\+net3' takes 5"):
        three().predict(rows(3, features=4))


def test_the_digest_changes_with_what_changes_an_answer_only() -> None:
    cascade = three()
    assert cascade.digest() == three().with_(name="another").digest()
    assert cascade.digest() == cascade.with_(calibration=Calibration(10, (3, 1), 0.1, 0.9, True)).digest()
    assert cascade.digest() != cascade.with_(thresholds=(1.5, 0.5)).digest()
    assert cascade.digest() != cascade.with_(stages=(*cascade.stages[:2], net(4, hidden=9))).digest()


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", [None, Calibration(500, (77, 12), 0.01, 0.95, False)])
def test_a_file_gives_back_the_same_cascade(tmp_path: Path, calibration: Calibration | None) -> None:
    stages = (gm.quantise(net(1), "w8"), gm.quantise(net(2), "w8a8", calibration=rows()), net(3))
    cascade = Cascade(stages, (np.inf, 0.3), calibration, "mine")
    cascade.save(tmp_path / "c.safetensors")
    found = gm.load(tmp_path / "c.safetensors")
    assert isinstance(found, Cascade)
    assert found == cascade
    assert (found.thresholds, found.calibration) == (cascade.thresholds, cascade.calibration)
    assert found.stages[1].scheme is not None
    assert pack(found) == pack(cascade)
    for same in (pickle.loads(pickle.dumps(cascade)), copy.deepcopy(cascade)):
        assert same == cascade


def test_an_mlp_is_still_written_as_version_1() -> None:
    assert parts(pack(net(1)))[0]["format_version"] == 1
    assert isinstance(unpack(pack(net(1))), MLP)


def parts(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["gigamlp"]), load_tensors(data)


def test_malformed_files_are_refused() -> None:
    header, tensors = parts(pack(three().with_(calibration=Calibration(10, (3, 1), 0.1, 0.9, True))))
    wrong: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"kind": "forest"}, {}, FileFormatError, "kind 'forest' is not known"),
        ({"format_version": 3}, {}, FileFormatError, "newer than 2"),
        ({"stages": header["stages"][:2]}, {}, FileFormatError, "malformed|belong to no part|thresholds"),
        ({"stages": None}, {}, FileFormatError, "malformed"),
        ({"calibration": {"rows": 3}}, {}, FileFormatError, "malformed"),
        ({"calibration": {**header["calibration"], "unsure": [99, 1]}}, {}, ModelError, "cannot have"),
        ({}, {"cascade.thresholds": np.array([1, 2], np.float64)}, FileFormatError, "must be float32"),
        ({}, {"cascade.thresholds": np.array([1], np.float32)}, ModelError, "3 stages need 2 thresholds"),
        ({}, {"cascade.thresholds": np.array([1, np.nan], np.float32)}, ModelError, "at least 0"),
        ({}, {"stages.0.extra": np.array([1], np.float32)}, FileFormatError, r"no part of the model: stages\.0\.extra"),
        ({}, {"stages.7.layers.0.weight": np.array([1], np.float32)}, FileFormatError, "no part of the model"),
    ]
    for own, arrays, kind, says in wrong:
        data = save_tensors({**tensors, **arrays}, metadata={"gigamlp": json.dumps({**header, **own})})
        with pytest.raises((kind, ModelError) if own.get("stages") else kind, match=says):
            unpack(data)
    for key in tensors:
        data = save_tensors({k: v for k, v in tensors.items() if k != key}, metadata={"gigamlp": json.dumps(header)})
        if key.endswith("bias"):
            assert unpack(data) != three()
            continue
        with pytest.raises(FileFormatError, match="malformed"):
            unpack(data)


@pytest.mark.parametrize(
    "what",
    ["to_onnx", "to_c", "to_torch", "to_numpy_script", "quantise", "agreement"],
)
def test_what_takes_one_mlp_says_so(what, tmp_path):
    own = {"to_onnx": (tmp_path / "m.onnx",), "to_c": (tmp_path / "m.c",), "to_numpy_script": (tmp_path / "m.py",)}
    own["agreement"] = (np.zeros((1, 784), np.uint8),)
    call = getattr(gm, what)
    cascade = gm.Cascade([gm.load("mnist-16"), gm.load("mnist-40")], [1.0])
    with pytest.raises(InvalidInput, match=f"{what} takes one MLP, and 'mnist-16\\+mnist-40' is several"):
        call(cascade, *own.get(what, ()))
    with pytest.raises(InvalidInput, match=f"{what} takes an MLP, not a str"):
        call("mnist-16", *own.get(what, ()))
    assert not list(tmp_path.iterdir())

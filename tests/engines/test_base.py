"""The words of a run: Spec and Variant, as engines use them."""

from __future__ import annotations

import pytest

from gigamlp.engines import Spec, Unsupported, Variant
from gigamlp.errors import GigaMLPError, InvalidInput


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"device": "auto"}, "device must be"),
        ({"device": "cuda"}, "device must be"),
        ({"device": "cuda:x"}, "device must be"),
        ({"batch": 0}, "batch must be"),
        ({"batch": True}, "batch must be"),
        ({"batch": 1.5}, "batch must be"),
        ({"input_dtype": "int16"}, "input_dtype must be one of uint8"),
        ({"output": "labels"}, "output must be one of class"),
        ({"input_on": "disk"}, "input_on must be"),
        ({"threads": 0}, "threads must be"),
    ],
)
def test_bad_specs_are_refused(fields, match):
    with pytest.raises(InvalidInput, match=match):
        Spec(**fields)


def test_specs_are_values():
    spec = Spec("cuda:1", 7, "float16", "margin")
    assert spec == Spec(**spec.to_json())
    assert hash(spec) == hash(Spec(**spec.to_json()))
    assert spec.is_cuda
    assert not Spec().is_cuda


def test_variants_keep_their_order_and_travel_as_json():
    variant = Variant.of(op="mm", pad=16, inplace=False)
    assert variant.label == "op=mm pad=16 inplace=no"
    assert Variant.from_json(variant.to_json()) == variant
    assert variant.get("pad") == 16
    assert variant.get("graph", True) is True
    assert variant != Variant.of(op="mm", pad=10, inplace=False)


def test_unsupported_carries_its_reason():
    error = Unsupported("no such instruction")
    assert error.reason == "no such instruction"
    assert isinstance(error, GigaMLPError)
    assert isinstance(error, NotImplementedError)

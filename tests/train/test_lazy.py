"""`gigamlp.train` without torch."""

from __future__ import annotations

import sys

import pytest

import gigamlp.train
from gigamlp.errors import Unsupported

MODULES = ("ce", "ce_graph", "elm", "gram", "network", "problem", "settings", "trainer")


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"gigamlp.train.{name}", raising=False)
    for name in gigamlp.train.__all__:
        monkeypatch.delitem(vars(gigamlp.train), name, raising=False)


@pytest.mark.parametrize("name", ["ridge", "finetune", "fit_ridge_widths"])
def test_what_needs_torch_names_the_extra(no_torch, name):
    with pytest.raises(Unsupported, match=r"training needs PyTorch.*pip install 'gigamlp\[torch\]'"):
        getattr(gigamlp.train, name)


def test_another_missing_module_is_no_business_of_torchs_message(no_torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigamlp.train.elm", None)
    with pytest.raises(ModuleNotFoundError, match=r"gigamlp\.train\.elm"):
        gigamlp.train.ridge  # noqa: B018


def test_recipes_need_no_torch(no_torch):
    assert gigamlp.train.default_recipe((40,), 55_000).epochs == 40

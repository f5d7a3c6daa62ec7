"""The shipped models: the very files of the record, with the accuracy that it states."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from gigamlp import models
from gigamlp.cli import main
from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.quantize import integer_form
from tests.docblocks import ROOT

FOLDER = Path(models.__file__).parent
RECORDS = sorted((ROOT / "records").glob("h200-distill-*.json"))


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in RECORDS:
        for row in json.loads(path.read_text())["rows"]:
            found.setdefault(row["name"], row)
    return found


def test_the_folder_holds_what_is_named() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(models.names())
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 3_000_000


@pytest.mark.parametrize("name", models.names())
def test_a_shipped_model_is_as_accurate_as_the_record_says(name: str) -> None:
    *_, x_test, y_test = gm.data.load_mnist()
    mlp = gm.load(name)
    assert mlp.name == name
    answers = mlp.answers(integer_form(mlp).reference_logits(x_test))
    row = recorded()[name]
    assert float(np.mean(answers == y_test)) == row["accuracy"]
    assert list(mlp.hidden) == row["hidden"]
    assert mlp.features_read == row["features_read_bytes"]


# everything that decides an answer, codes included: the same on every machine
@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("mnist-40", "7b18a1cbc5d4df1430015796f7e4854c095b949e1752f9987f0d704ef4266d3d"),
        ("mnist-512", "e49af5260b78af25e23270abc4875639c42ac71b7184663cae33dfe0173c1e2f"),
    ],
)
def test_codes_are_the_same_bits_everywhere(name: str, digest: str) -> None:
    mlp = gm.load(name)
    assert mlp.scheme is not None
    assert mlp.scheme.arrays["codes.0"].dtype == np.int8
    assert mlp.digest() == digest
    assert gm.quantise(mlp.with_(scheme=None)) == mlp


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gm.MLP([gm.Layer([[1.0]])], name="mine").save("mnist-40")
    assert gm.load("mnist-40").name == "mine"


@pytest.mark.parametrize("name", ["mnist-41", "", "mnist-40.safetensors", "/nowhere/mnist-40"])
def test_an_unknown_name_lists_the_shipped_ones(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="mnist-16, mnist-32, mnist-40, mnist-64"):
        gm.load(name)
    with pytest.raises(InvalidInput, match="mnist-16, mnist-32"):
        models.load(name)


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(models.path("mnist-16").read_bytes())
    data[-1] ^= 1
    (tmp_path / "mnist-16.safetensors").write_bytes(data)
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileFormatError, match="not the file that was shipped"):
        models.load("mnist-16")


def test_info_takes_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "mnist-40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scheme"] == "w8"
    assert hashlib.sha256(Path(found["path"]).read_bytes()).hexdigest() == models._SHA256["mnist-40"]

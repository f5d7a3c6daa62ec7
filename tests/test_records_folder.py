"""What lies in ``records/`` is what the program reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gigamlp.plan import Plan
from gigamlp.record import Record

FILES = sorted((Path(__file__).parents[1] / "records").glob("*.json"))


def test_there_are_records() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_a_record_or_a_plan(path: Path) -> None:
    schema = json.loads(path.read_text())["schema"]
    found = Plan.load(path) if schema.startswith("gigamlp-plan") else Record.load(path)
    assert found.versions["gigamlp"]
    if isinstance(found, Record):
        assert found.command
        assert all(row.quoted or row.wall_us or row.note for row in found.rows)

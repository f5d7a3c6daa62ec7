"""The speed guard-rail."""

from __future__ import annotations

import pytest

from gigamlp.errors import InvalidInput
from gigamlp.guard import guard_rail


def test_the_ratio_is_inclusive_and_the_baseline_survives() -> None:
    out = guard_rail({"512": 100.0, "768": 80.0, "1024": 79.9, "2048": None}, "512", speed_ratio_min=0.8)
    assert out["512"] is None
    assert out["768"] is None
    assert "0.80" in out["1024"]
    assert out["2048"] == "no candidate ran"


def test_at_most_so_many_the_fastest_first_and_the_baseline_among_them() -> None:
    out = guard_rail({"a": 10.0, "b": 11.0, "c": 12.0, "d": 13.0}, "a", survivors_max=3)
    assert [n for n, reason in out.items() if reason is None] == ["a", "c", "d"]
    out = guard_rail({"a": 10.0, "b": 11.0}, "a", survivors_max=1)
    assert [n for n, reason in out.items() if reason is None] == ["a"]


@pytest.mark.parametrize(("speeds", "ratio"), [({}, 0.8), ({"a": None}, 0.8), ({"a": 1.0}, 0), ({"a": 1.0}, 1.5)])
def test_nonsense_is_refused(speeds: dict[str, float | None], ratio: float) -> None:
    with pytest.raises(InvalidInput):
        guard_rail(speeds, "a", speed_ratio_min=ratio)

"""The article's speed guard-rail: which networks are fast enough to go on."""

from __future__ import annotations

from collections.abc import Mapping

from gigamlp.errors import InvalidInput

__all__ = ["guard_rail"]


def guard_rail(
    speeds: Mapping[str, float | None],
    baseline: str,
    *,
    speed_ratio_min: float = 0.80,
    survivors_max: int | None = None,
) -> dict[str, str | None]:
    """Say which networks are fast enough: name -> None (survives) or the reason why not.

    Parameters
    ----------
    speeds : mapping of str to float
        Rows per second of each network's quickest accepted candidate; None if it has none.
    baseline : str
        The network whose speed is the measure; it always survives.
    speed_ratio_min : float
        The least share of the baseline's speed.
    survivors_max : int, optional
        Keep at most this many, the fastest first, the baseline always among them.

    Examples
    --------
    >>> guard_rail({"512": 100.0, "768": 85.0, "1024": 70.0}, "512")
    {'512': None, '768': None, '1024': 'runs at 0.70 of the speed of 512, below 0.80'}
    """
    base = speeds.get(baseline)
    if not base:
        raise InvalidInput(f"the baseline {baseline!r} has no measured speed")
    if not 0 < speed_ratio_min <= 1:
        raise InvalidInput(f"speed_ratio_min is a fraction in 0..1, got {speed_ratio_min}")
    out: dict[str, str | None] = {}
    for name, speed in speeds.items():
        if speed is None:
            out[name] = "no candidate ran"
        elif name != baseline and speed < speed_ratio_min * base:
            out[name] = f"runs at {speed / base:.2f} of the speed of {baseline}, below {speed_ratio_min:.2f}"
        else:
            out[name] = None
    if survivors_max is not None:
        alive = [n for n, reason in out.items() if reason is None and n != baseline]
        alive.sort(key=lambda n: -(speeds[n] or 0.0))
        for name in alive[max(survivors_max - 1, 0) :]:
            out[name] = f"not among the {survivors_max} fastest survivors"
    return out

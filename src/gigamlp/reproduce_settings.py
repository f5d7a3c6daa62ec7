"""How much `gigamlp reproduce` does, by device and by how long the user will wait."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gigamlp.errors import InvalidInput
from gigamlp.tune import Effort

__all__ = ["ARTICLE_WIDTHS", "Settings", "settings_for"]

ARTICLE_WIDTHS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144)


@dataclass(frozen=True)
class Settings:
    """What one `reproduce` does; see `settings_for` for the defaults of a device.

    Attributes
    ----------
    widths : tuple of int
        Hidden widths of the ridge-ELMs; the first is the baseline.
    input_dtype : str
        Of the article's rows: float16 on CUDA, float32 on a CPU (where float16 is far slower).
    batch : int
        Rows per run of the article's rows.
    reader_batch : int
        The same for the reader's 784-40-10.
    large_batch : int or None
        An additional batch for both networks, large enough to be cold by its size.
    speed_ratio_min : float
        The guard-rail: the least share of the baseline's throughput.
    survivors_max : int
        At most so many networks are fine-tuned and compiled.
    accuracy_loss_max : float
        What a variant may lose against float32 on the held-out rows.
    accuracy_min : float
        The accuracy target on the held-out rows: a fine-tuned network below it is not selected if another reaches it.
        The article's own accuracy.
    epochs : int or None
        Of fine-tuning; None for the trainer's default.
    """

    widths: tuple[int, ...] = ARTICLE_WIDTHS
    input_dtype: str = "float32"
    batch: int = 1024
    reader_batch: int = 10_000
    large_batch: int | None = None
    speed_ratio_min: float = 0.80
    survivors_max: int = 4
    accuracy_loss_max: float = 0.002
    accuracy_min: float = 0.9679
    epochs: int | None = None
    holdout: int = 5000
    screen: Effort = field(default_factory=lambda: Effort(min_s=0.01, latency_top=0, compile=False))
    final: Effort = field(default_factory=Effort)
    repeats: int = 9
    min_s: float = 0.05
    budget_s: float = 360.0


def settings_for(device: str, *, quick: bool = False, grid: str = "default", budget_s: float | None = None) -> Settings:
    """Return the settings for a resolved device.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    quick : bool
        Fewer widths, epochs and repeats, and no compilation: under 90 s on two cores.
    grid : {"default", "full"}
        ``full`` also compiles every variant and keeps every survivor.
    budget_s : float, optional
        After so many seconds no further candidate is started. Default: 360 on a CPU, 480 on CUDA.
    """
    if grid not in ("default", "full"):
        raise InvalidInput(f"grid must be 'default' or 'full', got {grid!r}")
    if budget_s is not None and not budget_s > 0:
        raise InvalidInput(f"budget must be a positive number of seconds, got {budget_s}")
    cuda = device.startswith("cuda")
    settings = Settings(
        input_dtype="float16" if cuda else "float32",
        large_batch=2_097_152 if cuda else 65_536,
        survivors_max=4 if cuda else 2,
        final=Effort(compile_top=8 if cuda else 1),
        budget_s=480.0 if cuda else 240.0,
    )
    if quick:
        settings = replace(
            settings,
            widths=(512, 768, 1024),
            epochs=None if cuda else 8,
            survivors_max=2,
            large_batch=None,
            final=Effort(compile=False),
            repeats=5,
            budget_s=60.0,
        )
    if grid == "full":
        full = Effort(repeats=7, full=True)
        screen = replace(full, min_s=0.01, latency_top=0)
        settings = replace(settings, screen=screen, final=full, survivors_max=len(settings.widths), budget_s=7200.0)
    return settings if budget_s is None else replace(settings, budget_s=budget_s)

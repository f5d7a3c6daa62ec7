"""Every error that gigamlp raises on purpose.

One class per kind of fault. The message says what was wrong with which value, and what to do about it. Each class also
derives from the built-in exception that a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

__all__ = [
    "BudgetExceeded",
    "ConversionError",
    "DataError",
    "DeviceError",
    "FileFormatError",
    "GigaMLPError",
    "InvalidInput",
    "MeasurementError",
    "ModelError",
    "PlanMismatch",
    "TrainingError",
    "Unsupported",
]


class GigaMLPError(Exception):
    """Base class: catch this to catch everything that gigamlp raises on purpose."""


class InvalidInput(GigaMLPError, ValueError):
    """An argument or a batch of rows cannot be used: wrong width, dtype, shape or range, or NaN."""


class ModelError(GigaMLPError, ValueError):
    """An MLP is malformed: layer shapes that do not chain, non-finite weights, an unknown activation or head."""


class ConversionError(GigaMLPError, ValueError):
    """A model of another framework holds what no MLP can express. The message names it and says where it is."""


class FileFormatError(GigaMLPError, ValueError):
    """A file is not what it should be: truncated, wrong magic, wrong checksum, or a format version from the future."""


class DataError(GigaMLPError, ValueError):
    """A data set does not hold together: images and labels differ in number, or labels are unusable."""


class DeviceError(GigaMLPError, RuntimeError):
    """A device was named that this machine does not have, or that cannot be used now."""


class Unsupported(GigaMLPError, NotImplementedError):
    """An engine cannot run this MLP, Spec or machine. ``reason`` is the sentence that ``doctor`` and Plans show.

    Parameters
    ----------
    reason : str
        What is missing and, if there is one, the way to get it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrainingError(GigaMLPError, RuntimeError):
    """Training cannot go on: the loss became non-finite, or no solver handled the normal equations."""


class MeasurementError(GigaMLPError, RuntimeError):
    """A measurement cannot be trusted or taken: answers differ from the reference, or the clock did not advance."""


class PlanMismatch(GigaMLPError, RuntimeError):
    """A Plan was made for another model, machine or version. The message says which; tune again to replace it."""


class BudgetExceeded(GigaMLPError, TimeoutError):
    """The time budget ended before the first usable result. Raise ``--budget`` or narrow the grid."""

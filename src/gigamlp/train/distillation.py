"""More accuracy from training alone: many small MLPs trained at once on augmented rows, taught by a larger network."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from gigamlp.errors import InvalidInput
from gigamlp.train.augment import Augment, TableAugment
from gigamlp.train.checkpoint import Checkpoint, load_checkpoint
from gigamlp.train.choices import Choice, choose, copies, default_batch, default_epochs
from gigamlp.train.distill_run import Run
from gigamlp.train.distill_values import Distillation, Settings, Widths, checked_widths
from gigamlp.train.encode import ImageShape, Problem, encode
from gigamlp.train.pool import Progress
from gigamlp.train.problem import Pair
from gigamlp.train.recipe import Recipe
from gigamlp.train.rows import Array
from gigamlp.train.teacher import ConvTeacher, MLPTeacher
from gigamlp.train.window import Columns, Reads, Segments, requests

__all__ = ["Teacher", "distill"]

Teacher: TypeAlias = Literal["auto", "conv", "mlp"] | ConvTeacher | MLPTeacher | Callable[[Array], Any] | None

_CPU_POOL_BYTES = 1 << 30


def distill(
    x: Any,
    y: Any,
    hidden: Widths = (16, 32, 64),
    *,
    seeds: int = 4,
    teacher: Teacher = "auto",
    augment: Literal["auto"] | Augment | TableAugment | None = "auto",
    epochs: int | None = None,
    batch: int | None = None,
    quick: bool = False,
    validation: Pair | int | None = None,
    seed: int = 0,
    device: str = "auto",
    image_shape: ImageShape = "auto",
    columns: Columns = None,
    choices: dict[tuple[int, ...], Choice] | None = None,
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    budget_s: float | None = None,
) -> Distillation:
    """Train MLPs of several widths and seeds at once on augmented rows that a teacher has seen too.

    Inference stays as it is: each result is a plain MLP that reads raw rows. Held-out rows decide which seed is chosen.

    Parameters
    ----------
    x : array_like [n, features], or images [n, height, width]
        Raw rows. uint8 rows stay bytes on the device.
    y : array_like [n]
        Labels, integers or strings.
    hidden : int or sequence of int or of sequences
        One network for each entry: ``(16, 32)`` are two of one hidden layer, ``((32, 16),)`` is one of two.
    seeds : int
        Networks per width.
    teacher : {"auto", "conv", "mlp"}, ConvTeacher, MLPTeacher, callable or None
        ``conv``: small convolutional networks, for images. ``mlp``: an ensemble of wide MLPs. A callable maps raw rows
        [m, features] to logits [m, classes] (NumPy, classes sorted). None: labels only. ``auto``: for images ``conv``
        on CUDA and none on a CPU, where it costs more than it gains; for other rows ``mlp``.
    augment : {"auto"}, Augment, TableAugment or None
        ``auto``: `Augment` for images, `TableAugment` for other rows.
    epochs, batch : int, optional
        Default: 400 and 1,024 (quick: 60 and 256); less for small data sets, see `gigamlp.train.choices`.
    quick : bool
        A short training.
    validation : (x, y) or int, optional
        Rows to choose by: your own, or how many to hold out of `x` (0: none). Default: 5,000, at most a twelfth; of
        fewer than 600 rows a sixth.
    seed : int
        Of the held-out rows, the augmentation, the teacher and the order of the rows; students get ``seed ...``.
    device : {"auto", "cpu", "cuda", "cuda:N"}
    image_shape : {"auto", "square"}, (height, width) or None
        ``auto``: rows of rank 3 are images; rows of rank 2 are if `teacher` or `augment` is one for images and they are
        square.
    columns : Window, Crop, Segments, runs of (start, stop), a sequence of such, or a dict, optional
        The part of each row that the networks read: chosen on held-out rows (`Window`, `Segments`) or given. Several:
        networks for each of them, None among them being whole rows. A dict says it for hidden widths.
    choices : dict, optional
        Hidden widths -> `Choice`, instead of the default for that width.
    progress : callable, optional
        Called as ``progress(done, total, text)`` within each stage.
    checkpoint : path-like, optional
        File to keep the state in, some twenty times a stage.
    resume : bool
        Go on from `checkpoint` if it exists. Rows and settings must be the same.
    budget_s : float, optional
        Finish within about so many seconds: the students get fewer epochs if the time that is left asks for it.

    Returns
    -------
    Distillation

    Raises
    ------
    InvalidInput, DataError
        If arguments, rows or labels cannot be used.
    TrainingError
        If a loss becomes non-finite.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(300, 4))
    >>> y = np.where(x[:, 0] > x[:, 1], "more", "less")
    >>> found = distill(x, y, hidden=(4, 8), seeds=2, epochs=40, device="cpu")
    >>> bool((found.best(8).mlp.predict(x) == y).mean() > 0.95)
    True
    """
    from gigamlp.measure.telemetry import resolve_device

    place = torch.device(resolve_device(device))
    widths = checked_widths(hidden)
    _check(seeds=seeds, seed=seed, budget_s=budget_s, resume=resume, checkpoint=checkpoint)
    if image_shape == "auto" and (
        teacher == "conv" or isinstance(teacher, ConvTeacher) or isinstance(augment, Augment)
    ):
        image_shape = "square" if np.ndim(x) == 2 else "auto"
    problem = encode(x, y, validation=validation, image_shape=image_shape, seed=seed, device=place)
    settings = _settings(
        problem=problem,
        widths=widths,
        seeds=seeds,
        teacher=teacher,
        augment=augment,
        lengths=(epochs, batch),
        quick=quick,
        seed=seed,
        given=choices or {},
        reads=requests(columns, widths),
    )
    print_of = _fingerprint(problem, settings, seed)
    kept = load_checkpoint(checkpoint, print_of) if resume and checkpoint else Checkpoint(checkpoint, print_of)
    run = Run(
        problem=problem,
        settings=settings,
        teacher=teacher,
        seed=seed,
        kept=kept,
        progress=progress,
        budget_s=budget_s,
    )
    return run.result()


def _check(*, seeds: int, seed: int, budget_s: float | None, resume: bool, checkpoint: Any) -> None:
    for what, value, least in (("seeds", seeds, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InvalidInput(f"{what} must be a whole number >= {least}, got {value!r}")
    if budget_s is not None and not budget_s > 0:
        raise InvalidInput(f"budget_s must be > 0, got {budget_s!r}")
    if resume and checkpoint is None:
        raise InvalidInput("resume=True needs checkpoint=..., the file to go on from")


def _settings(
    *,
    problem: Problem,
    widths: tuple[tuple[int, ...], ...],
    seeds: int,
    teacher: Teacher,
    augment: Any,
    lengths: tuple[int | None, int | None],
    quick: bool,
    seed: int,
    given: dict[tuple[int, ...], Choice],
    reads: Reads,
) -> Settings:
    rows = problem.rows
    for request in {each for several in reads.values() for each in several if each is not None}:
        if isinstance(request, Segments):  # what does not fit is refused before anything is trained
            request.all(rows.x.shape[1])
        else:
            request.candidates(rows.x.shape[1], rows.shape)
    device, count = rows.x.device, len(rows.x)
    image = rows.shape is not None
    if augment == "auto":
        augment = Augment() if image else TableAugment()
    if not isinstance(augment, Augment | TableAugment | None):
        raise InvalidInput(f"augment must be 'auto', an Augment, a TableAugment or None, got {augment!r}")
    batch = lengths[1] or default_batch(count, quick=quick)
    recipe = Recipe(epochs=lengths[0] or default_epochs(count, batch, quick=quick), batch=min(batch, count))
    unknown = sorted(set(given) - set(widths))
    if unknown:
        raise InvalidInput(f"choices are for the hidden widths {unknown[0]}, which are not among {widths}")
    chosen = {each: given.get(each) or choose(each, image=image, augmented=augment is not None) for each in widths}
    kind = _teacher(teacher, image=image, cuda=device.type == "cuda", quick=quick)
    if kind is None:
        chosen = {each: replace(choice, follow=0.0) for each, choice in chosen.items()}
    elif not any(choice.follow for choice in chosen.values()):
        kind = None
    row_bytes = rows.x.shape[1] * rows.x.element_size() + 6 * rows.classes + 32
    most = torch.cuda.mem_get_info(device)[0] // 3 if device.type == "cuda" else _CPU_POOL_BYTES
    strengths = copies([c.phases for c in chosen.values()], recipe.epochs, max(1, most // (row_bytes * count)))
    return Settings(
        recipe,
        kind,
        augment,
        chosen,
        reads,
        tuple(seed + index for index in range(seeds)),
        strengths,
        rows.shape,
        count,
        0 if problem.x_val is None else len(problem.x_val),
        str(device),
        quick,
    )


def _teacher(teacher: Teacher, *, image: bool, cuda: bool, quick: bool) -> ConvTeacher | MLPTeacher | str | None:
    if isinstance(teacher, ConvTeacher | MLPTeacher):
        return teacher
    if teacher == "auto":
        teacher = ("conv" if cuda else None) if image else "mlp"
    if teacher == "conv":
        if cuda:
            return ConvTeacher(nets=1, epochs=4) if quick else ConvTeacher()
        return ConvTeacher(1, (8, 16, 32), 1, 256) if quick else ConvTeacher(1, (16, 32, 64), 4, 256)
    if teacher == "mlp":
        return MLPTeacher()
    if teacher is None or callable(teacher):
        return None if teacher is None else "callable"
    raise InvalidInput(f"teacher must be 'auto', 'conv', 'mlp', a callable or None, got {teacher!r}")


def _fingerprint(problem: Problem, settings: Settings, seed: int) -> str:
    digest = hashlib.sha256(repr((settings, seed, problem.classes.tolist())).encode())
    for tensor in (problem.rows.x, problem.rows.y, problem.x_val, problem.y_val):
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    for part in (problem.scaling.scale, problem.scaling.centre):
        digest.update(np.asarray(part).tobytes())
    return digest.hexdigest()

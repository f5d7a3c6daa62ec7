"""Teachers: small convolutional networks for images, an ensemble of wide MLPs for tables, or any callable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.train.augment import Shape
from gigamlp.train.bank import Bank
from gigamlp.train.bank_layout import Student
from gigamlp.train.pool import Encoded, Pool, Progress, TeacherLogits, epoch_plan
from gigamlp.train.recipe import Recipe
from gigamlp.train.rows import Array, Scaling
from gigamlp.train.settings import cpu_threads

__all__ = [
    "ConvNets",
    "ConvTeacher",
    "MLPTeacher",
    "MLPs",
    "callable_teacher",
    "fit_conv",
    "fit_mlps",
    "restore_conv",
    "restore_mlps",
]

_LARGEST_SIDE = 4  # of the last feature map: larger images are averaged down to it
_MASKS = 4096
_DROPPED = 0.3
_LEAST_STEPS = 500  # small data sets get more epochs: batch normalisation's averages need the steps


@dataclass(frozen=True)
class ConvTeacher:
    """How the convolutional teacher is made and trained.

    Parameters
    ----------
    nets : int
        Networks whose logits are averaged.
    channels : tuple of int
        Of each stage: two 3x3 convolutions with batch normalisation and relu, then a 2x2 maximum. Stages that an image
        is too small for are left out.
    epochs : int
        More where that is fewer than 500 steps.
    batch : int
    lr : float
        Peak of AdamW's rate: 15 % warm-up, then cosine.
    weight_decay : float
    """

    nets: int = 3
    channels: tuple[int, ...] = (32, 64, 128)
    epochs: int = 18
    batch: int = 1024
    lr: float = 4e-3
    weight_decay: float = 0.02


@dataclass(frozen=True)
class MLPTeacher:
    """How the ensemble of wide MLPs is made and trained.

    Parameters
    ----------
    nets : int
    hidden : tuple of int
    epochs : int
        At most; never more than the students get.
    lr, weight_decay : float
    """

    nets: int = 5
    hidden: tuple[int, ...] = (256,)
    epochs: int = 100
    lr: float = 5e-3
    weight_decay: float = 0.3


class _Net(nn.Module):
    """The features of an image, then one linear layer, with dropout between them from masks that are given."""

    def __init__(self, shape: Shape, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        stages = max(1, min(len(channels), int(math.log2(max(min(shape) / 2, 1)))))
        layers: list[nn.Module] = []
        height, width = shape
        for inputs, out in pairwise((1, *channels[:stages])):
            for before in (inputs, out):
                layers += [nn.Conv2d(before, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            if min(height, width) >= 2:
                layers.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
        if max(height, width) > _LARGEST_SIDE:
            height, width = min(height, _LARGEST_SIDE), min(width, _LARGEST_SIDE)
            layers.append(nn.AdaptiveAvgPool2d((height, width)))
        self.shape = shape
        self.width = channels[stages - 1] * height * width
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.last = nn.Linear(self.width, classes)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        images = inputs.view(-1, 1, *self.shape).contiguous(memory_format=torch.channels_last)
        found = self.features(images)
        return self.last(found if mask is None else found * mask)  # type: ignore[no-any-return]


class ConvNets:
    """Convolutional networks whose logits are averaged: raw rows in, logits float32 [n, classes] out."""

    def __init__(self, source: Encoded, nets: Sequence[_Net]) -> None:
        self.source = source
        self.nets = [net.eval().requires_grad_(False) for net in nets]
        self._fused = [_fused(net, source.x.device) for net in self.nets]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits of raw rows."""
        inputs = self.source.inputs(rows)
        if inputs.device.type == "cuda":
            inputs = inputs.half()
        with torch.no_grad():
            return torch.stack([net(inputs).float() for net in self._fused]).mean(0)

    def state(self) -> dict[str, Array]:
        """Return all parameters: what `restore_conv` takes."""
        return {
            f"{index}.{name}": tensor.cpu().numpy()
            for index, net in enumerate(self.nets)
            for name, tensor in net.state_dict().items()
        }


def _fused(net: _Net, device: torch.device) -> _Net:
    """Return a copy with each normalisation folded into its convolution; on CUDA in float16."""
    found = copy.deepcopy(net)
    layers: list[nn.Module] = []
    for layer in found.features:
        if isinstance(layer, nn.BatchNorm2d):
            layers[-1] = torch.nn.utils.fusion.fuse_conv_bn_eval(layers[-1], layer)  # type: ignore[type-var]
        else:
            layers.append(layer)
    found.features = nn.Sequential(*layers)
    return found.half() if device.type == "cuda" else found


def restore_conv(source: Encoded, settings: ConvTeacher, state: dict[str, Array]) -> ConvNets:
    """Return the networks whose `ConvNets.state` was kept."""
    nets = []
    for index in range(settings.nets):
        net = _net(source, settings, 0)
        cut = f"{index}."
        own = {k.removeprefix(cut): torch.from_numpy(v.copy()) for k, v in state.items() if k.startswith(cut)}
        net.load_state_dict(own)
        nets.append(net)
    return ConvNets(source, nets)


def fit_conv(
    pool: Pool,
    settings: ConvTeacher,
    *,
    seed: int = 0,
    strength: float = 0.0,
    progress: Progress | None = None,
) -> ConvNets:
    """Train the convolutional teacher on the pool's copies of `strength`.

    All random draws come from the CPU: first weights, the order of rows, and the dropout masks (a table of 4,096).

    Raises
    ------
    InvalidInput
        If the rows are not known to be images.
    TrainingError
        If it became non-finite.
    """
    nets = []
    for index in range(settings.nets):

        def told(done: int, total: int, text: str, before: int = index) -> None:
            if progress is not None:
                progress(before * total + done, settings.nets * total, text)

        nets.append(_fit_net(pool, settings, [seed, index], strength, told))
    return ConvNets(pool.source, nets)


def _net(source: Encoded, settings: ConvTeacher, seed: int) -> _Net:
    if source.shape is None:
        raise InvalidInput("teacher='conv' is for images, and these rows are not known to be; give image_shape")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _Net(source.shape, settings.channels, source.classes)
    return net.to(source.x.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _fit_net(pool: Pool, settings: ConvTeacher, seed: Sequence[int], strength: float, progress: Progress) -> _Net:
    device, source = pool.x.device, pool.source
    random = np.random.default_rng(seed)
    net = _net(source, settings, int(random.integers(2**31)))
    cuda = device.type == "cuda"
    kept = random.random((_MASKS, net.width), np.float32) >= _DROPPED
    masks = torch.from_numpy(kept).to(device).float().div_(1 - _DROPPED)
    optimiser = torch.optim.AdamW(
        net.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True if cuda else None
    )
    batch = min(settings.batch, max(32, pool.rows // 16), pool.rows)
    steps = pool.rows // batch
    epochs = max(settings.epochs, -(-_LEAST_STEPS // steps))
    total = steps * epochs
    rates = Recipe(epochs=1, lr=settings.lr, warmup=0.15).tables(total)[0]
    skipped = seed[-1] * epochs  # each net reads other copies
    plan = epoch_plan(pool.strengths, ((0.0, strength),), skipped + epochs)[skipped:]
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    macs = batch * sum(each.numel() for each in net.parameters()) * math.prod(net.shape) // 4  # roughly
    try:
        net.train()
        for epoch, read in enumerate(plan):
            order = torch.from_numpy(random.permutation(pool.rows) + read * pool.rows).to(device)
            chosen = torch.from_numpy(random.integers(_MASKS, size=pool.rows)).to(device)
            with cpu_threads(macs):
                for step in range(steps):
                    part = slice(step * batch, (step + 1) * batch)
                    optimiser.param_groups[0]["lr"] = float(rates[epoch * steps + step])
                    inputs = source.inputs(pool.x.index_select(0, order[part]))
                    with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                        found = net(inputs, masks.index_select(0, chosen[part]))
                    target = pool.targets(order[part])[:, : source.classes]
                    loss = nn.functional.cross_entropy(found.float(), target)
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            last = loss.item()
            if not math.isfinite(last):
                raise TrainingError(f"the teacher's loss became {last} in epoch {epoch + 1}; use a smaller lr")
            progress(epoch + 1, epochs, f"teacher, loss {last:.3f}")
    finally:
        torch.backends.cudnn.benchmark = benchmark
    return net


class MLPs:
    """An ensemble of MLPs: raw rows in, the logarithm of the mean probability out, float32 [n, classes]."""

    def __init__(self, source: Encoded, layers: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        self.source = source
        self.layers = layers  # of each MLP: (weight [out, in], bias [out])

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits of raw rows."""
        inputs = self.source.inputs(rows)
        found = []
        for layers in self.layers:
            h = inputs
            for weight, bias in layers[:-1]:
                h = torch.addmm(bias, h, weight.t()).relu_()
            found.append(torch.log_softmax(torch.addmm(layers[-1][1], h, layers[-1][0].t()), 1))
        return torch.logsumexp(torch.stack(found), 0) - math.log(len(found))

    def state(self) -> dict[str, Array]:
        """Return all parameters: what `restore_mlps` takes."""
        return {
            f"{index}.{depth}.{name}": tensor.cpu().numpy()
            for index, layers in enumerate(self.layers)
            for depth, layer in enumerate(layers)
            for name, tensor in zip(("weight", "bias"), layer, strict=True)
        }


def restore_mlps(source: Encoded, state: dict[str, Array]) -> MLPs:
    """Return the ensemble whose `MLPs.state` was kept."""
    places = sorted({tuple(map(int, name.split(".")[:2])) for name in state})
    layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(1 + places[-1][0])]
    for index, depth in places:
        weight, bias = (
            torch.from_numpy(state[f"{index}.{depth}.{name}"].copy()).to(source.x.device) for name in ("weight", "bias")
        )
        layers[index].append((weight, bias))
    return MLPs(source, layers)


def fit_mlps(
    pool: Pool,
    settings: MLPTeacher,
    recipe: Recipe,
    *,
    seed: int = 0,
    strength: float = 0.0,
    graph: bool = False,
    progress: Progress | None = None,
) -> MLPs:
    """Train an ensemble of wide MLPs on the pool's copies of `strength`."""
    recipe = recipe.with_(epochs=min(settings.epochs, recipe.epochs))
    students = [
        Student(settings.hidden, seed * 1000 + index, settings.lr, settings.weight_decay)
        for index in range(settings.nets)
    ]

    def told(done: int) -> None:
        if progress is not None:
            progress(done, recipe.epochs, "teacher")

    with Bank(students, pool, recipe, seed=seed, graph=graph) as bank:
        bank.run(epoch_plan(pool.strengths, ((0.0, strength),), recipe.epochs), told)
        networks = bank.networks()
    state = {
        f"{index}.{depth}.{name}": np.array(getattr(layer, name))
        for index, layers in enumerate(networks)
        for depth, layer in enumerate(layers)
        for name in ("weight", "bias")
    }
    return restore_mlps(pool.source, state)


def callable_teacher(function: Callable[[Array], Any], source: Encoded, scaling: Scaling | None) -> TeacherLogits:
    """Return the user's function of NumPy rows as one of the device's rows.

    Parameters
    ----------
    function : callable
        Raw rows [n, features] -> logits [n, classes].
    source : Encoded
    scaling : Scaling or None
        How `source`'s rows were scaled, to undo it; None if they are raw.
    """

    def logits(rows: Tensor) -> Tensor:
        raw = rows.cpu().numpy()
        if scaling is not None:
            scale = np.broadcast_to(np.asarray(scaling.scale, np.float64), scaling.centre.shape)
            raw = np.divide(raw, scale, out=np.zeros(raw.shape), where=scale != 0) + scaling.centre
        found = np.asarray(function(raw))
        if found.dtype.kind not in "fiu":
            raise InvalidInput(f"the teacher must give numbers, got dtype {found.dtype}")
        return torch.from_numpy(found.astype(np.float32)).to(rows.device)

    return logits

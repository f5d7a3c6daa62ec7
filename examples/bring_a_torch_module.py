"""Take a PyTorch module, run it, and hand it on: as ONNX, as C, and back as a PyTorch module.

Run with `python examples/bring_a_torch_module.py`. Needs `gigamlp[torch,onnx]`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gigamlp as gm


class Net(nn.Module):
    """A small classifier of 8x8 images, as one writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(x.size(0), -1) / 255
        return self.last(torch.relu(self.norm(self.first(x))))


def main(folder: Path, device: str = "auto") -> gm.MLP:
    """Return the MLP."""
    torch.manual_seed(0)
    net = Net()
    net.norm.running_mean.normal_()  # as if it had been trained

    mlp = gm.from_torch(net)  # the division and the batch norm are folded into weights
    print(mlp)

    images = np.random.default_rng(0).integers(0, 256, (1000, 8, 8), dtype=np.uint8)
    with gm.Session(mlp, device=device) as session:
        classes = session.predict(images.reshape(1000, -1))
    with torch.no_grad():
        theirs = net.eval()(torch.from_numpy(images).float()).argmax(1).numpy()
    print(f"{np.mean(classes == theirs):.1%} of the classes are those of the module")

    gm.to_onnx(mlp, folder / "net.onnx", input_dtype="uint8", output="class")
    gm.to_c(mlp, folder / "net.c", dtype="int8")
    print(gm.to_torch(mlp))
    return mlp


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        main(Path(where))

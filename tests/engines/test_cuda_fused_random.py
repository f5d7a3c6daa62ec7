"""On a GPU: random networks through `cuda_fused`, the shapes at its limits, and rows beyond 4 GiB.

The draws and the bound are those of `tests.kernels.cuda.fuzz`, which runs the same text on the host.
"""

from __future__ import annotations

import numpy as np
import pytest

from gigamlp.engines.cuda_fused import CudaFused
from gigamlp.kernels.cuda.driver import open_gpu
from gigamlp.mlp import MLP, Layer
from gigamlp.quantize import integer_form
from gigamlp.rounded import rounded_form
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import net
from tests.kernels.cuda import fuzz

pytestmark = pytest.mark.gpu
ENGINE = CudaFused()


def answers(y):
    return tuple(part.cpu().numpy() for part in y) if isinstance(y, tuple) else y.cpu().numpy()


@pytest.mark.parametrize("seed", range(100, 140))
def test_random_networks(seed):
    torch = pytest.importorskip("torch")
    gpu = open_gpu(0)
    drawn = fuzz.draw(seed, (gpu.capability, gpu.shared_bytes))
    if drawn is None:
        pytest.skip("gigamlp refuses this draw")
    config, network = drawn.config, drawn.network
    names = ("path", "tiles", "warps", "stages", "weights")
    variant = Variant.of(dtype=network.dtype, graph=False, **{name: getattr(config, name) for name in names})
    for x in drawn.batches:
        if not len(x):
            continue
        spec = Spec("cuda:0", len(x), x.dtype.name, network.output)
        runner = ENGINE.build(drawn.integer.mlp, spec, variant)
        # rows apart as drawn; what lies between and after them must decide nothing
        around = torch.full((len(x) * drawn.stride + 64,), 0x5A, dtype=torch.uint8, device="cuda")
        rows = around.as_strided((len(x), network.features), (drawn.stride, 1)).view(getattr(torch, x.dtype.name))
        rows.copy_(torch.from_numpy(x))
        fuzz.check(drawn, x, answers(runner.run(rows)))
        runner.input.copy_(torch.from_numpy(x))
        fuzz.check(drawn, x, answers(runner.run(runner.input)))
        runner.close()


@pytest.mark.parametrize(
    ("widths", "rows"),
    [
        pytest.param((66_304, 40, 10), 100, id="very wide rows"),
        pytest.param((66_311, 3), 33, id="the widest rows, of single bytes"),
        pytest.param((15, 1, 1, 1, 1, 128), 101, id="four hidden layers of one"),
        pytest.param((17, 127, 128, 127, 128, 127), 101, id="four hidden layers, widest"),
    ],
)
def test_shapes_at_the_limits(widths, rows):
    torch = pytest.importorskip("torch")
    mlp = net(*widths)
    x = np.random.default_rng(0).integers(0, 256, (rows, mlp.features)).astype(np.uint8)
    integer = integer_form(mlp)
    spec = Spec("cuda:0", rows, output="logits")
    for variant in ENGINE.variants(mlp, spec):
        if variant.get("graph"):
            continue
        compute = variant.get("compute")
        if compute == "int8":
            want, error = fuzz.bound(integer, x)
        else:
            want, error = rounded_form(mlp, "uint8", compute).reference(x)
        runner = ENGINE.build(mlp, spec, variant)
        got = runner.run(torch.from_numpy(x).cuda()).cpu().numpy()
        assert (np.abs(got - want) <= error).all(), (variant.label, np.abs(got - want).max(), error.max())
        runner.close()


def test_the_largest_sums_fit():
    """255 x 127 x 66,311 = 2,147,481,735, 1,912 below what an int32 holds."""
    torch = pytest.importorskip("torch")
    weight = np.ones((3, 66_311))
    weight[1] = -1.0
    weight[2, ::2] = -1.0
    mlp = MLP([Layer(weight, activation="identity")])
    x = np.full((17, 66_311), 255, np.uint8)
    x[3], x[16] = 0, 254
    for variant in ENGINE.variants(mlp, Spec("cuda:0", 17, output="logits")):
        if variant.get("compute") != "int8":
            continue
        runner = ENGINE.build(mlp, Spec("cuda:0", 17, output="logits"), variant)
        runner.input.copy_(torch.from_numpy(x))
        np.testing.assert_array_equal(
            runner.run(runner.input).cpu().numpy(), integer_form(mlp).reference_logits(x), err_msg=variant.label
        )
        runner.close()


@pytest.mark.parametrize("path", ["direct", "ring", "window", "split"])
def test_rows_beyond_4_gib(path):
    """Offsets of rows and answers pass what 32 bits hold."""
    torch = pytest.importorskip("torch")
    mlp = net(384, 40, 10, columns=((400, 784),), features=784) if path == "window" else net(784, 40, 10)
    rows = 5_600_003  # 4.39 GB, and no multiple of anything
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randint(0, 256, (rows, 784), dtype=torch.uint8, device="cuda", generator=generator)
    spec = Spec("cuda:0", rows)
    large = Spec("cuda:0", 1 << 21)
    found = [v for s in (spec, large) for v in ENGINE.variants(mlp, s, full=True) if v.get("path") == path]
    if not found:
        pytest.skip(f"this GPU has no path {path}")
    runner = ENGINE.build(mlp, spec, found[0]).bind(x)
    got = runner.run(x)
    small = ENGINE.build(mlp, Spec("cuda:0", 1003))
    for begin in (0, 5_478_000, rows - 1003):  # the middle one spans byte 2**32
        part = x[begin : begin + 1003].clone()
        assert torch.equal(small.run(part), got[begin : begin + 1003])
    runner.close()

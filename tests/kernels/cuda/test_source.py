"""What the generator writes compiles for every architecture, and what it takes of a GPU's registers and memory."""

from __future__ import annotations

import pytest

from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.kernels.cuda import compile as cc
from gigamlp.kernels.cuda.paths import Config, configs, shared_bytes
from gigamlp.kernels.cuda.source import generate
from tests.kernels.cuda import cases

# architecture, compute capability, shared memory of a block, registers of a multiprocessor
GPUS = {
    "sm_75": ((7, 5), 65_536),
    "sm_80": ((8, 0), 166_912),
    "sm_86": ((8, 6), 101_376),
    "sm_89": ((8, 9), 101_376),
    "sm_90a": ((9, 0), 232_448),
    "sm_100": ((10, 0), 232_448),
    "sm_120": ((12, 0), 101_376),
}
REGISTERS = 65_536
ROWS = {"large": 1 << 21, "small": 1024}
# (widths, what else): the shapes of the benchmark's table, then one of each kind of awkwardness
TABLE = {
    "784-40-10": ([784, 40, 10], {}),
    "784-40-10 window": ([384, 40, 10], {"features": 784, "columns": [(208, 592)]}),
    "784-64-10": ([784, 64, 10], {}),
    "784-128-10": ([784, 128, 10], {}),
}
OTHERS = {
    "odd": ([13, 7, 3], {}, "margin"),
    "deep": ([100, 128, 128, 128, 128, 128], {"activation": "gelu"}, "proba"),
    "wide rows": ([3072, 128, 10], {"activation": "silu"}, "logits"),
}

needs_nvrtc = pytest.mark.skipif(cc.toolchain_problem() is not None, reason=str(cc.toolchain_problem()))


def compiled(network, config, arch):
    made = generate(network, config)
    return made, cc.compile_cubin(made.source, arch).resources(made.name)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_75"])
@pytest.mark.parametrize("name", list(TABLE))
def test_the_shapes_that_matter_stay_in_registers(arch, name):
    widths, options = TABLE[name]
    _, network = cases.form(cases.make(widths, **options))
    capability, shared = GPUS[arch]
    for rows in ROWS.values():
        config = configs(network, capability, shared, rows)[0]
        made, found = compiled(network, config, arch)
        assert (found.spill_bytes, found.stack_bytes, found.shared_bytes <= 1024) == (0, 0, True), (config, found)
        assert found.registers * made.block <= REGISTERS
        assert made.shared_bytes <= shared


@needs_nvrtc
@pytest.mark.parametrize("arch", list(GPUS))
@pytest.mark.parametrize("name", list(OTHERS))
def test_other_shapes_compile_for_every_architecture(arch, name):
    widths, options, output = OTHERS[name]
    _, network = cases.form(cases.make(widths, **options), output, None)
    capability, shared = GPUS[arch]
    config = configs(network, capability, shared, 1024 if name == "odd" else 1 << 21)[0]
    made, found = compiled(network, config, arch)
    assert found.registers * made.block <= REGISTERS
    assert made.shared_bytes <= shared


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize("name", list(TABLE))
@pytest.mark.parametrize("rows", [1, 1024, 10_000, 1 << 21])
def test_every_configuration_fits_its_gpu(gpu, name, rows):
    widths, options = TABLE[name]
    _, network = cases.form(cases.make(widths, **options))
    capability, shared = GPUS[gpu]
    few, all_ = (configs(network, capability, shared, rows, full=full) for full in (False, True))
    assert 1 <= len(few) <= 8
    assert set(few) <= set(all_)
    assert len(set(all_)) == len(all_)
    for config in all_:
        assert shared_bytes(network, config) <= shared
        assert capability >= (9, 0) or config.path in ("direct", "split")
    if capability >= (9, 0) and rows > 1 << 20:
        assert few[0].path == ("window" if "window" in name else "ring")
    if rows <= 1024:
        assert few[0].path == "split"


@needs_nvrtc
@pytest.mark.parametrize("path", ["split", "direct", "ring"])
def test_the_compiler_leaves_the_reading_of_rows_behind_the_wait(path):
    """What is known to be constant may be read at any time; rows that an earlier launch writes are not."""
    _, network = cases.form(cases.make([333, 24, 10]))
    text = ptx(generate(network, Config(path, 1, 4, 1, "later", overlap=True)).source)
    before, _, after = text.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global.nc.v4" in before  # weights
    constant = [line.split()[0] for line in after.splitlines() if "ld.global.nc" in line]
    # a table's entries and the codes of a path that keeps them in L2; no bytes and words of rows
    assert not {"ld.global.nc.u8", "ld.global.nc.L2::128B.v4.u32"} & set(constant)
    plain = ptx(generate(network, Config(path, 1, 4, 1, "later")).source)
    assert "griddepcontrol" not in plain
    assert "ld.global.nc.u8" in plain


def ptx(source):
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, 2, [b"-arch=compute_90a", b"-std=c++17"])
    assert not int(status)
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode()


def test_old_gpus_are_refused():
    _, network = cases.form(cases.make([16, 8, 4]))
    with pytest.raises(Unsupported, match=r"7\.0.*7\.5"):
        configs(network, (7, 0), 49_152, 100)


@pytest.mark.parametrize("path", ["direct", "ring", "split"])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 1023, 10_007])
def test_the_grid_has_no_more_blocks_than_steps(path, rows):
    _, network = cases.form(cases.make([784, 40, 10]))
    made = generate(network, Config(path, 1, 4, 2, "later"))
    steps = -(-rows // 16)
    for batches in (1, 64):
        grid = made.grid(rows, batches, 132, 2)
        assert grid == max(1, steps * batches if path == "split" else min(264, steps * batches))


def test_which_rows_a_path_reads_where_they_lie():
    def made(features, path):
        return generate(cases.form(cases.make([features, 8, 4]))[1], Config(path, 1, 4, 1))

    assert made(784, "direct").alignment == made(784, "ring").alignment == 16
    assert (made(100, "direct").alignment, made(101, "direct").alignment, made(101, "ring").alignment) == (4, 4, 16)
    assert [made(100, "direct").stride_fits(n) for n in (99, 100, 102, 104, 112)] == [False, True, False, True, True]
    assert [made(101, "direct").stride_fits(n) for n in (101, 102)] == [True, True]
    assert [made(112, "ring").stride_fits(n) for n in (112, 128)] == [True, False]
    assert [made(112, "window").stride_fits(n) for n in (112, 128)] == [True, True]


def test_what_the_kernel_cannot_do_is_refused():
    for widths, words in (([16, 129, 4], "129 outputs"), ([8] * 7, "5 hidden layers")):
        with pytest.raises(Unsupported, match=words):
            cases.form(cases.make(widths))
    with pytest.raises(Unsupported, match="'multilabel' gives logits or proba"):
        cases.form(cases.make([16, 8, 4], head="multilabel"))
    with pytest.raises(InvalidInput, match="uint8 or int32, not int64"):
        cases.form(cases.make([16, 8, 4]), "class", "int64")
    with pytest.raises(InvalidInput, match="output must be one of"):
        cases.form(cases.make([16, 8, 4]), "scores")

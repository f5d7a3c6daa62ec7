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
WIDE = {
    "784-256-10": ([784, 256, 10], {}),
    "784-512-10": ([784, 512, 10], {}),
    "odd": ([785, 300, 17, 3], {}),
    "a wide second layer": ([784, 512, 128, 10], {}),
    "widest": ([784, 1024, 10], {}),
}
OTHERS = {
    "odd": ([13, 7, 3], {}, "margin"),
    "deep": ([100, 128, 128, 128, 128, 128], {"activation": "gelu"}, "proba"),
    "wide rows": ([3072, 128, 10], {"activation": "silu"}, "logits"),
}

# rows' dtype, compute
FLOATS = [
    ("float16", "float16"),
    ("float16", "float16x2"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16x2"),
    ("float32", "tf32"),
    ("uint8", "float16"),
]

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
@pytest.mark.parametrize("rows", [1024, 1 << 21])
@pytest.mark.parametrize("name", list(WIDE))
def test_wide_layers_stay_in_registers_on_hopper(name, rows):
    _, network = cases.form(cases.make(WIDE[name][0]))
    capability, shared = GPUS["sm_90a"]
    config = configs(network, capability, shared, rows)[0]
    made, found = compiled(network, config, "sm_90a")
    assert config.path == "wgmma"
    assert (found.spill_bytes, found.stack_bytes) == (0, 0), (config, found)
    assert found.registers * made.block <= REGISTERS
    assert made.shared_bytes <= shared
    assert made.pack(cases.form(cases.make(WIDE[name][0]))[0]).size == made.packed_bytes


@pytest.mark.parametrize("name", list(WIDE))
def test_wide_layers_are_refused_elsewhere(name):
    _, network = cases.form(cases.make(WIDE[name][0]))
    for arch in ("sm_75", "sm_89", "sm_100"):
        with pytest.raises(Unsupported, match=r"layer 0 has .* outputs; on a GPU of compute capability"):
            configs(network, *GPUS[arch], 1024)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_75"])
@pytest.mark.parametrize("hidden", [40, 64, 128])
@pytest.mark.parametrize(("rows", "compute"), [each for each in FLOATS if each[1] != "bfloat16"])  # as float16's
def test_float_forms_stay_in_registers(arch, hidden, rows, compute):
    capability, shared = GPUS[arch]
    mlp = cases.make([784, hidden, 10])
    if arch == "sm_75":
        if compute not in ("float16", "float16x2"):
            with pytest.raises(Unsupported, match=r"bfloat16 and tf32 come with compute capability 8\.0"):
                configs(cases.rounded(mlp, rows, compute)[1], capability, shared, 1024)
            return
        network = cases.rounded(mlp, rows, compute, later="float16")[1]
    else:
        network = cases.rounded(mlp, rows, compute)[1]
    for count in ROWS.values():
        config = configs(network, capability, shared, count)[0]
        made, found = compiled(network, config, arch)
        assert (found.spill_bytes, found.stack_bytes, found.shared_bytes <= 1024) == (0, 0, True), (config, found)
        assert found.registers * made.block <= REGISTERS
        assert made.shared_bytes <= shared


@needs_nvrtc
@pytest.mark.parametrize("arch", list(GPUS))
@pytest.mark.parametrize(("rows", "compute"), [FLOATS[0], *FLOATS[3:]])
def test_float_forms_of_odd_width_compile_for_every_architecture(arch, rows, compute):
    later = "float16" if arch == "sm_75" else "tf32"
    if arch == "sm_75":  # the others are refused there
        rows, compute = "float16", "float16x2"
    width = {"float32": 25, "uint8": 37}.get(rows, 21)  # padded to 48 bytes beyond whole units: every width of a unit
    _, network = cases.rounded(cases.make([width, 7, 9, 3]), rows, compute, "margin", later=later)
    assert network.padded % 64 == 48
    assert network.masked == (rows != "uint8")
    capability, shared = GPUS[arch]
    paths = list({each.path: each for each in configs(network, capability, shared, 1 << 21, full=True)}.values())
    config = paths[FLOATS.index((rows, compute)) % len(paths)]  # each path in turn
    made, found = compiled(network, config, arch)
    assert found.registers * made.block <= REGISTERS
    assert made.shared_bytes <= shared


def test_float_codes_stay_in_shared_memory_where_they_fit():
    capability, shared = GPUS["sm_90a"]
    network = cases.rounded(cases.make([784, 40, 10]), "float16")[1]
    found = configs(network, capability, shared, 1 << 21)
    assert found[0].path in ("ring", "window")
    assert found[0].weights == "shared"


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize(("rows", "compute"), FLOATS)
@pytest.mark.parametrize("hidden", [1, 40, 64, 128])
def test_every_float_configuration_fits_its_gpu(gpu, rows, compute, hidden):
    capability, shared = GPUS[gpu]
    if gpu == "sm_75" and compute not in ("float16", "float16x2"):
        return  # refused there, see above
    later = "float16" if gpu == "sm_75" else "tf32"
    network = cases.rounded(cases.make([784, hidden, 10]), rows, compute, later=later)[1]
    for batch in (1, 1024, 1 << 21):
        few, all_ = (configs(network, capability, shared, batch, full=full) for full in (False, True))
        assert 1 <= len(few) <= 8
        assert set(few) <= set(all_)
        for config in all_:
            assert shared_bytes(network, config) <= shared
            assert config.warps * 32 <= 1024


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
    assert 1 <= len(few) <= 9
    assert set(few) <= set(all_)
    assert len(set(all_)) == len(all_)
    for config in all_:
        assert shared_bytes(network, config) <= shared
        assert capability >= (9, 0) or config.path in ("direct", "split")
        assert capability == (9, 0) or config.path != "wgmma"
    if capability >= (9, 0) and rows > 1 << 20:
        wide = capability == (9, 0) and network.hidden >= 64
        assert few[0].path == ("wgmma" if wide else "window" if "window" in name else "ring")
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


@pytest.mark.parametrize(
    ("rows", "want"), [(0, 2), (1, 2), (64, 2), (65, 4), (64 * 66, 132), (64 * 67, 132), (10**7, 132)]
)
def test_the_grid_of_clusters_is_whole(rows, want):
    _, network = cases.form(cases.make([784, 512, 10]))
    made = generate(network, Config("wgmma", 4, 8, 6, outputs=256))
    assert made.cluster == 2
    assert made.grid(rows, 1, 132, 1) == want


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
    for widths, words in (
        ([16, 1025, 4], "1,025 outputs"),
        ([16, 8, 129, 4], "129 outputs"),
        ([8] * 7, "5 hidden layers"),
    ):
        with pytest.raises(Unsupported, match=words):
            cases.form(cases.make(widths))
    with pytest.raises(Unsupported, match="'multilabel' gives logits or proba"):
        cases.form(cases.make([16, 8, 4], head="multilabel"))
    with pytest.raises(InvalidInput, match="uint8 or int32, not int64"):
        cases.form(cases.make([16, 8, 4]), "class", "int64")
    with pytest.raises(InvalidInput, match="output must be one of"):
        cases.form(cases.make([16, 8, 4]), "scores")

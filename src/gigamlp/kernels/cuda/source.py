"""The kernel's source, specialised: ``#define``s of a network and a path before the CUDA C++, and how to launch it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.integer import Integer
from gigamlp.kernels.cuda.pack import pack, pack_slices
from gigamlp.kernels.cuda.paths import PATHS, Config, layout, order, registers, shared_bytes, slice_of
from gigamlp.kernels.cuda.shape import Form, Network

__all__ = ["NAME", "Generated", "generate"]

NAME = "gigamlp_fused"
_REGISTERS = 65_536
_COMPUTES = ("int8", "float16", "bfloat16", "tf32")


@dataclass(frozen=True)
class Generated:
    """A specialised source and what its launches need.

    Attributes
    ----------
    source : str
    name : str
        Of the kernel in it.
    network : Network
    config : Config
    packets : bool
        Whether the answers are packets for the host. The kernel then takes one argument more.
    sift : bool
        Whether the rows that it is unsure of are listed for the next stage of a cascade: three arguments more.
    gather : bool
        Whether its rows are those that the stage before listed: two arguments more, before those of `sift`.
    """

    source: str
    name: str
    network: Network
    config: Config
    packets: bool = False
    carried: int = 0
    sift: bool = False
    gather: bool = False

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.config.warps * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return shared_bytes(self.network, self.config)

    @property
    def packed_bytes(self) -> int:
        """Size of the packed weights."""
        return layout(self.network, self.config).total * self.config.cluster(self.network)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster; the grid is a multiple of it."""
        return self.config.cluster(self.network) * self.config.teams

    @property
    def alignment(self) -> int:
        """What the address of a batch's first row must be a multiple of."""
        return 16 if self.config.wide else max(4, self.network.align)

    @property
    def outputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape (without the batch) and dtype of each output; a packet is two uint32, value bits and serial number."""
        if self.packets:
            return tuple(((*shape, 2), "uint32") for shape, _ in self.network.outputs)
        return self.network.outputs

    def pack(self, form: Form) -> NDArray[np.uint8]:
        """Return the packed weights of `form`, whose `Network` this was generated for: uint8 [packed_bytes]."""
        if self.config.outputs:
            assert isinstance(form, Integer)
            return pack_slices(form, self.network, self.config.outputs)
        return pack(form, self.network, order(self.network, self.config))

    def stride_fits(self, row_stride: int) -> bool:
        """Return whether rows may lie `row_stride` bytes apart."""
        if self.config.path == "ring":
            return row_stride == self.network.features
        return row_stride >= self.network.features and row_stride % self.network.align == 0

    def grid(self, rows: int, batches: int, multiprocessors: int, blocks_per_multiprocessor: int) -> int:
        """Return how many blocks to launch for `batches` batches of (up to) `rows` rows."""
        steps = -(-rows // (16 * self.config.tiles)) * batches
        if self.config.path == "split":  # a step a block
            return max(1, steps)
        if self.config.path == "wgmma":  # a step a team's four warps, as long as there are clusters
            clusters = multiprocessors * max(1, blocks_per_multiprocessor) // self.cluster
            return max(1, min(-(-steps // self.config.teams), clusters)) * self.cluster
        return max(1, min(steps, multiprocessors * max(1, blocks_per_multiprocessor)))


def generate(
    network: Network,
    config: Config,
    *,
    packets: bool = False,
    carried: int = 0,
    sift: bool = False,
    gather: bool = False,
) -> Generated:
    """Return the source for `network` on the path `config`.

    Parameters
    ----------
    network : Network
    config : Config
    packets : bool
        Answers are for a host that waits for them.
    carried : int
        If not 0, the rows are the last one of the kernel's arguments, of so many bytes. The first one is not looked at.
    sift, gather : bool
        It is a stage of a cascade, for the outputs ``class`` and ``margin``: one that lists the rows it is unsure of,
        one that is about listed rows.

    Raises
    ------
    InvalidInput
        If the path does not do what is asked: `split` alone has packets and takes rows from its arguments, `split`
        and `ring` take no rows from a list.

    Examples
    --------
    >>> network = Network(784, 0, 784, 40, (10,), ("relu", "identity"), "softmax", "class", "uint8", False, ((0, 784),))
    >>> made = generate(network, Config("ring", 1, 7, 2))
    >>> made.block, made.shared_bytes, made.packed_bytes, made.grid(1024, 1, 132, 1)
    (224, 209008, 33280, 64)
    """
    if packets and config.path != "split":
        raise InvalidInput(f"answers go to the host as packets on the path 'split' only, not on {config.path!r}")
    if carried and config.path != "split":
        raise InvalidInput(f"rows travel with the launch on the path 'split' only, not on {config.path!r}")
    if gather and config.path in ("ring", "split"):
        raise InvalidInput(f"the path {config.path!r} takes rows that lie side by side, not those of a list")
    if (sift or gather) and (packets or carried or network.output not in ("class", "margin")):
        raise InvalidInput("a stage of a cascade answers with classes and margins, and not to the host")
    at, own = layout(network, config), slice_of(network, config)
    copied_from = {"shared": 0, "later": at.affine, "global": at.total}[config.weights]
    defines = {
        "K": network.reads,
        "K_OFFSET": network.offset,
        "FEATURES": network.features,
        "H0": own.hidden,
        "LATER": len(network.later),
        "WIDTHS": _list(network.later),
        "ACTIVATIONS": _list(each.upper() for each in network.activations),
        "CLASSES": network.classes,
        "HEAD": network.head.upper(),
        "OUTPUT": network.output.upper(),
        "SIGNED_ROWS": int(network.signed),
        "COMPUTE": _COMPUTES.index(network.compute.removesuffix("x2")),
        "EXPAND": network.expand,
        "TERMS": network.terms,
        "MASKED": int(network.masked),
        "LATER_TF32": int(network.later_compute == "tf32"),
        "ID": "int" if network.dtype == "int32" else "u8",
        "VALUE_BITS": 16 if network.dtype == "float16" else 32,
        "MASK_AT": at.mask,
        "AFFINE_AT": at.affine,
        "BIAS_AT": _list(at.biases),
        "WEIGHT_AT": _list(at.weights),
        "PACKED_BYTES": at.total,
        "PATH": PATHS.index(config.path),
        "ORDER": order(network, config),
        "ALIGN": network.align,
        "TILES": config.tiles,
        "WARPS": config.warps,
        "STAGES": config.stages,
        "MIN_BLOCKS": _blocks(network, config),
        "SHARED_FROM": copied_from,
        "CLUSTER": config.cluster(network),
        "TEAMS": config.teams,
        "PACKETS": int(packets),
        "CARRIED": carried,
        "OVERLAP": int(config.overlap),
        "SIFT": int(sift),
        "GATHER": int(gather),
    }
    head = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    folder = files("gigamlp.kernels.cuda")
    texts = [folder.joinpath(name).read_text(encoding="utf-8") for name in _files(config)]
    if config.path == "wgmma":
        texts.insert(1, _wgmma(own.hidden, -(-(network.later or (8,))[0] // 8)))
    return Generated("".join([head, *texts]), NAME, network, config, packets, carried, sift, gather)


def _wgmma(outputs: int, blocks: int) -> str:
    """Return the functions around wgmma for `outputs` of the first layer and 8 `blocks` of the second.

    Its operands have to be counted out: that many registers for the sums, 4 for the rows, the codes' descriptor, and
    whether to add to the sums that were.
    """
    first = _operands(outputs // 8, "r", ("a0", "a1", "a2", "a3"), "add")
    second = _operands(blocks, "f", ("a[0]", "a[1]", "a[2]", "a[3]"), "1")
    return f"""\
// int32 sums[64][outputs] (+)= rows[64][32] x codes[32][outputs], by four warps together
DEVICE void wgmma(int (&c)[{outputs // 8}][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {{
  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add,%{outputs // 2 + 5},0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{outputs}k32.s32." ROW_TYPE ".s8 {first[0]},add;\\n}}"
    {first[1]});
}}
// float32 sums[64][outputs] += float16 a[64][16] x b[16][outputs]
DEVICE void wgmma_half(float (&c)[{blocks}][4], const u32 (&a)[4], u64 b) {{
  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add,%{blocks * 4 + 5},0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{blocks * 8}k16.f32.f16.f16 {second[0]},add,1,1,0;\\n}}"
    {second[1]});
}}
"""


def _operands(blocks: int, kind: str, rows: tuple[str, ...], add: str) -> tuple[str, str]:
    """Return a wgmma's operands, and what in C++ they are."""
    count = 4 * blocks
    sums, a = (",".join(f"%{i}" for i in numbers) for numbers in (range(count), range(count, count + 4)))
    outs = ", ".join(f'"+{kind}"(c[{i // 4}][{i % 4}])' for i in range(count))
    ins = ", ".join(f'"r"({row})' for row in rows)
    return f"{{{sums}}},{{{a}}},%{count + 4}", f': {outs}\n    : {ins}, "l"(b), "r"({add})'


def _files(config: Config) -> tuple[str, ...]:
    return ("ptx.cuh", "fused.cuh", "ring.cu" if config.wide else f"{config.path}.cu")


def _list(values: object) -> str:
    return ", ".join(str(value) for value in values) or "0"  # type: ignore[attr-defined]


def _blocks(network: Network, config: Config) -> int:
    """Return how many blocks of a multiprocessor the compiler is to leave registers for."""
    if config.wide:
        return 1
    fitting = _REGISTERS // (config.warps * 32 * registers(network, config))
    return max(1, min(4, fitting))

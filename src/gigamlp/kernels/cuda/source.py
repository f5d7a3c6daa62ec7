"""The kernel's source, specialised: ``#define``s of a network and a path before the CUDA C++, and how to launch it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from gigamlp.errors import InvalidInput
from gigamlp.kernels.cuda.pack import layout_of
from gigamlp.kernels.cuda.paths import PATHS, Config, registers, shared_bytes
from gigamlp.kernels.cuda.shape import Network

__all__ = ["NAME", "Generated", "generate"]

NAME = "gigamlp_fused"
_REGISTERS = 65_536


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
    """

    source: str
    name: str
    network: Network
    config: Config
    packets: bool = False

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
        return layout_of(self.network).total

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
        return max(1, min(steps, multiprocessors * max(1, blocks_per_multiprocessor)))


def generate(network: Network, config: Config, *, packets: bool = False) -> Generated:
    """Return the source for `network` on the path `config`, with `packets` for a host that waits for its answers.

    Raises
    ------
    InvalidInput
        If that path has no packets: `split` has.

    Examples
    --------
    >>> network = Network(784, 0, 784, 40, (10,), ("relu", "identity"), "softmax", "class", "uint8", False, ((0, 784),))
    >>> made = generate(network, Config("ring", 1, 7, 2))
    >>> made.block, made.shared_bytes, made.packed_bytes, made.grid(1024, 1, 132, 1)
    (224, 209008, 33280, 64)
    """
    if packets and config.path != "split":
        raise InvalidInput(f"answers go to the host as packets on the path 'split' only, not on {config.path!r}")
    layout = layout_of(network)
    copied_from = {"shared": 0, "later": layout.affine, "global": layout.total}[config.weights]
    defines = {
        "K": network.reads,
        "K_OFFSET": network.offset,
        "FEATURES": network.features,
        "H0": network.hidden,
        "LATER": len(network.later),
        "WIDTHS": _list(network.later),
        "ACTIVATIONS": _list(each.upper() for each in network.activations),
        "CLASSES": network.classes,
        "HEAD": network.head.upper(),
        "OUTPUT": network.output.upper(),
        "SIGNED_ROWS": int(network.signed),
        "ID": "int" if network.dtype == "int32" else "u8",
        "VALUE_BITS": 16 if network.dtype == "float16" else 32,
        "AFFINE_AT": layout.affine,
        "BIAS_AT": _list(layout.biases),
        "WEIGHT_AT": _list(layout.weights),
        "PACKED_BYTES": layout.total,
        "PATH": PATHS.index(config.path),
        "ALIGN": network.align,
        "TILES": config.tiles,
        "WARPS": config.warps,
        "STAGES": config.stages,
        "MIN_BLOCKS": _blocks(network, config),
        "SHARED_FROM": copied_from,
        "PACKETS": int(packets),
        "OVERLAP": int(config.overlap),
    }
    head = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    folder = files("gigamlp.kernels.cuda")
    texts = [folder.joinpath(name).read_text(encoding="utf-8") for name in _files(config)]
    return Generated("".join([head, *texts]), NAME, network, config, packets)


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

"""The ways in which the fused kernel can go over its rows, and which of them suit a network, a GPU and a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gigamlp.errors import Unsupported
from gigamlp.kernels.cuda.pack import layout_of
from gigamlp.kernels.cuda.shape import Network

__all__ = ["PATHS", "Config", "configs", "shared_bytes"]

PATHS = ("direct", "ring", "window", "split")
_REGISTERS = 65_536  # of a multiprocessor
_SMALL = 20_000  # rows up to which latencies decide, not bandwidth: 784-40-10 on an H200 takes 6 us for them
_FEW = 4_000  # rows up to which every multiprocessor of a large GPU has one step or two
_MOST_WARPS = 16
_MOST_STAGES = 8


@dataclass(frozen=True)
class Config:
    """One way over the rows.

    Attributes
    ----------
    path : {"direct", "ring", "window", "split"}
        ``direct``: rows go from global memory to registers. ``ring``: bulk copies of whole rows fill a ring of slots in
        shared memory that each warp has for itself. ``window``: the same, with one bulk copy a row, of the bytes that
        are read. ``split``: 16 rows a block, the features split over its warps.
    tiles : int
        Tiles of 16 rows that a warp computes at once.
    warps : int
        Of a block.
    stages : int
        Slots of a ring; for ``direct`` the units of 64 bytes of a row that are read ahead.
    weights : {"shared", "later", "global"}
        Which weights a block copies to its shared memory: all, all but the first layer's codes, none.
    overlap : bool
        Whether a launch may begin while the launch before it in the stream still runs (programmatic dependent launch,
        9.0 and later). It fetches weights meanwhile, and waits before it reads rows or writes answers.
    """

    path: str
    tiles: int
    warps: int
    stages: int
    weights: str = "shared"
    overlap: bool = False

    @property
    def wide(self) -> bool:
        """Whether rows are multiplied from shared memory: the order of features that `pack` is to use."""
        return self.path in ("ring", "window")

    @property
    def label(self) -> str:
        """The configuration in one word."""
        kept = "" if self.weights == "shared" or self.path == "split" else f"-{self.weights}"
        return f"{self.path}-t{self.tiles}w{self.warps}s{self.stages}{kept}{'-overlap' if self.overlap else ''}"


def configs(
    network: Network, capability: tuple[int, int], shared: int, rows: int, *, full: bool = False
) -> tuple[Config, ...]:
    """Return the configurations worth measuring, the most promising first.

    Parameters
    ----------
    network : Network
    capability : (major, minor)
    shared : int
        Bytes of shared memory that a block may have.
    rows : int
        Of a batch.
    full : bool
        Return all that are known to make sense.

    Raises
    ------
    Unsupported
        If the GPU is too old.

    Examples
    --------
    >>> network = Network(784, 0, 784, 40, (10,), ("relu", "identity"), "softmax", "class", "uint8", False, ((0, 784),))
    >>> [each.label for each in configs(network, (9, 0), 232_448, 1 << 21)]
    ['ring-t1w7s2', 'ring-t2w7s1', 'ring-t1w15s1', 'direct-t2w8s4', 'direct-t1w8s4', 'ring-t1w7s2-overlap']
    >>> [each.label for each in configs(network, (7, 5), 65_536, 1024)][:2]
    ['split-t1w12s1', 'split-t1w6s1']
    """
    if capability < (7, 5):
        raise Unsupported(
            f"the GPU has compute capability {capability[0]}.{capability[1]}; "
            "the integer tensor cores that the fused kernel needs come with 7.5 (Turing)"
        )
    split, direct, rings = _split(network, shared, rows), _direct(network, shared), []
    if capability >= (9, 0):
        for path in ("window", "ring"):
            rings += _ring(network, path, shared)
        # whole rows cost whole rows' bandwidth, but one copy a tile instead of one a row
        if network.reads > 0.9 * network.features and network.features // 16 % 2:
            rings.sort(key=lambda each: each.path != "ring")
    most = 100 if full else 3
    if rows <= _SMALL:
        found = [*split[: most + 1], *rings[: most - 1], *direct[:1]] if not full else [*split, *rings, *direct]
    else:
        found = [*rings[:most], *direct[: most if not rings else 2], *(split[:1] if full else [])]
    if capability >= (9, 0):  # the most promising ones again, as launches that overlap
        first = [next((c for c in found if c.path == path), None) for path in ("split", "window", "ring", "direct")]
        found += [replace(c, overlap=True) for c in (first if full else found[:1]) if c is not None]
    return tuple(dict.fromkeys(found))


def shared_bytes(network: Network, config: Config) -> int:
    """Return the dynamic shared memory of a block in bytes."""
    layout = layout_of(network)
    weights = layout.total - {"shared": 0, "later": layout.affine, "global": layout.total}[config.weights]
    tile = network.blocks * 512
    if config.path == "split":
        hidden = -(-network.hidden // 16) * 512 if network.later else 0
        return weights + config.tiles * (config.warps * tile + hidden)
    if config.path == "direct":
        return weights
    return weights + config.warps * config.stages * (slot_bytes(network, config) + 8)


def slot_bytes(network: Network, config: Config) -> int:
    """Return the size of one slot of a ring."""
    pitch = network.features
    if config.path == "window":
        pitch = network.reads + (0 if network.reads // 16 % 2 else 16)
    return -(-config.tiles * 16 * pitch // 16) * 16 + (0 if network.align == 16 else 32)


def registers(network: Network, config: Config) -> int:
    """Return about how many registers a thread needs: what decides how many warps fit, not what the compiler takes."""
    sums = config.tiles * network.blocks * 4
    widest = max((-(-width // 8) for width in network.later), default=0)
    # while a layer is computed, its inputs (rounded to float16) and its sums are live
    chain = (network.blocks + widest) * 4 if network.later else 0
    if config.path == "split":
        own = max(1, -(-(network.padded // 64) // config.warps))
        group = max(1, min(own, 20 // network.blocks))  # as in split.cu
        plain = network.output == "class" and set(network.activations) <= {"relu", "identity"}
        need = max(sums + group * (config.tiles * 8 + network.blocks * 4), chain + 16) + (30 if plain else 56)
    else:
        ahead = (config.stages if config.path == "direct" else 1) * config.tiles * 8
        need = sums + max(ahead, chain) + 56
    return min(255, -(-need // 8) * 8)


def _split(network: Network, shared: int, rows: int) -> list[Config]:
    full = network.padded // 64
    # (tiles, units of 64 bytes a warp): codes are fetched once a step, and few rows want many steps
    forms = [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 4), (1, 6), (2, 3)]
    if rows > _FEW:
        forms.sort(key=lambda form: (form[1] == 1, -form[0], form[1]))
    found = []
    for tiles, share in forms:
        if tiles * network.blocks > 16:
            continue
        share = max(share, -(-full // _MOST_WARPS))
        warps = max(1, -(-full // share))
        for weights in ("later", "global"):
            config = Config("split", tiles, warps, 1, weights)
            if shared_bytes(network, config) <= shared:
                found.append(config)
                break
    return list(dict.fromkeys(found))


def _direct(network: Network, shared: int) -> list[Config]:
    found = []
    for tiles in (2, 1):
        for warps, stages in ((8, 4), (8, 3), (4, 4), (4, 2)):
            for weights in ("shared", "later", "global"):
                config = Config("direct", tiles, warps, stages, weights)
                if shared_bytes(network, config) <= shared:
                    break
            if registers(network, config) <= (200 if tiles > 1 else 255):
                found.append(config)
    return sorted(found, key=lambda each: (-each.warps, -each.stages, -each.tiles))


def _ring(network: Network, path: str, shared: int) -> list[Config]:
    """Return rings that fill the shared memory: the more bytes on their way, the nearer to the memory's bandwidth."""
    if path == "window" and network.align < 16:
        return []
    if path == "window" and network.reads == network.features and network.features // 16 % 2:
        return []  # the very same slots as whole rows
    found = []
    for tiles, stages in ((1, 2), (2, 1), (1, 1), (1, 3), (2, 2), (1, 4)):
        for weights in ("shared", "later"):
            one = Config(path, tiles, 1, stages, weights)
            weights_bytes = shared_bytes(network, one) - stages * (slot_bytes(network, one) + 8)
            room = (shared - weights_bytes) // (slot_bytes(network, one) + 8)
            most = min(_MOST_WARPS, _REGISTERS // 32 // registers(network, one))
            warps = min(most, room // stages)
            if warps >= 4:  # fewer leave the tensor cores idle while they wait
                deep = min(_MOST_STAGES, room // warps) if warps == most else stages
                found.append(Config(path, tiles, warps, max(stages, deep), weights))
                break
    return list(dict.fromkeys(found))

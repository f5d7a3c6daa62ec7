"""The ways in which the fused kernel can go over its rows, and which of them suit a network, a GPU and a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from gigamlp.errors import Unsupported
from gigamlp.kernels.cuda.pack import Layout, later_inputs, layout_of
from gigamlp.kernels.cuda.shape import MOST, Network

__all__ = ["PATHS", "Config", "configs", "layout", "listed_configs", "order", "shared_bytes", "sift_shared", "slice_of"]

PATHS = ("direct", "ring", "window", "split", "wgmma")
_REGISTERS = 65_536  # of a multiprocessor
_SMALL = 20_000  # rows up to which latencies decide, not bandwidth: 784-40-10 on an H200 takes 6 us for them
_FEW = 4_000  # rows up to which every multiprocessor of a large GPU has one step or two
_MOST_WARPS = 16
_MOST_STAGES = 8
_MOST_SENT = 4  # blocks of 8 outputs that a block of a cluster sends at a time, as in wgmma.cu
_MOST_SLICE = 256  # outputs of one wgmma
_MOST_TOGETHER = 8  # blocks of a cluster that every Hopper GPU has room for
_WIDE = 48  # first-layer outputs from which wgmma may be quicker than mma.sync: 784-64-10 by 3 %, 784-40-10 not


@dataclass(frozen=True)
class Config:
    """One way over the rows.

    Attributes
    ----------
    path : {"direct", "ring", "window", "split", "wgmma"}
        ``direct``: rows go from global memory to registers. ``ring``: bulk copies of whole rows fill a ring of slots in
        shared memory that each warp has for itself. ``window``: the same, with one bulk copy a row, of the bytes that
        are read. ``split``: 16 rows a block, the features split over its warps. ``wgmma``: four warps a step of 64
        rows, Hopper's instructions for wide layers; the blocks of a cluster may share the first layer.
    tiles : int
        Tiles of 16 rows that a warp computes at once.
    warps : int
        Of a block.
    stages : int
        Slots of a ring; for ``direct`` and ``wgmma`` the units of 64 bytes of a row that are read ahead.
    weights : {"shared", "later", "global"}
        Which weights a block copies to its shared memory: all, all but the first layer's codes, none.
    outputs : int
        First-layer outputs of a block, if the blocks of a team share them (``wgmma``); else 0.
    teams : int
        Teams of a cluster. Each has its own rows, and codes come from the L2 cache once for all (``wgmma``).
    overlap : bool
        Whether a launch may begin while the launch before it in the stream still runs (programmatic dependent launch,
        9.0 and later). It fetches weights meanwhile, and waits before it reads rows or writes answers.
    """

    path: str
    tiles: int
    warps: int
    stages: int
    weights: str = "shared"
    outputs: int = 0
    teams: int = 1
    overlap: bool = False

    @property
    def wide(self) -> bool:
        """Whether rows are multiplied from shared memory."""
        return self.path in ("ring", "window")

    @property
    def label(self) -> str:
        """The configuration in one word."""
        kept = "" if self.weights == "shared" or self.path == "split" else f"-{self.weights}"
        share = f"n{self.outputs}" if self.outputs else ""
        share += f"x{self.teams}" if self.teams > 1 else ""
        overlap = "-overlap" if self.overlap else ""
        return f"{self.path}-t{self.tiles}w{self.warps}s{self.stages}{share}{kept}{overlap}"

    def cluster(self, network: Network) -> int:
        """Return how many blocks share the first layer: a team."""
        return -(-network.hidden // self.outputs) if self.outputs else 1


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
    major, minor = capability
    if major < 8 and ("tf32" in (network.compute, network.later_compute) or "bfloat16" in network.compute):
        raise Unsupported(
            f"bfloat16 and tf32 come with compute capability 8.0 (Ampere), the GPU has {major}.{minor}; "
            "rows of float16 it can take"
        )
    most = 100 if full else 3
    hopper = capability == (9, 0) and network.compute == "int8"
    wgmma = _wgmma(network, shared, rows) if hopper and network.hidden >= _WIDE else []
    if network.hidden > MOST:
        if not hopper:
            raise Unsupported(
                f"layer 0 has {network.hidden:,} outputs; on a GPU of compute capability {major}.{minor}, computing in "
                f"{network.compute}, the fused kernel takes up to {MOST} (more on 9.0, Hopper, in int8)"
            )
        few = [each for n, each in enumerate(wgmma) if sum(e.outputs == each.outputs for e in wgmma[:n]) < 2]
        return tuple(wgmma if full else few[: 2 * most])
    split, direct, rings = _split(network, shared, rows), _direct(network, shared), []
    if capability >= (9, 0):
        for path in ("window", "ring"):
            rings += _ring(network, path, shared)
        # whole rows cost whole rows' bandwidth, but one copy a tile instead of one a row
        if network.reads > 0.9 * network.features and network.features // 16 % 8:
            rings.sort(key=lambda each: each.path != "ring")
        if network.item > 1 or network.expand > 1:
            # float codes are large: rings that leave them in L2 read more codes than rows
            first = rings[0].path if rings else ""
            rings.sort(key=lambda each: (each.weights != "shared", each.path != first, -each.warps))
    if rows <= _SMALL:
        few = [*split[: most + 1], *wgmma[:1], *rings[: most - 1], *direct[:1]]
        found = few if not full else [*split, *rings, *direct, *wgmma]
    else:
        found = [*wgmma[:most], *rings[:most], *direct[: most if not rings else 2], *(split[:1] if full else [])]
        if rings and rings[0].weights != "shared" and (network.item > 1 or network.expand > 1):
            found.sort(key=lambda each: each.weights != "shared")
    if capability >= (9, 0):  # the most promising ones again, as launches that overlap
        each_path = [next((c for c in found if c.path == path), None) for path in ("split", "window", "ring", "direct")]
        again = each_path if full else [next((c for c in found if c.path != "wgmma"), None)]
        found += [replace(c, overlap=True) for c in again if c is not None]
    return tuple(dict.fromkeys(found))


def listed_configs(
    network: Network, capability: tuple[int, int], shared: int, rows: int, *, full: bool = False
) -> tuple[Config, ...]:
    """Return the configurations for rows out of a list, up to `rows` of them, the most promising first.

    Such launches follow those that make the list; from 9.0 on they begin before these have ended.

    Parameters
    ----------
    network, capability, shared, rows, full
        As for `configs`.

    Raises
    ------
    Unsupported
        If the GPU is too old, or the network too wide for it.
    """
    plain = configs(network, capability, shared, rows, full=full)  # which refuses what cannot be
    hopper = capability == (9, 0) and network.compute == "int8"
    overlap = capability >= (9, 0)
    wgmma = _wgmma(network, shared, max(rows, _SMALL + 1)) if hopper and network.hidden >= _WIDE else []
    if network.hidden > MOST:
        wgmma = wgmma or [c for c in plain if c.path == "wgmma"]
        # the numbers of listed rows take registers, which a cluster has none left of: fewer units on their way
        shared_out = [c for c in wgmma if c.cluster(network) > 1]
        fewer = [replace(c, stages=n) for c in shared_out[:1] for n in (4, 3) if n < c.stages]
        found = [*[c for c in wgmma if c.cluster(network) == 1], *fewer, *shared_out]
    else:
        window = _ring(network, "window", shared, listed=True) if overlap else []
        found = [*wgmma[:4], *window[:2], *_direct(network, shared)[:2]]
        if full:
            found = [*wgmma, *window, *_direct(network, shared)]
    return tuple(dict.fromkeys(replace(c, overlap=overlap) for c in found))


def sift_shared(shared: int) -> int:
    """Return what is left of `shared` bytes to a stage of a cascade that lists rows, as in fused.cuh."""
    return shared - _MOST_WARPS * (48 + 1) * 4 - 128


def slice_of(network: Network, config: Config) -> Network:
    """Return the network that one block has: `network`, or with ``outputs`` its share of it."""
    return replace(network, hidden=config.outputs) if config.outputs else network


def layout(network: Network, config: Config) -> Layout:
    """Return where the sections of the packed weights, or of each slice of them, begin."""
    return layout_of(slice_of(network, config), 32 if config.path == "wgmma" else 16)


def shared_bytes(network: Network, config: Config) -> int:
    """Return the dynamic shared memory of a block in bytes."""
    at = layout(network, config)
    weights = {"shared": at.total, "later": at.total - at.affine, "global": 0}[config.weights]
    if config.path == "wgmma":
        groups = config.warps // 4
        sums = -(-(network.later or (0,))[0] // 8)  # of the second layer, in blocks of 8; of 64 rows
        part = min(sums, _MOST_SENT) * 2048
        barriers = network.padded // 64 + 1 + 2 * groups + 3 * (groups == 2)
        return weights + groups * (config.cluster(network) - 1) * part + 8 * barriers
    tile = network.blocks * 512
    if config.path == "split":
        hidden = -(-network.hidden // later_inputs(network)) * 512 if network.later else 0
        return weights + config.tiles * (config.warps * tile + hidden)
    if config.path == "direct":
        return weights
    return weights + config.warps * config.stages * (slot_bytes(network, config) + 8)


def order(network: Network, config: Config) -> int:
    """Return the order in which `config` reads features: the one without bank conflicts. See `pack.units`."""
    if not config.wide:
        return 0
    pitch = network.features // 16 if config.path == "ring" and network.align == 16 else 1
    return 1 if pitch % 2 or pitch % 8 == 0 else 2 if pitch % 4 else 0


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
        codes = network.blocks * network.parts
        group = max(1, min(own, 20 // codes))  # as in split.cu
        plain = network.output == "class" and set(network.activations) <= {"relu", "identity"}
        need = max(sums + group * (config.tiles * 8 + codes * 4), chain + 16) + (30 if plain else 56)
    elif config.path == "wgmma":
        kept = -(-(network.later or (0,))[0] // 8) if config.cluster(network) > 1 else 0
        sums = widest + (kept if kept <= _MOST_SENT else 0)
        ahead = 8 * min(config.stages, network.padded // 64) + {16: 0, 4: 24, 1: 64}[network.align]
        return config.outputs // 2 + 4 * sums + ahead + 44
    else:
        ahead = (config.stages if config.path == "direct" else 1) * config.tiles * 8
        widened = config.tiles * 16 if network.expand > 1 else 0
        need = sums + max(ahead + widened, chain) + 56
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
                if warps * 32 * registers(network, config) <= _REGISTERS:
                    found.append(config)
                break
    return list(dict.fromkeys(found))


def _wgmma(network: Network, shared: int, rows: int) -> list[Config]:
    """Return the ways to share a wide first layer out among blocks, with the sizes that did best on an H200 first."""
    whole = max(1, network.padded // 64)  # two groups of warps that take turns want a whole row on its way
    shares: tuple[int, ...]
    forms: tuple[tuple[int, int], ...]
    teams: tuple[int, ...] = (1,)
    if rows > _SMALL:  # the fewer blocks, the fewer read the same rows
        shares, forms = (1, 2, 4, 8), ((8, whole), (8, 6), (12, 6), (12, 5), (16, 6), (8, 5), (8, 4), (4, 6), (4, 3))
    elif rows > _FEW:  # most of the time goes into fetching codes for so few rows
        shares, forms, teams = (2, 1, 4, 8), ((8, 6), (8, whole), (8, 4), (4, 6), (12, 6), (4, 3)), (2, 4, 1)
    else:  # more blocks are done sooner, but a cluster of 8 takes 1.5 us more to start than one of 4
        shares, forms = (4, 2, 8, 1), ((4, 6), (8, 6), (12, 6), (4, whole), (8, 4), (4, 3))
    found = []
    for blocks in shares:
        outputs = -(-network.hidden // blocks // 16) * 16
        if outputs > _MOST_SLICE or (blocks > 1 and (not network.later or outputs < _WIDE)):
            continue
        for (warps, stages), count in product(forms, teams):
            if blocks * count > _MOST_TOGETHER:
                continue
            config = Config("wgmma", 4, warps, min(stages, whole), "shared", outputs, count)
            fits = shared_bytes(network, config) <= shared and config.cluster(network) == blocks
            if fits and registers(network, config) <= min(255, _REGISTERS // 32 // warps // 8 * 8):
                found.append(config)
    return list(dict.fromkeys(found))


def _direct(network: Network, shared: int) -> list[Config]:
    found = []
    for tiles in (2, 1):
        # float codes leave room for one block or two, which then needs many bytes on their way
        forms = (
            ((16, 4), (12, 4), (8, 8), (8, 4), (8, 2), (4, 4)) if network.item > 1 else ((8, 4), (8, 3), (4, 4), (4, 2))
        )
        for warps, stages in forms:
            for weights in ("shared", "later", "global"):
                config = Config("direct", tiles, warps, stages, weights)
                if shared_bytes(network, config) <= shared:
                    break
            most = min(200 if tiles > 1 else 255, _REGISTERS // 32 // warps)
            # 16 blocks and more than 2 stages: 88 bytes
            spills = network.item > 1 and stages > 2 and (network.blocks + stages) * tiles > 18
            if registers(network, config) <= most and not spills:
                found.append(config)
    return sorted(found, key=lambda each: (-each.warps, -each.stages, -each.tiles))


def _ring(network: Network, path: str, shared: int, listed: bool = False) -> list[Config]:
    """Return rings that fill the shared memory: the more bytes on their way, the nearer to the memory's bandwidth."""
    if path == "window" and network.align < 16:
        return []
    if not listed and path == "window" and network.reads == network.features and network.features // 16 % 2:
        return []  # the very same slots as whole rows
    found = []
    for tiles, stages in ((1, 2), (2, 1), (1, 1), (1, 3), (2, 2), (1, 4)):
        for weights in ("shared", "later"):
            one = Config(path, tiles, 1, stages, weights)
            weights_bytes = shared_bytes(network, one) - stages * (slot_bytes(network, one) + 8)
            room = (shared - weights_bytes) // (slot_bytes(network, one) + 8)
            most = min(_MOST_WARPS, _REGISTERS // 32 // registers(network, one))
            warps = min(most, room // stages)
            # fewer leave the tensor cores idle while they wait; float rows take longer to come
            if warps >= (4 if network.item == 1 else 3):
                deep = min(_MOST_STAGES, room // warps) if warps == most else stages
                found.append(Config(path, tiles, warps, max(stages, deep), weights))
                break
    return list(dict.fromkeys(found))

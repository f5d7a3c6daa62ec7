"""Chains of kernels for cascades, without a GPU: what is offered, that it can be built again, and that it compiles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import gigamlp as gm
from gigamlp.engines import cuda_cascade
from gigamlp.engines.cuda_cascade import build_chain, chains
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.kernels.cuda.cache import cubin_for
from gigamlp.kernels.cuda.compile import architecture, toolchain_problem
from gigamlp.spec import Spec, Variant
from tests.engines.test_cuda_fused import CARDS

PAIR = gm.Cascade([gm.load("mnist-40-w384"), gm.load("mnist-64")], [3.0])
THREE = gm.Cascade([gm.load("mnist-40-w352"), gm.load("mnist-40"), gm.load("mnist-128")], [4.0, 3.0])
needs_nvrtc = pytest.mark.skipif(toolchain_problem() is not None, reason=str(toolchain_problem()))


@pytest.fixture
def built(monkeypatch):
    """Make `build_chain` stop at what it would compile."""
    monkeypatch.setattr(cuda_cascade, "cubin_for", lambda source, arch: source)
    monkeypatch.setattr(cuda_cascade, "load", lambda gpu, made, cubin, form: made)
    monkeypatch.setattr(
        cuda_cascade, "CudaCascadeRunner", lambda program, spec, variant: SimpleNamespace(variant=variant)
    )
    monkeypatch.setattr(cuda_cascade, "ChainProgram", lambda stages, thresholds: stages)
    return build_chain


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("cascade", [PAIR, THREE], ids=["two", "three"])
@pytest.mark.parametrize("batch", [31, 4096, 1 << 21])
def test_every_variant_that_is_offered_can_be_built_again(built, batch, cascade, full):
    for gpu in CARDS.values():
        offered = [each.variant for each in chains(gpu, cascade, Spec("cuda:0", batch), full=full)]
        assert len(set(offered)) == len(offered)
        for variant in offered[:: 1 if len(offered) < 20 else 29]:
            assert built(gpu, cascade, Spec("cuda:0", batch), variant).variant == variant


def test_what_is_refused(built):
    gpu, spec = CARDS["H200"], Spec("cuda:0", 64)
    with pytest.raises(InvalidInput, match="unknown options tiles"):
        built(gpu, PAIR, spec, Variant.of(tiles=1))
    with pytest.raises(Unsupported, match="no chain of kernels is"):
        built(gpu, PAIR, spec, Variant.of(form="split"))
    with pytest.raises(Unsupported, match="device memory"):
        chains(gpu, PAIR, Spec("cuda:0", 64, input_on="host"))
    wide = gm.Cascade([gm.load("mnist-40"), gm.load("mnist-512")], [1.0])
    with pytest.raises(Unsupported, match=r"512 outputs"):
        chains(CARDS["A100"], wide, spec)


@needs_nvrtc
@pytest.mark.parametrize("name", list(CARDS))
def test_a_chain_compiles_without_spills(name):
    gpu = CARDS[name]
    cascade = THREE if name == "H200" else PAIR
    for batch in (1024, 1 << 21):
        chain = chains(gpu, cascade, Spec("cuda:0", batch, output="margin"))[0]
        for made in chain.made:
            found = cubin_for(made.source, architecture(gpu.capability)).resources(made.name)
            assert found.spill_bytes == 0, (chain.variant.label, made.config.label)


@needs_nvrtc
@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (10, 0)])
def test_other_architectures_compile(capability):
    like = CARDS["A100"] if capability < (9, 0) else CARDS["5090"]
    gpu = replace(like, capability=capability)
    for made in chains(gpu, PAIR, Spec("cuda:0", 4096))[0].made:
        assert cubin_for(made.source, architecture(capability)).image

"""NVRTC on a machine without a GPU: code, resources, architectures, and what is said when something is missing."""

from __future__ import annotations

import pytest

from gigamlp.errors import Unsupported
from gigamlp.kernels.cuda import compile as cc

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(128) addone(const int* x, int* y, long long n) {
  __shared__ int kept[128];
  long long i = blockIdx.x * 128ll + threadIdx.x;
  kept[threadIdx.x] = i < n ? x[i] : 0;
  __syncthreads();
  if (i < n) y[i] = kept[127 - threadIdx.x] + 1;
}
"""
# 64 live values and 32 registers: ptxas has to spill
SPILLS = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* x, float* y) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; i++) y[i * 1024 + threadIdx.x] = v[i] * v[63 - i] + v[(i * 7) % 64];
}
"""

needs_nvrtc = pytest.mark.skipif(cc.toolchain_problem() is not None, reason=str(cc.toolchain_problem()))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_it_compiles_for_every_architecture_without_a_gpu(arch):
    made = cc.compile_cubin(SOURCE, arch)
    assert made.image[:4] == b"\x7fELF"
    assert made.arch == arch
    found = made.resources("addone")
    assert 4 <= found.registers <= 64
    assert (found.stack_bytes, found.spill_bytes, found.shared_bytes >= 512) == (0, 0, True)


@needs_nvrtc
def test_spills_are_seen():
    found = cc.compile_cubin(SPILLS, "sm_90a").resources("spills")
    assert found.registers <= 32
    assert found.spill_bytes > 0


@needs_nvrtc
def test_a_wrong_source_and_a_wrong_architecture_are_refused_with_the_compilers_words():
    with pytest.raises(Unsupported, match=r"for sm_80: .*undefined"):
        cc.compile_cubin('extern "C" __global__ void k() { nothing_of_the_kind(); }', "sm_80")
    with pytest.raises(Unsupported, match=r"for sm_60: .*gpu-architecture"):
        cc.compile_cubin(SOURCE, "sm_60")


@needs_nvrtc
def test_the_log_names_its_kernels():
    with pytest.raises(Unsupported, match=r"kernel 'other' takes; it names \['addone'\]"):
        cc.compile_cubin(SOURCE, "sm_80").resources("other")


KNOWN = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),  # T4
        ((8, 0), "sm_80"),  # A100
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),  # L4, 4090
        ((9, 0), "sm_90a"),  # H100, H200
        ((10, 0), "sm_100"),  # B200
        ((12, 0), "sm_120"),  # 5090
        ((12, 9), "sm_121"),  # unknown yet: the highest one below it runs
    ],
)
def test_architecture(capability, arch):
    assert cc.architecture(capability, KNOWN) == arch


def test_an_exact_architecture_is_not_used_for_its_successors():
    assert cc.architecture((9, 1), KNOWN) == "sm_90"


def test_gpus_that_cannot_be_served():
    with pytest.raises(Unsupported, match=r"compute capability 7\.0; .* come with 7\.5"):
        cc.architecture((7, 0), KNOWN)
    with pytest.raises(Unsupported, match=r"none of which runs on a GPU of compute capability 13\.0; update"):
        cc.architecture((13, 0), KNOWN)
    with pytest.raises(Unsupported, match=r"compute capability 12\.0"):
        cc.architecture((12, 0), (75, 80, 90))


def test_what_is_missing_is_named_with_the_extra_that_has_it(monkeypatch):
    monkeypatch.setattr(cc, "find_spec", lambda name: None if name == "cuda.core" else object())
    assert cc.toolchain_problem() == (
        "cuda-core not installed; get what the fused engine needs with: pip install 'gigamlp[cuda13]'"
    )
    assert "gigamlp[cuda12]" in str(cc.toolchain_problem((12, 4)))
    monkeypatch.setattr(cc, "find_spec", lambda name: None)
    assert str(cc.toolchain_problem()).startswith("cuda-core and cuda-bindings not installed")


def test_nvrtc_and_driver_versions(monkeypatch):
    monkeypatch.setattr(cc, "find_spec", lambda name: object())
    monkeypatch.setattr(cc, "nvrtc_version", lambda: (13, 5))
    assert cc.toolchain_problem() is None
    assert cc.toolchain_problem((13, 0)) is None  # code of the same major version runs
    assert cc.toolchain_problem((14, 1)) is None
    assert cc.toolchain_problem((12, 8)) == (
        "NVRTC 13.5 makes code that the driver (CUDA 12.8) cannot load; update the driver, or install what fits it: "
        "pip install 'gigamlp[cuda12]'"
    )

    def missing():
        raise Unsupported("the CUDA run-time compiler NVRTC cannot be loaded (libnvrtc not found)")

    monkeypatch.setattr(cc, "nvrtc_version", missing)
    assert cc.toolchain_problem() == (
        "the CUDA run-time compiler NVRTC cannot be loaded (libnvrtc not found); get it with: "
        "pip install 'gigamlp[cuda13]'"
    )

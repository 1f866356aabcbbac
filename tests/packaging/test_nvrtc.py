"""The wrappers of instructions, arch/, compile by NVRTC too, where there is nothing to include but they."""

from __future__ import annotations

import locale

import nvrtc
import pytest
from nvrtc import INCLUDE, Nvrtc

HEADERS = sorted(p.stem for p in (INCLUDE / "monoidreduce/device/arch").iterdir())

# What the kernel below calls of each header, and the instruction that it becomes.
SM80 = {
    "approximate": {
        "x[0] = exp2(x[0]);": "ex2.approx.ftz.f32",
        "x[1] = reciprocal(x[1]);": "rcp.approx.ftz.f32",
        "x[2] = tanh(x[2]);": "tanh.approx.f32",
        "words[0] = pack<__nv_bfloat16>(x[0], x[1]);": "cvt.rn.bf16x2.f32",
        "words[1] = pack<__half>(x[0], x[1]);": "cvt.rn.f16x2.f32",
        "x[3] = unpack<__nv_bfloat16>(words[2]).x;": "shl.b32",
        "x[4] = unpack<__half>(words[2]).y;": "cvt.f32.f16",
    },
    "async_copy": {
        "copy_async(at, x, thread_again() < 8);": "cp.async.cg.shared.global",
        "commit_copies();": "cp.async.commit_group;",
        "wait_copies<1>();": "cp.async.wait_group 1;",
    },
    "barrier": {
        "sync_threads(1, 64);": "bar.sync",
        "arrive_threads(2, 64);": "bar.arrive",
    },
    "flag": {
        "words[0] = load_acquire(words + 1);": "ld.acquire.gpu.global.u32",
        "add_release(words, 1);": "red.release.gpu.global.add.u32",
    },
    "mma": {
        "mma<__nv_bfloat16>(x, words, words + 4);": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "mma<__half>(x, words, words + 4);": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "mma<float>(x, words, words + 4);": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
        "words[0] = round_to_tf32(x[0]);": "cvt.rna.tf32.f32",
        "words[1] = transpose_matrix(words[1]);": "movmatrix.sync.aligned.m8n8.trans.b16",
    },
    "reduce_add": {
        "reduce_add(x, x[4], x[5], x[6], x[7]);": ".global.add.f32",
    },
    "register": {"x[5] = copied(x[5]);": "mov.b32"},
    "shared_memory": {
        "store(at, x[0]);": "st.shared.f32",
        "store(at, words[0]);": "st.shared.u32",
        "x[0] = load<float2>(at).y;": "ld.shared.v2.f32",
        "x[1] = load<float>(at);": "ld.shared.f32",
        "words[0] = load<unsigned>(at);": "ld.shared.u32",
        "words[1] = load<unsigned short>(at);": "ld.shared.u16",
        "words[2] = load<unsigned char>(at);": "ld.shared.u8",
        "unsigned a[4]; load_matrix_x4<false>(a, at); x[2] = a[0];": "ldmatrix.sync.aligned.m8n8.x4.shared",
        "unsigned b[4]; load_matrix_x4<true>(b, at); x[3] = b[0];": "ldmatrix.sync.aligned.m8n8.x4.trans",
    },
    "warpgroup": {
        "words[0] = uniform(words[1]);": "shfl.sync.idx.b32",
    },
}
HOPPER = {
    "barrier": {
        "init(barrier, 1);": "mbarrier.init.shared.b64",
        "fence_init();": "fence.mbarrier_init.release.cluster;",
        "arrive(barrier);": "mbarrier.arrive.shared.b64",
        "arrive_expect(barrier, 16);": "mbarrier.arrive.expect_tx.shared.b64",
        "wait(barrier, 0);": "mbarrier.try_wait.parity.shared.b64",
    },
    "cluster": {
        "words[0] = cluster_rank();": "%cluster_ctarank",
        "arrive_cluster();": "barrier.cluster.arrive.aligned;",
        "wait_cluster();": "barrier.cluster.wait.aligned;",
        "const SharedAddress there = map_to_rank(memory, 1);": "mapa.shared::cluster.u32",
        "words[1] = load_from_block(there);": "ld.shared::cluster.u32",
        "arrive(there);": "mbarrier.arrive.shared::cluster.b64",
    },
    "flag": {
        "fence_async_global();": "fence.proxy.async.global;",
    },
    "reduce_add": {
        "reduce_add(x, x[4], x[5], x[6], x[7]);": "red.global.add.v4.f32",
    },
    "shared_memory": {
        "fence_async_shared();": "fence.proxy.async.shared::cta;",
        "store_matrix_x4(at, {1, 2, 3, 4});": "stmatrix.sync.aligned.m8n8.x4.shared.b16",
        "store_matrix_x4_transposed(at, {1, 2, 3, 4});": "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
    },
    "store_async": {
        "store_async(at, x, at);": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32",
    },
    "tma": {
        "prefetch(map);": "prefetch.tensormap",
        "load(memory, map, {}, barrier);": "cp.async.bulk.tensor.4d.shared::cluster.global.tile",
        "load_to_blocks(memory, map, {}, barrier, 3);": "complete_tx::bytes.multicast::cluster",
        "store(map, {}, memory);": "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [",
        "store_streaming(map, {}, memory);": "tile.bulk_group.L2::cache_hint",
        "load(memory, x, 16, barrier);": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "reduce_add(map, {}, memory);": "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add",
        "commit_stores();": "cp.async.bulk.commit_group;",
        "wait_stores<1>();": "cp.async.bulk.wait_group 1;",
        "wait_stores_read<2>();": "cp.async.bulk.wait_group.read 2;",
    },
    "warpgroup": {
        "words[1] = elect();": "elect.sync",
        "setmaxnreg_dec<24>();": "setmaxnreg.dec.sync.aligned.u32 24;",
        "setmaxnreg_inc<240>();": "setmaxnreg.inc.sync.aligned.u32 240;",
        "float sums[2] = {x[0], x[1]}; pin(sums); fence_wgmma();": "wgmma.fence.sync.aligned;",
        "commit_wgmma();": "wgmma.commit_group.sync.aligned;",
        "wait_wgmma<1>();": "wgmma.wait_group.sync.aligned 1;",
    },
    "wgmma": {
        f"Wgmma<{element}, {width}>::{call}(sums<{width // 2}>(x), {left}, 2, true);": (
            f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{ptx}.{ptx}"
        )
        for element, ptx in (("__nv_bfloat16", "bf16"), ("__half", "f16"))
        for width in (32, 64, 80, 96, 128, 192, 256)
        for call, left in (("shared<true, false>", "1"), ("registers<true>", "words"))
    },
}
KERNEL = """
#include "monoidreduce/device/arch/{header}.cuh"

namespace monoidreduce::arch {{
template <int kSize>
__device__ auto sums(float* x) -> float (&)[kSize] {{
  return reinterpret_cast<float(&)[kSize]>(*x);
}}
extern "C" __global__ void kernel(float* x, unsigned* words{map}) {{
  __shared__ alignas(128) unsigned char memory[1024];
  [[maybe_unused]] const unsigned at = __cvta_generic_to_shared(memory);
  [[maybe_unused]] auto* const barrier = reinterpret_cast<unsigned long long*>(memory);
  {calls}
}}
}}
"""


@pytest.fixture(scope="module")
def newest() -> Nvrtc:
    return nvrtc.newest()


@pytest.fixture(scope="module")
def oldest() -> Nvrtc:
    return nvrtc.oldest()


def test_every_wrapper_has_its_kernel() -> None:
    assert {*SM80, *HOPPER} == set(HEADERS) - {"element"}  # which has names alone


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(newest: Nvrtc, header: str, arch: str) -> None:
    calls = SM80.get(header, {}) | (HOPPER.get(header, {}) if arch == "sm_90a" else {})
    parameter = ", const __grid_constant__ TensorMap map" if header == "tma" else ""
    source = KERNEL.format(header=header, map=parameter, calls="\n  ".join(calls))
    options = ["--std=c++20", f"--gpu-architecture={arch}", f"--include-path={INCLUDE}"]
    ptx = newest.compile_ptx(source, options)
    assert [instruction for instruction in calls.values() if instruction not in ptx] == []


def test_compilation_leaves_the_locale_of_its_thread(oldest: Nvrtc) -> None:
    before = locale.getpreferredencoding(False)
    oldest.compile("__global__ void nothing() {}", "sm_80", [], ["nothing"])
    assert locale.getpreferredencoding(False) == before

"""Device code compiles by NVRTC: each header alone, and each kernel with a monoid that is not the library's.

Each kernel is compiled to machine code once, for sm_80 or, if it is for Hopper alone, for sm_90a. For newer
architectures the kernels for every GPU are compiled to PTX, which takes half of the time. The NVRTC of the
oldest torch compiles some of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import nvrtc
import pytest
from nvrtc import INCLUDE, STAND_INS, Nvrtc

LIBRARY = INCLUDE / "monoidreduce"
USER = Path(__file__).parent / "nvrtc"
OPTIONS = [
    "--std=c++20",
    "-default-device",
    *(f"--include-path={folder}" for folder in (STAND_INS, INCLUDE, USER)),
]
DEVICE_HEADERS = sorted(
    str(header.relative_to(INCLUDE))
    for folder in (*(LIBRARY / "device").iterdir(), LIBRARY / "monoids")
    for header in folder.iterdir()
)
KERNELS = {Path(header).stem: header for header in DEVICE_HEADERS}
PREAMBLE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoids.cuh"
#include "programs.cuh"
#include "rows.cuh"

using namespace monoidreduce;
using namespace user;
using E = __nv_bfloat16;
using F = Fast<__half>;
using M = LogMeanExp<Bits>;  // normalized, with a frame
using Q = Squares<F>;        // neither
using S = ScaledScores<Bits>;
using B = BiasedScores<F, __half>;
"""


class Kernel(NamedTuple):
    """Headers of device/, and kernels that they have."""

    headers: str
    instances: tuple[str, ...]


EVERY_GPU = {
    "simt forward": Kernel(
        "fold_forward_simt",
        (
            "simt::fold_forward<true, LogMeanExp<float>, Rows<LogMeanExp<float>>>",
            "simt::fold_forward<false, NoisyOr<double>, Rows<NoisyOr<double>>>",
            "simt::combine_splits<NoisyOr<double>, Rows<NoisyOr<double>>>",
        ),
    ),
    "simt backward": Kernel(
        "fold_backward_simt",
        (
            "simt::fold_backward<true, LogMeanExp<float>, Rows<LogMeanExp<float>>>",
            "simt::fold_backward<false, NoisyOr<double>, Rows<NoisyOr<double>>>",
        ),
    ),
    "simt programs": Kernel(
        "program_simt", ("simt::fold_program<Program<float>>", "simt::pull_program<Program<double>>")
    ),
    "simt programs, narrow": Kernel(
        "program_narrow",
        (
            "simt::narrow::fold_narrow<Program<float>, 64, 0, 4>",
            "simt::combine_states<Program<float>>",
            "simt::narrow::pull_narrow<Program<double>, 32, 0, 4>",
        ),
    ),
    "simt monoids": Kernel(
        "monoid_simt",
        (
            "simt::fold_monoid<LogMeanExp<float>, LogMeanExpFields<float>>",
            "simt::pull_monoid<LogMeanExp<double>, LogMeanExpFields<double>>",
            "simt::try_laws<LogMeanExp<double>, LogMeanExpFields<double>>",
        ),
    ),
    "simt centre of rows": Kernel("row_prologue", ("simt::row_centre<float>",)),
    "simt rows of stored scores": Kernel(
        "jsd_rows", ("simt::jsd_rows_kernel<JsdMath, 512>", "simt::jsd_gradient_kernel<JsdMath, 256>")
    ),
    "simt gradient of sinks": Kernel(
        "sink_gradient", ("simt::sink_gradient<LogMeanExp<double>, RepairedRows<LogMeanExp<double>>>",)
    ),
    "centre of rows": Kernel("row_residuals", ("prepare_rows<E, 16>",)),
    "repair": Kernel(
        "repair",
        (
            "repair_forward_kernel<LogMeanExp<double>, RepairedRows<LogMeanExp<double>>>",
            "repair_backward_kernel<LogMeanExp<float>, RepairedRows<LogMeanExp<float>>>",
        ),
    ),
    "combination of splits": Kernel(
        "combine_splits", ("combine_splits_kernel<__half, LogMeanExp<F>, ResidentRows<LogMeanExp<F>>>",)
    ),
    "sm80 resident forward": Kernel(
        "fold_forward_sm80",
        (
            "sm80::fold_forward_kernel<E, sm80::ForwardTile<64, 64, 2, 2, 3>, M, "
            "ElementBiasedScores<Bits>, ResidentRows<M>>",
        ),
    ),
    "sm80 few rows": Kernel(
        "fold_forward_sm80",
        (
            "sm80::fold_forward_kernel<__half, sm80::ForwardTile<64, 64, 2, 2, 3, true>, Q, B, "
            "sm80::RowSplits<Q>>",
        ),
    ),
    "sm80 resident backward": Kernel(
        "fold_backward_sm80",
        (
            "sm80::fold_backward_kernel<E, sm80::BackwardTile<64, 64, 64, 4, 1, 2>, M, "
            "ElementBiasedScores<Bits>>",
        ),
    ),
    "sm80 contraction, fold": Kernel(
        "contraction_sm80 fold_epilogue",
        (
            "sm80::contraction_kernel<E, sm80::ContractionTile<2>, FoldEpilogue<M, S, FoldRows<M>>>",
            "combine_partial<M, sm80::ContractionTile<2>, FoldRows<M>>",
        ),
    ),
    "sm80 contraction, gradient": Kernel(
        "contraction_sm80 gradient_epilogue",
        (
            "sm80::contraction_kernel<E, sm80::ContractionTile<2>, "
            "GradientEpilogue<E, M, LogitScores<Bits, E>, GradientRows<M>, sm80::QuadStores<1>>>",
        ),
    ),
    "sm80 contraction, payload": Kernel(
        "contraction_sm80 payload_epilogue",
        (
            "sm80::contraction_kernel<__half, sm80::ContractionTile<3, 2, true>, "
            "PayloadEpilogue<__half, Q, B, sm80::QuadStores<2>>>",
        ),
    ),
}
HOPPER = {
    "simt rows of stored scores, of clusters": Kernel(
        "jsd_rows_sm90", ("simt::jsd_rows_of_cluster<JsdMath, 8, 512>",)
    ),
    "sm90 resident forward": Kernel(
        "fold_forward_sm90",
        (
            "sm90::fold_forward_kernel<E, sm90::ForwardTile<64, 64, 128, 2, 2>, M, "
            "TileBiasedScores<Bits, E>, ResidentRows<M>>",
        ),
    ),
    "sm90 resident forward of planes": Kernel(
        "fold_forward_planes_sm90 split_heads",
        (
            "sm90::fold_forward_planes_kernel<sm90::PlanesTile<128, 2, 2>, M, S, ResidentRows<M>>",
            "sm90::fold_forward_planes_kernel<sm90::PlanesTile<128, 2, 1, 2, 8>, M, S, ResidentRows<M>>",
            "split_heads_kernel<128>",
        ),
    ),
    "sm90 resident backward of planes": Kernel(
        "fold_backward_planes_sm90",
        (
            "sm90::fold_backward_planes_kernel<"
            "sm90::PlanesPassTile<sm90::GradientOf::kRows, 64, 2, false>, M, S>",
            "sm90::fold_backward_planes_kernel<"
            "sm90::PlanesPassTile<sm90::GradientOf::kRows, 128, 1, false, 2, 3>, M, S>",
            "sm90::gather_residuals",
        ),
    ),
    "sm90 few rows": Kernel(
        "fold_few_rows_sm90",
        ("sm90::fold_few_rows_kernel<E, sm90::ForwardTile<64, 64, 128, 1, 4>, M, S, ResidentRows<M>>",),
    ),
    "sm90 resident backward": Kernel(
        "fold_backward_sm90",
        (
            "sm90::fold_backward_kernel<E, sm90::BackwardTile<64, 64, false, sm90::RowSums::kAnyOrder>, M, "
            "TileBiasedScores<Bits, bool>>",
        ),
    ),
    "sm90 resident backward in passes": Kernel(
        "fold_backward_pass_sm90",
        (
            "sm90::fold_backward_pass_kernel<E, M, SoftcappedScores<Bits>, "
            "sm90::PassTile<sm90::GradientOf::kRows, 192, false>>",
        ),
    ),
    "sm90 contraction, fold": Kernel(
        "contraction_sm90 fold_epilogue",
        (
            "sm90::contraction_kernel<E, sm90::ContractionTile<256, 4>, FoldEpilogue<M, S, FoldRows<M>>>",
            "combine_partial<M, sm90::ContractionTile<256, 4>, FoldRows<M>>",
        ),
    ),
    "sm90 contraction, gradient": Kernel(
        "contraction_sm90 gradient_epilogue",
        (
            "sm90::contraction_kernel<E, sm90::ContractionTile<256, 4>, "
            "GradientEpilogue<E, M, S, GradientRows<M>, sm90::SlabStores<1>>>",
        ),
    ),
    "sm90 contraction, payload": Kernel(
        "contraction_sm90 payload_epilogue",
        (
            "sm90::contraction_kernel<__half, sm90::ContractionTile<192, 4, 2>, "
            "PayloadEpilogue<__half, Q, B, sm90::SlabStores<2>>>",
        ),
    ),
    "sm90 contraction, fold that keeps weights": Kernel(
        "saving_epilogue_sm90",
        (
            "sm90::contraction_kernel<E, sm90::ContractionTile<256, 4>, "
            "sm90::SavingEpilogue<M, S, FoldRows<M>, sm90::KeptWeights<1, 256>>>",
        ),
    ),
    "sm90 programs in one pass": Kernel(
        "fold_payload_sm90",
        ("sm90::fold_payload_kernel<E, Program<ElementReal>, sm90::PayloadSlabs<0, 0>>",),
    ),
    "sm90 products of matrices": Kernel(
        "contraction_sm90 product_epilogue_sm90",
        tuple(
            f"sm90::contraction_kernel<E, sm90::ContractionTile<192, 4, 1, {transposed}>, sm90::{epilogue}>"
            for epilogue, transposed in (
                ("StoreEpilogue<E>", "true"),
                ("ScatterEpilogue<E>", "false"),
                ("AddEpilogue<sm90::RowFactors>", "false"),
                ("AddEpilogue<sm90::OneFactor>", "true"),
                ("FloatEpilogue", "false"),
            )
        ),
    ),
    "sm90 contraction of planes": Kernel(
        "contraction_sm90 saving_epilogue_sm90 gradient_epilogue product_epilogue_sm90 payload_epilogue",
        (
            "sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2>, "
            "FoldEpilogue<M, S, FoldRows<M>>>",
            "sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2>, "
            "sm90::SavingEpilogue<M, S, FoldRows<M>, sm90::KeptWeights<1, 128, float>>>",
            "sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2>, "
            "GradientEpilogue<float, M, S, GradientRows<M>, sm90::SlabStores<1>>>",
            "sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, true, 2>, "
            "sm90::AddEpilogue<sm90::RowFactors>>",
            "sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 2, false, 2>, "
            "PayloadEpilogue<__half, Q, B, sm90::SlabStores<2>>>",
        ),
    ),
    "sm90 gradients of rows of planes": Kernel(
        "row_gradient_planes_sm90",
        tuple(f"sm90::row_gradient_planes_kernel<Program<ElementReal>, {width}>" for width in (64, 128)),
    ),
    "splitting into planes": Kernel(
        "split_planes", ("split_rows_kernel", "largest_of_columns_kernel", "split_columns_kernel")
    ),
    "conversion of weights": Kernel(
        "weights_to_gradients",
        tuple(
            f"sm90::weights_to_gradients_kernel<E, sm90::KeptWeights<1, 256>, KeptRows<sm90::{terms}>>"
            for terms in ("RowTerms<1>", "EntropyTerms")
        ),
    ),
}
# Compiled by the oldest NVRTC too, which knows no newer architecture.
OLD_COMPILER = {
    "sm_80": ("simt backward", "sm80 contraction, fold"),
    "sm_90a": ("sm90 resident backward", "sm90 contraction, gradient"),
}


@pytest.fixture(scope="module")
def newest() -> Nvrtc:
    return nvrtc.newest()


@pytest.fixture(scope="module")
def oldest() -> Nvrtc:
    return nvrtc.oldest()


def compile_kernel(compiler: Nvrtc, kernel: Kernel, architecture: str) -> None:
    includes = "".join(f'#include "{KERNELS[header]}"\n' for header in kernel.headers.split())
    options = [*OPTIONS, f"--gpu-architecture={architecture}"]
    ptx = compiler.compile_ptx(includes + PREAMBLE, options, kernel.instances)
    assert len(re.findall(r"\.entry ", ptx)) >= len(kernel.instances)


def names(kernels: Iterable[Kernel]) -> set[str]:
    """The kernels that are instantiated, without namespaces and template arguments."""
    instances = (instance for kernel in kernels for instance in kernel.instances)
    return {re.sub(r"<.*", "", instance).split("::")[-1] for instance in instances}


def test_every_kernel_has_its_instance() -> None:
    declared = {
        name
        for header in LIBRARY.glob("device/*/*")
        for name in re.findall(
            r"__global__ void (?:__\w+__\([^()]*(?:\([^()]*\))?[^()]*\)\s+)*(\w+)\(", header.read_text()
        )
    }
    assert declared == names([*EVERY_GPU.values(), *HOPPER.values()])


@pytest.mark.parametrize("header", DEVICE_HEADERS)
def test_header_compiles_alone(newest: Nvrtc, header: str) -> None:
    newest.compile_ptx(f'#include "{header}"\n', [*OPTIONS, "--gpu-architecture=compute_90a"])


@pytest.mark.parametrize("name", EVERY_GPU)
def test_kernel_for_every_gpu(newest: Nvrtc, name: str) -> None:
    compile_kernel(newest, EVERY_GPU[name], "sm_80")


@pytest.mark.parametrize("name", HOPPER)
def test_kernel_for_hopper(newest: Nvrtc, name: str) -> None:
    compile_kernel(newest, HOPPER[name], "sm_90a")


@pytest.mark.parametrize(
    "architecture", [pytest.param("compute_100", marks=pytest.mark.release), "compute_120"]
)
@pytest.mark.parametrize("name", EVERY_GPU)
def test_newer_architecture(newest: Nvrtc, name: str, architecture: str) -> None:
    compile_kernel(newest, EVERY_GPU[name], architecture)


@pytest.mark.parametrize(
    ("architecture", "name"), [(arch, name) for arch, chosen in OLD_COMPILER.items() for name in chosen]
)
def test_oldest_compiler(oldest: Nvrtc, architecture: str, name: str) -> None:
    assert oldest.version == (12, 4)
    compile_kernel(oldest, (EVERY_GPU | HOPPER)[name], architecture)

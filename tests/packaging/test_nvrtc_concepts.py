"""A type that a kernel cannot use is refused by NVRTC, and the message names the concept (traits.h)."""

from __future__ import annotations

from typing import NamedTuple

import nvrtc
import pytest
from nvrtc import CompilationError, Nvrtc
from test_nvrtc_kernels import KERNELS, OPTIONS, PREAMBLE


class Wrong(NamedTuple):
    """A kernel with one argument that is wrong, and the concept that says so."""

    header: str
    definition: str
    instance: str
    concept: str


FORWARD = "fold_forward_sm90", "sm90::fold_forward_kernel<E, {tile}, {monoid}, {scores}, {rows}>"
TILE = "sm90::ForwardTile<64, 64, 128, 2, 2>"


def forward(definition: str, concept: str, **wrong: str) -> Wrong:
    header, kernel = FORWARD
    arguments = {"tile": TILE, "monoid": "M", "scores": "S", "rows": "ResidentRows<M>"} | wrong
    return Wrong(header, definition, kernel.format(**arguments), concept)


CASES = {
    "rows without an output": forward("", "PayloadRows", rows="FoldRows<M>"),
    "rows of another monoid": Wrong(
        "fold_forward_simt",
        "",
        "simt::fold_forward<true, LogMeanExp<float>, Rows<NoisyOr<double>>>",
        "RowPolicy",
    ),
    "scores that never say what they keep": Wrong(
        "fold_forward_simt",
        """
        struct Doubled {
          struct At {
            __device__ float value(float dot) const { return 2 * dot; }
            __device__ float chain(float g, float) const { return 2 * g; }
          };
          __device__ At at(std::int64_t, std::int64_t) const { return {}; }
          __device__ bool touches(std::int64_t, std::int64_t) const { return true; }
        };
        __device__ Doubled scores_of_head(Doubled x, const Tensor&, std::int64_t, std::int64_t) {
          return x;
        }""",
        "simt::fold_forward<true, LogMeanExp<float>, Rows<LogMeanExp<float>>, Doubled>",
        "ElementScores",
    ),
    "rows that store no state": Wrong(
        "fold_epilogue",
        "",
        "combine_partial<M, sm80::ContractionTile<2>, GradientRows<M>>",
        "StateRows",
    ),
    "rows without far": Wrong(
        "contraction_sm80 gradient_epilogue",
        "",
        "sm80::contraction_kernel<E, sm80::ContractionTile<2>, "
        "GradientEpilogue<E, M, LogitScores<Bits, E>, FoldRows<M>, sm80::QuadStores<1>>>",
        "LocalGradientRows",
    ),
    "scores that round nothing": forward(
        """
        struct Plain {
          static constexpr bool kMonotone = true;
          template <int kSize>
          __device__ void prepare(float (&)[kSize], int, int) const {}
          __device__ Bits value(Bits x, int) const { return x; }
        };""",
        "FragmentScores",
        scores="Plain",
    ),
    "scores of another unit": forward("", "FragmentScores", scores="ScaledScores<F>"),
    "scores without heads": Wrong(
        "fold_forward_sm80",
        "",
        "sm80::fold_forward_kernel<E, sm80::ForwardTile<64, 64, 2, 2, 3>, M, LogitScores<Bits, E>, "
        "ResidentRows<M>>",
        "ScoresOfHeads",
    ),
    "a tile of another tier": forward("", "ForwardTiling", tile="sm80::ForwardTile<64, 64, 2, 2, 3>"),
    "an epilogue without an end": Wrong(
        "contraction_sm90",
        """
        struct Endless {
          struct Memory {};
          struct Work {};
          __device__ Work begin(int) const { return {}; }
          template <int kSize>
          __device__ void tile(Work&, float (&)[1][kSize], int, int, Memory&, int) const {}
          __device__ void finish() const {}
        };""",
        "sm90::contraction_kernel<E, sm90::ContractionTile<256, 4>, Endless>",
        "ContractionEpilogue",
    ),
    "an epilogue of two scores": Wrong(
        "contraction_sm90 payload_epilogue",
        "",
        "sm90::contraction_kernel<__half, sm90::ContractionTile<256, 4>, "
        "PayloadEpilogue<__half, Q, B, sm90::SlabStores<2>>>",
        "ContractionEpilogue",
    ),
    "a monoid without an absent score": forward(
        """
        template <class R>
        struct Unmasked : LogMeanExp<R> {
          void absent() const;
        };""",
        "TileMonoid",
        monoid="Unmasked<Bits>",
        rows="ResidentRows<Unmasked<Bits>>",
    ),
    "a monoid whose frames are not monotone": forward(
        """
        template <class R>
        struct OfLeast : LogMeanExp<R> {
          static constexpr bool kMonotone = false;
        };""",
        "MonotoneMonoid",
        monoid="OfLeast<Bits>",
        rows="ResidentRows<OfLeast<Bits>>",
    ),
    "a monoid without a frame": Wrong(
        "contraction_sm80 fold_epilogue",
        "",
        "sm80::contraction_kernel<E, sm80::ContractionTile<2>, "
        "FoldEpilogue<NoisyOr<Bits>, S, FoldRows<NoisyOr<Bits>>>>",
        "MonotoneMonoid",
    ),
}


def message(compiler: Nvrtc, wrong: Wrong) -> str:
    includes = "".join(f'#include "{KERNELS[header]}"\n' for header in wrong.header.split())
    # The tiles of both tiers. One of the two is the wrong tier.
    tiles = "".join(
        f'#include "{KERNELS[header]}"\n'
        for header in ("fold_forward_sm80", "contraction_sm80", "contraction_sm90")
    )
    with pytest.raises(CompilationError) as caught:
        compiler.compile_ptx(
            includes + tiles + PREAMBLE + wrong.definition,
            [*OPTIONS, "--gpu-architecture=sm_90a"],
            [wrong.instance],
        )
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_message_names_the_concept(version: str, name: str) -> None:
    compiler = nvrtc.newest() if version == "newest" else nvrtc.oldest()
    first, *_ = message(compiler, CASES[name]).split("\n\n")
    assert f"{CASES[name].concept}" in first

#include "../../plan/small_tile.h"
#include "../../plan/tiles.h"
#include "../cross_entropy_passes.cuh"
#include "../engine.h"
#include "cross_entropy_saving.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/path_counter.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Wide = ContractionTile<256, 4>;
using Small = ContractionTile<128, 6>;
static_assert(kSizesOf<Wide> == tiles::kSm90Loss && kSizesOf<Small> == tiles::kSm90Small);
static_assert(kStateFloats<CrossEntropy<Bits>> == kStateFloats<CrossEntropy<float>>);
static_assert(kStateFloats<LogSumExp<Bits>> == kStateFloats<LogSumExp<float>>);

template <class Run>
void with_tile(const Plan& plan, Run run) {
  require(plan.tile.has_value(), "plan: expected one with a tile, got ", text(plan));
  if (plan.tile->columns == Small::kColumns) return run(Small{});
  run(Wide{});
}

}  // namespace

template <>
void run(const CrossEntropyKeptGradients& x, const Plan& plan, const Launch& launch) {
  with_tile(plan, [&](auto tile) {
    with_element(x.x.dtype, [&](auto element) {
      const auto kept = kept_weights<decltype(tile)>(x.kept, static_cast<float*>(x.frames.data));
      to_gradients<decltype(element)>(x, kept, cross_entropy_problem(x), launch);
    });
  });
}

template <>
void run(const CrossEntropyForward& x, const Plan& plan, const Launch& launch) {
  if (!x.kept.present()) return cross_entropy_forward_pass<Wide, true>(x, launch);
  with_tile(plan, [&](auto tile) { cross_entropy_forward_saving<decltype(tile)>(x, plan, launch); });
  // The forward pass has done a part of the backward pass.
  count_path("cross_entropy_backward", "cuda", "sm90", false, name(x.x.dtype));
}

template <>
void run(const LogSumExpForward& x, const Plan& plan, const Launch& launch) {
  if (plan.narrow) return logsumexp_mean(x, launch);
  with_tile(plan, [&](auto tile) {
    using Tile = decltype(tile);
    x.kept.present() ? logsumexp_forward_saving<Tile>(x, plan, launch)
                     : logsumexp_forward_pass<Tile>(x, launch);
  });
  if (x.kept.present()) count_path("logsumexp_backward", "cuda", "sm90", false, name(x.a.dtype));
}

}  // namespace monoidreduce::cuda::sm90

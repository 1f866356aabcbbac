// Scores as a matrix product in float32, for losses whose rows are computed from stored scores ("jsd").
#include <cuda_bf16.h>

#include "../engine.h"
#include "monoidreduce/device/contraction/product_epilogue_sm90.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/ops/stored_scores.h"

namespace monoidreduce::cuda::sm90 {

using namespace monoidreduce::sm90;

template <>
void run(const ScoreProduct& x, const Plan&, const Launch& launch) {
  const ContractionTile<256, 4> tile;
  const FloatEpilogue epilogue{stores_for(tile, {as_rows(x.out)})};
  contraction<__nv_bfloat16>(tile, product_problem(x), epilogue, nullptr, "score_product", launch);
}

}  // namespace monoidreduce::cuda::sm90

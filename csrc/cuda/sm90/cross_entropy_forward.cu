#include "../cross_entropy_passes.cuh"
#include "../gathered_rows.h"
#include "../linear_losses.h"
#include "monoidreduce/kernel/parts.h"
#include "monoidreduce/kernel/weights_to_gradients.cuh"
#include "monoidreduce/path_counter.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<256, 4>;
using Kept = KeptWeights<1, Tile::kColumns>;

struct CrossEntropyTerms {
  CrossEntropyRows<float> rows;
  const float* miss;
  __device__ bool active(std::int64_t row) const { return rows.active(row); }
  __device__ RowTerms<1> terms(std::int64_t row) const {
    const auto u = rows.upstream(row);
    return {.lse = {bits(rows.product(row).lse)},
            .factor = {u.lse},
            .addend = u.sum,
            .at_label = u.lse * miss[row] + (u.lse + u.target + u.sum),
            .label = rows.valid(row) ? static_cast<int>(rows.label(row)) : -1};
  }
};

// What is kept of a call, its frames after `before` floats of the scratch.
Kept kept_of(const CrossEntropyForward& x, std::int64_t before) {
  return {.weights = {static_cast<__half*>(x.kept.data)},
          .frames = {static_cast<float*>(x.scratch.data) + before},
          .pitch = x.kept.stride[0],
          .columns = static_cast<int>(x.kept.size[1])};
}

// Idle warps of an H100 turn 193e9 weights a second into local gradients, beside 330e12 multiplications: one weight for so
// many of the fold. (Where there were fewer, with rows of 2304 elements and all kept, the fold waited for them.)
constexpr int kProductsBeside = 1700;
// How many rows may be converted for each that is folded.
constexpr int kConverted = 2;
// Fewer turns of all clusters are not worth parts, each of which ends with some of them idle.
constexpr int kFewestTurns = 32;

bool converts_beside(const FoldProblem& p, const Kept& kept) {
  const TileSchedule schedule = contraction_schedule<Tile>(p);
  return std::int64_t{schedule.row_blocks} * schedule.column_tiles >=
             std::int64_t{kFewestTurns} * schedule.clusters &&
         p.columns() * p.width() >= kProductsBeside * kConverted * std::int64_t{kept.columns};
}

// The same forward, and local gradients for an upstream gradient of kept_upstream. The rows come in parts. What is kept of one
// becomes local gradients while the next is folded, by warps that have nothing else to do; of the last one it takes time of its
// own, so parts get smaller.
void cross_entropy_forward_keeping(const CrossEntropyForward& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const std::int64_t states = fold_floats<CrossEntropy<Bits>, Tile>(problem);
  const Kept kept = kept_of(x, states);
  float* const miss = kept.frames[0] + problem.rows() * kept.tiles();  // a number a row
  const CrossEntropyRows<float, double> rows = rows_of(x);
  const CrossEntropyTerms terms{{.target = rows.target,
                                 .target_stride = rows.target_stride,
                                 .ignore_index = rows.ignore_index,
                                 .classes = rows.classes,
                                 .rule = rows.rule,
                                 .loss = nullptr,
                                 .lse = rows.lse,
                                 .lse_low = rows.lse_low,
                                 .grad_loss = {static_cast<float*>(x.kept_upstream.data), 0},
                                 .grad_lse = {}},
                                miss};
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  const bool beside = converts_beside(problem, kept);
  if (beside) count_path("weights_to_gradients", "cuda/sm90/beside");
  const auto most_of = [&](std::int64_t left) {
    return beside ? falling_part(left, problem.rows(), Tile::kRowBlock) : left;
  };
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    using ToGradients = WeightsToGradients<E, 1, Tile::kColumns, CrossEntropyTerms>;
    const auto of_rows = [&](const FoldProblem& part) {
      return ToGradients{kept.from(part.first_place), RowOrder(part), terms};
    };
    const ToGradients all = of_rows(problem);
    const auto run = [&](auto m) {
      ToGradients before = all;  // of the part before, if that is converted beside a fold
      before.order.rows = 0;
      in_parts(x, problem, launch, most_of, [&](const FoldProblem& part) {
        const ToGradients of_part = of_rows(part);
        fold_keeping<E, Tile>(m, scores, part, CrossEntropyResults{rows, miss}, x.scratch.data, of_part.kept,
                              before, launch);
        if (beside) before = of_part;
      });
      weights_to_gradients(beside ? before : all, x.x.cuda_device, launch);
    };
    if (x.options.label_smoothing != 0) {
      run(CrossEntropy<Bits>{});
    } else {
      run(CrossEntropy<Bits, false>{});
    }
  });
}

}  // namespace

std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x) {
  const FoldProblem problem = cross_entropy_problem(x);
  const std::int64_t states = fold_floats<CrossEntropy<Bits>, Tile>(problem);
  return x.kept.present() ? states + problem.rows() * (kept_of(x, states).tiles() + 1) : states;
}
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x) {
  return fold_floats<LogSumExp<Bits>, Tile>(logsumexp_problem(x));
}

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  if (x.kept.present()) return cross_entropy_forward_keeping(x, launch);
  cross_entropy_forward_pass<Gathering<Tile>>(x, launch);
}

void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  logsumexp_forward_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90

#include "../cross_entropy_passes.cuh"
#include "../linear_losses.h"
#include "monoidreduce/kernel/weights_to_gradients.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<256, 4>;
static_assert(Tile::kColumns == kKeptTile);

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

// What is kept of a call: of the first classes, of late ones, of the last.
struct KeptPieces {
  KeptWeights<1> pieces[3];
  std::int64_t floats;  // of the scratch, up to the end of their frames
};
// Their frames come after `before` floats of the scratch.
KeptPieces kept_of(const CrossEntropyForward& x, std::int64_t before) {
  const int classes = static_cast<int>(x.weight.size[0]);
  const KeptWeights<1> none{.tile_columns = Tile::kColumns, .first = classes};
  KeptPieces kept{.pieces = {none, none, none}, .floats = before};
  int count = 0;
  const auto add = [&](const TensorView& given, int first) {
    if (!given.present()) return;
    KeptWeights<1>& piece = kept.pieces[count++];
    piece = {.weights = {static_cast<__half*>(given.data)},
             .frames = {static_cast<float*>(x.scratch.data) + kept.floats},
             .pitch = given.stride[0],
             .columns = static_cast<int>(given.size[1]),
             .tile_columns = Tile::kColumns,
             .first = first};
    kept.floats += x.x.size[0] * piece.tiles();
  };
  add(x.kept, 0);
  add(x.late_kept, static_cast<int>(late_classes(x).begin));
  add(x.last_kept, static_cast<int>(late_classes(x).end));
  return kept;
}

// The same forward, and local gradients for an upstream gradient of kept_upstream.
void cross_entropy_forward_keeping(const CrossEntropyForward& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const std::int64_t states = fold_floats<CrossEntropy<Bits>, Tile>(problem);
  const KeptPieces kept = kept_of(x, states);
  float* const miss = static_cast<float*>(x.scratch.data) + kept.floats;  // a number a row
  const CrossEntropyRows<float, double> rows = rows_of(x);
  const CrossEntropyTerms terms{{.target = rows.target,
                                 .target_stride = rows.target_stride,
                                 .ignore_index = rows.ignore_index,
                                 .rule = rows.rule,
                                 .loss = nullptr,
                                 .lse = rows.lse,
                                 .lse_low = rows.lse_low,
                                 .grad_loss = {static_cast<float*>(x.kept_upstream.data), 0},
                                 .grad_lse = {}},
                                miss};
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](auto m) {
      in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
        const auto of_part = [&](int n) { return kept.pieces[n].from(part.first_place); };
        const KeptWeights<1> pieces[] = {of_part(0), of_part(1), of_part(2)};
        fold_keeping<E, Tile>(m, scores, part, CrossEntropyResults{rows, miss}, x.scratch.data, pieces,
                              launch);
      });
    };
    if (x.options.label_smoothing != 0) {
      run(CrossEntropy<Bits>{});
    } else {
      run(CrossEntropy<Bits, false>{});
    }
    for (const KeptWeights<1>& piece : kept.pieces)
      if (piece.columns > 0) weights_to_gradients<E>(piece, terms, problem, launch);
  });
}

}  // namespace

std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x) {
  const FoldProblem problem = cross_entropy_problem(x);
  const std::int64_t states = fold_floats<CrossEntropy<Bits>, Tile>(problem);
  return keeps(x) ? kept_of(x, states).floats + problem.rows() : states;
}
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x) {
  return fold_floats<LogSumExp<Bits>, Tile>(logsumexp_problem(x));
}

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  if (keeps(x)) return cross_entropy_forward_keeping(x, launch);
  cross_entropy_forward_pass<Tile>(x, launch);
}

void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  logsumexp_forward_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90

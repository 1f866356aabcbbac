#include "../../plan/tiles.h"
#include "../engine.h"
#include "../log_probs_passes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/saving_epilogue_sm90.cuh"
#include "monoidreduce/launch/weights_to_gradients.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<256, 4>;
static_assert(kSizesOf<Tile> == tiles::kSm90Loss);
static_assert(kStateFloats<TopLogProbs<Bits>> == kStateFloats<TopLogProbs<float>>);

// dlogits as in LogProbsRule::gradient, with the probabilities made of saved weights. The label's p is
// e^log_prob. Near 1 it lacks digits that e^log_prob - 1 has; far from 1 it is the other way round.
struct LogProbsTerms {
  LogProbsRows<float> rows;
  const float* log_probs;
  float slope;  // derivative of a score with respect to its dot product

  __device__ bool active(std::int64_t row) const { return rows.active(row); }
  __device__ EntropyTerms terms(std::int64_t row) const {
    const LogProbsStatistics<float> p = rows.product(row);
    const LogProbsUpstream<float> u = rows.upstream(row);
    const float unit = rows.factor(row) * slope, log_prob = Entropy<float>::finite(log_probs[row]);
    const float of_share = u.lse - u.entropy * (log_prob + p.entropy);
    const float at_label = log_prob < -1.f ? ::expf(log_prob) * of_share + u.target
                                           : ::expm1f(log_prob) * of_share + (of_share + u.target);
    return {{.lse = {bits(p.lse)},
             .factor = {unit * (u.lse - u.entropy * p.entropy)},
             .at_label = unit * at_label,
             .label = rows.target.valid(row) ? static_cast<int>(rows.label(row)) : -1},
            unit * -u.entropy * float(kLn2)};
  }
};

// The same forward pass; also saves the weights of the first classes.
void log_probs_forward_saving(const LogProbsForward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const auto kept = kept_weights<Tile>(x.kept, static_cast<float*>(x.scratch.data) + plan.saved.frames);
  const LogProbsResults results{log_probs_rows<float, double>(x)};
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  with_element(x.x.dtype, [&](auto element) {
    in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
      const auto save = [&](const auto& scores) {
        fold_and_save<decltype(element), Tile>(LogProbs<Bits>{}, scores, part, results, x.scratch.data,
                                               kept.from(part.first_place), launch);
      };
      x.mask.present() ? save(kept_scores(scores, x, part)) : save(scores);
    });
  });
}

}  // namespace

template <>
void run(const LogProbsForward& x, const Plan& plan, const Launch& launch) {
  if (x.kept.present()) return log_probs_forward_saving(x, plan, launch);
  log_probs_forward_pass<Tile, true, true>(x, launch);
}

template <>
void run(const LogProbsLocalGradient& x, const Plan&, const Launch& launch) {
  if (!x.frames.present()) return log_probs_gradient_pass<Tile>(x, launch);
  const LogProbsTerms terms{log_probs_rows<float>(x), static_cast<const float*>(x.log_probs.data),
                            static_cast<float>(x.options.logit_scale)};
  const auto kept = kept_weights<Tile>(x.out, static_cast<float*>(x.frames.data));
  with_element(x.x.dtype, [&](auto element) {
    weights_to_gradients<decltype(element)>(kept, terms, cross_entropy_problem(x), launch);
  });
}

}  // namespace monoidreduce::cuda::sm90

// Concepts for the template parameters of kernels other than the monoid (monoid.h): rows, scores and epilogues. The
// concepts of tile shapes are declared beside the kernels, such as ForwardTiling in device/resident/fold_forward_sm90.cuh.
//
// A kernel checks its types in the class templates that it uses, or by static_assert, and not by a constraint on the
// function template itself: when such a constraint fails, nvcc and NVRTC do not say which one.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// Element::factor of a row; 1 if the row policy defines none.
template <class R, class Rows>
MR_HD R factor_of(const Rows& rows, std::int64_t row) {
  if constexpr (requires { rows.factor(row); })
    return R(rows.factor(row));
  else
    return R(1);
}

// ---- Rows: what an operator stores for each row of a fold over M, and which gradient flows back into it. row is the
// flat index over [B, H, M].

// Forward: stores P_i and the results that the operator computes from it.
template <class P, class M>
concept ProductStore =
    requires(const P p, std::int64_t row, typename M::Output output) { p.store(row, output); };

// Backward: P_i, and the gradient with respect to it. With a payload, upstream() is the c of pull() (pull.h).
template <class P, class M>
concept ProductSource = requires(const P p, std::int64_t row) {
  { p.product(row) } -> std::same_as<typename M::Output>;
  { p.upstream(row) } -> std::same_as<typename M::Upstream>;
};

// Rows that the CPU engine and the SIMT kernels take.
template <class P, class M>
concept RowPolicy = ProductStore<P, M> && ProductSource<P, M> && requires(const P p, std::int64_t row) {
  { p.active(row) } -> std::same_as<bool>;         // false: backward skips the row, whose gradients are all 0
  { p.label(row) } -> std::same_as<std::int64_t>;  // Element::label
};

// Rows that also know g_i, the gradient with respect to P_i without the part that comes from the payload (pull.h).
template <class P, class M>
concept KnowsProductGradient = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t row) {
  { p.product_gradient(row) } -> std::same_as<typename M::Real>;
};

// Rows that may have an attention sink: one more element in the fold of every row of a head, with score sink(head) and
// payload 0.
template <class P, class M>
concept RowsWithSinks = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t head) {
  { p.has_sinks() } -> std::same_as<bool>;
  { p.sink(head) } -> std::same_as<typename M::Real>;
};

// Rows that can be computed a second time (device/resident/repair.cuh). marked(row): the forward kernel found a result
// that is not finite in this row.
template <class P, class M>
concept MarkedRows = ProductStore<P, M> && requires(const P p, std::int64_t row) {
  { p.marked(row) } -> std::same_as<bool>;
};

// Rows of the resident forward kernels. kLowWords: the output may have low words (FoldOutput::low).
template <class P, class M>
concept PayloadRows = requires(const P p, std::int64_t row, int head, typename M::Output product, bool right,
                               float (&sums)[4], int column0) {
  { P::kLowWords } -> std::convertible_to<bool>;
  p.store(row, head, product, right);  // right: false if the row must be computed again (MarkedRows)
  // Turn the payload's fold into what is written; the MLP adds its output bias here. output: a thread's fragment of two
  // rows. output_of: consecutive components of one row, from column0 on.
  p.output(sums);
  p.output_of(sums, column0);
};

// Rows of a fold by the contraction kernels. They store states, not products: a row's columns may be split over several
// clusters. label(row) is Element::label, or -1. A row that is not active gets skip(row) instead of store().
template <class P, class M>
concept StateRows = requires(const P p, std::int64_t row, typename M::State state) {
  { p.label(row) } -> std::convertible_to<std::int64_t>;
  p.store(row, state);
  p.skip(row);
};

// Rows of the contraction kernels that compute local gradients (dlogits). product is in M's units. far: the row's scores
// are so large that they must be rounded before they are subtracted (kLargeScore in device/block/fold_fragment.cuh).
// upstream already has the factor `unit`, the scores' unit(), so that results are derivatives by the dot product.
template <class P, class M>
concept LocalGradientRows =
    requires(const P p, std::int64_t row, typename M::Output product, typename M::Real unit) {
      { p.label(row) } -> std::convertible_to<int>;
      { p.product(row) } -> std::same_as<typename M::Output>;
      { p.far(product) } -> std::same_as<bool>;
      { p.upstream(row, unit) } -> std::same_as<typename M::Upstream>;
    };

// ---- Scores of the SIMT kernels: the scores of a head, element by element, from dot products of type R
// (device/block/elements.cuh).
//   at(row, column)       an element: its score for a dot product, and the chain rule back to the dot product
//   touches(row, column)  false: the tile that begins here holds no score at all
//   masks()               whether single elements can be masked; if so, keeps(row, column) is false for those that are
template <class S, class R>
concept ElementScores = requires(const S s, std::int64_t row, std::int64_t column, R dot, R g) {
  { s.at(row, column).value(dot) } -> std::same_as<R>;
  { s.at(row, column).chain(g, dot) } -> std::same_as<R>;
  { s.touches(row, column) } -> std::same_as<bool>;
  { s.masks() } -> std::same_as<bool>;
  { s.keeps(row, column) } -> std::same_as<bool>;
};

// ---- Scores of the tensor-core kernels: score.h for a fragment, a thread's part of a tile of dot products
// (device/block/fragment.cuh). The fragment sizes below are examples; kernels deduce them.

// Forward, for a fragment whose lines are rows. kMonotone: the score grows with the dot product. A fragment may then keep
// dot products in place of scores, and a masked element is one whose dot product is absent().
template <class S, class M>
concept FragmentScores =
    requires(const S s, float (&tile)[4], int row0, int column0, typename M::Real x, int i) {
      { S::kMonotone } -> std::convertible_to<bool>;
      // Turns the dot products of the tile at (row0, column0) into the numbers that the fragment holds.
      s.prepare(tile, row0, column0);
      // The score of element i, where x is the number in the fragment; the compiler may fuse it with its use.
      { s.value(x, i) } -> std::same_as<typename M::Real>;
      { s.rounded(x) } -> std::same_as<typename M::Real>;  // the same score, never fused
    } && (!S::kMonotone || requires(const S s, typename M::Real x, int i) {
      // The scores of a fragment that holds rounded scores (true), or dot products.
      { s.of_scores(true).value(x, i) } -> std::same_as<typename M::Real>;
    });

// Backward: the chain rule.
template <class S, class M>
concept PulledScores = requires(const S s, typename M::Real x, typename M::Real g, int i) {
  // As in FragmentScores; any number where finish_transposed masks.
  { s.value(x, i) } -> std::same_as<typename M::Real>;
  // The derivative of the score (in natural units) with respect to the variable of chain().
  { s.unit() } -> std::same_as<typename M::Real>;
  // From the derivative g with respect to the score of element i.
  { s.chain(g, x, i) } -> std::same_as<typename M::Real>;
};

// Backward, for a transposed fragment: its lines are columns.
template <class S, class M>
concept TransposedScores = PulledScores<S, M> && requires(const S s, float (&tile)[4], float (&weights)[4],
                                                          float (&g)[4], int row0, int column0) {
  s.prepare_transposed(tile, row0, column0);
  // Receives the softmax probabilities ("weights") and the results of chain(). Sets both to 0 where s itself masks an
  // element; until then they may be any numbers there, also infinite or NaN. The kernel clears what the range masks.
  s.finish_transposed(weights, g, row0, column0);
};

// Scores with one bias per element, which TMA loads in tiles (device/block/bias_tile.cuh). s.folded(tile) gives
// FragmentScores, s.pulled(tile) TransposedScores. rows_share: all rows of a head have the same biases.
template <class S>
concept ScoresWithTiles = requires(const S s) {
  typename S::BiasElement;
  { s.rows_share } -> std::convertible_to<bool>;
};

// Scores that depend on the head. Forward asks for the scores of one head, backward for those of one tile of a head.
template <class S, class M>
concept ScoresOfHeads = requires(const S s, int batch, int head) {
  requires FragmentScores<std::remove_cvref_t<decltype(s.of_head(batch, head))>, M>;
};
template <class S, class M>
concept PulledScoresOfHeads = requires(const S s, int batch, int head, int row0, int column0) {
  requires TransposedScores<std::remove_cvref_t<decltype(s.pulled(batch, head, row0, column0))>, M>;
};

// Whether scores read tables whose gradient the backward kernels sum (device/program/table_gradient.cuh).
template <class S>
concept HasTableGradient = S::kHasTableGradient;

// Whether scores take registers for each element: for a bias per element, or for a user's function.
template <class S>
inline constexpr bool kScoresOfElements = false;
// Whether a kernel also handles listed spans (ColumnRange::listed, packed sequences). That code takes registers too. So a
// kernel whose scores take registers has it only if it was compiled for packed sequences.
template <class S>
inline constexpr bool kMayBeListed = !kScoresOfElements<S>;
template <class S>
  requires requires { S::kOfSequences; }
inline constexpr bool kMayBeListed<S> = S::kOfSequences;

// Scores that drop weights after the softmax (dropout): some become 0, and the others are multiplied by s.kept_factor(). The
// same happens to the <G_i, v_j> of the backward pass. s.drop(weights, row0, column0) clears weights of a fragment.
// s.drops(i) says whether element i is dropped. Fragments leave the factor to the sums of weights. Without fragments,
// s.factor() of an element is 0 or the factor.
template <class S>
concept DropsWeights = S::kDropsWeights;

// Scores with a block mask (device/program/score_element.h). s.touches(...) says whether a tile holds any score. A strip is
// all tiles of some rows, or of some columns: next() finds the next tile that holds a score, whole() says whether a tile
// is entirely unmasked.
template <class S>
concept SkipsBlocks = requires(const S s) {
  { s.touches(0, 0, 0, 0, 0, 0) } -> std::same_as<bool>;
  { s.strip_of_rows(0, 0, 0, 0).template next<64>(0, 0) } -> std::same_as<int>;
  { s.strip_of_rows(0, 0, 0, 0).template whole<64>(0) } -> std::same_as<bool>;
  { s.strip_of_columns(0, 0, 0, 0).template next<64>(0, 0) } -> std::same_as<int>;
  { s.strip_of_columns(0, 0, 0, 0).template whole<64>(0) } -> std::same_as<bool>;
};

// ---- Epilogues of the contraction.

// An epilogue is passed to the kernel by value. Memory is its part of shared memory. Work is what a thread keeps for the 64
// rows from row0 on while their tiles are computed. dots are the dot products of one tile, for each of kScores scores.
// place is the index of row0 in [groups, clusters, shares, rows of a block] (device/schedule/tile_schedule.cuh). An epilogue with
// a member kLoops is called in a loop over a thread's fragments on sm_80, so that its code is there once.
template <class P, int kScores>
concept ContractionEpilogue =
    requires(const P p, typename P::Work& work, typename P::Memory& memory, float (&dots)[kScores][32],
             int row0, int column0, int warpgroup, std::int64_t place) {
      { p.begin(row0) } -> std::same_as<typename P::Work>;
      p.tile(work, dots, row0, column0, memory, warpgroup);
      p.end(work, place);  // after the last tile of these rows
      p.finish();          // before the block ends
    };

// How an epilogue stores rounded fragments of 64 columns, into kOuts tensors. A tile takes several stores; this is number
// `at` of them.
template <class S>
concept FragmentStores = requires(const S s, const std::uint32_t (&words)[16], int n, int row0, int column,
                                  int at, typename S::Memory& memory, int warpgroup) {
  { S::kOuts } -> std::convertible_to<int>;
  s.template store<1>(words, n, row0, column, at, memory, warpgroup);
  s.finish();
};

}  // namespace monoidreduce

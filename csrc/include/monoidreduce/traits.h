// What kernels ask of the types that they are templates over, beside the monoid (monoid.h): rows, scores and epilogues.
// Tiles have their concepts beside them, as ForwardTiling of device/resident/fold_forward_sm90.cuh.
//
// A kernel checks its types in the class templates that it uses, or by static_assert. Where the constraint of
// a function template fails, nvcc and NVRTC do not say which.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// Element::factor of a row, for rows that know one.
template <class R, class Rows>
MR_HD R factor_of(const Rows& rows, std::int64_t row) {
  if constexpr (requires { rows.factor(row); })
    return R(rows.factor(row));
  else
    return R(1);
}

// ---- Rows: what an operator stores for each row of a fold over M, and what gradient flows back into it. row is the
// flat index over [B, H, M].

// Forward: stores P_i, and the operator's results made of it.
template <class P, class M>
concept ProductStore =
    requires(const P p, std::int64_t row, typename M::Output output) { p.store(row, output); };

// Backward: P_i, and the gradient with respect to it (with a payload, see pull()).
template <class P, class M>
concept ProductSource = requires(const P p, std::int64_t row) {
  { p.product(row) } -> std::same_as<typename M::Output>;
  { p.upstream(row) } -> std::same_as<typename M::Upstream>;
};

// Rows of the CPU engine and of the SIMT kernels.
template <class P, class M>
concept RowPolicy = ProductStore<P, M> && ProductSource<P, M> && requires(const P p, std::int64_t row) {
  // Backward skips a row that is not active: all its gradients are 0.
  { p.active(row) } -> std::same_as<bool>;
  { p.label(row) } -> std::same_as<std::int64_t>;  // Element::label
};

// A row policy that also knows g_i, the gradient with respect to P_i without the part of the payload (see pull()).
template <class P, class M>
concept KnowsProductGradient = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t row) {
  { p.of_product(row) } -> std::same_as<typename M::Real>;
};

// Rows that may have a sink: one more element of the fold of each row of a head. Its score is sink(head), its
// payload 0.
template <class P, class M>
concept RowsWithSinks = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t head) {
  { p.has_sinks() } -> std::same_as<bool>;
  { p.sink(head) } -> std::same_as<typename M::Real>;
};

// Rows that may be computed again (device/resident/repair.cuh). marked: was the result of this row not
// finite.
template <class P, class M>
concept MarkedRows = ProductStore<P, M> && requires(const P p, std::int64_t row) {
  { p.marked(row) } -> std::same_as<bool>;
};

// Rows of the resident forward kernels. kLowWords: can the output have low words (FoldOutput).
template <class P, class M>
concept PayloadRows = requires(const P p, std::int64_t row, int head, typename M::Output product, bool right,
                               float (&sums)[4], int column0) {
  { P::kLowWords } -> std::convertible_to<bool>;
  p.store(row, head, product, right);  // right: false if the row must be computed again (MarkedRows)
  // Makes of the payload's fold what is written: all that a thread has of two rows, or consecutive components of one.
  p.output(sums);
  p.output_of(sums, column0);
};

// Rows of a fold by contraction tiles, which takes states: label(row) is Element::label or -1. skip(row) is called
// instead of store for a row that is not active.
template <class P, class M>
concept StateRows = requires(const P p, std::int64_t row, typename M::State state) {
  { p.label(row) } -> std::convertible_to<std::int64_t>;
  p.store(row, state);
  p.skip(row);
};

// Rows of local gradients by contraction tiles. product is in the units of M; far: must scores be rounded (kFarScore
// of device/block/fold_fragment.cuh). upstream is by the dot product, where unit is the scores' unit().
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
template <class S, class R>
concept ElementScores = requires(const S s, std::int64_t row, std::int64_t column, R dot, R g) {
  { s.at(row, column).value(dot) } -> std::same_as<R>;
  { s.at(row, column).chain(g, dot) } -> std::same_as<R>;
  { s.touches(row, column) } -> std::same_as<bool>;
  { s.masks() } -> std::same_as<bool>;
  { s.keeps(row, column) } -> std::same_as<bool>;
};

// ---- Scores: score.h for a fragment, a thread's part of a tile of dot products (device/block/fragment.cuh). Sizes of
// fragments are deduced; those here are examples.

// Forward, for a fragment whose lines are rows. kMonotone: does the score grow with the dot product. Then a fragment may
// hold dot products in place of scores, and an absent score is an absent dot product.
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
  { s.value(x, i) } -> std::same_as<typename M::Real>;  // as in FragmentScores
  // The derivative of the score (in natural units) with respect to the variable of chain().
  { s.unit() } -> std::same_as<typename M::Real>;
  // From the derivative g with respect to the score of element i.
  { s.chain(g, x, i) } -> std::same_as<typename M::Real>;
};

// Backward, for a fragment whose lines are columns.
template <class S, class M>
concept TransposedScores = PulledScores<S, M> && requires(const S s, float (&tile)[4], float (&weights)[4],
                                                          float (&g)[4], int row0, int column0) {
  s.prepare_transposed(tile, row0, column0);
  // Receives the weights and the results of chain(), 0 where a row does not keep a column.
  s.finish_transposed(weights, g, row0, column0);
};

// Scores with a bias an element. TMA loads the biases in tiles: s.folded(tile) are FragmentScores,
// s.pulled(tile) are TransposedScores (device/block/bias_tile.cuh).
template <class S>
concept ScoresWithTiles = requires(const S s) {
  typename S::BiasElement;
  { s.rows_share } -> std::convertible_to<bool>;
};

// Scores that depend on the head. Forward: the scores of one head; backward: the scores of one tile of a
// head.
template <class S, class M>
concept ScoresOfHeads = requires(const S s, int batch, int head) {
  requires FragmentScores<std::remove_cvref_t<decltype(s.of_head(batch, head))>, M>;
};
template <class S, class M>
concept PulledScoresOfHeads = requires(const S s, int batch, int head, int row0, int column0) {
  requires TransposedScores<std::remove_cvref_t<decltype(s.pulled(batch, head, row0, column0))>, M>;
};

// Does each score take registers: for a bias an element, or for a function.
template <class S>
inline constexpr bool kScoresOfElements = false;
// May the columns of a row be listed spans. Code for these takes registers too, so a kernel for scores of elements has it
// only if it is for packed sequences.
template <class S>
inline constexpr bool kMayBeListed = !kScoresOfElements<S>;
template <class S>
  requires requires { S::kOfSequences; }
inline constexpr bool kMayBeListed<S> = S::kOfSequences;

// Scores that may be absent from whole blocks (device/program/score_element.h): s.touches(...) says whether a tile holds any
// score. The strips say which tiles of some rows, or of some columns, hold any, and which hold all.
template <class S>
concept SkipsBlocks = requires(const S s) {
  { s.touches(0, 0, 0, 0, 0, 0) } -> std::same_as<bool>;
  { s.strip_of_rows(0, 0, 0, 0).template next<64>(0, 0) } -> std::same_as<int>;
  { s.strip_of_rows(0, 0, 0, 0).template whole<64>(0) } -> std::same_as<bool>;
  { s.strip_of_columns(0, 0, 0, 0).template next<64>(0, 0) } -> std::same_as<int>;
  { s.strip_of_columns(0, 0, 0, 0).template whole<64>(0) } -> std::same_as<bool>;
};

// ---- Epilogues of the contraction.

// Passed to the kernel by value. Memory is its shared memory. Work is what a thread keeps for 64 rows, from
// row0 on, while their tiles are computed. dots are the dot products of one tile, for each of kScores scores.
// place is the index of row0 in [groups, clusters, shares, rows of a block]
// (device/schedule/tile_schedule.cuh).
template <class P, int kScores>
concept ContractionEpilogue =
    requires(const P p, typename P::Work& work, typename P::Memory& memory, float (&dots)[kScores][32],
             int row0, int column0, int warpgroup, std::int64_t place) {
      { p.begin(row0) } -> std::same_as<typename P::Work>;
      p.tile(work, dots, row0, column0, memory, warpgroup);
      p.end(work, place);  // after the last tile of these rows
      p.finish();          // before the block ends
    };

// How an epilogue stores rounded fragments of 64 columns, in kOuts tensors: the `at`-th of kStores stores of a tile.
template <class S>
concept FragmentStores = requires(const S s, const std::uint32_t (&words)[16], int n, int row0, int column,
                                  int at, typename S::Memory& memory, int warpgroup) {
  { S::kOuts } -> std::convertible_to<int>;
  s.template store<1>(words, n, row0, column, at, memory, warpgroup);
  s.finish();
};

}  // namespace monoidreduce

// Rows and columns of a problem as the CPU engine sees them: panels of kPanel rows, one lane a row, and tiles
// of columns.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "monoidreduce/cpu/matmul.h"
#include "monoidreduce/cpu/tiles.h"
#include "monoidreduce/fold.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// Columns in a tile or block are a multiple of this, the rows of c that matmul keeps in registers.
inline constexpr std::int64_t kColumnStep = kVectorRegisters == 32 ? 12 : 6;

// A struct of packs is an array of words, each a vector of lanes; the same struct of scalars is one lane of
// it.
template <class T, class Scalars, class Packs>
MR_HD Scalars lane_of(const Packs& packs, int lane) {
  static_assert(sizeof(Packs) == sizeof(Scalars) * kLanes<T>);
  Scalars scalars;
  for (std::size_t word = 0; word < sizeof(Scalars) / sizeof(T); ++word) {
    std::memcpy(reinterpret_cast<char*>(&scalars) + word * sizeof(T),
                reinterpret_cast<const char*>(&packs) + (word * kLanes<T> + lane) * sizeof(T), sizeof(T));
  }
  return scalars;
}
template <class T, class Packs, class Scalars>
MR_HD void set_lane(Packs& packs, int lane, const Scalars& scalars) {
  static_assert(sizeof(Packs) == sizeof(Scalars) * kLanes<T>);
  for (std::size_t word = 0; word < sizeof(Scalars) / sizeof(T); ++word) {
    std::memcpy(reinterpret_cast<char*>(&packs) + (word * kLanes<T> + lane) * sizeof(T),
                reinterpret_cast<const char*>(&scalars) + word * sizeof(T), sizeof(T));
  }
}
// A lane at a time: a where the mask is set, else b.
template <class T, class Packs>
MR_HD Packs select_words(Mask<LanePack<T>> mask, const Packs& a, const Packs& b) {
  if constexpr (std::is_empty_v<Packs>) {
    return a;
  } else {
    using Word = Index<LanePack<T>>;
    constexpr int kWords = sizeof(Packs) / sizeof(Word);
    Word words_a[kWords], words_b[kWords];
    std::memcpy(words_a, &a, sizeof(Packs));
    std::memcpy(words_b, &b, sizeof(Packs));
    for (int w = 0; w < kWords; ++w) words_a[w] = select(mask, words_a[w], words_b[w]);
    Packs chosen;
    std::memcpy(&chosen, words_a, sizeof(Packs));
    return chosen;
  }
}

// The rows that share one set of columns: those of every query head of a group, one head after the other.
struct ProblemRows {
  std::int64_t batch, column_head, first_head, group, per_head, heads;

  ProblemRows(const FoldProblem& p, std::int64_t problem)
      : batch(problem / p.column_heads()),
        column_head(problem % p.column_heads()),
        first_head(column_head * (p.heads() / p.column_heads())),
        group(p.heads() / p.column_heads()),
        per_head(p.rows()),
        heads(p.heads()) {}

  std::int64_t count() const { return group * per_head; }
  std::int64_t head(std::int64_t row) const { return first_head + row / per_head; }
  std::int64_t position(std::int64_t row) const { return row % per_head; }
  std::int64_t flat(std::int64_t row) const { return (batch * heads + head(row)) * per_head + position(row); }
  std::int64_t offset(const TensorView& t, std::int64_t row) const {
    return batch * t.stride[0] + head(row) * t.stride[1] + position(row) * t.stride[2];
  }
  std::int64_t column_offset(const TensorView& t, std::int64_t column) const {
    return batch * t.stride[0] + column_head * t.stride[1] + column * t.stride[2];
  }
};

// Which columns the lanes of a panel keep, and the row facts that elements and validity need.
template <class T>
struct PanelRows {
  using R = LanePack<T>;
  std::int64_t first, count;  // rows [first, first + count) of the problem, count <= kPanel
  Index<R> begin[kPacks], end[kPacks], label[kPacks];
  std::int64_t least_begin, most_begin, least_end, most_end;  // over the lanes

  template <class Rows>
  PanelRows(const FoldProblem& p, const ProblemRows& rows, std::int64_t first, const Rows& policy,
            bool skip_inactive)
      : first(first), count(std::min<std::int64_t>(kPanel<T>, rows.count() - first)) {
    using I = IntegerOf<T>;
    I begins[kPanel<T>] = {}, ends[kPanel<T>] = {}, labels[kPanel<T>] = {};
    least_begin = p.columns(), most_begin = 0, least_end = p.columns(), most_end = 0;
    for (int lane = 0; lane < kPanel<T>; ++lane) {
      std::int64_t from = 0, to = 0;
      if (lane < count) {
        const std::int64_t row = rows.flat(first + lane);
        if (!skip_inactive || policy.active(row)) {
          from = std::min(p.range.begin(rows.position(first + lane)), p.columns());
          to = std::max(from, p.range.end(rows.position(first + lane), p.columns()));
        }
        labels[lane] = static_cast<I>(policy.label(row));
      }
      begins[lane] = static_cast<I>(from), ends[lane] = static_cast<I>(to);
      if (lane < count) {
        least_begin = std::min(least_begin, from), most_begin = std::max(most_begin, from);
        least_end = std::min(least_end, to), most_end = std::max(most_end, to);
      }
    }
    for (int half = 0; half < kPacks; ++half) {
      begin[half] = Index<R>::load(begins + half * kLanes<T>);
      end[half] = Index<R>::load(ends + half * kLanes<T>);
      label[half] = Index<R>::load(labels + half * kLanes<T>);
    }
  }
  bool touches(std::int64_t column, std::int64_t columns) const {
    return column < most_end && column + columns > least_begin;
  }
  bool covers(std::int64_t column, std::int64_t columns) const {
    return most_begin <= column && column + columns <= least_end;
  }
  Mask<R> keeps(int half, std::int64_t column) const {
    const Index<R> j(static_cast<IntegerOf<T>>(column));
    return (j >= begin[half]) & (j < end[half]);
  }
};

// A row's elements as operands, element k at to[k / kDepth * step + k % kDepth]: loaded as T, or as they are
// for BFloat16.
template <class T>
inline void load_operands(const TensorView& t, std::int64_t offset, std::int64_t count, T* to,
                          std::int64_t step) {
  load_row(t, offset, t.stride[3], count, to, step);
}
inline void load_operands(const TensorView& t, std::int64_t offset, std::int64_t count, BFloat16* to,
                          std::int64_t step) {
  const BFloat16* from = static_cast<const BFloat16*>(t.data) + offset;
  const std::int64_t stride = t.stride[3];
  for (std::int64_t k = 0; k + 1 < count; k += 2) {
    to[k / 2 * step] = from[k * stride];
    to[k / 2 * step + 1] = from[(k + 1) * stride];
  }
  if (count % 2) to[count / 2 * step] = from[(count - 1) * stride], to[count / 2 * step + 1] = {0};
}

// A panel of rows with rows as lanes, [k / kDepth][lane][kDepth]: 0 beyond the last row.
template <class T, class E>
inline void load_lanes(const TensorView& t, const ProblemRows& rows, std::int64_t first, std::int64_t count,
                       E* panel) {
  const std::int64_t width = t.size[3];
  if (count < kPanel<T>) std::fill_n(panel, round_up(width, kDepth<E>) * kPanel<T>, E{});
  for (std::int64_t lane = 0; lane < count; ++lane) {
    load_operands(t, rows.offset(t, first + lane), width, panel + lane * kDepth<E>, kPanel<T> * kDepth<E>);
  }
}

// A panel of rows with widths as lanes, [width panel][row / kDepth][lane][kDepth], width panels stride apart:
// 0 beyond the width, beyond the last row, and for rows that are not active.
template <class T, class E, class Rows>
inline void load_widths(const TensorView& t, const ProblemRows& rows, const Rows& policy, std::int64_t first,
                        std::int64_t count, std::int64_t stride, E* panels) {
  const std::int64_t width = t.size[3];
  for (std::int64_t w = 0; w < width; w += kPanel<T>) {
    E* panel = panels + w / kPanel<T> * stride;
    const std::int64_t in_panel = std::min<std::int64_t>(kPanel<T>, width - w);
    if (in_panel < kPanel<T> || count < kPanel<T>) std::fill_n(panel, kPanel<T> * kPanel<T>, E{});
    for (std::int64_t row = 0; row < count; ++row) {
      E* to = panel + row / kDepth<E> * kDepth<E> * kPanel<T> + row % kDepth<E>;
      if (!policy.active(rows.flat(first + row))) {
        for (std::int64_t k = 0; k < in_panel; ++k) to[k * kDepth<E>] = E{};
      } else if constexpr (kDepth<E> == 1) {
        load_row(t, rows.offset(t, first + row) + w * t.stride[3], t.stride[3], in_panel, to, 1);
      } else {
        const E* from = static_cast<const E*>(t.data) + rows.offset(t, first + row) + w * t.stride[3];
        for (std::int64_t k = 0; k < in_panel; ++k) to[k * kDepth<E>] = from[k * t.stride[3]];
      }
    }
  }
}

// A tile of columns, [column][width rounded up to kDepth]: the broadcast operand of products over the width.
template <class E>
inline void load_columns(const TensorView& t, const ProblemRows& rows, std::int64_t first, std::int64_t count,
                         E* tile) {
  const std::int64_t row = round_up(t.size[3], kDepth<E>);
  for (std::int64_t j = 0; j < count; ++j) {
    load_operands(t, rows.column_offset(t, first + j), t.size[3], tile + j * row, kDepth<E>);
  }
}
template <class E>
inline Broadcast<E> over_width(const E* tile, std::int64_t width) {
  return {tile, round_up(width, kDepth<E>), kDepth<E>};
}

// The same tile as [column / kDepth][width][kDepth]: the broadcast operand of products over columns. One and
// the same for T.
template <class E>
inline const E* interleave_columns(const E* tile, std::int64_t count, std::int64_t width, E* storage) {
  if constexpr (kDepth<E> == 1) {
    return tile;
  } else {
    const std::int64_t row = round_up(width, kDepth<E>);
    for (std::int64_t j = 0; j < count; j += 2) {
      const E *even = tile + j * row, *odd = even + row;
      E* to = storage + j * width;
      for (std::int64_t k = 0; k < width; ++k)
        to[2 * k] = even[k], to[2 * k + 1] = j + 1 < count ? odd[k] : E{};
    }
    return storage;
  }
}
template <class E>
inline Broadcast<E> over_columns(const E* interleaved, std::int64_t width) {
  return {interleaved, kDepth<E>, width * kDepth<E>};
}

// panel[j][lane] = bias of the lane's row and column first + j; a bool bias reads as 0 or -inf.
template <class T>
inline void load_bias(const TensorView& t, const ProblemRows& rows, std::int64_t first_row,
                      std::int64_t row_count, std::int64_t first, std::int64_t count, T* panel) {
  const auto load = [&](std::int64_t row, std::int64_t width, T* to) {
    const std::int64_t offset = rows.offset(t, first_row + row) + first * t.stride[3];
    if (t.dtype == DType::kBool) {
      const bool* from = static_cast<const bool*>(t.data) + offset;
      for (std::int64_t j = 0; j < count; ++j)
        to[j * kPanel<T>] = from[j * t.stride[3]] ? T(0) : -infinity<T>();
    } else {
      load_row(t, offset, t.stride[3], width, to, kPanel<T>);
    }
  };
  if (t.stride[2] == 0 && (rows.group == 1 || t.stride[1] == 0)) {  // the same for every row
    load(0, count, panel);
    for (std::int64_t j = 0; j < count; ++j)
      std::fill_n(panel + j * kPanel<T>, kPanel<T>, panel[j * kPanel<T>]);
    return;
  }
  if (row_count < kPanel<T>) std::fill_n(panel, count * kPanel<T>, T(0));
  for (std::int64_t row = 0; row < row_count; ++row) load(row, count, panel + row);
}

inline bool has_bool_bias(const FoldProblem& p) { return p.bias.present() && p.bias.dtype == DType::kBool; }
inline bool has_mask(const FoldProblem& p) { return !p.range.all() || has_bool_bias(p); }

// Can the products take BFloat16 operands as they are. Not with a mask: there a number that is not finite may
// have to be taken out of a tile (NonFinite), which works on T.
inline bool all_bfloat16(const FoldProblem& p, const TensorView& grad_out) {
  for (const TensorView* t : {&p.a, &p.b, &p.other_a, &p.other_b, &p.payload, &grad_out}) {
    if (t->present() && t->dtype != DType::kBFloat16) return false;
  }
  return !has_mask(p);
}

// The elements of one panel and one tile of columns, from their dot products.
template <class M, class T>
struct PanelTile {
  using R = LanePack<T>;
  const M& m;
  const FoldProblem& p;
  const Score<R>& score;
  const PanelRows<T>& rows;
  std::int64_t first_column;
  const T* dot;        // [columns][kPanel]
  const T* other_dot;  // the same for the second score
  const T* bias;       // the same, or null

  MR_HD std::int64_t at(std::int64_t j, int half) const { return j * kPanel<T> + half * kLanes<T>; }
  MR_HD R bias_at(std::int64_t j, int half) const { return bias ? R::load(bias + at(j, half)) : R(0); }
  MR_HD Element<R> from_dots(std::int64_t j, int half) const {
    Element<R> e{score.value(R::load(dot + at(j, half)), bias_at(j, half)), R(0),
                 Index<R>(static_cast<IntegerOf<T>>(first_column + j)), rows.label[half]};
    if constexpr (M::kScores == 2) e.other = score.value(R::load(other_dot + at(j, half)), R(0));
    return e;
  }
  // The same from scores that were stored over the dot products.
  MR_HD Element<R> from_scores(std::int64_t j, int half) const {
    Element<R> e{R::load(dot + at(j, half)), R(0), Index<R>(static_cast<IntegerOf<T>>(first_column + j)),
                 rows.label[half]};
    if constexpr (M::kScores == 2) e.other = R::load(other_dot + at(j, half));
    return e;
  }
  MR_HD Mask<R> valid(std::int64_t j, int half) const {
    Mask<R> keep = rows.keeps(half, first_column + j);
    if (bias && p.bias.dtype == DType::kBool) keep = keep & (bias_at(j, half) == R(0));
    return keep;
  }
};

// Adds what was taken out of a tile of columns: to[entry column][lane] += weight[entry row][lane] * value,
// for the lanes that keep that column.
template <class M, class T>
inline void add_non_finite(const PanelTile<M, T>& tile, const NonFinite<T>& taken, const T* weight, T* to) {
  using R = LanePack<T>;
  for (const auto& entry : taken) {
    for (int half = 0; half < kPacks; ++half) {
      T* sum = to + tile.at(entry.column, half);
      const R term = R::load(weight + tile.at(entry.row, half)) * R(entry.value);
      select(tile.valid(entry.row, half), R::load(sum) + term, R::load(sum)).store(sum);
    }
  }
}

// M<T> as M<Pack>: a monoid's parameters, if it has any, do not depend on its real type.
template <template <class> class M, class T>
inline M<LanePack<T>> as_packs(const M<T>& m) {
  static_assert(sizeof(M<LanePack<T>>) == sizeof(M<T>),
                "a monoid's members must be parameters of type Scalar<R>");
  return std::bit_cast<M<LanePack<T>>>(m);
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

// The rows and columns of a problem on the CPU: panels of kPanel rows, one lane per row, and tiles of columns.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "monoidreduce/cpu/matmul.h"
#include "monoidreduce/cpu/tiles.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/monoid.h"
#include "monoidreduce/traits.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// The number of columns in a tile or block is a multiple of this, which is the number of rows of c that matmul keeps in
// registers.
inline constexpr std::int64_t kColumnStep = kVectorRegisters == 32 ? 12 : 6;

// The most terms that a score's dot product, over the width, sums in one run (kRun in matmul.h). It does not depend on tile
// sizes, nor on which operand has the rows. So forward and backward compute the same score, and so does the fold of the
// exchanged operands that sums the gradients of columns' data. It is half as long if there are few rows or columns: there BLAS,
// the reference for our errors, sums in many chains.
template <class T, class E>
std::int64_t longest_run(const FoldProblem& p) {
  return std::min(p.rows(), p.columns()) > 16 || !std::is_same_v<T, E> ? kRun<T, E> : kRun<T, E> / 2;
}

// A monoid that does the work of a whole tile itself, forward and backward (cpu/program.h). Its problems have no mask, no bias
// and no payload.
template <class M>
concept FoldsTiles = M::kFoldsTiles;

// A monoid that turns the dot products of a tile into scores itself, and says which of them are masked (cpu/modified_scores.h).
template <class M>
concept ModifiesScores = M::kModifiesScores;

// values *= factors, for the elements of a tile: [columns][kPanel].
template <class T>
inline void multiply_factors(const T* factors, std::int64_t columns, T* values) {
  using R = LanePack<T>;
  for (std::int64_t i = 0; i < columns * kPanel<T>; i += kLanes<T>)
    (R::load(values + i) * R::load(factors + i)).store(values + i);
}

// If the rows of a panel together have at most this many unmasked columns, delta is computed from the columns (delta_term in
// pull.h). That second pass over the exponentials takes 5 to 15 % of backward's time. With more columns, the error that it
// avoids is small.
inline constexpr std::int64_t kFewColumns = 128;

// A struct of packs is treated as an array of words, each a vector of lanes; the same struct of scalars is one lane of it.
// These functions read and write one lane.
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
// In each lane, a if the mask is set, otherwise b.
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

// The rows that share one set of columns: the rows of all query heads of a group, one head after the other.
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

// The unmasked columns [begin, end) of each row of a panel, and the labels and factors of the rows. One lane is one row.
template <class T>
struct PanelRows {
  using R = LanePack<T>;
  std::int64_t first, count;  // rows [first, first + count) of the problem, count <= kPanel
  Index<R> begin[kPacks], end[kPacks], label[kPacks];
  R factor[kPacks];
  std::int64_t least_begin, most_begin, least_end, most_end;  // over the lanes

  template <class Rows>
  PanelRows(const FoldProblem& p, const ProblemRows& rows, std::int64_t first, const Rows& policy,
            bool skip_inactive)
      : first(first), count(std::min<std::int64_t>(kPanel<T>, rows.count() - first)) {
    using I = IntegerOf<T>;
    I begins[kPanel<T>] = {}, ends[kPanel<T>] = {}, labels[kPanel<T>] = {};
    T factors[kPanel<T>];
    std::fill_n(factors, kPanel<T>, T(1));
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
        factors[lane] = factor_of<T>(policy, row);
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
      factor[half] = R::load(factors + half * kLanes<T>);
    }
  }
  bool touches(std::int64_t column, std::int64_t columns) const {
    return column < most_end && column + columns > least_begin;
  }
  bool covers(std::int64_t column, std::int64_t columns) const {
    return most_begin <= column && column + columns <= least_end;
  }
  // Whether the rows together have at most kFewColumns unmasked columns, all of them among these.
  bool few_within(std::int64_t column, std::int64_t columns) const {
    return most_end - least_begin <= kFewColumns && column <= least_begin && most_end <= column + columns;
  }
  Mask<R> keeps(int half, std::int64_t column) const {
    const Index<R> j(static_cast<IntegerOf<T>>(column));
    return (j >= begin[half]) & (j < end[half]);
  }
};

// Copies elements of a row without conversion. (The load_row in tiles.h widens them.)
inline void load_row(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count,
                     BFloat16* to, std::int64_t to_stride) {
  const BFloat16* from = static_cast<const BFloat16*>(t.data) + offset;
  if (stride == 1 && to_stride == 1) {
    std::copy_n(from, count, to);
  } else {
    for (std::int64_t k = 0; k < count; ++k) to[k * to_stride] = from[k * stride];
  }
}

// Prefetches the element 16 rows ahead. Rows are read once per block of columns, from the last cache level at best, and the
// hardware prefetcher stops at the end of each row. Loading rows is 1.5 to 3 times faster with this.
inline void prefetch(const TensorView& t, std::int64_t offset) {
  __builtin_prefetch(static_cast<const char*>(t.data) + (offset + 16 * t.stride[2]) * item_size(t.dtype));
}

// Loads the first `count` of kCount elements, and zeros for the rest.
template <class E, std::size_t kCount>
inline void load_part(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count,
                      E (&to)[kCount]) {
  if (count == kCount) {  // a constant count, which the compiler vectorizes
    load_row(t, offset, stride, kCount, to, 1);
  } else {
    std::fill_n(to, kCount, E{});
    load_row(t, offset, stride, count, to, 1);
  }
}

// Loads a panel of rows with one row per lane: [k / kDepth][lane][kDepth], 0 beyond the last row and beyond the width.
template <class T, class E>
inline void load_lanes(const TensorView& t, const ProblemRows& rows, std::int64_t first, std::int64_t count,
                       E* panel) {
  constexpr int kWidth = kLanes<T> * kDepth<E>;  // elements loaded at a time from each of kLanes rows
  const std::int64_t width = t.size[3];
  for (int half = 0; half < kPacks; ++half) {
    std::int64_t offset[kLanes<T>], loaded[kLanes<T>];
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      const std::int64_t row = half * kLanes<T> + lane;
      offset[lane] = row < count ? rows.offset(t, first + row) : 0, loaded[lane] = row < count ? width : 0;
    }
    for (std::int64_t k = 0; k < width; k += kWidth) {
      LanePack<T> words[kLanes<T>];
      for (int lane = 0; lane < kLanes<T>; ++lane) {
        E elements[kWidth];
        load_part(t, offset[lane] + k * t.stride[3], t.stride[3],
                  std::clamp<std::int64_t>(loaded[lane] - k, 0, kWidth), elements);
        std::memcpy(&words[lane], elements, sizeof(elements));
        prefetch(t, offset[lane] + k * t.stride[3]);
      }
      transpose(words);
      E* to = panel + k * kPanel<T> + half * kWidth;
      for (int word = 0; word < kLanes<T> && k + word * kDepth<E> < width; ++word) {
        std::memcpy(to + word * kPanel<T> * kDepth<E>, &words[word], sizeof(words[word]));
      }
    }
  }
}

// Loads a panel of rows with one element of the width per lane: [width panel][row / kDepth][lane][kDepth], width panels
// `stride` apart. It holds 0 beyond the width, beyond the last row, and for rows that are not active.
template <class T, class E, class Rows>
inline void load_widths(const TensorView& t, const ProblemRows& rows, const Rows& policy, std::int64_t first,
                        std::int64_t count, std::int64_t stride, E* panels) {
  const std::int64_t width = t.size[3];
  for (int row = 0; row < kPanel<T>; row += kDepth<E>) {
    std::int64_t offset[kDepth<E>], loaded[kDepth<E>];
    for (int d = 0; d < kDepth<E>; ++d) {
      const bool active = row + d < count && policy.active(rows.flat(first + row + d));
      offset[d] = active ? rows.offset(t, first + row + d) : 0, loaded[d] = active ? width : 0;
    }
    for (std::int64_t w = 0; w < width; w += kPanel<T>) {
      E elements[kDepth<E>][kPanel<T>];
      const E* from[kDepth<E>];
      for (int d = 0; d < kDepth<E>; ++d) {
        load_part(t, offset[d] + w * t.stride[3], t.stride[3],
                  std::clamp<std::int64_t>(loaded[d] - w, 0, kPanel<T>), elements[d]);
        from[d] = elements[d];
      }
      interleave(from, kPanel<T>, panels + w / kPanel<T> * stride + row * kPanel<T>);
      for (int d = 0; d < kDepth<E>; ++d) prefetch(t, offset[d] + w * t.stride[3]);
    }
  }
}

// Stores a panel with one row per lane: panel[.][lane] is row first + lane of t.
template <class T>
inline void store_lanes(const TensorView& t, const ProblemRows& rows, std::int64_t first, std::int64_t count,
                        const T* panel) {
  const std::int64_t width = t.size[3];
  for (std::int64_t k = 0; k < width; k += kLanes<T>) {
    const std::int64_t stored = std::min<std::int64_t>(kLanes<T>, width - k);
    for (int half = 0; half < kPacks; ++half) {
      LanePack<T> words[kLanes<T>];
      for (int i = 0; i < kLanes<T>; ++i) {
        words[i] =
            i < stored ? LanePack<T>::load(panel + (k + i) * kPanel<T> + half * kLanes<T>) : LanePack<T>(0);
      }
      transpose(words);
      for (std::int64_t lane = 0; lane < kLanes<T> && half * kLanes<T> + lane < count; ++lane) {
        T elements[kLanes<T>];
        words[lane].store(elements);
        store_row(t, rows.offset(t, first + half * kLanes<T> + lane) + k * t.stride[3], t.stride[3], stored,
                  elements, 1);
      }
    }
  }
}

// t[offset + k k_stride + lane lane_stride] = panel[k][lane]. Stores go along the axis that is contiguous in memory.
template <class T>
inline void store_panel(const TensorView& t, std::int64_t offset, std::int64_t k_stride,
                        std::int64_t lane_stride, std::int64_t count, std::int64_t lanes, const T* panel) {
  if (k_stride == 1) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      store_row(t, offset + lane * lane_stride, k_stride, count, panel + lane, kPanel<T>);
    }
  } else {
    for (std::int64_t k = 0; k < count; ++k) {
      store_row(t, offset + k * k_stride, lane_stride, lanes, panel + k * kPanel<T>, 1);
    }
  }
}

// A tile of columns as the broadcast operand of matmul: [column][width] for products that sum over the width, and
// [column / kDepth][width][kDepth] for products that sum over the columns. If E is T, the two layouts are the same.
template <class T, class E>
class ColumnTile {
  static constexpr bool kNarrow = !std::is_same_v<E, T>;
  static constexpr int kWords = kLanes<T> * kDepth<E>;  // elements in a vector register

 public:
  // over_columns: whether over_columns() is going to be called.
  ColumnTile(std::int64_t columns, std::int64_t width, bool over_columns)
      : width_(width),
        pitch_(pitch(width)),
        tile_(columns * pitch_),
        interleaved_(kNarrow && over_columns ? divide_up(columns, kDepth<E>) * pitch(width * kDepth<E>) : 0) {
  }

  // Loads the columns [from, from + count) of the tile. The tile begins with column `first` of t, and `from` is even.
  void load(const TensorView& t, const ProblemRows& rows, std::int64_t first, std::int64_t from,
            std::int64_t count) {
    if (t.stride[2] == 1 && t.stride[3] != 1) {
      load_transposed(t, rows.column_offset(t, first + from), tile_ + from * pitch_, count);
    } else {
      for (std::int64_t j = from; j < from + count; ++j) {
        load_row(t, rows.column_offset(t, first + j), t.stride[3], width_, tile_ + j * pitch_, 1);
        if (width_ % kDepth<E>) *(tile_ + j * pitch_ + width_) = E{};
      }
    }
    if constexpr (kNarrow) {
      if (!interleaved_.get()) return;
      if (count % kDepth<E>) std::fill_n(tile_ + (from + count) * pitch_, width_, E{});
      for (std::int64_t j = from; j < from + count; j += kDepth<E>) {
        interleave({tile_ + j * pitch_, tile_ + (j + 1) * pitch_}, width_, interleaved_ + place(j, 0));
      }
    }
  }

  // Moves the numbers that are not finite from the first `count` columns into `taken` (NonFinite in tiles.h). The `row` of an
  // entry is the column.
  void take_non_finite(std::int64_t count, NonFinite<T>& taken) {
    taken.take(tile_.get(), count, width_, pitch_);
    if (!interleaved_.get()) return;
    for (const auto& entry : taken) interleaved_.get()[place(entry.row, entry.column)] = E{};
  }

  Broadcast<E> over_width() const { return {tile_.get(), pitch_, kDepth<E>}; }
  Broadcast<E> over_columns() const {
    if constexpr (kNarrow) return {interleaved_.get(), kDepth<E>, pitch(width_ * kDepth<E>)};
    return {tile_.get(), 1, pitch_};
  }

 private:
  // The distance between the rows of a tile, in elements. It is an odd number of cache lines, so that a product that walks down
  // the rows uses all sets of a cache.
  static std::int64_t pitch(std::int64_t elements) {
    constexpr std::int64_t kLine = 64 / sizeof(E);
    return (divide_up(elements, kLine) | 1) * kLine;
  }
  std::int64_t place(std::int64_t column, std::int64_t k) const {
    return column / kDepth<E> * pitch(width_ * kDepth<E>) + k * kDepth<E> + column % kDepth<E>;
  }

  // Loads columns that are adjacent in memory.
  void load_transposed(const TensorView& t, std::int64_t offset, E* to, std::int64_t count) {
    for (std::int64_t j = 0; j < count; j += kLanes<T>) {
      const std::int64_t columns = std::min<std::int64_t>(kLanes<T>, count - j);
      for (std::int64_t k = 0; k < width_; k += kWords) {
        LanePack<T> words[kLanes<T>];
        for (int i = 0; i < kLanes<T>; ++i) {
          E elements[kDepth<E>][kLanes<T>], pairs[kWords];
          const E* from[kDepth<E>];
          for (int d = 0; d < kDepth<E>; ++d) {
            const std::int64_t row = k + i * kDepth<E> + d;
            load_part(t, offset + row * t.stride[3] + j, 1, row < width_ ? columns : 0, elements[d]);
            from[d] = elements[d];
          }
          interleave(from, kLanes<T>, pairs);
          std::memcpy(&words[i], pairs, sizeof(pairs));
        }
        transpose(words);
        for (std::int64_t i = 0; i < columns; ++i) {
          std::memcpy(to + (j + i) * pitch_ + k, &words[i], sizeof(words[i]));
        }
      }
    }
  }

  const std::int64_t width_, pitch_;
  Scratch<E> tile_, interleaved_;
};

// panel[j][lane] = the bias for the lane's row and column first + j. A bool bias reads as 0, or -inf where it masks.
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

// Rows that keep only some of their elements: kept.some() says whether any do, kept(row, column) which ones.
template <class Rows>
concept KeepsElements = requires(const Rows rows, std::int64_t row, std::int64_t column) {
  { rows.kept.some() } -> std::same_as<bool>;
  { rows.kept(row, column) } -> std::same_as<bool>;
};
template <class Rows>
bool keeps_some(const Rows& policy) {
  if constexpr (KeepsElements<Rows>) return policy.kept.some();
  return false;
}
// panel[j][lane] = 0 if the lane's row keeps column first + j, otherwise -inf. Returns it, or null if rows keep all elements.
template <class T, class Rows>
const T* load_kept(const Rows& policy, const ProblemRows& rows, std::int64_t first_row,
                   std::int64_t row_count, std::int64_t first, std::int64_t count, T* panel) {
  if constexpr (KeepsElements<Rows>) {
    if (policy.kept.some()) {
      if (row_count < kPanel<T>) std::fill_n(panel, count * kPanel<T>, T(0));
      for (std::int64_t lane = 0; lane < row_count; ++lane) {
        const std::int64_t row = rows.flat(first_row + lane);
        for (std::int64_t j = 0; j < count; ++j)
          panel[j * kPanel<T> + lane] = policy.kept(row, first + j) ? T(0) : -infinity<T>();
      }
      return panel;
    }
  }
  return nullptr;
}

inline bool has_bool_bias(const FoldProblem& p) { return p.bias.present() && p.bias.dtype == DType::kBool; }
inline bool has_mask(const FoldProblem& p) { return !p.range.all() || has_bool_bias(p); }

// Calls f with a null pointer to the operand type of the matrix products: BFloat16 if the processor multiplies it and all
// operands have it, otherwise T.
template <class T, class F>
void with_operand(const FoldProblem& p, const TensorView& grad_out, F f) {
  if constexpr (kMultipliesBFloat16 && std::is_same_v<T, float>) {
    const TensorView* operands[] = {&p.a, &p.b, &p.other_a, &p.other_b, &p.payload, &grad_out};
    const auto taken = [](const TensorView* t) { return !t->present() || t->dtype == DType::kBFloat16; };
    if (std::ranges::all_of(operands, taken)) return f(static_cast<BFloat16*>(nullptr));
  }
  if constexpr (kOnlyBFloat16) {
    throw std::invalid_argument("expected operands of type bfloat16, all of them");
  } else {
    f(static_cast<T*>(nullptr));
  }
}

// The elements of one panel of rows and one tile of columns, computed from their dot products.
template <class M, class T>
struct PanelTile {
  using R = LanePack<T>;
  const FoldProblem& p;
  const Score<R>& score;
  const PanelRows<T>& rows;
  std::int64_t first_column;
  const T* dot;        // [columns][kPanel]
  const T* other_dot;  // the same for the second score
  const T* bias;       // the same, or null; if M modifies scores: 0, or -inf where masked
  const T* kept;  // the same: 0, or -inf where the row does not keep the element (KeepsElements); or null

  MR_HD std::int64_t at(std::int64_t j, int half) const { return j * kPanel<T> + half * kLanes<T>; }
  MR_HD R bias_at(std::int64_t j, int half) const { return bias ? R::load(bias + at(j, half)) : R(0); }
  // Whether nothing is masked, and every score is just a dot product times the scale.
  bool plain(std::int64_t columns) const {
    return !bias && !kept && score.softcap == 0 && rows.covers(first_column, columns);
  }
  template <bool kPlain>
  MR_HD Element<R> from_dots(std::int64_t j, int half) const {
    const auto value = [&](const T* dots, R added) {
      const R x = R::load(dots + at(j, half));
      // The + 0 keeps the compiler from fusing the product with a later addition, in one pass but not in the other. Forward
      // and backward must see the same rounded score.
      const R product = x * R(score.scale) + R(0);
      if (kPlain) return product;
      return score.softcap == 0 ? product + added : score.value(x, added);
    };
    Element<R> e{value(dot, bias_at(j, half)), R(0), Index<R>(static_cast<IntegerOf<T>>(first_column + j)),
                 rows.label[half], rows.factor[half]};
    if constexpr (M::kScores == 2) e.other = value(other_dot, R(0));
    return e;
  }
  // The same element, from scores that have replaced the dot products in memory.
  MR_HD Element<R> from_scores(std::int64_t j, int half) const {
    Element<R> e{R::load(dot + at(j, half)), R(0), Index<R>(static_cast<IntegerOf<T>>(first_column + j)),
                 rows.label[half], rows.factor[half]};
    if constexpr (M::kScores == 2) e.other = R::load(other_dot + at(j, half));
    return e;
  }
  MR_HD Mask<R> valid(std::int64_t j, int half) const {
    Mask<R> keep = rows.keeps(half, first_column + j);
    if (bias && (ModifiesScores<M> || p.bias.dtype == DType::kBool)) keep = keep & (bias_at(j, half) == R(0));
    if (kept) keep = keep & (R::load(kept + at(j, half)) == R(0));
    return keep;
  }
};

// Adds the contribution of numbers that were taken out of a tile of columns (NonFinite), to lanes in which their column is not
// masked:
//
//   to[entry column][lane] += weight[entry row][lane] * value
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

// Converts M<T> to M<Pack>. The members of a monoid, if it has any, are parameters that do not depend on its real type.
template <template <class> class M, class T>
inline M<LanePack<T>> as_packs(const M<T>& m) {
  static_assert(sizeof(M<LanePack<T>>) == sizeof(M<T>),
                "a monoid's members must be parameters of type Scalar<R>");
  return std::bit_cast<M<LanePack<T>>>(m);
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

// Backward on the CPU: see cpu/fold.h.
//
// For a block of columns and a chunk of rows, dz (and the weights) are recomputed into a workspace of panels;
// d_a is complete for that block, and d_b and d_payload, which stay in float panels for all rows, are written
// once. Two loops over tasks a chunk: over panels of rows, then over groups of columns, so no two threads
// ever add to the same number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/cpu/matmul.h"
#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/cpu/thread_pool.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// What is wanted of a backward pass, and what that needs.
struct Wanted {
  bool a, b, other_a, other_b, payload, bias;
  bool dz() const { return a || b || bias; }
  bool other_dz() const { return other_a || other_b; }
  explicit Wanted(const FoldGradients& g)
      : a(g.d_a.present()),
        b(g.d_b.present()),
        other_a(g.d_other_a.present()),
        other_b(g.d_other_b.present()),
        payload(g.d_payload.present()),
        bias(g.d_bias.present()) {}
};

// One operand of the backward pass as the widths of columns' sums: a with b, other_a with other_b, grad_out
// with payload.
template <class T, class E>
struct ColumnSums {
  Scratch<E> rows;  // [width panel][chunk row / kDepth][kPanel][kDepth]: the chunk's rows, lanes are widths
  Scratch<T> sums;  // [width panel][block column][kPanel]
  NonFinite<T> taken;
  std::int64_t width;
  ColumnSums(bool wanted, std::int64_t width, std::int64_t chunk, std::int64_t block)
      : rows(wanted ? round_up(width, kPanel<T>) * chunk : 0),
        sums(wanted ? round_up(width, kPanel<T>) * block : 0),
        width(wanted ? width : 0) {}
};

// E: what the products multiply, T or BFloat16.
template <template <class> class M, class T, class E, class Rows>
  requires Monoid<M<T>> && RowPolicy<Rows, M<T>>
class Backward {
  using R = LanePack<T>;
  using Packs = M<R>;
  static constexpr int kScores = Packs::kScores;
  static constexpr bool kNarrow = !std::is_same_v<E, T>;

 public:
  Backward(const M<T>& m, const FoldProblem& p, const Rows& policy, const FoldGradients& g, int threads)
      : m_(as_packs<M, T>(m)), p_(p), policy_(policy), g_(g), want_(g), score_(p.score) {
    problems_ = p.batch() * p.column_heads();
    // A gradient of the bias may be shared by problems: then they go one after the other.
    const bool apart = problems_ >= threads && !want_.bias;
    outer_threads_ = apart ? threads : 1;
    inner_threads_ = apart ? 1 : threads;
    // 252 (or 504) columns make packing the rows cheap; the workspace, columns x chunk, stays in the
    // second-level cache for a payload of its own, in the third for the long rows of a loss.
    block_ =
        std::min(round_up(p.columns(), kColumnStep), round_up(p.payload.present() ? 240 : 480, kColumnStep));
    const std::int64_t group_rows = p.heads() / std::max<std::int64_t>(p.column_heads(), 1) * p.rows();
    chunk_ = std::min<std::int64_t>(
        round_up(group_rows, kPanel<T>),
        std::max<std::int64_t>(p.payload.present() ? 256 : 512, 2 * inner_threads_ * kPanel<T>));
  }

  void run() {
    parallel_for(outer_threads_, problems_, [&](std::int64_t problem, int) { Block(*this, problem).run(); });
  }

 private:
  // The whole backward pass of one problem, with its workspace.
  class Block {
   public:
    Block(const Backward& pass, std::int64_t problem)
        : pass_(pass),
          p_(pass.p_),
          rows_(p_, problem),
          b_(pass.block_ * (p_.width() + 1)),
          other_b_(pass.block_ * (p_.other_width() + 1)),
          payload_(pass.block_ * (p_.payload_width() + 1)),
          b_interleaved_(kNarrow ? pass.block_ * p_.width() : 0),
          other_b_interleaved_(kNarrow ? pass.block_ * p_.other_width() : 0),
          dz_(pass.chunk_ * pass.block_),
          other_dz_(kScores == 2 ? pass.chunk_ * pass.block_ : 0),
          weights_(p_.payload.present() ? pass.chunk_ * pass.block_ : 0),
          bias_(p_.bias.present() ? pass.chunk_ * pass.block_ : 0),
          of_b_(pass.want_.b, p_.width(), pass.chunk_, pass.block_),
          of_other_b_(pass.want_.other_b, p_.other_width(), pass.chunk_, pass.block_),
          of_payload_(pass.want_.payload, p_.payload_width(), pass.chunk_, pass.block_) {}

    void run() {
      for (first_ = 0; first_ < p_.columns(); first_ += pass_.block_) {
        columns_ = std::min(pass_.block_, p_.columns() - first_);
        load_block();
        for (std::int64_t row = 0; row < rows_.count(); row += pass_.chunk_) {
          first_row_ = row;
          chunk_rows_ = std::min(pass_.chunk_, rows_.count() - row);
          panels_ = divide_up(chunk_rows_, kPanel<T>);
          run_chunk();
        }
        store_block();
      }
    }

   private:
    void load_block() {
      load_columns(p_.b, rows_, first_, columns_, b_.get());
      if constexpr (kScores == 2) load_columns(p_.other_b, rows_, first_, columns_, other_b_.get());
      if (p_.payload.present()) load_columns(p_.payload, rows_, first_, columns_, payload_.get());
      b_columns_ = interleave_columns(b_.get(), columns_, p_.width(), b_interleaved_.get());
      other_b_columns_ =
          interleave_columns(other_b_.get(), columns_, p_.other_width(), other_b_interleaved_.get());
      for (auto* sums : {&of_b_, &of_other_b_, &of_payload_}) {
        std::fill_n(sums->sums.get(), round_up(sums->width, kPanel<T>) * pass_.block_, T(0));
      }
      if constexpr (!kNarrow) {
        if (has_mask(p_)) b_taken_.take(b_.get(), columns_, p_.width(), p_.width());
      }
    }

    void run_chunk() {
      parallel_for(pass_.inner_threads_, panels_, [&](std::int64_t panel, int) { pull_panel(panel); });
      if constexpr (!kNarrow) {
        if (has_mask(p_)) take_non_finite_rows();
      }
      const std::int64_t group = 2 * kColumnStep * (pass_.inner_threads_ > 1 ? 1 : 16);
      parallel_for(pass_.inner_threads_, divide_up(columns_, group), [&](std::int64_t task, int) {
        const std::int64_t from = task * group, count = std::min(group, columns_ - from);
        add_column_sums(of_b_, dz_.get(), from, count);
        add_column_sums(of_other_b_, other_dz_.get(), from, count);
        add_column_sums(of_payload_, weights_.get(), from, count);
        if (pass_.want_.bias && pass_.g_.d_bias.stride[3] != 0) add_bias(from, count);
      });
      if (pass_.want_.bias && pass_.g_.d_bias.stride[3] == 0) add_bias(0, columns_);
    }

    void take_non_finite_rows() {
      for (auto* sums : {&of_b_, &of_other_b_, &of_payload_}) {
        const std::int64_t panels = divide_up(sums->width, kPanel<T>);
        sums->taken.take(sums->rows.get(), panels * pass_.chunk_, kPanel<T>, kPanel<T>);
      }
    }

    // Recomputes the scores of a panel, pulls the gradient through the fold, and finishes d_a for this block
    // of columns.
    void pull_panel(std::int64_t panel) {
      const std::int64_t first = first_row_ + panel * kPanel<T>;
      const PanelRows<T> panel_rows(p_, rows_, first, pass_.policy_, true);
      const std::int64_t at = panel * pass_.block_ * kPanel<T>, count = panel_rows.count;
      keep_rows(of_b_, p_.a, panel, first, count);
      keep_rows(of_other_b_, p_.other_a, panel, first, count);
      keep_rows(of_payload_, pass_.g_.grad_out, panel, first, count);
      T* bias = p_.bias.present() ? bias_ + at : nullptr;
      if (!panel_rows.touches(first_, columns_)) {
        for (Scratch<E>* tile : {&dz_, &other_dz_, &weights_}) {
          if (tile->get()) std::fill_n(*tile + at, columns_ * kPanel<T>, E{});
        }
        if (bias) std::fill_n(bias, columns_ * kPanel<T>, T(0));
        return;
      }
      // In T, the workspace itself holds the tiles; BFloat16 operands are rounded into it.
      const std::int64_t size = kNarrow ? pass_.block_ * kPanel<T> : 0;
      Scratch<T> dz_tile(size), other_dz_tile(other_dz_.get() ? size : 0),
          weights_tile(weights_.get() ? size : 0);
      T *dz = tile_of(dz_, dz_tile, at), *other_dz = tile_of(other_dz_, other_dz_tile, at);
      T* weights = tile_of(weights_, weights_tile, at);
      const std::int64_t width = std::max({p_.width(), p_.other_width(), p_.payload_width()}) + 1;
      Scratch<E> lanes(width * kPanel<T>);
      load_lanes<T>(p_.a, rows_, first, count, lanes.get());
      matmul(over_width(b_.get(), p_.width()), columns_, 1, p_.width(), lanes.get(), dz, false);
      // What is not finite in b matters to the scores, so it goes back in for this product.
      if constexpr (!kNarrow) {
        for (const auto& entry : b_taken_) {
          for (int half = 0; half < kPacks; ++half) {
            T* dot = dz + entry.row * kPanel<T> + half * kLanes<T>;
            (R::load(dot) + R::load(lanes + entry.column * kPanel<T> + half * kLanes<T>) * R(entry.value))
                .store(dot);
          }
        }
      }
      if constexpr (kScores == 2) {
        load_lanes<T>(p_.other_a, rows_, first, count, lanes.get());
        matmul(over_width(other_b_.get(), p_.other_width()), columns_, 1, p_.other_width(), lanes.get(),
               other_dz, false);
      }
      if (p_.payload.present()) {
        load_lanes<T>(pass_.g_.grad_out, rows_, first, count, lanes.get());
        matmul(over_width(payload_.get(), p_.payload_width()), columns_, 1, p_.payload_width(), lanes.get(),
               weights, false);
      }
      if (bias) load_bias(p_.bias, rows_, first, count, first_, columns_, bias);

      const PanelTile<Packs, T> tile{m(), p_, pass_.score_, panel_rows, first_, dz, other_dz, bias};
      // Lanes beyond the last row keep no column, so that nothing of theirs reaches the column sums.
      if (has_bool_bias(p_) || count < kPanel<T> || !panel_rows.covers(first_, columns_)) {
        pull_tile<true>(tile, dz, other_dz, weights, bias);
      } else {
        pull_tile<false>(tile, dz, other_dz, weights, bias);
      }
      Scratch<T> sums(width * kPanel<T>);
      Scratch<E> operand(kNarrow ? round_up(columns_, kDepth<E>) * kPanel<T> : 0);
      if (pass_.want_.a) {
        matmul(over_columns(b_columns_, p_.width()), p_.width(), 1, columns_,
               as_operand(dz, columns_, operand.get()), sums.get(), false);
        add_non_finite(tile, b_taken_, dz, sums.get());
        add_rows(pass_.g_.d_a, first, count, sums.get());
      }
      if (pass_.want_.other_a) {
        matmul(over_columns(other_b_columns_, p_.other_width()), p_.other_width(), 1, columns_,
               as_operand(other_dz, columns_, operand.get()), sums.get(), false);
        add_rows(pass_.g_.d_other_a, first, count, sums.get());
      }
      if constexpr (kNarrow) {
        if (pass_.want_.b) narrow_rows(dz, columns_, dz_ + at);
        if (pass_.want_.other_b) narrow_rows(other_dz, columns_, other_dz_ + at);
        if (pass_.want_.payload) narrow_rows(weights, columns_, weights_ + at);
      }
    }

    // Where a panel's tile is computed; null if there is none.
    static T* tile_of(const Scratch<E>& workspace, const Scratch<T>& tile, std::int64_t at) {
      if (!workspace.get()) return nullptr;
      if constexpr (kNarrow) {
        return tile.get();
      } else {
        return workspace + at;
      }
    }

    // Scores become dz in place, u becomes the weight, and the bias its gradient.
    template <bool kMasked>
    void pull_tile(const PanelTile<Packs, T>& tile, T* dz, T* other_dz, T* weights, T* bias) const {
      typename Packs::Output product[kPacks];
      typename Packs::Upstream upstream[kPacks];
      std::memset(static_cast<void*>(product), 0, sizeof(product));
      std::memset(static_cast<void*>(upstream), 0, sizeof(upstream));
      for (int lane = 0; lane < tile.rows.count; ++lane) {
        const std::int64_t row = rows_.flat(tile.rows.first + lane);
        set_lane<T>(product[lane / kLanes<T>], lane % kLanes<T>, pass_.policy_.product(row));
        set_lane<T>(upstream[lane / kLanes<T>], lane % kLanes<T>, pass_.policy_.upstream(row));
      }
      const R zero(0), scale(pass_.score_.scale);
      for (std::int64_t j = 0; j < columns_; ++j) {
        for (int half = 0; half < kPacks; ++half) {
          const std::int64_t at = tile.at(j, half);
          const Element<R> e = tile.from_dots(j, half);
          const auto keep = [&](R x) { return kMasked ? select(tile.valid(j, half), x, zero) : x; };
          Gradient<R> gradient{zero, zero};
          if constexpr (PayloadMonoid<Packs>) {
            if (weights) {
              const PayloadPull<R> pulled =
                  pull(m(), e, product[half], upstream[half], R::load(weights + at));
              keep(pulled.weight).store(weights + at);
              gradient.score = pulled.score;
            } else {
              gradient = pull(m(), e, product[half], upstream[half]);
            }
          } else {
            gradient = pull(m(), e, product[half], upstream[half]);
          }
          const R slope = pass_.score_.slope(R::load(dz + at), tile.bias_at(j, half));
          const R by_score = keep(gradient.score), by_dot = keep(gradient.score * slope);
          if constexpr (kScores == 2) {
            const R other_slope = pass_.score_.slope(R::load(other_dz + at), zero);
            (keep(gradient.other * other_slope) * scale).store(other_dz + at);
          }
          (by_dot * scale).store(dz + at);
          // tile.valid reads a bool bias: its gradient is not wanted, so it stays.
          if (pass_.want_.bias) (p_.score.bias_inside ? by_dot : by_score).store(bias + at);
        }
      }
    }

    // The chunk's rows with widths as lanes, for the products over rows.
    void keep_rows(const ColumnSums<T, E>& sums, const TensorView& t, std::int64_t panel, std::int64_t first,
                   std::int64_t count) const {
      if (sums.width == 0) return;
      load_widths<T>(t, rows_, pass_.policy_, first, count, pass_.chunk_ * kPanel<T>,
                     sums.rows + panel * kPanel<T> * kPanel<T>);
    }

    // sums[column][width] += sum over the chunk's rows of dz (or weight) times the row.
    void add_column_sums(const ColumnSums<T, E>& sums, const E* dz, std::int64_t from,
                         std::int64_t count) const {
      const std::int64_t step = pass_.block_ * kPanel<T>;
      for (std::int64_t w = 0; w < round_up(sums.width, kPanel<T>); w += kPanel<T>) {
        matmul<T, E>({dz + from * kPanel<T>, kPanel<T>, kDepth<E>, step}, count, panels_, kPanel<T>,
                     sums.rows + w * pass_.chunk_, sums.sums + w * pass_.block_ + from * kPanel<T>, true);
      }
      if constexpr (!kNarrow) add_non_finite_rows(sums, dz, from, count);
    }

    void add_non_finite_rows(const ColumnSums<T, E>& sums, const T* dz, std::int64_t from,
                             std::int64_t count) const {
      const std::int64_t step = pass_.block_ * kPanel<T>;
      for (const auto& entry : sums.taken) {
        const std::int64_t row = entry.row % pass_.chunk_, width_panel = entry.row / pass_.chunk_;
        T* to = sums.sums + width_panel * kPanel<T> * pass_.block_ + entry.column;
        for (std::int64_t j = from; j < from + count; ++j) {
          if (!keeps(first_row_ + row, first_ + j)) continue;
          to[j * kPanel<T>] += dz[row / kPanel<T> * step + j * kPanel<T> + row % kPanel<T>] * entry.value;
        }
      }
    }

    bool keeps(std::int64_t row, std::int64_t column) const {
      const std::int64_t position = rows_.position(row);
      if (column < p_.range.begin(position) || column >= p_.range.end(position, p_.columns())) return false;
      if (!has_bool_bias(p_)) return true;
      return static_cast<const bool*>(p_.bias.data)[rows_.offset(p_.bias, row) + column * p_.bias.stride[3]];
    }

    void add_bias(std::int64_t from, std::int64_t count) const {
      const TensorView& t = pass_.g_.d_bias;
      for (std::int64_t row = 0, rows = 0; row < chunk_rows_; row += rows) {
        // A bias that the panel's rows share takes the panel's sum at once.
        const std::int64_t last = std::min(row - row % kPanel<T> + kPanel<T>, chunk_rows_) - 1;
        const bool shared = t.stride[2] == 0 && rows_.head(first_row_ + row) == rows_.head(first_row_ + last);
        rows = shared ? last - row + 1 : 1;
        T* to = static_cast<T*>(t.data) + rows_.offset(t, first_row_ + row) + (first_ + from) * t.stride[3];
        const T* gradient =
            bias_ + row / kPanel<T> * pass_.block_ * kPanel<T> + from * kPanel<T> + row % kPanel<T>;
        for (std::int64_t j = 0; j < count; ++j) {
          T sum = gradient[j * kPanel<T>];
          for (std::int64_t lane = 1; lane < rows; ++lane) sum += gradient[j * kPanel<T> + lane];
          to[j * t.stride[3]] += sum;
        }
      }
    }

    // t[row] += panel[.][lane], a panel of rows.
    void add_rows(const TensorView& t, std::int64_t first, std::int64_t count, const T* panel) const {
      for (std::int64_t lane = 0; lane < count; ++lane) {
        if (!pass_.policy_.active(rows_.flat(first + lane))) continue;
        T* to = static_cast<T*>(t.data) + rows_.offset(t, first + lane);
        for (std::int64_t k = 0; k < t.size[3]; ++k) to[k * t.stride[3]] += panel[k * kPanel<T> + lane];
      }
    }

    void store_block() const {
      store_sums(pass_.g_.d_b, of_b_);
      store_sums(pass_.g_.d_other_b, of_other_b_);
      store_sums(pass_.g_.d_payload, of_payload_);
    }
    void store_sums(const TensorView& t, const ColumnSums<T, E>& sums) const {
      for (std::int64_t w = 0; w < sums.width; w += kPanel<T>) {
        const std::int64_t in_panel = std::min<std::int64_t>(kPanel<T>, sums.width - w);
        for (std::int64_t j = 0; j < columns_; ++j) {
          store_row(t, rows_.column_offset(t, first_ + j) + w * t.stride[3], t.stride[3], in_panel,
                    sums.sums + w * pass_.block_ + j * kPanel<T>, 1);
        }
      }
    }

    const Packs& m() const { return pass_.m_; }

    const Backward& pass_;
    const FoldProblem& p_;
    const ProblemRows rows_;
    Scratch<E> b_, other_b_, payload_;                // the block's columns, [column][width]
    Scratch<E> b_interleaved_, other_b_interleaved_;  // [column / kDepth][width][kDepth]
    const E *b_columns_ = nullptr, *other_b_columns_ = nullptr;
    NonFinite<T> b_taken_;
    Scratch<E> dz_, other_dz_, weights_;  // the workspace: [panel][column][kPanel]
    Scratch<T> bias_;                     // the same: bias, then its gradient
    ColumnSums<T, E> of_b_, of_other_b_, of_payload_;
    std::int64_t first_ = 0, columns_ = 0;                      // the block of columns
    std::int64_t first_row_ = 0, chunk_rows_ = 0, panels_ = 0;  // the chunk of rows
  };

  const Packs m_;
  const FoldProblem& p_;
  const Rows& policy_;
  const FoldGradients& g_;
  const Wanted want_;
  const Score<R> score_;
  std::int64_t problems_, block_, chunk_;
  int outer_threads_, inner_threads_;
};

// The gradients that g names, from policy's P_i and upstream gradients and from recomputed scores.
template <template <class> class M, class T, class Rows>
void fold_backward(const M<T>& m, const FoldProblem& p, const Rows& policy, const FoldGradients& g,
                   int threads) {
  if constexpr (kMultipliesBFloat16 && std::is_same_v<T, float>) {
    if (all_bfloat16(p, g.grad_out)) return Backward<M, T, BFloat16, Rows>(m, p, policy, g, threads).run();
  }
  Backward<M, T, T, Rows>(m, p, policy, g, threads).run();
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

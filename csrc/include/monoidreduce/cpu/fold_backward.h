// Backward on the CPU: see cpu/fold.h.
//
// For a block of columns and a chunk of rows, one parallel loop over panels of rows recomputes dz and the weights into a
// workspace, and adds to d_a. A second one, over groups of columns, adds to d_b and d_payload. So no two threads ever add to
// the same number.
//
// All sums are panels of T. The sums of a block of columns are complete before the next block begins, those of a row after the
// last block. Each is written once, in the type of its gradient.
//
// If there are fewer problems (batch times column heads) than threads, and all columns are equally much work, the columns are
// cut into slices. Each thread then has a slice and runs both loops alone.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <type_traits>
#include <utility>

#include "monoidreduce/cpu/matmul.h"
#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/cpu/thread_pool.h"
#include "monoidreduce/pull.h"
#include "monoidreduce/traits.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// The gradients that a backward pass computes.
struct Wanted {
  bool a, b, other_a, other_b, payload, bias;
  explicit Wanted(const FoldGradients& g)
      : a(g.d_a.present()),
        b(g.d_b.present()),
        other_a(g.d_other_a.present()),
        other_b(g.d_other_b.present()),
        payload(g.d_payload.present()),
        bias(g.d_bias.present()) {}
};

// What backward knows of a panel of rows, independent of the column.
template <class M, class T>
struct PanelFacts {
  PanelRows<T> rows;
  typename M::Output product[kPacks];
  typename M::Upstream upstream[kPacks];
  LanePack<T> product_gradient[kPacks];  // g_i, if the policy knows it (KnowsProductGradient); otherwise 0

  template <class Rows>
  PanelFacts(const FoldProblem& p, const ProblemRows& problem, std::int64_t first, const Rows& policy)
      : rows(p, problem, first, policy, true) {
    std::memset(static_cast<void*>(product), 0, sizeof(product));
    std::memset(static_cast<void*>(upstream), 0, sizeof(upstream));
    std::fill_n(product_gradient, kPacks, LanePack<T>(0));
    for (int lane = 0; lane < rows.count; ++lane) {
      const std::int64_t row = problem.flat(first + lane);
      set_lane<T>(product[lane / kLanes<T>], lane % kLanes<T>, policy.product(row));
      set_lane<T>(upstream[lane / kLanes<T>], lane % kLanes<T>, policy.upstream(row));
      if constexpr (requires { policy.product_gradient(row); }) {
        set_lane<T>(product_gradient[lane / kLanes<T>], lane % kLanes<T>, policy.product_gradient(row));
      }
    }
  }
};

// The sums of d_a (or d_other_a) over the columns of one problem, as panels of rows: [width][kPanel].
//
// The memory of the gradient itself holds the panels until its rows are stored. If the gradient has type T, it holds whole
// numbers. If its type has half as many bytes, it holds their upper halves, and lower_ holds the lower halves. A last panel
// that is not full has memory of its own.
template <class T>
class RowSums {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  using Half = std::conditional_t<sizeof(T) == 8, std::uint32_t, std::uint16_t>;
  static constexpr int kHalfBits = 8 * sizeof(Half);

 public:
  RowSums(const TensorView& t, const ProblemRows& rows, bool in_gradient)
      : width_(t.present() ? t.size[3] : 0),
        halves_(width_ && item_size(t.dtype) == sizeof(Half)),
        in_place_(in_gradient && width_ && holds_panels(t, rows) ? rows.count() / kPanel<T> : 0),
        place_(in_place_ ? static_cast<char*>(t.data) + rows.offset(t, 0) * item_size(t.dtype) : nullptr),
        lower_(halves_ ? in_place_ * panel_size() : 0),
        own_((divide_up(rows.count(), kPanel<T>) - in_place_) * panel_size()) {
    if (in_place_) std::memset(place_, 0, in_place_ * panel_size() * item_size(t.dtype));
    if (halves_) std::fill_n(lower_.get(), in_place_ * panel_size(), Half(0));
    std::fill_n(own_.get(), (divide_up(rows.count(), kPanel<T>) - in_place_) * panel_size(), T(0));
  }
  std::int64_t panel_size() const { return width_ * kPanel<T>; }

  // Panel i: a pointer to it if it is stored whole, otherwise a copy in `room`. Call keep() after adding to it.
  T* panel(std::int64_t i, T* room) const {
    if (i >= in_place_) return own_ + (i - in_place_) * panel_size();
    if (!halves_) return reinterpret_cast<T*>(place_) + i * panel_size();
    const char* upper = place_ + i * panel_size() * sizeof(Half);
    const Half* lower = lower_ + i * panel_size();
    for (std::int64_t k = 0; k < panel_size(); ++k) {
      Half half;
      std::memcpy(&half, upper + k * sizeof(Half), sizeof(Half));
      room[k] = std::bit_cast<T>(static_cast<Bits>(half) << kHalfBits | lower[k]);
    }
    return room;
  }
  void keep(std::int64_t i, const T* sums) const {
    if (i >= in_place_ || !halves_) return;
    char* upper = place_ + i * panel_size() * sizeof(Half);
    Half* lower = lower_ + i * panel_size();
    for (std::int64_t k = 0; k < panel_size(); ++k) {
      const Bits bits = std::bit_cast<Bits>(sums[k]);
      const Half half = static_cast<Half>(bits >> kHalfBits);
      std::memcpy(upper + k * sizeof(Half), &half, sizeof(Half));
      lower[k] = static_cast<Half>(bits);
    }
  }

 private:
  static bool holds_panels(const TensorView& t, const ProblemRows& rows) {
    return (item_size(t.dtype) == sizeof(T) || item_size(t.dtype) == sizeof(Half)) && t.stride[3] == 1 &&
           t.stride[2] == t.size[3] && (rows.group == 1 || t.stride[1] == rows.per_head * t.stride[2]);
  }
  std::int64_t width_;
  bool halves_;
  std::int64_t in_place_;  // number of panels in the gradient's memory
  char* place_;
  Scratch<Half> lower_;
  Scratch<T> own_;
};

// The sums of one gradient of columns (d_b, d_other_b or d_payload), and the rows that they are summed over (of a, other_a or
// grad_out), with one element of the width per lane.
template <class T, class E>
struct ColumnSums {
  static constexpr std::int64_t kStep = kPanel<T> * kDepth<E>;  // elements of a step: kDepth rows
  std::int64_t width;
  // The number of steps in a width panel: the chunk's rows, and one step of zeros, which keeps writes to different width panels
  // in different cache sets.
  std::int64_t steps;
  Scratch<E> rows;  // [width panel][step][kPanel][kDepth]: the chunk's rows
  Scratch<T> sums;  // [width panel][block column][kPanel]
  NonFinite<T> taken;
  ColumnSums(bool wanted, std::int64_t width, std::int64_t chunk, std::int64_t block)
      : width(wanted ? width : 0),
        steps(chunk / kDepth<E> + 1),
        rows(divide_up(this->width, kPanel<T>) * steps * kStep),
        sums(round_up(this->width, kPanel<T>) * block) {
    std::fill_n(rows.get(), divide_up(this->width, kPanel<T>) * steps * kStep, E{});
  }
};

// The number of threads that work on one problem: all of them if there are few problems. Problems may share a bias gradient; if
// there is one, they run one after the other.
inline int threads_per_problem(const FoldProblem& p, bool bias_gradient, int threads) {
  return p.batch() * p.column_heads() >= threads && !bias_gradient ? 1 : threads;
}

// Whether each thread gets a slice of the columns to itself. It then has its own sums of the rows' gradients, which are added
// up at the end. So no thread reads data that another has just written, which between core complexes takes four times as
// long. The slices must be equal work, and the sums must take little memory.
template <class T>
bool may_slice(const FoldProblem& p, const FoldGradients& g, std::int64_t block, int threads) {
  constexpr std::int64_t kMostBytes = 16 << 20;
  const std::int64_t group_rows = p.heads() / std::max<std::int64_t>(p.column_heads(), 1) * p.rows();
  const std::int64_t width =
      (g.d_a.present() ? p.width() : 0) + (g.d_other_a.present() ? p.other_width() : 0);
  const bool shares_bias = g.d_bias.present() && g.d_bias.stride[3] == 0;
  return threads > 1 && p.range.all() && !shares_bias && p.columns() >= threads * block &&
         (threads - 1) * group_rows * width * static_cast<std::int64_t>(sizeof(T)) <= kMostBytes;
}

// The tile: a chunk of rows by a block of columns. Rows are loaded once per block, so a block needs many columns. With a
// payload, blocks are smaller: the workspace (columns x chunk, twice) then stays in the L2 cache, and the edge of a causal
// mask cuts fewer blocks.
template <class T>
TileSize backward_tile(const FoldProblem& p, int threads) {
  const bool payload = p.payload.present();
  const std::int64_t group_rows = p.heads() / std::max<std::int64_t>(p.column_heads(), 1) * p.rows();
  const std::int64_t rows = std::max<std::int64_t>(payload ? 256 : 512, 2 * threads * kPanel<T>);
  return {std::min(round_up(group_rows, kPanel<T>), rows),
          std::min(round_up(p.columns(), kColumnStep), round_up(payload ? 240 : 480, kColumnStep))};
}

// E: the operand type of the matrix products, T or BFloat16.
template <template <class> class M, class T, class E, class Rows>
  requires(Monoid<M<T>> || FoldsTiles<M<T>>) && RowPolicy<Rows, M<T>>
class Backward {
  using R = LanePack<T>;
  using Packs = M<R>;
  static constexpr int kScores = Packs::kScores;
  static constexpr bool kModifies = ModifiesScores<Packs>;
  static constexpr bool kNarrow = !std::is_same_v<E, T>;

 public:
  Backward(const M<T>& m, const FoldProblem& p, const Rows& policy, const FoldGradients& g, int threads)
      : m_(as_packs<M, T>(m)), p_(p), policy_(policy), g_(g), want_(g), score_(p.score) {
    problems_ = p.batch() * p.column_heads();
    inner_threads_ = threads_per_problem(p, want_.bias, threads);
    outer_threads_ = threads / inner_threads_;
    if (may_slice<T>(p, g, backward_tile<T>(p, 1).columns, inner_threads_)) {
      slices_ = std::exchange(inner_threads_, 1);
    }
    const TileSize tile = backward_tile<T>(p, inner_threads_);
    chunk_ = tile.rows, block_ = tile.columns;
  }

  void run() {
    parallel_for(outer_threads_, problems_,
                 [&](std::int64_t problem, int) { Problem(*this, problem).run(); });
  }

 private:
  // The rows of one problem: their data, and the sums of their gradients over each slice of the columns.
  class Problem {
   public:
    Problem(const Backward& pass, std::int64_t problem)
        : pass(pass), rows(pass.p_, problem), panels(divide_up(rows.count(), kPanel<T>)), facts(panels) {
      for (int slice = 0; slice < pass.slices_; ++slice) {
        of_a.emplace_back(pass.g_.d_a, rows, slice == 0);
        of_other_a.emplace_back(pass.g_.d_other_a, rows, slice == 0);
      }
    }

    void run() {
      parallel_for(threads(), panels, [&](std::int64_t i, int) {
        std::construct_at(facts + i, pass.p_, rows, i * kPanel<T>, pass.policy_);
      });
      parallel_for(pass.slices_, pass.slices_, [&](std::int64_t slice, int) { Slice(*this, slice).run(); });
      store_rows(pass.g_.d_a, of_a);
      store_rows(pass.g_.d_other_a, of_other_a);
    }

    const Backward& pass;
    const ProblemRows rows;
    const std::int64_t panels;
    Scratch<PanelFacts<Packs, T>> facts;
    std::deque<RowSums<T>> of_a, of_other_a;  // one for each slice

   private:
    int threads() const { return pass.slices_ * pass.inner_threads_; }

    // Adds up the slices' sums and stores them. Rows that are not active get zeros: their lanes may hold NaN, from 0 times a
    // number of b that is not finite.
    void store_rows(const TensorView& t, const std::deque<RowSums<T>>& sums) const {
      if (!t.present()) return;
      parallel_for(threads(), panels, [&](std::int64_t i, int) {
        const PanelRows<T>& of_panel = (facts + i)->rows;
        const std::int64_t size = sums[0].panel_size();
        Scratch<T> panel(size);
        const T* const at = sums[0].panel(i, panel.get());
        if (at != panel.get()) std::copy_n(at, size, panel.get());
        for (int slice = 1; slice < pass.slices_; ++slice) {
          const T* const added = sums[slice].panel(i, nullptr);
          for (std::int64_t k = 0; k < size; ++k) panel.get()[k] += added[k];
        }
        for (std::int64_t lane = 0; lane < of_panel.count; ++lane) {
          if (pass.policy_.active(rows.flat(of_panel.first + lane))) continue;
          for (std::int64_t k = lane; k < size; k += kPanel<T>) panel.get()[k] = T(0);
        }
        store_lanes(t, rows, of_panel.first, of_panel.count, panel.get());
      });
    }
  };

  // The backward pass over one slice of a problem's columns, with its workspace.
  class Slice {
   public:
    Slice(Problem& problem, std::int64_t slice)
        : pass_(problem.pass),
          p_(pass_.p_),
          rows_(problem.rows),
          all_panels_(problem.panels),
          facts_(problem.facts),
          begin_(p_.columns() * slice / pass_.slices_),
          end_(p_.columns() * (slice + 1) / pass_.slices_),
          b_(pass_.block_, p_.width(), pass_.want_.a),
          other_b_(pass_.block_, p_.other_width(), pass_.want_.other_a),
          payload_(pass_.block_, p_.payload_width(), false),
          dz_(pass_.chunk_ * pass_.block_),
          other_dz_(kScores == 2 ? pass_.chunk_ * pass_.block_ : 0),
          weights_(p_.payload.present() ? pass_.chunk_ * pass_.block_ : 0),
          bias_(kModifies || p_.bias.present() ? pass_.chunk_ * pass_.block_ : 0),
          lanes_(pass_.inner_threads_ * lanes_size()),
          sums_(pass_.inner_threads_ * lanes_size()),
          tiles_(kNarrow ? pass_.inner_threads_ * 3 * tile_size() : 0),
          slopes_(kModifies ? pass_.inner_threads_ * tile_size() : 0),
          factors_(has_factors() ? pass_.inner_threads_ * tile_size() : 0),
          kept_(keeps_some(pass_.policy_) ? pass_.inner_threads_ * tile_size() : 0),
          operands_(kNarrow ? pass_.inner_threads_ * tile_size() : 0),
          of_a_(problem.of_a[slice]),
          of_other_a_(problem.of_other_a[slice]),
          of_b_(pass_.want_.b, p_.width(), pass_.chunk_, pass_.block_),
          of_other_b_(pass_.want_.other_b, p_.other_width(), pass_.chunk_, pass_.block_),
          of_payload_(pass_.want_.payload, p_.payload_width(), pass_.chunk_, pass_.block_) {}

    void run() {
      const std::int64_t chunk_panels = pass_.chunk_ / kPanel<T>;
      for (first_ = begin_; first_ < end_; first_ += pass_.block_) {
        columns_ = std::min(pass_.block_, end_ - first_);
        load_block();
        for (std::int64_t i = 0; i < all_panels_; i += chunk_panels) {
          // Skips panels at both ends in which all of these columns are masked.
          std::int64_t begin = i, end = std::min(i + chunk_panels, all_panels_);
          while (begin < end && !touches(begin)) ++begin;
          while (begin < end && !touches(end - 1)) --end;
          first_panel_ = begin, panels_ = end - begin;
          if (panels_ > 0) run_chunk();
        }
        store_block();
      }
    }

   private:
    // Whether some elements are masked.
    bool masks() const { return kModifies || has_mask(p_) || keeps_some(pass_.policy_); }
    bool has_factors() const {
      if constexpr (kModifies) return pass_.m_.has_factors;
      return false;
    }
    bool touches(std::int64_t panel) const {
      const PanelRows<T>& rows = (facts_ + panel)->rows;
      if (!rows.touches(first_, columns_)) return false;
      if constexpr (kModifies) return pass_.m_.touches(rows_, rows.first, rows.count, first_, columns_);
      return true;
    }

    void load_block() {
      for_columns([&](std::int64_t from, std::int64_t count) {
        b_.load(p_.b, rows_, first_, from, count);
        if constexpr (kScores == 2) other_b_.load(p_.other_b, rows_, first_, from, count);
        if (p_.payload.present()) payload_.load(p_.payload, rows_, first_, from, count);
        for (auto* sums : {&of_b_, &of_other_b_, &of_payload_}) {
          for (std::int64_t w = 0; w < sums->width; w += kPanel<T>) {
            std::fill_n(sums->sums + w * pass_.block_ + from * kPanel<T>, count * kPanel<T>, T(0));
          }
        }
      });
      if (masks()) b_.take_non_finite(columns_, b_taken_);
    }

    // Calls f(from, count) for groups of the block's columns, in parallel.
    template <class F>
    void for_columns(F f) {
      const std::int64_t group = 2 * kColumnStep * (pass_.inner_threads_ > 1 ? 1 : 16);
      parallel_for(pass_.inner_threads_, divide_up(columns_, group), [&](std::int64_t task, int) {
        f(task * group, std::min(group, columns_ - task * group));
      });
    }

    void run_chunk() {
      parallel_for(pass_.inner_threads_, panels_, [&](std::int64_t panel, int worker) {
        keep_rows(of_b_, p_.a, panel);
        keep_rows(of_other_b_, p_.other_a, panel);
        keep_rows(of_payload_, pass_.g_.grad_out, panel);
        touches(first_panel_ + panel) ? pull_panel(panel, worker) : clear_panel(panel);
      });
      if (masks()) take_non_finite_rows();
      for_columns([&](std::int64_t from, std::int64_t count) {
        add_column_sums(of_b_, dz_.get(), from, count);
        add_column_sums(of_other_b_, other_dz_.get(), from, count);
        add_column_sums(of_payload_, weights_.get(), from, count);
        if (pass_.want_.bias && pass_.g_.d_bias.stride[3] != 0) add_bias(from, count);
      });
      if (pass_.want_.bias && pass_.g_.d_bias.stride[3] == 0) add_bias(0, columns_);
    }

    void take_non_finite_rows() {
      for (auto* sums : {&of_b_, &of_other_b_, &of_payload_}) {
        constexpr std::int64_t kStep = ColumnSums<T, E>::kStep;
        sums->taken.take(sums->rows.get(), divide_up(sums->width, kPanel<T>) * sums->steps, kStep, kStep);
      }
    }

    // Clears the workspace of a panel in which all columns are masked.
    void clear_panel(std::int64_t panel) {
      for (Scratch<E>* tile : {&dz_, &other_dz_, &weights_}) {
        if (tile->get()) std::fill_n(*tile + panel * tile_size(), columns_ * kPanel<T>, E{});
      }
      const T nothing = kModifies ? -infinity<T>() : T(0);
      if (bias_.get()) std::fill_n(bias_ + panel * tile_size(), columns_ * kPanel<T>, nothing);
    }

    // Clears the lanes beyond the last row. Their scores are 0 times the columns, which is NaN if a column is infinite.
    void clear_lanes_beyond(std::int64_t rows, T* tile) const {
      if (rows == kPanel<T> || !tile) return;
      for (T* column = tile; column != tile + columns_ * kPanel<T>; column += kPanel<T>)
        std::fill(column + rows, column + kPanel<T>, T(0));
    }

    // Recomputes the scores of a panel, turns them into dz (the VJP of each element, pull.h), and adds to d_a.
    void pull_panel(std::int64_t panel, int worker) {
      const PanelFacts<Packs, T>& facts = *(facts_ + first_panel_ + panel);
      const std::int64_t at = panel * tile_size(), first = facts.rows.first, count = facts.rows.count;
      T *dz = tile_of(dz_, at, worker, 0), *other_dz = tile_of(other_dz_, at, worker, 1);
      T* weights = tile_of(weights_, at, worker, 2);
      T* bias = bias_.get() ? bias_ + at : nullptr;
      E *lanes = lanes_ + worker * lanes_size(), *operand = operands_ + worker * tile_size();
      T* room = sums_ + worker * lanes_size();
      load_lanes<T>(p_.a, rows_, first, count, lanes);
      matmul(b_.over_width(), columns_, 1, p_.width(), lanes, dz, false, longest_run<T, E>(p_));
      // Numbers of b that are not finite were taken out of the tile. Scores need them, so their products are added here.
      for (const auto& entry : b_taken_) {
        const E* row = lanes + entry.column / kDepth<E> * kDepth<E> * kPanel<T> + entry.column % kDepth<E>;
        for (int lane = 0; lane < kPanel<T>; ++lane) {
          dz[entry.row * kPanel<T> + lane] += static_cast<T>(widen(row[lane * kDepth<E>])) * entry.value;
        }
      }
      if (kScores == 2 && p_.other_a.present()) {
        load_lanes<T>(p_.other_a, rows_, first, count, lanes);
        matmul(other_b_.over_width(), columns_, 1, p_.other_width(), lanes, other_dz, false,
               longest_run<T, E>(p_));
      }
      if (p_.payload.present()) {
        load_lanes<T>(pass_.g_.grad_out, rows_, first, count, lanes);
        matmul(payload_.over_width(), columns_, 1, p_.payload_width(), lanes, weights, false,
               longest_run<T, E>(p_));
      }
      T* slope = slopes_ + worker * tile_size();
      T* const factors = factors_ + worker * tile_size();
      if constexpr (kModifies) {
        pass_.m_.modify(rows_, first, first_, columns_, {dz, bias, slope, factors});
        if (has_factors() && weights) multiply_factors(factors, columns_, weights);
      } else if (bias) {
        load_bias(p_.bias, rows_, first, count, first_, columns_, bias);
      }

      const T* const kept =
          load_kept(pass_.policy_, rows_, first, count, first_, columns_, kept_ + worker * tile_size());
      const PanelTile<Packs, T> tile{p_, pass_.score_, facts.rows, first_, dz, other_dz, bias, kept};
      with_named(pass_.m_, [&](const auto& m) {
        if constexpr (FoldsTiles<Packs>) {
          m.pull_tile(tile, columns_, dz, other_dz);
        } else if (tile.plain(columns_)) {
          pull_tile<true>(m, tile, facts, dz, other_dz, weights, bias);
        } else {
          pull_tile<false>(m, tile, facts, dz, other_dz, weights, bias);
        }
      });
      if constexpr (kModifies) {
        multiply_slopes(slope, dz);
        if (has_factors() && weights) multiply_factors(factors, columns_, weights);
      }
      for (T* found : {dz, other_dz, weights, kModifies ? nullptr : bias}) clear_lanes_beyond(count, found);
      if (pass_.want_.a) {
        T* sums = of_a_.panel(first_panel_ + panel, room);
        matmul(b_.over_columns(), p_.width(), 1, columns_, as_operand(dz, columns_, operand), sums, true);
        add_non_finite(tile, b_taken_, dz, sums);
        of_a_.keep(first_panel_ + panel, sums);
      }
      if (pass_.want_.other_a) {
        T* sums = of_other_a_.panel(first_panel_ + panel, room);
        matmul(other_b_.over_columns(), p_.other_width(), 1, columns_,
               as_operand(other_dz, columns_, operand), sums, true);
        of_other_a_.keep(first_panel_ + panel, sums);
      }
      if constexpr (kNarrow) {
        if (pass_.want_.b) narrow_rows(dz, columns_, dz_ + at);
        if (pass_.want_.other_b) narrow_rows(other_dz, columns_, other_dz_ + at);
        if (pass_.want_.payload) narrow_rows(weights, columns_, weights_ + at);
      }
    }

    // dz *= slope, the derivative of a modified score. For a masked element it may not be finite, and dz stays 0.
    void multiply_slopes(const T* slope, T* dz) const {
      for (std::int64_t i = 0; i < columns_ * kPanel<T>; i += kLanes<T>) {
        const R of_score = R::load(dz + i);
        select(of_score == R(0), R(0), of_score * R::load(slope + i)).store(dz + i);
      }
    }

    // The memory in which a panel's tile is computed, or null. If E is T, it is the workspace itself. For BFloat16 operands it
    // is a tile of T, which is rounded into the workspace later.
    T* tile_of(const Scratch<E>& workspace, std::int64_t at, int worker, int which) const {
      if (!workspace.get()) return nullptr;
      if constexpr (kNarrow) {
        return tiles_ + (worker * 3 + which) * tile_size();
      } else {
        return workspace + at;
      }
    }

    // In place, dot products become dz, u becomes the weight, and the bias becomes its gradient.
    template <bool kPlain, class Named>
    void pull_tile(const Named& named, const PanelTile<Packs, T>& tile, const PanelFacts<Packs, T>& facts,
                   T* dz, T* other_dz, T* weights, T* bias) const {
      // Local copies, because the compiler can tell that stores do not change these.
      const Named m = named;
      const Score<R> score = pass_.score_;
      typename Packs::Output product[kPacks];
      typename Packs::Upstream upstream[kPacks];
      std::copy_n(facts.product, kPacks, product);
      std::copy_n(facts.upstream, kPacks, upstream);
      const R zero(0), scale(score.scale);
      if constexpr (KnowsProductGradient<Rows, M<T>>) {
        if (weights && p_.whole && tile.rows.few_within(first_, columns_)) {
          R mean[kPacks] = {zero, zero};
          for (std::int64_t j = 0; j < columns_; ++j) {
            for (int half = 0; half < kPacks; ++half) {
              const Element<R> e = tile.template from_dots<kPlain>(j, half);
              const R added = delta_term(m, e, product[half], R::load(weights + tile.at(j, half)));
              mean[half] = mean[half] + (kPlain ? added : select(tile.valid(j, half), added, zero));
            }
          }
          for (int half = 0; half < kPacks; ++half) {
            // A lane beyond the last row has no columns; its mean may be NaN (0 times infinity) and must not be used.
            const Mask<R> keeps_any = facts.rows.begin[half] < facts.rows.end[half];
            upstream[half] = select(keeps_any, facts.product_gradient[half] - mean[half], upstream[half]);
          }
        }
      }
      for (std::int64_t j = 0; j < columns_; ++j) {
        for (int half = 0; half < kPacks; ++half) {
          const std::int64_t at = tile.at(j, half);
          const Element<R> e = tile.template from_dots<kPlain>(j, half);
          const auto keep = [&](R x) { return kPlain ? x : select(tile.valid(j, half), x, zero); };
          const auto slope = [&](const T* dot, R bias) {
            return kPlain ? R(1) : score.slope(R::load(dot + at), bias);
          };
          Gradient<R> gradient{zero, zero};
          if constexpr (PayloadMonoid<Packs>) {
            if (weights) {
              const PayloadPull<R> pulled = pull(m, e, product[half], upstream[half], R::load(weights + at));
              keep(pulled.weight).store(weights + at);
              gradient.score = pulled.score;
            } else {
              gradient = pull(m, e, product[half], upstream[half]);
            }
          } else {
            gradient = pull(m, e, product[half], upstream[half]);
          }
          const R by_dot = keep(gradient.score * slope(dz, tile.bias_at(j, half)));
          if constexpr (kScores == 2) {
            (keep(gradient.other * slope(other_dz, zero)) * scale).store(other_dz + at);
          }
          (by_dot * scale).store(dz + at);
          // tile.valid reads a bool bias. It has no gradient, so it is not overwritten.
          if (!kPlain && pass_.want_.bias) {
            (p_.score.bias_inside ? by_dot : keep(gradient.score)).store(bias + at);
          }
        }
      }
    }

    // Stores the panel's rows with one element of the width per lane, for the products that sum over rows.
    void keep_rows(const ColumnSums<T, E>& sums, const TensorView& t, std::int64_t panel) const {
      if (sums.width == 0) return;
      const PanelRows<T>& rows = (facts_ + first_panel_ + panel)->rows;
      load_widths<T>(t, rows_, pass_.policy_, rows.first, rows.count, sums.steps * sums.kStep,
                     sums.rows + panel * kPanel<T> * kPanel<T>);
    }

    // sums[column][width] += sum over the chunk's rows of dz (or weight) times the row.
    void add_column_sums(const ColumnSums<T, E>& sums, const E* dz, std::int64_t from,
                         std::int64_t count) const {
      const std::int64_t step = pass_.block_ * kPanel<T>;
      for (std::int64_t w = 0; w < round_up(sums.width, kPanel<T>); w += kPanel<T>) {
        matmul<T, E>({dz + from * kPanel<T>, kPanel<T>, kDepth<E>, step}, count, panels_, kPanel<T>,
                     sums.rows + w / kPanel<T> * sums.steps * sums.kStep,
                     sums.sums + w * pass_.block_ + from * kPanel<T>, true);
      }
      add_non_finite_rows(sums, dz, from, count);
    }

    // Adds the products of the numbers that were taken out of the rows. `row` of an entry counts steps of kDepth rows,
    // through all width panels; `column` is lane * kDepth + the row within the step.
    void add_non_finite_rows(const ColumnSums<T, E>& sums, const E* dz, std::int64_t from,
                             std::int64_t count) const {
      for (const auto& entry : sums.taken) {
        const std::int64_t row = entry.row % sums.steps * kDepth<E> + entry.column % kDepth<E>;
        const E* of_row = dz + row / kPanel<T> * tile_size() + row % kPanel<T>;
        T* to = sums.sums + entry.row / sums.steps * kPanel<T> * pass_.block_ + entry.column / kDepth<E>;
        for (std::int64_t j = from; j < from + count; ++j) {
          if (!keeps(first_panel_ * kPanel<T> + row, first_ + j)) continue;
          to[j * kPanel<T>] += static_cast<T>(widen(of_row[j * kPanel<T>])) * entry.value;
        }
      }
    }

    bool keeps(std::int64_t row, std::int64_t column) const {
      const std::int64_t position = rows_.position(row);
      if (column < p_.range.begin(position) || column >= p_.range.end(position, p_.columns())) return false;
      if constexpr (kModifies) {
        const std::int64_t in_chunk = row - first_panel_ * kPanel<T>;
        return *(bias_ + in_chunk / kPanel<T> * tile_size() + (column - first_) * kPanel<T> +
                 in_chunk % kPanel<T>) == T(0);
      }
      if constexpr (KeepsElements<Rows>) {
        if (pass_.policy_.kept.some() && !pass_.policy_.kept(rows_.flat(row), column)) return false;
      }
      if (!has_bool_bias(p_)) return true;
      return static_cast<const bool*>(p_.bias.data)[rows_.offset(p_.bias, row) + column * p_.bias.stride[3]];
    }

    void add_bias(std::int64_t from, std::int64_t count) const {
      const TensorView& t = pass_.g_.d_bias;
      const std::int64_t first = first_panel_ * kPanel<T>;
      const std::int64_t chunk_rows = std::min(panels_ * kPanel<T>, rows_.count() - first);
      for (std::int64_t row = 0, rows = 0; row < chunk_rows; row += rows) {
        // If the panel's rows share a bias, their gradients are summed first.
        const std::int64_t last = std::min(row - row % kPanel<T> + kPanel<T>, chunk_rows) - 1;
        const bool shared = t.stride[2] == 0 && rows_.head(first + row) == rows_.head(first + last);
        rows = shared ? last - row + 1 : 1;
        T* to = static_cast<T*>(t.data) + rows_.offset(t, first + row) + (first_ + from) * t.stride[3];
        const T* gradient = bias_ + row / kPanel<T> * tile_size() + from * kPanel<T> + row % kPanel<T>;
        for (std::int64_t j = 0; j < count; ++j) {
          T sum = gradient[j * kPanel<T>];
          for (std::int64_t lane = 1; lane < rows; ++lane) sum += gradient[j * kPanel<T> + lane];
          to[j * t.stride[3]] += sum;
        }
      }
    }

    void store_block() {
      for_columns([&](std::int64_t from, std::int64_t count) {
        store_sums(pass_.g_.d_b, of_b_, from, count);
        store_sums(pass_.g_.d_other_b, of_other_b_, from, count);
        store_sums(pass_.g_.d_payload, of_payload_, from, count);
      });
    }
    void store_sums(const TensorView& t, const ColumnSums<T, E>& sums, std::int64_t from,
                    std::int64_t count) const {
      for (std::int64_t w = 0; w < sums.width; w += kPanel<T>) {
        store_panel(t, rows_.column_offset(t, first_ + from) + w * t.stride[3], t.stride[2], t.stride[3],
                    count, std::min<std::int64_t>(kPanel<T>, sums.width - w),
                    sums.sums + w * pass_.block_ + from * kPanel<T>);
      }
    }

    std::int64_t tile_size() const { return pass_.block_ * kPanel<T>; }
    std::int64_t lanes_size() const {
      return (std::max({p_.width(), p_.other_width(), p_.payload_width()}) + 1) * kPanel<T>;
    }

    const Backward& pass_;
    const FoldProblem& p_;
    const ProblemRows& rows_;
    const std::int64_t all_panels_;
    const Scratch<PanelFacts<Packs, T>>& facts_;
    const std::int64_t begin_, end_;          // the columns of the slice
    ColumnTile<T, E> b_, other_b_, payload_;  // the block's columns
    NonFinite<T> b_taken_;
    Scratch<E> dz_, other_dz_, weights_;  // the workspace of a chunk: [panel][column][kPanel]
    // The same shape: the bias, then its gradient. If M modifies scores, the mask (0 or -inf).
    Scratch<T> bias_;
    // Each worker has its own part of the following.
    Scratch<E> lanes_;     // a panel of rows
    Scratch<T> sums_;      // a panel of row sums
    Scratch<T> tiles_;     // dz, other_dz and weights before they are rounded
    Scratch<T> slopes_;    // derivatives of modified scores, times the scale
    Scratch<T> factors_;   // factors of the weights
    Scratch<T> kept_;      // 0, or -inf where a row does not keep an element
    Scratch<E> operands_;  // dz as an operand of d_a's product
    const RowSums<T>&of_a_, &of_other_a_;
    ColumnSums<T, E> of_b_, of_other_b_, of_payload_;
    std::int64_t first_ = 0, columns_ = 0;       // the block of columns
    std::int64_t first_panel_ = 0, panels_ = 0;  // the chunk of rows
  };

  const Packs m_;
  const FoldProblem& p_;
  const Rows& policy_;
  const FoldGradients& g_;
  const Wanted want_;
  const Score<R> score_;
  std::int64_t problems_, block_, chunk_;
  // Threads over problems; slices of a problem's columns, a thread each; threads within a slice.
  int outer_threads_, slices_ = 1, inner_threads_;
};

// Computes the gradients that are present in g, from recomputed scores and from the policy's P_i and upstream gradients.
template <template <class> class M, class T, class Rows>
void fold_backward(const M<T>& m, const FoldProblem& p, const Rows& policy, const FoldGradients& g,
                   int threads) {
  with_operand<T>(p, g.grad_out, [&](auto* operand) {
    using E = std::remove_pointer_t<decltype(operand)>;
    Backward<M, T, E, Rows>(m, p, policy, g, threads).run();
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

// Forward on the CPU: see cpu/fold.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/cpu/matmul.h"
#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/cpu/thread_pool.h"
#include "monoidreduce/traits.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// Folds a tile into the panel's states. With a payload, scores become weights in place, and `scale` becomes the factor that
// rescales the payload's sums so far. Masked elements are skipped.
template <bool kPlain, class M, class Tile, class T>
inline void fold_panel(const M& m, const Tile& tile, std::int64_t columns, typename M::State (&state)[kPacks],
                       T* scores, T* other_scores, bool payload, LanePack<T> (&scale)[kPacks]) {
  using R = LanePack<T>;
  if constexpr (FramedMonoid<M>) {
    constexpr bool kMoving = !std::is_empty_v<typename M::Frame>;
    if constexpr (kMoving) {
      typename M::Frame frame[kPacks];
      for (int half = 0; half < kPacks; ++half) frame[half] = m.frame_of(state[half]);
      for (std::int64_t j = 0; j < columns; ++j) {
        for (int half = 0; half < kPacks; ++half) {
          const Element<R> e = tile.template from_dots<kPlain>(j, half);
          e.score.store(scores + tile.at(j, half));
          if constexpr (M::kScores == 2) e.other.store(other_scores + tile.at(j, half));
          const typename M::Frame joined = m.join(frame[half], m.frame(e));
          frame[half] = kPlain ? joined : select_words<T>(tile.valid(j, half), joined, frame[half]);
        }
      }
      for (int half = 0; half < kPacks; ++half) {
        if constexpr (PayloadMonoid<M>) scale[half] = m.rescale(m.frame_of(state[half]), frame[half]);
        state[half] = m.reframe(state[half], frame[half]);
      }
    }
    // The tile has a state of its own, which is combined once: a sum of tiles' sums is more accurate than one long sum.
    typename M::State sum[kPacks];
    for (int half = 0; half < kPacks; ++half) sum[half] = m.reframe(m.identity(), m.frame_of(state[half]));
    for (std::int64_t j = 0; j < columns; ++j) {
      for (int half = 0; half < kPacks; ++half) {
        const Element<R> e = kMoving ? tile.from_scores(j, half) : tile.template from_dots<kPlain>(j, half);
        const typename M::State added = m.accumulate(sum[half], e);
        if constexpr (PayloadMonoid<M>) {
          if (payload) {
            const R weight = m.weight(e, m.frame_of(sum[half]));
            (kPlain ? weight : select(tile.valid(j, half), weight, R(0))).store(scores + tile.at(j, half));
          }
        }
        sum[half] = kPlain ? added : select_words<T>(tile.valid(j, half), added, sum[half]);
      }
    }
    for (int half = 0; half < kPacks; ++half) state[half] = combine(m, state[half], sum[half]);
  } else {
    for (std::int64_t j = 0; j < columns; ++j) {
      for (int half = 0; half < kPacks; ++half) {
        const typename M::State combined =
            combine(m, state[half], m.lift(tile.template from_dots<kPlain>(j, half)));
        state[half] = kPlain ? combined : select_words<T>(tile.valid(j, half), combined, state[half]);
      }
    }
  }
}

// The tile: a panel of rows by a number of columns. The columns stay in the L2 cache while a block of panels passes over them;
// a panel of scores stays in L1. E: the operand type of the matrix products.
template <class T, class E>
TileSize forward_tile(const FoldProblem& p) {
  const std::int64_t column_bytes = (p.width() + p.other_width() + p.payload_width()) * sizeof(E);
  const std::int64_t steps = 192 * 1024 / std::max<std::int64_t>(column_bytes, 1) / kColumnStep;
  return {kPanel<T>, std::clamp(steps, std::int64_t(2), 120 / kColumnStep) * kColumnStep};
}

// E: the operand type of the matrix products, T or BFloat16.
template <template <class> class M, class T, class E, class Rows>
  requires(Monoid<M<T>> || FoldsTiles<M<T>>) && RowPolicy<Rows, M<T>>
class Forward {
  using R = LanePack<T>;
  using Packs = M<R>;
  using State = typename Packs::State;

 public:
  Forward(const M<T>& m, const FoldProblem& p, const Rows& policy, const FoldOutput& out, int threads)
      : m_(as_packs<M, T>(m)), p_(p), policy_(policy), out_(out), threads_(threads), score_(p.score) {
    const std::int64_t panel_bytes = (p.width() + p.other_width()) * kPanel<T> * sizeof(E);
    problems_ = p.batch() * p.column_heads();
    panels_ = divide_up(p.heads() / std::max<std::int64_t>(p.column_heads(), 1) * p.rows(), kPanel<T>);
    columns_ = forward_tile<T, E>(p).columns;
    // A tile of columns is loaded for a block of up to 16 panels, if these fit into the caches. If that gives too few tasks for
    // the threads, the columns are split into slices, one per task, and the slices' states are combined in order (split-KV).
    // Each thread then reads only a part of the columns, instead of all of them for a few rows.
    const std::int64_t tasks = threads > 1 ? 2 * threads : 1;
    const std::int64_t most_splits = std::clamp(p.columns() / (2 * columns_), std::int64_t(1), tasks);
    const std::int64_t most_panels = std::clamp(
        (std::int64_t(1) << 21) / std::max<std::int64_t>(panel_bytes, 1), std::int64_t(1), std::int64_t(16));
    block_ = std::clamp(divide_up(problems_ * panels_ * most_splits, tasks), std::int64_t(1), most_panels);
    blocks_ = divide_up(panels_, block_);
    splits_ = std::clamp(divide_up(tasks, std::max<std::int64_t>(problems_ * blocks_, 1)), std::int64_t(1),
                         most_splits);
  }

  void run() {
    if (problems_ * panels_ == 0) return;
    const std::int64_t partials = splits_ > 1 ? problems_ * panels_ * splits_ : 0;
    Scratch<State> states(partials * kPacks);
    Scratch<T> payloads(partials * p_.payload_width() * kPanel<T>);
    parallel_for(threads_, problems_ * blocks_ * splits_, [&](std::int64_t task, int) {
      fold_block(task / splits_ / blocks_, task / splits_ % blocks_, task % splits_, states.get(),
                 payloads.get());
    });
    if (splits_ == 1) return;
    parallel_for(threads_, problems_ * panels_, [&](std::int64_t panel, int) {
      State* state = states + panel * splits_ * kPacks;
      T* payload = payloads + panel * splits_ * p_.payload_width() * kPanel<T>;
      for (std::int64_t split = 1; split < splits_; ++split) {
        merge(state, payload, state + split * kPacks, payload + split * p_.payload_width() * kPanel<T>);
      }
      finish(ProblemRows(p_, panel / panels_), panel % panels_ * kPanel<T>, state, payload);
    });
  }

 private:
  void fold_block(std::int64_t problem, std::int64_t block, std::int64_t split, State* partial_states,
                  T* partial_payloads) {
    const std::int64_t width = p_.width(), other_width = p_.other_width(), payload_width = p_.payload_width();
    const ProblemRows rows(p_, problem);
    const std::int64_t first_panel = block * block_, panels = std::min(block_, panels_ - first_panel);
    const std::int64_t panel_size = round_up(width, kDepth<E>) * kPanel<T>;
    const std::int64_t other_panel_size = round_up(other_width, kDepth<E>) * kPanel<T>;
    Scratch<E> a(panels * panel_size), other_a(panels * other_panel_size);
    Scratch<T> payload_sums(panels * payload_width * kPanel<T>);
    ColumnTile<T, E> b(columns_, width, false), other_b(columns_, other_width, false);
    ColumnTile<T, E> payload(columns_, payload_width, true);
    Scratch<E> weights(kDepth<E> > 1 ? columns_ * kPanel<T> : 0);
    Scratch<T> scores(columns_ * kPanel<T>), other_scores(columns_ * kPanel<T>), bias(columns_ * kPanel<T>);
    Scratch<T> factors(has_factors() ? columns_ * kPanel<T> : 0);
    Scratch<T> kept(keeps_some(policy_) ? columns_ * kPanel<T> : 0);
    Scratch<State> states(panels * kPacks);
    NonFinite<T> taken;
    for (std::int64_t i = 0; i < panels; ++i) {
      const std::int64_t first = (first_panel + i) * kPanel<T>,
                         count = std::min<std::int64_t>(kPanel<T>, rows.count() - first);
      load_lanes<T>(p_.a, rows, first, count, a + i * panel_size);
      if constexpr (Packs::kScores == 2)
        load_lanes<T>(p_.other_a, rows, first, count, other_a + i * other_panel_size);
      std::fill_n(payload_sums + i * payload_width * kPanel<T>, payload_width * kPanel<T>, T(0));
      for (int half = 0; half < kPacks; ++half) states.get()[i * kPacks + half] = m_.identity();
    }
    const std::int64_t slice = round_up(divide_up(p_.columns(), splits_), columns_);
    const std::int64_t end = std::min(p_.columns(), (split + 1) * slice);
    for (std::int64_t j = split * slice; j < end; j += columns_) {
      const std::int64_t count = std::min(columns_, end - j);
      bool loaded = false;
      for (std::int64_t i = 0; i < panels; ++i) {
        const PanelRows<T> panel_rows(p_, rows, (first_panel + i) * kPanel<T>, policy_, false);
        if (!panel_rows.touches(j, count)) continue;
        if constexpr (ModifiesScores<Packs>) {
          if (!m_.touches(rows, panel_rows.first, panel_rows.count, j, count)) continue;
        }
        if (!loaded) {
          b.load(p_.b, rows, j, 0, count);
          if constexpr (Packs::kScores == 2) other_b.load(p_.other_b, rows, j, 0, count);
          if (payload_width) {
            payload.load(p_.payload, rows, j, 0, count);
            if (ModifiesScores<Packs> || has_mask(p_)) payload.take_non_finite(count, taken);
          }
          loaded = true;
        }
        if (p_.bias.present())
          load_bias(p_.bias, rows, panel_rows.first, panel_rows.count, j, count, bias.get());
        matmul(b.over_width(), count, 1, width, a + i * panel_size, scores.get(), false,
               longest_run<T, E>(p_));
        if (Packs::kScores == 2 && p_.other_a.present()) {
          matmul(other_b.over_width(), count, 1, other_width, other_a + i * other_panel_size,
                 other_scores.get(), false, longest_run<T, E>(p_));
        }
        if constexpr (ModifiesScores<Packs>)
          m_.modify(rows, panel_rows.first, j, count, {scores.get(), bias.get(), nullptr, factors.get()});
        const PanelTile<Packs, T> tile{
            p_,
            score_,
            panel_rows,
            j,
            scores.get(),
            other_scores.get(),
            ModifiesScores<Packs> || p_.bias.present() ? bias.get() : nullptr,
            load_kept(policy_, rows, panel_rows.first, panel_rows.count, j, count, kept.get())};
        State(&state)[kPacks] = *reinterpret_cast<State(*)[kPacks]>(states + i * kPacks);
        R scale[kPacks] = {R(1), R(1)};
        with_named(m_, [&](const auto& m) {
          if (tile.plain(count)) {
            fold_panel<true>(m, tile, count, state, scores.get(), other_scores.get(), payload_width != 0,
                             scale);
          } else {
            fold_panel<false>(m, tile, count, state, scores.get(), other_scores.get(), payload_width != 0,
                              scale);
          }
        });
        if (payload_width) {
          T* sums = payload_sums + i * payload_width * kPanel<T>;
          rescale_payload(sums, scale);
          if constexpr (ModifiesScores<Packs>) {
            if (has_factors()) multiply_factors(factors.get(), count, scores.get());
          }
          matmul(payload.over_columns(), payload_width, 1, count,
                 as_operand(scores.get(), count, weights.get()), sums, true);
          add_non_finite(tile, taken, scores.get(), sums);
        }
      }
    }
    for (std::int64_t i = 0; i < panels; ++i) {
      State* state = states + i * kPacks;
      T* sums = payload_sums + i * payload_width * kPanel<T>;
      if (splits_ == 1) {
        finish(rows, (first_panel + i) * kPanel<T>, state, sums);
      } else {
        const std::int64_t slot = (problem * panels_ + first_panel + i) * splits_ + split;
        std::copy_n(state, kPacks, partial_states + slot * kPacks);
        std::copy_n(sums, payload_width * kPanel<T>, partial_payloads + slot * payload_width * kPanel<T>);
      }
    }
  }

  // Whether the weights that multiply the payload have factors (dropout).
  bool has_factors() const {
    if constexpr (ModifiesScores<Packs>) return m_.has_factors;
    return false;
  }

  void rescale_payload(T* sums, const R (&scale)[kPacks]) const {
    if (!(any(scale[0] != R(1)) || any(scale[1] != R(1)))) return;
    for (std::int64_t d = 0; d < p_.payload_width(); ++d) {
      for (int half = 0; half < kPacks; ++half) {
        T* sum = sums + d * kPanel<T> + half * kLanes<T>;
        (R::load(sum) * scale[half]).store(sum);
      }
    }
  }

  // state, payload <- combine(state, payload; other state, other payload), for a panel of rows.
  void merge(State* state, T* payload, const State* other, const T* other_payload) const {
    for (int half = 0; half < kPacks; ++half) {
      const State combined = combine(m_, state[half], other[half]);
      if constexpr (PayloadMonoid<Packs>) {
        const R mine = m_.rescale(m_.frame_of(state[half]), m_.frame_of(combined));
        const R theirs = m_.rescale(m_.frame_of(other[half]), m_.frame_of(combined));
        for (std::int64_t d = 0; d < p_.payload_width(); ++d) {
          const std::int64_t at = d * kPanel<T> + half * kLanes<T>;
          (R::load(payload + at) * mine + R::load(other_payload + at) * theirs).store(payload + at);
        }
      }
      state[half] = combined;
    }
  }

  // The scores of the sinks of the rows in a pack.
  R sinks_of(const ProblemRows& rows, std::int64_t first) const {
    T sinks[kLanes<T>] = {};
    for (int lane = 0; lane < kLanes<T> && first + lane < rows.count(); ++lane)
      sinks[lane] = policy_.sink(rows.head(first + lane));
    return R::load(sinks);
  }

  void finish(const ProblemRows& rows, std::int64_t first, const State* state, T* sums) const {
    for (int half = 0; half < kPacks; ++half) {
      State whole = state[half];
      R scale(1);
      if constexpr (RowsWithSinks<Rows, M<T>>) {
        if (policy_.has_sinks()) scale = join_sink(m_, whole, sinks_of(rows, first + half * kLanes<T>));
      }
      if constexpr (PayloadMonoid<Packs>) {
        if constexpr (Packs::kNormalized)
          scale = scale * select(m_.mass(whole) == R(0), R(0), R(1) / m_.mass(whole));
      }
      const typename Packs::Output product = m_.project(whole);
      for (std::int64_t d = 0; d < p_.payload_width(); ++d) {
        T* sum = sums + d * kPanel<T> + half * kLanes<T>;
        (R::load(sum) * scale + (p_.out_bias.present() ? R(load_one<T>(p_.out_bias, d)) : R(0))).store(sum);
      }
      for (int lane = 0; lane < kLanes<T>; ++lane) {
        const std::int64_t row = first + half * kLanes<T> + lane;
        if (row >= rows.count()) break;
        policy_.store(rows.flat(row), lane_of<T, typename M<T>::Output>(product, lane));
      }
    }
    if (p_.payload_width()) {
      const std::int64_t count = std::min<std::int64_t>(kPanel<T>, rows.count() - first);
      store_lanes(out_.out, rows, first, count, sums);
      if (out_.low.present()) {
        with_element_type(out_.out.dtype, [&](auto* type) {
          using Out = std::remove_pointer_t<decltype(type)>;
          for (std::int64_t n = 0; n < p_.payload_width() * kPanel<T>; ++n)
            sums[n] = low_word(sums[n], static_cast<T>(widen(narrow<Out>(sums[n]))));
        });
        store_lanes(out_.low, rows, first, count, sums);
      }
    }
  }

  const Packs m_;
  const FoldProblem& p_;
  const Rows& policy_;
  const FoldOutput& out_;
  const int threads_;
  const Score<R> score_;
  std::int64_t problems_, panels_, columns_, block_, blocks_, splits_;
};

// Folds every row, passes P_i to policy.store(), and writes the payload's fold to out ([B, H, M, D]; absent without a payload).
template <template <class> class M, class T, class Rows>
void fold_forward(const M<T>& m, const FoldProblem& p, const Rows& policy, const FoldOutput& out,
                  int threads) {
  with_operand<T>(p, {}, [&](auto* operand) {
    using E = std::remove_pointer_t<decltype(operand)>;
    Forward<M, T, E, Rows>(m, p, policy, out, threads).run();
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

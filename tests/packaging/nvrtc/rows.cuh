// Row policies (traits.h) for any monoid, for test_nvrtc.py.
#pragma once

#include <cstdint>

#include "monoidreduce/math.h"
#include "monoids.cuh"

namespace user {

// Of the SIMT kernels.
template <class M>
struct Rows {
  typename M::Output* products;
  const typename M::Upstream* upstreams;
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD void store(std::int64_t row, typename M::Output p) const { products[row] = p; }
  MR_HD typename M::Output product(std::int64_t row) const { return products[row]; }
  MR_HD typename M::Upstream upstream(std::int64_t row) const { return upstreams[row]; }
};

// P_i as numbers, of kernels of monoids.
template <class R>
struct LogMeanExpFields {
  using Output = typename LogMeanExp<R>::Output;
  static constexpr int kGradients = 1, kReals = 2, kIndices = 0;
  MR_HD static void unpack(const Output& p, auto& real, auto&) { real[0] = p.value, real[1] = p.count; }
  MR_HD static Output pack(const auto& real, const auto&) { return {real[0], real[1]}; }
  MR_HD static R upstream(const auto& g) { return g[0]; }
};

// Of the resident kernels' forward pass.
template <class M>
struct ResidentRows {
  static constexpr bool kLowWords = false;
  typename M::Output* products;
  const float* sinks;
  MR_HD bool has_sinks() const { return sinks != nullptr; }
  MR_HD typename M::Real sink(std::int64_t head) const { return sinks[head]; }
  MR_HD void store(std::int64_t row, int, typename M::Output p, bool right) const {
    if (right) products[row] = p;
  }
  template <int kSize>
  MR_HD void output(float (&)[kSize]) const {}
  template <int kSize>
  MR_HD void output_of(float (&)[kSize], int) const {}
};

// Of rows that are computed again.
template <class M>
struct RepairedRows {
  typename M::Output* products;
  const typename M::Upstream* upstreams;
  MR_HD bool marked(std::int64_t row) const { return row % 2 == 0; }
  MR_HD void store(std::int64_t row, typename M::Output p) const { products[row] = p; }
  MR_HD typename M::Output product(std::int64_t row) const { return products[row]; }
  MR_HD typename M::Upstream upstream(std::int64_t row) const { return upstreams[row]; }
};

// Of the contraction's fold.
template <class M>
struct FoldRows {
  M m;
  typename M::Output* products;
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD void store(std::int64_t row, typename M::State s) const { products[row] = m.project(s); }
  MR_HD void skip(std::int64_t row) const { products[row] = m.project(m.identity()); }
};

// Of the contraction's local gradients.
template <class M>
struct GradientRows {
  const typename M::Output* products;
  const typename M::Upstream* upstreams;
  MR_HD int label(std::int64_t) const { return -1; }
  MR_HD typename M::Output product(std::int64_t row) const { return products[row]; }
  MR_HD bool far(typename M::Output) const { return false; }
  MR_HD typename M::Upstream upstream(std::int64_t row, typename M::Real unit) const {
    return upstreams[row] * unit;
  }
};

// Of the conversion of stored weights.
template <class Terms>
struct KeptRows {
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD Terms terms(std::int64_t) const { return {}; }
};

// Of stored scores.
struct JsdMath {
  MR_HD static float exp2(float x) { return ::exp2f(x); }
  MR_HD static float log2(float x) { return ::log2f(x); }
  MR_HD static unsigned pack(float low, float high) { return low < high; }
};

}  // namespace user

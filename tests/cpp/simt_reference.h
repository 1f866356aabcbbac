// The oracle of the SIMT tests: the fold and its gradients by their definitions, one element after another, in double on the
// host.
#pragma once

#include <vector>

#include "monoidreduce/fold.h"
#include "monoidreduce/monoid.h"
#include "monoidreduce/pull.h"

namespace monoidreduce::test {

inline double& at(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t k) {
  return static_cast<double*>(t.data)[b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + k * t.stride[3]];
}

// One element in range, and what its score was computed from.
struct ReferenceElement {
  Element<double> element;
  double dot, other_dot, bias;
};

// The unmasked elements of one row. bias_excludes: the bias is a mask, 0 for a masked element, and is not added.
inline std::vector<ReferenceElement> elements_of(const FoldProblem& p, bool bias_excludes, std::int64_t label,
                                                 std::int64_t b, std::int64_t h, std::int64_t i) {
  const std::int64_t hc = h / (p.heads() / p.column_heads());
  const Score<double> score(p.score);
  std::vector<ReferenceElement> elements;
  for (std::int64_t j = p.range.begin(i); j < p.range.end(i, p.columns()); ++j) {
    if (bias_excludes && at(p.bias, b, h, i, j) == 0) continue;
    ReferenceElement e{
        {0, 0, j, label}, 0, 0, p.bias.present() && !bias_excludes ? at(p.bias, b, h, i, j) : 0};
    for (std::int64_t k = 0; k < p.width(); ++k) e.dot += at(p.a, b, h, i, k) * at(p.b, b, hc, j, k);
    for (std::int64_t k = 0; k < p.other_width(); ++k)
      e.other_dot += at(p.other_a, b, h, i, k) * at(p.other_b, b, hc, j, k);
    e.element.score = score.value(e.dot, e.bias);
    if (p.other_a.present()) e.element.other = score.value(e.other_dot, 0.);
    elements.push_back(e);
  }
  return elements;
}

template <class Visit>
void for_each_row(const FoldProblem& p, Visit visit) {
  std::int64_t flat = 0;
  for (std::int64_t b = 0; b < p.batch(); ++b) {
    for (std::int64_t h = 0; h < p.heads(); ++h) {
      for (std::int64_t i = 0; i < p.rows(); ++i) visit(flat++, b, h, i);
    }
  }
}

// out: [B, H, M, D] with a payload.
template <bool kPayload, class M, class Rows>
void reference_forward(const M& m, const FoldProblem& p, bool bias_excludes, const Rows& rows,
                       const TensorView& out) {
  for_each_row(p, [&](std::int64_t flat, std::int64_t b, std::int64_t h, std::int64_t i) {
    const auto elements = elements_of(p, bias_excludes, rows.label(flat), b, h, i);
    auto state = m.identity();
    for (const auto& e : elements) state = combine(m, state, m.lift(e.element));
    rows.store(flat, m.project(state));
    if constexpr (kPayload) {
      const std::int64_t hc = h / (p.heads() / p.column_heads());
      for (std::int64_t d = 0; d < p.payload_width(); ++d) {
        double sum = 0;
        for (const auto& e : elements) {
          sum += m.weight(e.element, m.frame_of(state)) * at(p.payload, b, hc, e.element.column, d);
        }
        if (M::kNormalized) sum = m.mass(state) == 0 ? 0 : sum / m.mass(state);
        at(out, b, h, i, d) = sum;
      }
    }
  });
}

// Adds to all gradients in g.
template <bool kPayload, class M, class Rows>
void reference_backward(const M& m, const FoldProblem& p, bool bias_excludes, const Rows& rows,
                        const FoldGradients& g) {
  const Score<double> score(p.score);
  for_each_row(p, [&](std::int64_t flat, std::int64_t b, std::int64_t h, std::int64_t i) {
    if (!rows.active(flat)) return;
    const std::int64_t hc = h / (p.heads() / p.column_heads());
    const auto product = rows.product(flat);
    const auto upstream = rows.upstream(flat);
    for (const auto& e : elements_of(p, bias_excludes, rows.label(flat), b, h, i)) {
      const std::int64_t j = e.element.column;
      Gradient<double> d{};
      if constexpr (kPayload) {
        double u = 0;
        if (g.grad_out.present()) {
          for (std::int64_t k = 0; k < p.payload_width(); ++k)
            u += at(g.grad_out, b, h, i, k) * at(p.payload, b, hc, j, k);
        }
        const auto pulled = pull(m, e.element, product, upstream, u);
        d.score = pulled.score;
        if (g.d_payload.present() && g.grad_out.present()) {
          for (std::int64_t k = 0; k < p.payload_width(); ++k) {
            at(g.d_payload, b, hc, j, k) += pulled.weight * at(g.grad_out, b, h, i, k);
          }
        }
      } else {
        d = pull(m, e.element, product, upstream);
      }
      const double slope = score.slope(e.dot, e.bias), other_slope = score.slope(e.other_dot, 0.);
      if (g.d_bias.present()) at(g.d_bias, b, h, i, j) += score.bias_inside ? d.score * slope : d.score;
      for (std::int64_t k = 0; k < p.width(); ++k) {
        if (g.d_a.present()) at(g.d_a, b, h, i, k) += score.scale * slope * d.score * at(p.b, b, hc, j, k);
        if (g.d_b.present()) at(g.d_b, b, hc, j, k) += score.scale * slope * d.score * at(p.a, b, h, i, k);
      }
      for (std::int64_t k = 0; k < p.other_width(); ++k) {
        if (g.d_other_a.present())
          at(g.d_other_a, b, h, i, k) += score.scale * other_slope * d.other * at(p.other_b, b, hc, j, k);
        if (g.d_other_b.present())
          at(g.d_other_b, b, hc, j, k) += score.scale * other_slope * d.other * at(p.other_a, b, h, i, k);
      }
    }
  });
}

}  // namespace monoidreduce::test

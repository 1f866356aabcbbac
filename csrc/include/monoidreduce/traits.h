// What kernels ask of the types that they are templates over, beside the monoid (monoid.h).
#pragma once

#include <concepts>
#include <cstdint>

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// What an operator defines for each of its rows. row is the flat index over [B, H, M].
template <class P, class M>
concept RowPolicy = requires(const P p, std::int64_t row, typename M::Output output) {
  // Backward skips a row that is not active: all its gradients are 0.
  { p.active(row) } -> std::same_as<bool>;
  { p.label(row) } -> std::same_as<std::int64_t>;  // Element::label
  p.store(row, output);  // forward: store P_i, and the operator's results made of it
  { p.product(row) } -> std::same_as<typename M::Output>;  // backward: P_i
  // Backward: the gradient with respect to P_i (with a payload, see pull()).
  { p.upstream(row) } -> std::same_as<typename M::Upstream>;
};

// A row policy that also knows g_i, the gradient with respect to P_i without the part of the payload (see pull()).
template <class P, class M>
concept KnowsProductGradient = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t row) {
  { p.of_product(row) } -> std::same_as<typename M::Real>;
};

}  // namespace monoidreduce

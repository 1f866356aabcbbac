// Backward preprocess of attention: g_lse - delta of each row, which the code calls the row's centre.
#pragma once

#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/cpu/thread_pool.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// For each row: of_lse = grad_lse, or 0 if it is absent; centre = grad_lse - delta, with delta = <grad_out, out + out_low>.
template <class T>
void row_centres(const TensorView& grad_out, const TensorView& grad_lse, const TensorView& out,
                 const TensorView& out_low, int threads, T* of_lse, T* centre) {
  const std::int64_t heads = out.size[1], rows = out.size[2], width = out.size[3];
  const auto at = [](const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t i) {
    return b * t.stride[0] + h * t.stride[1] + i * t.stride[2];
  };
  parallel_for(threads, out.size[0] * heads, [&](std::int64_t problem, int) {
    const std::int64_t b = problem / heads, h = problem % heads;
    Scratch<T> product(width), low(width), grad(width);
    std::fill_n(low.get(), width, T(0));
    for (std::int64_t i = 0; i < rows; ++i) {
      T sum = 0;
      double dot = 0;
      if (grad_lse.present()) load_row(grad_lse, at(grad_lse, b, h, i), 1, 1, &sum, 1);
      if (grad_out.present()) {
        load_row(out, at(out, b, h, i), out.stride[3], width, product.get(), 1);
        if (out_low.present())
          load_row(out_low, at(out_low, b, h, i), out_low.stride[3], width, low.get(), 1);
        load_row(grad_out, at(grad_out, b, h, i), grad_out.stride[3], width, grad.get(), 1);
        for (std::int64_t d = 0; d < width; ++d)
          dot += (double{product.get()[d]} + low.get()[d]) * grad.get()[d];
      }
      of_lse[problem * rows + i] = sum;
      centre[problem * rows + i] = static_cast<T>(sum - dot);
    }
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

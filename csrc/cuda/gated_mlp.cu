// The elementwise steps between the matrix products of a gated MLP, each in one pass over memory.
#include "monoidreduce/ops/gated_mlp.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "monoidreduce/launch/launch_kernel.cuh"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kVector = 8;  // kVector: elements of a thread

template <class T>
struct alignas(16) Vector {
  T elements[kVector];

  // left: how many elements exist from `from` on.
  __device__ static Vector load(const T* from, std::int64_t left) {
    if (left >= kVector) return *reinterpret_cast<const Vector*>(from);
    Vector v{};
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      if (k < left) v.elements[k] = from[k];
    return v;
  }
  __device__ void store(T* to, std::int64_t left) const {
    if (left >= kVector) {
      *reinterpret_cast<Vector*>(to) = *this;
      return;
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      if (k < left) to[k] = elements[k];
  }
};

// ups = activation(gates) * ups, elementwise. gates, ups: [count] of type T, computed in R.
template <class T, class R>
__global__ void __launch_bounds__(kThreads)
    gated_hidden_kernel(const T* gates, T* ups, std::int64_t count, ActivationKind kind) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  const std::int64_t left = count - first;
  if (left <= 0) return;
  const auto gate = Vector<T>::load(gates + first, left);
  auto up = Vector<T>::load(ups + first, left);
  with_activation(kind, [&](auto activation) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const GatedUnit<decltype(activation), R> unit{R(gate.elements[k]), R(up.elements[k])};
      up.elements[k] = static_cast<T>(unit.hidden());
    }
  });
  up.store(ups + first, left);
}

// Backward, elementwise. hiddens, on entry the gradient of the hidden values, becomes the hidden values;
// gates and ups become their gradients. All are [count].
template <class T, class R>
__global__ void __launch_bounds__(kThreads)
    gated_gradient_kernel(T* gates, T* ups, T* hiddens, std::int64_t count, ActivationKind kind) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  const std::int64_t left = count - first;
  if (left <= 0) return;
  auto gate = Vector<T>::load(gates + first, left), up = Vector<T>::load(ups + first, left),
       hidden = Vector<T>::load(hiddens + first, left);
  with_activation(kind, [&](auto activation) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      GatedUnit<decltype(activation), R> unit{R(gate.elements[k]), R(up.elements[k])};
      hidden.elements[k] = static_cast<T>(unit.pull(R(hidden.elements[k])));
      gate.elements[k] = static_cast<T>(unit.gate), up.elements[k] = static_cast<T>(unit.up);
    }
  });
  gate.store(gates + first, left), up.store(ups + first, left), hidden.store(hiddens + first, left);
}

// Calls run(T{}, R{}): T is the element type, R the type to compute in.
template <class Run>
void with_types(DType dtype, Run run) {
  if (dtype == DType::kFloat64) return run(double{}, double{});
  if (dtype == DType::kFloat32) return run(float{}, float{});
  if (dtype == DType::kBFloat16) return run(__nv_bfloat16{}, float{});
  run(__half{}, float{});
}

void require_aligned(const char* name, const TensorView& t) {
  require(reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0, name,
          ": expected memory on a 16-byte boundary");
}

unsigned blocks_of(std::int64_t count) {
  constexpr std::int64_t kElements = kThreads * kVector;
  return blocks_for((count + kElements - 1) / kElements);
}

}  // namespace

template <>
void run(const GatedHidden& x, const Launch& launch) {
  require_aligned("gate", x.gate), require_aligned("up", x.up);
  const std::int64_t count = x.gate.numel();
  if (count == 0) return;
  const DeviceGuard device(x.gate.cuda_device);
  with_types(x.gate.dtype, [&](auto element, auto real) {
    using T = decltype(element);
    launch_kernel("gated_hidden", &gated_hidden_kernel<T, decltype(real)>, blocks_of(count), kThreads, 0,
                  launch.stream, data<const T>(x.gate), data<T>(x.up), count, x.activation);
  });
}

template <>
void run(const GatedGradient& x, const Launch& launch) {
  require_aligned("gate", x.gate), require_aligned("up", x.up), require_aligned("hidden", x.hidden);
  const std::int64_t count = x.gate.numel();
  if (count == 0) return;
  const DeviceGuard device(x.gate.cuda_device);
  with_types(x.gate.dtype, [&](auto element, auto real) {
    using T = decltype(element);
    launch_kernel("gated_gradient", &gated_gradient_kernel<T, decltype(real)>, blocks_of(count), kThreads, 0,
                  launch.stream, data<T>(x.gate), data<T>(x.up), data<T>(x.hidden), count, x.activation);
  });
}

}  // namespace monoidreduce::cuda

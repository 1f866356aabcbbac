// How a call is launched, and the facts of the GPU that it runs on.
#pragma once

#include <cstdint>

namespace monoidreduce {

struct Launch {
  int threads = 1;         // CPU threads
  void* stream = nullptr;  // cudaStream_t
  // Results must not depend on the order of atomic adds. The CPU engine is always deterministic.
  bool deterministic = false;
  // On CUDA, attention and the MLP may round float32 operands of matrix products to tf32.
  bool tf32 = false;
  // On CUDA, kernels may multiply float32 operands as planes of float16 (ops/planes.h).
  bool planes = false;
};

// The facts of a GPU that schedules and plans depend on.
struct DeviceFacts {
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::int64_t cache_bytes = 0;   // L2 cache
  std::int64_t shared_bytes = 0;  // the most shared memory that a block may have
};

}  // namespace monoidreduce

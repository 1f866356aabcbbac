// How a call runs, and what on.
#pragma once

#include <cstdint>

namespace monoidreduce {

struct Launch {
  int threads = 1;         // CPU threads
  void* stream = nullptr;  // cudaStream_t
  // No atomic adds whose order may change. The CPU engine is deterministic either way.
  bool deterministic = false;
  // On CUDA, attention and the MLP may round the operands of float32 products to tf32.
  bool tf32 = false;
};

// What schedules and plans depend on, of a GPU.
struct DeviceFacts {
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::int64_t cache_bytes = 0;   // of the second level
  std::int64_t shared_bytes = 0;  // of shared memory, that a block may have
};

}  // namespace monoidreduce

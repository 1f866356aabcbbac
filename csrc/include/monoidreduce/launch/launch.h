// How a call runs.
#pragma once

namespace monoidreduce {

struct Launch {
  int threads = 1;         // CPU threads
  void* stream = nullptr;  // cudaStream_t
  // No atomic adds whose order may change. The CPU engine is deterministic either way.
  bool deterministic = false;
  // On CUDA, attention and the MLP may round the operands of float32 products to tf32.
  bool tf32 = false;
};

}  // namespace monoidreduce

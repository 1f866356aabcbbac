#include "monoidreduce/operators.h"

#include "monoidreduce/checks.h"
#include "monoidreduce/error.h"

namespace monoidreduce {

#ifdef MONOIDREDUCE_WITH_CUDA
#define MR_RUN_ON_CUDA(name) cuda::name(arguments, launch)
#else
#define MR_RUN_ON_CUDA(name)                                                                              \
  throw Error(                                                                                            \
      message(#name, ": expected tensors on the CPU, got one on cuda:", leading(arguments).cuda_device,   \
              ". This build of monoidreduce is CPU-only; for GPUs, install it again where nvcc is, with " \
              "the environment variable MONOIDREDUCE_CUDA=ON"))
#endif

#define MR_DEFINE(name, Arguments)                              \
  void name(const Arguments& arguments, const Launch& launch) { \
    check(launch);                                              \
    check(arguments);                                           \
    if (!leading(arguments).is_cuda()) {                        \
      cpu::name(arguments, launch);                             \
    } else {                                                    \
      MR_RUN_ON_CUDA(name);                                     \
    }                                                           \
  }
MONOIDREDUCE_OPERATORS(MR_DEFINE)

}  // namespace monoidreduce

// Included instead of the library's header of this name: its launch_kernel also tells the fake runtime the kernel's parameters.
#pragma once

#define launch_kernel launch_undescribed
#include_next "monoidreduce/launch/launch_kernel.cuh"
#undef launch_kernel

#include "launches/parameters.h"

namespace monoidreduce {

template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads,
                   std::size_t shared_bytes, void* stream, const Arguments&... arguments) {
  launches::describe_parameters(reinterpret_cast<const void*>(kernel),
                                {launches::parameter<Parameters>()...});
  launch_undescribed(name, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace monoidreduce

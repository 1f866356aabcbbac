// The sizes of a kernel's parameters, which the CUDA runtime is not told at a launch.
#pragma once

#include <cstddef>
#include <vector>

namespace monoidreduce::launches {

struct Parameter {
  std::size_t size;
  void (*clear_padding)(void* bytes);
};

// A union around a value. Without it, GCC 12's __builtin_clear_padding also clears bytes that are not padding, in structs that
// have arrays of structs.
template <class T>
union Alone {
  T value;
};

template <class T>
Parameter parameter() {
  return {sizeof(T), [](void* bytes) { __builtin_clear_padding(static_cast<Alone<T>*>(bytes)); }};
}

// kernel: the host function with the kernel's name, by which the runtime identifies it.
void describe_parameters(const void* kernel, std::vector<Parameter> parameters);

}  // namespace monoidreduce::launches

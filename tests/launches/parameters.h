// What the CUDA runtime is not told at a launch: how large the kernel's parameters are.
#pragma once

#include <cstddef>
#include <vector>

namespace monoidreduce::launches {

struct Parameter {
  std::size_t size;
  void (*clear_padding)(void* bytes);
};

// Where a struct has arrays of structs, GCC 12 clears bytes that are not padding, unless it is in a union.
template <class T>
union Alone {
  T value;
};

template <class T>
Parameter parameter() {
  return {sizeof(T), [](void* bytes) { __builtin_clear_padding(static_cast<Alone<T>*>(bytes)); }};
}

// kernel: the host's function of that name, which the runtime knows it by.
void describe_parameters(const void* kernel, std::vector<Parameter> parameters);

}  // namespace monoidreduce::launches

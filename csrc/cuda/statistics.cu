// Statistics of a user's function have no kernels on CUDA yet.
#include "engine.h"
#include "monoidreduce/error.h"

namespace monoidreduce::cuda {
namespace {

[[noreturn]] void refuse(const char* name) {
  throw Error(message(
      name, ": expected tensors on the CPU, got CUDA tensors. For these, call `reference` of the function, ",
      "which stores all scores, or monoidreduce.map_reduce"));
}

}  // namespace

void statistics_forward(const StatisticsForward&, const Launch&) { refuse("statistics_forward"); }
void statistics_backward(const StatisticsBackward&, const Launch&) { refuse("statistics_backward"); }

}  // namespace monoidreduce::cuda

#include "mlp_backward.cuh"

namespace monoidreduce::cuda::sm80 {

template <>
void run(const MlpBackward& x, const Plan&, const Launch& launch) {
  if (x.x.dtype == DType::kFloat32) return mlp_backward_tf32(x, launch);
  mlp_backward_of<Halves>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80

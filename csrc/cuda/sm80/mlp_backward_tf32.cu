#include "mlp_backward.cuh"

namespace monoidreduce::cuda::sm80 {

void mlp_backward_tf32(const MlpBackward& x, const Launch& launch) { mlp_backward_of<Float>(x, launch); }

}  // namespace monoidreduce::cuda::sm80

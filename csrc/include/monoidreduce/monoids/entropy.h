// The entropy of a softmax, whose state has one number more than the log-sum-exp's:
//
//   entropy = log mass - sum / mass        sum = sum_j weight_j log weight_j
//
// Weights are measured from the frame, so neither term is as large as the log weights. The log-sum-exp less the mean of the
// log weights is the same number, but a small entropy of large log weights has no correct digit there.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

template <class R>
struct Entropy {
  // A weight's logarithm, made finite so that it can be multiplied by the weight. Where this changes it, the weight is 0.
  MR_HD static R finite(R log_weight) { return max(log_weight, R(-0x1p20f)); }
  // An empty row has entropy 0.
  MR_HD static R of(R mass, R sum) { return select(mass == R(0), R(0), log(mass) - sum / mass); }
  // The sum, measured from a frame that is higher by `rise`. kept: e^-rise, by which weights are multiplied. mass: the mass
  // there. Where nothing is kept it may be NaN, as the rise may be infinite, and the caller takes 0.
  MR_HD static R moved(R sum, R kept, R mass, R rise) { return sum * kept - mass * rise; }
};

}  // namespace monoidreduce

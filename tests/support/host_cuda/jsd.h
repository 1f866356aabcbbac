// device/simt/jsd_rows.cuh on the host.
#include <cmath>

#define HOST_THREADS 64  // two warps: a switch between threads takes longer than their work

#include "block.h"
#include "monoidreduce/device/simt/jsd_rows.cuh"

namespace {

using namespace monoidreduce::simt;

struct HostMath {
  static float exp2(float x) { return std::exp2(x); }
  static float log2(float x) { return std::log2(x); }
  // bfloat16, to nearest, ties to even; NaN stays NaN.
  static unsigned rounded(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static unsigned pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
};

struct Call {
  ScorePair scores;
  ActiveRows counted;
  float* losses;
  JsdRow* stats;
  const float* factor;
  double inverse, beta;

  Jsd<HostMath> jsd() const {
    return {static_cast<float>(inverse / std::log(2.)), static_cast<float>(beta),
            static_cast<float>(std::log2(beta)), static_cast<float>(std::log2(1 - beta))};
  }
};
constexpr int kThreads = host::Block::kThreads;
constexpr unsigned kBlocks = 3;  // fewer than rows

}  // namespace

extern "C" void jsd_rows(const Call* x) {
  host::launch(kBlocks, [&] {
    jsd_rows_kernel<HostMath, kThreads>(x->jsd(), x->scores, x->counted, x->losses, x->stats, x->factor);
  });
}
extern "C" void jsd_gradient(const Call* x) {
  host::launch(kBlocks, [&] {
    jsd_gradient_kernel<HostMath, kThreads>(x->jsd(), x->scores, x->counted, x->stats, x->factor);
  });
}

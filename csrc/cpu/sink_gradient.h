// The gradients of attention sinks.
#pragma once

#include "monoidreduce/cpu/thread_pool.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/pull.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// A sink is one more element in every row of its head, with payload 0. x: a backward call of attention; rows: its row policy.
template <class T, class Rows, class Call>
void sink_gradient(const Rows& rows, const Call& x, int threads) {
  if (!x.d_sinks.present()) return;
  const std::int64_t heads = x.q.size[1], count = x.q.size[2];
  parallel_for(threads, heads, [&](std::int64_t head, int) {
    Element<T> sink{};
    sink.score = static_cast<const T*>(x.sinks.data)[head];
    double sum = 0;
    for (std::int64_t batch = 0; batch < x.q.size[0]; ++batch) {
      for (std::int64_t row = (batch * heads + head) * count, i = 0; i < count; ++i, ++row)
        sum += pull(LogSumExp<T>{}, sink, rows.product(row), rows.upstream(row), T(0)).score;
    }
    static_cast<T*>(x.d_sinks.data)[head] = static_cast<T>(sum);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

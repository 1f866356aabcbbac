// A user's statistics on the CPU, by the interpreter.
#include "monoidreduce/ops/statistics.h"

#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/cpu/program.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
namespace {

// A row policy without content: labels, products and upstream gradients reach a program as data of its rows instead.
template <class M>
struct ProgramRows {
  bool active(std::int64_t) const { return true; }
  std::int64_t label(std::int64_t) const { return -1; }
  typename M::Output product(std::int64_t) const { return {}; }
  typename M::Upstream upstream(std::int64_t) const { return {}; }
  void store(std::int64_t, const typename M::Output&) const {}
};

template <class T>
struct StatisticsRows : ProgramRows<ProgramFold<T>> {
  const Statistics* statistics;
  T *values, *low;
  std::int64_t *indices, rows;

  void store(std::int64_t row, const typename ProgramFold<T>::Output& p) const {
    const Statistics& s = *statistics;
    T *value = values + row, *of_low = low + row;
    std::int64_t* index = indices + row;
    const auto put = [this](auto*& to, auto x) { *to = x, to += rows; };
    const auto put_index = [&](int field) {
      put(index, static_cast<std::int64_t>(ProgramFold<T>::index(p.field[field])));
    };
    s.each_softmax([&](int frame, int means) {
      put(value, p.field[frame]);
      put(of_low, p.field[frame + 1]);
      for (int k = frame + 2; k < frame + 2 + means; ++k) put(value, p.field[k]);
    });
    for (int k = s.first_total(); k < s.first_largest(); ++k) put(value, p.field[k]);
    for (int k = s.first_largest(); k < s.first_carried(); k += 2) put(value, p.field[k]), put_index(k + 1);
    for (int k = s.first_carried(); k < s.first_count(); ++k) put(value, p.field[k]);
    for (int k = s.first_count(); k < s.first_entropy(); ++k) put_index(k);
    for (int k = s.first_entropy(); k < s.fields(); ++k) put(value, p.field[k]);
  }
};

template <class T, class Call>
Program<T> program_of(const Call& x) {
  return Program<T>(x.program, Tables<T>(x.table, x.table_index), x.row, x.row_index, x.column,
                    x.column_index, x.a.size[0], x.b.size[0]);
}

}  // namespace

template <>
void run(const StatisticsForward& x, const Launch& launch) {
  with_accumulator(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Program<T> program = program_of<T>(x);
    const StatisticsRows<T> rows{{},
                                 &program.statistics,
                                 static_cast<T*>(x.values.data),
                                 static_cast<T*>(x.low.data),
                                 static_cast<std::int64_t*>(x.indices.data),
                                 x.a.size[0]};
    program.expect_results(x.values.size[0], x.low.size[0], x.indices.size[0]);
    fold_forward<ProgramFold, T>({&program}, statistics_problem(x), rows, {}, launch.threads);
  });
}

template <>
void run(const StatisticsBackward& x, const Launch& launch) {
  with_accumulator(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Program<T> program = program_of<T>(x);
    const FoldGradients gradients{.grad_out = {},
                                  .d_a = as_rows(x.d_a),
                                  .d_b = as_rows(x.d_b),
                                  .d_other_a = as_rows(x.d_other_a),
                                  .d_other_b = as_rows(x.d_other_b),
                                  .d_payload = {},
                                  .d_bias = {}};
    fold_backward<ProgramPull, T>({&program}, statistics_problem(x), ProgramRows<ProgramPull<T>>{}, gradients,
                                  launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

// The library's monoids as subjects of the law suite. M is the monoid itself, or a variant of it (a mutation, or one on packs).
#pragma once

#include "laws.h"
#include "monoidreduce/monoids/argmax.h"
#include "monoidreduce/monoids/cross_entropy.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/monoids/log_probs.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/monoids/weighted_sum.h"

namespace monoidreduce::test {

// "LogSumExp<float>", "Sum<double, Gelu>"
template <class M>
std::string with_real(const std::string& name, const std::string& argument = "") {
  return name + (sizeof(typename M::Real) == 4 ? "<float" : "<double") +
         (argument.empty() ? ">" : ", " + argument + ">");
}

template <class M>
Subject log_sum_exp() {
  return subject<M>(with_real<M>("LogSumExp"));
}

template <class M>
Subject sum(const char* activation) {
  Subject s = subject<M>(with_real<M>("Sum", activation));
  s.element = [](Random& random, int column) {
    const double z = normal(random, 3);
    return Item{.score = z + std::copysign(0.01, z), .column = column};  // Relu has a kink at 0
  };
  return s;
}

template <class M>
Subject cross_entropy() {
  Subject s = subject<M>(with_real<M>("CrossEntropy"));
  // Gradients are with respect to the log-sum-exp, the target's score, and the sum, which is the mean times the count.
  s.objective = [](const Values& p, const Values& g) {
    return g[0] * p[0] + g[1] * p[1] + g[2] * p[2] * p[3];
  };
  return s;
}

// With weights for as many classes as the suite's rows can have columns, in the monoid's real type.
template <class M>
Subject weighted_cross_entropy() {
  using R = typename M::Real;
  static const std::vector<R> weights = [] {
    Random random(12);
    std::vector<R> list(kLongest + 4);
    for (R& weight : list) weight = static_cast<R>(std::fabs(normal(random)));
    list[1] = 0;
    return list;
  }();
  M m{};
  m.softmax.weight = weights.data();
  Subject s = subject<M>(with_real<M>("WeightedCrossEntropy"), m);
  s.objective = cross_entropy<CrossEntropy<R>>().objective;
  return s;
}

// LogProbs and TopLogProbs, at a temperature of 1.6.
template <class M>
Subject log_probs(const std::string& name) {
  Subject s = subject<M>(with_real<M>(name));
  s.element = [](Random& random, int column) {
    return Item{.score = normal(random, 4), .column = column, .factor = 0.625};
  };
  s.objective = [](const Values& p, const Values& g) { return g[0] * p[0] + g[1] * p[1] + g[2] * p[2]; };
  return s;
}

template <class M>
Subject distillation(const char* loss) {
  Subject s = subject<M>(with_real<M>("Distillation", loss));
  s.extremes.pop_back();  // without -inf: the expectation would be infinite or NaN, depending on the order
  s.objective = [](const Values& p, const Values& g) { return g[0] * p[3]; };  // the loss
  return s;
}

template <class M>
Subject weighted_sum() {
  Subject s = subject<M>(with_real<M>("WSum"));
  s.element = [](Random& random, int column) {
    return Item{.score = 0.1 + std::fabs(normal(random)), .other = normal(random), .column = column};
  };
  s.extremes = {0., s.monoid.smallest_normal * s.monoid.epsilon, s.monoid.smallest_normal, 200,
                1e5};  // weights
  return s;
}

template <class M>
Subject log_weighted_sum() {
  Subject s = subject<M>(with_real<M>("LogWSum"));
  s.absent = -std::numeric_limits<double>::infinity();
  return s;
}

template <class M>
Subject arg_max() {
  Subject s = subject<M>(with_real<M>("ArgMax"));
  s.element = [](Random& random, int column) {  // no two scores are close, because a tie has no derivative
    return Item{.score = std::round(normal(random, 16)) / 4 + column / 128., .column = column};
  };
  s.objective = [](const Values& p, const Values& g) { return g[0] * p[0]; };
  s.exact = true;
  return s;
}

}  // namespace monoidreduce::test

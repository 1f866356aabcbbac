// Tests the law suite itself. Each mutation below is a monoid of the library with one broken member, and the law named beside
// it must fail. A mutation that passes its law fails this test.
#include "subjects.h"

namespace monoidreduce::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- LogSumExp

using Softmax = LogSumExp<double>;
using E = Element<double>;

struct RescaleUnguarded : Softmax {
  double rescale(double from, double to) const { return exp(from - to); }
};
struct WeightUnguarded : Softmax {
  double weight(E e, double f) const { return exp(e.score - f); }
};
struct ReframeUnguarded : Softmax {
  State reframe(State s, double f) const { return {f, s.mass * exp(s.frame - f)}; }
};
struct AccumulateUnguarded : Softmax {
  State accumulate(State s, E e) const { return {s.frame, s.mass + exp(e.score - s.frame)}; }
};
struct ShareUnguarded : Softmax {
  Gradient<double> local_gradient(E e, Output lse, double g) const {
    return {g * exp(e.score - lse.high - lse.low), 0};
  }
};
struct LiftOfOne : Softmax {
  State lift(E e) const { return {e.score, 1}; }
};
struct LowestFiniteIdentity : Softmax {
  State identity() const { return {-std::numeric_limits<double>::max(), 0}; }
};
struct ZeroFrameIdentity : Softmax {
  State identity() const { return {0, 0}; }
};
struct UnitMassIdentity : Softmax {
  State identity() const { return {-kInfinity, 1}; }
};
struct JoinKeepsFirst : Softmax {
  double join(double f, double) const { return f; }
};
struct JoinTakesLeast : Softmax {
  double join(double f, double g) const { return f < g ? f : g; }
};
struct JoinAdds : Softmax {
  double join(double f, double g) const { return f + g; }
};
struct ProjectHidesNan : Softmax {
  Output project(State s) const { return std::isnan(s.mass) ? Output{s.frame, 0} : Softmax::project(s); }
};
struct FrameIgnoresElement : Softmax {
  double frame(E) const { return 0; }
};
struct EmptyFrameForElement : Softmax {
  double frame(E) const { return -kInfinity; }
};
struct RescaleOfOne : Softmax {
  double rescale(double, double) const { return 1; }
};
struct RescaleInverted : Softmax {
  double rescale(double from, double to) const { return exp(to - origin(from)); }
};
struct RescaleInBaseTwo : Softmax {
  double rescale(double from, double to) const { return exp2(from - origin(to)); }
};
struct RescaleOfLargeStepsIsZero : Softmax {  // two small steps no longer equal one large step
  double rescale(double from, double to) const { return to - from > 4 ? 0 : Softmax::rescale(from, to); }
};
struct AddNotAssociative : Softmax {
  State add(State a, State b) const {
    const State c = Softmax::add(a, b);
    return {c.frame, a.mass != 0 && b.mass != 0 ? c.mass * (1 + 1e-12) : c.mass};
  }
};
struct ReframeKeepsMass : Softmax {
  State reframe(State s, double f) const { return {f, s.mass}; }
};
struct ReframeKeepsFrame : Softmax {
  State reframe(State s, double f) const { return {s.frame, Softmax::reframe(s, f).mass}; }
};
struct AccumulateInOwnFrame : Softmax {
  State accumulate(State s, E e) const { return {s.frame, s.mass + weight(e, e.score)}; }
};
struct AccumulateForgets : Softmax {
  State accumulate(State s, E e) const { return {s.frame, s.mass == 0 ? weight(e, s.frame) : s.mass}; }
};
struct WeightOffByOnePercent : Softmax {
  double weight(E e, double f) const { return 1.01 * Softmax::weight(e, f); }
};
struct WeightIgnoresFrame : Softmax {
  double weight(E e, double) const { return exp(e.score); }
};
struct MassOffByOnePercent : Softmax {
  double mass(State s) const { return 1.01 * s.mass; }
};
struct ShareOffByOnePercent : Softmax {
  double share(E e, Output lse) const { return 1.01 * Softmax::share(e, lse); }
};
struct ShareInBaseTwo : Softmax {
  double share(E e, Output lse) const { return weight(e, (lse.high + lse.low) * kLog2E); }
};
struct GradientOffByOnePercent : Softmax {
  Gradient<double> local_gradient(E e, Output lse, double g) const { return {1.01 * g * share(e, lse), 0}; }
};
struct GradientInScoreUnits : Softmax {
  Gradient<double> local_gradient(E e, Output lse, double g) const { return {kLn2 * g * share(e, lse), 0}; }
};
struct GradientIgnoresUpstream : Softmax {
  Gradient<double> local_gradient(E e, Output lse, double) const { return {share(e, lse), 0}; }
};
struct GradientOfOtherScore : Softmax {
  Gradient<double> local_gradient(E e, Output lse, double g) const { return {g * share(e, lse), g}; }
};
struct ProjectInBaseTwo : Softmax {
  Output project(State s) const { return {s.frame + log2(s.mass), 0}; }
};
struct SinglePrecisionInside : LogSumExp<double> {
  Output project(State s) const { return {static_cast<float>(LogSumExp<double>::project(s).high), 0}; }
};
struct PayloadNotNormalized : Softmax {
  static constexpr bool kNormalized = false;
};
struct AbsentIsZero : Softmax {
  double absent() const { return 0; }
};
struct AbsentIsLowestFinite : Softmax {  // a row of such elements only is not like an empty row
  double absent() const { return -std::numeric_limits<double>::max(); }
};
struct AbsentIsInfinite : Softmax {
  double absent() const { return kInfinity; }
};
// Frames may be larger than their elements without breaking other laws, but here the largest score does not have the largest
// frame.
struct FrameOfMagnitude : Softmax {
  double frame(E e) const { return abs(Softmax::frame(e)); }
  State lift(E e) const { return {frame(e), weight(e, frame(e))}; }
};
struct FrameOfLeast : Softmax {  // a softmax of negated scores, so the least score determines the frame
  static E negated(E e) { return {-e.score, e.other, e.column, e.label}; }
  double absent() const { return kInfinity; }
  double frame(E e) const { return Softmax::frame(negated(e)); }
  double weight(E e, double f) const { return Softmax::weight(negated(e), f); }
  double share(E e, Output p) const { return Softmax::share(negated(e), p); }
  State lift(E e) const { return Softmax::lift(negated(e)); }
  State accumulate(State s, E e) const { return Softmax::accumulate(s, negated(e)); }
  Gradient<double> local_gradient(E e, Output p, double g) const { return {-g * share(e, p), 0}; }
};
struct LowWordDropped : Softmax {
  Output project(State s) const { return {Softmax::project(s).high, 0}; }
};
struct LowWordNegated : Softmax {
  Output project(State s) const { return {Softmax::project(s).high, -Softmax::project(s).low}; }
};
struct LowWordIgnored : Softmax {
  double share(E e, Output lse) const { return weight(e, lse.high); }
};
struct LowWordOfNothingIsNan : Softmax {
  Output project(State s) const {
    const double log_mass = log(s.mass), high = s.frame + log_mass, added = high - s.frame;
    return {high, (s.frame - (high - added)) + (log_mass - added)};
  }
};

// Broken in float, and found by comparison with the double version.
struct TenBitProject : LogSumExp<float> {
  Output project(State s) const { return {std::round(LogSumExp<float>::project(s).high * 1024) / 1024, 0}; }
};
struct TenBitShare : LogSumExp<float> {
  Gradient<float> local_gradient(Element<float> e, Output lse, float g) const {
    return {std::round(g * share(e, lse) * 1024) / 1024, 0};
  }
};

// ---- Sum

using Gate = Sum<double, Silu>;

struct PositiveZeroIdentity : Gate {
  State identity() const { return {0.}; }
};
struct AddSubtracts : Gate {
  State add(State a, State b) const { return {a.mass - b.mass}; }
};
struct AddTakesMaximum : Gate {
  State add(State a, State b) const { return {max(a.mass, b.mass)}; }
};
struct AccumulateSkipsActivation : Gate {
  State accumulate(State s, E e) const { return {s.mass + e.score}; }
};
struct GradientIsValue : Gate {
  Gradient<double> local_gradient(E e, double, double g) const { return {g * Silu::value(e.score), 0}; }
};
struct WeightOfOne : Gate {
  double weight(E, Frame) const { return 1; }
};
struct ShareOfOne : Gate {
  double share(E, double) const { return 1; }
};
struct PayloadNormalized : Gate {
  static constexpr bool kNormalized = true;
};
struct ReframeNegates : Gate {
  State reframe(State s, Frame) const { return {-s.mass}; }
};

// ---- CrossEntropy

using Classes = CrossEntropy<double>;

struct TargetGradientSign : Classes {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) - hit(e, g.target) + g.sum, 0};
  }
};
struct TargetGradientEverywhere : Classes {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) + g.target + g.sum, 0};
  }
};
struct SmoothingGradientMissing : Classes {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) + hit(e, g.target), 0};
  }
};
struct PositiveZeroTarget : Classes {
  State identity() const { return {softmax.identity(), 0., -0., 0}; }
};
struct TargetFromFirstOnly : Classes {
  State add(State a, State b) const {
    return {softmax.add(a.lse, b.lse), a.target, a.sum + b.sum, a.count + b.count};
  }
};
struct TargetScaledWithMass : Classes {
  State reframe(State s, double f) const {
    const double target = s.target * softmax.rescale(s.lse.frame, f);
    s = Classes::reframe(s, f);
    return {s.lse, target, s.sum, s.count};
  }
};
struct SumNotMovedWithFrame : Classes {
  State reframe(State s, double f) const { return {softmax.reframe(s.lse, f), s.target, s.sum, s.count}; }
};
struct TargetTakesEveryColumn : Classes {
  State accumulate(State s, E e) const {
    const double target = s.target + e.score;
    s = Classes::accumulate(s, e);
    return {s.lse, target, s.sum, s.count};
  }
};
struct SumSkipsTarget : Classes {
  State accumulate(State s, E e) const {
    const double sum = s.sum;
    s = Classes::accumulate(s, e);
    return {s.lse, s.target, e.column == e.label ? sum : s.sum, s.count};
  }
};
struct ProjectSwapsParts : Classes {
  Output project(State s) const {
    const Output p = Classes::project(s);
    return {p.lse, p.mean.high, {p.target, 0}, p.count};
  }
};

using WeighedClasses = WeightedCrossEntropy<double>;

struct WeightNotInSum : WeighedClasses {
  State accumulate(State s, E e) const {
    const State with = WeighedClasses::accumulate(s, e);
    return {with.lse, with.target, s.sum + (e.score - softmax.origin(s.lse.frame)), with.count};
  }
};
struct WeightNotInGradient : WeighedClasses {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) + hit(e, g.target) + g.sum, 0};
  }
};
struct WeightsNotCounted : WeighedClasses {
  State accumulate(State s, E e) const {
    State with = WeighedClasses::accumulate(s, e);
    with.count = s.count + 1;
    return with;
  }
};

// ---- LogProbs and TopLogProbs

using Token = LogProbs<double>;

struct EntropyNotCentred : Token {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    p.entropy = 0;
    return Token::local_gradient(e, p, g);
  }
};
struct TemperatureNotInGradient : Token {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {Token::local_gradient(e, p, g).score / e.factor, 0};
  }
};
struct TemperatureNotInFrame : Token {
  double frame(E e) const { return softmax.frame(e); }
};
struct SurprisesNotMovedWithFrame : Token {
  State reframe(State s, double f) const {
    return {softmax.reframe(s.softmax, f), s.sum * softmax.rescale(s.softmax.frame, f), s.target};
  }
};
struct FaintScoreTimesZero : Token {
  State accumulate(State s, E e) const {
    const double above = e.score * e.factor - softmax.origin(s.softmax.frame);
    const State with = Token::accumulate(s, e);
    return {with.softmax, s.sum + exp(above) * above, with.target};
  }
};

using TopToken = TopLogProbs<double>;

struct TopKeptInHigherFrame : TopToken {
  State reframe(State s, double f) const { return {Token::reframe(s.all, f), s.top}; }
};
struct TopOfFirst : TopToken {
  State add(State a, State b) const { return {Token::add(a.all, b.all), a.top}; }
};

// ---- Distillation

template <DistillationLoss kLoss>
struct CrossTermNotReframed : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  typename Base::State reframe(typename Base::State s, typename Base::Frame f) const {
    return {this->p.reframe(s.p, f.p), {this->q.softmax.reframe(s.q.softmax, f.q), s.q.sum}};
  }
};
template <DistillationLoss kLoss>
struct CrossTermNotMoved : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  typename Base::State reframe(typename Base::State s, typename Base::Frame f) const {
    return {this->p.reframe(s.p, f.p), this->q.reframe(s.q, f.q)};
  }
};
template <DistillationLoss kLoss>
struct CrossTermInOtherFrame : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  typename Base::State reframe(typename Base::State s, typename Base::Frame f) const {
    return {this->p.reframe(s.p, f.p),
            {this->q.softmax.reframe(s.q.softmax, f.q), s.q.sum * this->p.rescale(s.p.frame, f.p)}};
  }
};
template <DistillationLoss kLoss>
struct GradientNotCentred : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  Gradient<double> local_gradient(E e, typename Base::Output p, double g) const {
    p.centre = p.p_lse;
    return Base::local_gradient(e, p, g);
  }
};
template <DistillationLoss kLoss>
struct GradientsSwapped : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  Gradient<double> local_gradient(E e, typename Base::Output p, double g) const {
    const Gradient<double> d = Base::local_gradient(e, p, g);
    return {d.other, d.score};
  }
};
template <DistillationLoss kLoss>
struct TeacherGradientMissing : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  Gradient<double> local_gradient(E e, typename Base::Output p, double g) const {
    return {Base::local_gradient(e, p, g).score, 0};
  }
};
template <DistillationLoss kLoss>
struct LossSign : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  typename Base::Output project(typename Base::State s) const {
    typename Base::Output p = Base::project(s);
    p.loss = -p.loss;
    return p;
  }
};
// Both distributions have one frame, so the mass of the one with smaller scores underflows.
template <DistillationLoss kLoss>
struct FramesShared : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  typename Base::Frame frame(E e) const { return {max(e.score, e.other), max(e.score, e.other)}; }
};

template <DistillationLoss kLoss>
struct TeacherFrameOfLeast : Distillation<double, kLoss> {
  using Base = Distillation<double, kLoss>;
  typename Base::Frame frame(E e) const { return Base::frame({e.score, -e.other, e.column, e.label}); }
};

// ---- ArgMax

using Best = ArgMax<double>;

struct TieKeepsFirst : Best {
  State combine(State a, State b) const { return b.value > a.value || std::isnan(b.value) ? b : a; }
};
struct NanIgnored : Best {
  State combine(State a, State b) const {
    if (std::isnan(a.value)) return b;
    return std::isnan(b.value) ? a : Best::combine(a, b);
  }
};
struct NanTieKeepsFirst : Best {
  State combine(State a, State b) const { return std::isnan(a.value) ? a : Best::combine(a, b); }
};
struct IdentityIsColumnZero : Best {
  State identity() const { return {-kInfinity, 0}; }
};
struct IdentityIsLowestFinite : Best {
  State identity() const { return {-std::numeric_limits<double>::max(), kNone}; }
};
struct GradientEverywhere : Best {
  Gradient<double> local_gradient(E, Output, double g) const { return {g, 0}; }
};
struct GradientToEqualScores : Best {
  Gradient<double> local_gradient(E e, Output p, double g) const {
    return {e.score >= p.value - 1 ? g : 0, 0};
  }
};

// ---- WSum, LogWSum

struct WeightsAveraged : WSum<double> {
  State combine(State a, State b) const { return {(a.weight + b.weight) / 2, (a.sum + b.sum) / 2}; }
};
struct MeanGradientNotDivided : WSum<double> {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {g.weight + g.mean * (e.other - p.mean), g.mean * e.score};
  }
};
struct MeanGradientNotCentred : WSum<double> {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    p.mean = 0;
    return WSum<double>::local_gradient(e, p, g);
  }
};
struct EmptyMeanIsNan : WSum<double> {
  Output project(State s) const { return {s.weight, s.sum / s.weight}; }
};
struct SumNotReframed : LogWSum<double> {
  State reframe(State s, double f) const { return {softmax.reframe(s.softmax, f), s.sum}; }
};
struct ValueGradientMissing : LogWSum<double> {
  Gradient<double> local_gradient(E e, Output p, Upstream g) const {
    return {LogWSum<double>::local_gradient(e, p, g).score, 0};
  }
};

// ---- Functions of any monoid: WithPayload, combine, the tile fold and the pull

Subject with_payload(Subject s, const std::function<void(AnyMonoid&)>& plant) {
  plant(*s.with_payload);
  return s;
}
Subject with_member(Subject s, const std::function<void(AnyMonoid&)>& plant) {
  plant(s.monoid);
  return s;
}

// Adds the payload sums of both sides without rescaling.
void payload_not_rescaled(AnyMonoid& m) {
  m.combine = [combine = m.combine](const Values& a, const Values& b) {
    Values c = combine(a, b);
    for (int d = 0; d < kPayload; ++d)
      c[c.size() - kPayload + d] = a[a.size() - kPayload + d] + b[b.size() - kPayload + d];
    return c;
  };
}
void payload_not_weighted(AnyMonoid& m) {
  m.lift = [lift = m.lift](const Item& e) {
    Values s = lift(e);
    std::copy_n(e.payload.begin(), kPayload, s.end() - kPayload);
    return s;
  };
}
void payload_identity_is_positive_zero(AnyMonoid& m) {
  m.identity = [identity = m.identity] {
    Values s = identity();
    std::fill_n(s.end() - kPayload, kPayload, 0.);
    return s;
  };
}
void payload_of_last_component_dropped(AnyMonoid& m) {
  m.combine = [combine = m.combine](const Values& a, const Values& b) {
    Values c = combine(a, b);
    c[c.size() - 2] = a[a.size() - 2];
    return c;
  };
}

void combine_forgets_one_frame(AnyMonoid& m) {
  m.combine = [m](const Values& a, const Values& b) {
    const Values frame = m.join(m.frame_of(a), m.frame_of(b));
    return Values{frame[0], m.reframe(a, frame)[1] + b[1]};
  };
}

// Ignores the mask of a ragged tile: fold_tile folds a multiple of four elements, whatever the count.
void mask_ignored(AnyMonoid& m) {
  m.fold_tile = [fold = m.fold_tile](const Values& s, int count, const ItemAt& at) {
    return fold(s, (count + 3) / 4 * 4, at);
  };
}
void last_of_tile_dropped(AnyMonoid& m) {
  m.fold_tile = [fold = m.fold_tile](const Values& s, int count, const ItemAt& at) {
    return fold(s, count == 4 ? 3 : count, at);
  };
}
void state_before_tile_dropped(AnyMonoid& m) {
  m.fold_tile = [fold = m.fold_tile, empty = m.identity()](const Values& s, int count, const ItemAt& at) {
    return count ? fold(empty, count, at) : s;
  };
}
void frame_of_first_element_only(AnyMonoid& m) {
  m.fold_tile = [m](const Values& s, int count, const ItemAt& at) {
    Values state = count ? m.reframe(s, m.join(m.frame_of(s), m.frame(at(0)))) : s;
    for (int c = 0; c < count; ++c) state = m.accumulate(state, at(c));
    return state;
  };
}
void mass_not_reframed(AnyMonoid& m) {
  m.fold_tile = [m](const Values& s, int count, const ItemAt& at) {
    Values frame = m.frame_of(s);
    for (int c = 0; c < count; ++c) frame = m.join(frame, m.frame(at(c)));
    Values state = {frame[0], s[1]};
    for (int c = 0; c < count; ++c) state = m.accumulate(state, at(c));
    return state;
  };
}

void pull_without_centre(AnyMonoid& m) {
  m.pull = [pull = m.pull](const Item& e, const Values& p, double, double u) { return pull(e, p, 0, u); };
}
void pull_without_payload(AnyMonoid& m) {
  m.pull = [pull = m.pull](const Item& e, const Values& p, double c, double) { return pull(e, p, c, 0); };
}
void pull_swapped(AnyMonoid& m) {
  m.pull = [pull = m.pull](const Item& e, const Values& p, double c, double u) {
    const Values pulled = pull(e, p, c, u);
    return Values{pulled[1], pulled[0]};
  };
}

// ---- The table

struct Mutation {
  const char* name;
  Subject subject;
  const char* law;  // the law that must fail
};

template <DistillationLoss kLoss>
void add_distillation(std::vector<Mutation>& list) {
  list.push_back({"cross term not reframed", distillation<CrossTermNotReframed<kLoss>>(""), "accumulate"});
  list.push_back({"cross term not moved", distillation<CrossTermNotMoved<kLoss>>(""), "accumulate"});
  list.push_back(
      {"cross term in the other frame", distillation<CrossTermInOtherFrame<kLoss>>(""), "tile fold"});
  list.push_back({"gradient not centred", distillation<GradientNotCentred<kLoss>>(""), "local gradient"});
  list.push_back({"gradients swapped", distillation<GradientsSwapped<kLoss>>(""), "local gradient"});
  list.push_back(
      {"teacher gradient missing", distillation<TeacherGradientMissing<kLoss>>(""), "local gradient"});
  list.push_back({"sign of the loss", distillation<LossSign<kLoss>>(""), "local gradient"});
  list.push_back({"frames shared", distillation<FramesShared<kLoss>>(""), "tile fold"});
  list.push_back(
      {"teacher's frame of the least", distillation<TeacherFrameOfLeast<kLoss>>(""), "frames are monotone"});
}

std::vector<Mutation> mutations() {
  const auto softmax = log_sum_exp<Softmax>;
  const auto gate = [] { return sum<Gate>("Silu"); };
  std::vector<Mutation> list = {
      {"no guard in rescale", log_sum_exp<RescaleUnguarded>(), "rescale"},
      {"no guard in weight", log_sum_exp<WeightUnguarded>(), "weight"},
      {"no guard in reframe", log_sum_exp<ReframeUnguarded>(), "identity"},
      {"no guard in accumulate", log_sum_exp<AccumulateUnguarded>(), "tile fold"},
      {"no guard in local_gradient", log_sum_exp<ShareUnguarded>(), "absent is neutral"},
      {"lift of -inf has mass 1", log_sum_exp<LiftOfOne>(), "identity"},
      {"identity has the lowest finite frame", log_sum_exp<LowestFiniteIdentity>(), "identity"},
      {"identity has frame 0", log_sum_exp<ZeroFrameIdentity>(), "identity"},
      {"identity has mass 1", log_sum_exp<UnitMassIdentity>(), "tile fold"},
      {"join keeps the first", log_sum_exp<JoinKeepsFirst>(), "frames are a semilattice"},
      {"join takes the least", log_sum_exp<JoinTakesLeast>(), "frames are a semilattice"},
      {"join adds", log_sum_exp<JoinAdds>(), "frames are a semilattice"},
      {"project hides NaN", log_sum_exp<ProjectHidesNan>(), "NaN"},
      {"frame ignores the element", log_sum_exp<FrameIgnoresElement>(), "tile fold"},
      {"frame of an element is empty", log_sum_exp<EmptyFrameForElement>(), "tile fold"},
      {"rescale = 1", log_sum_exp<RescaleOfOne>(), "rescale"},
      {"rescale = 1, payload", log_sum_exp<RescaleOfOne>(), "payload gradients"},
      {"rescale inverted", log_sum_exp<RescaleInverted>(), "rescale"},
      {"rescale in base 2", log_sum_exp<RescaleInBaseTwo>(), "rescale"},
      {"rescale drops large steps", log_sum_exp<RescaleOfLargeStepsIsZero>(), "rescale"},
      {"combine forgets one frame", with_member(softmax(), combine_forgets_one_frame), "commutativity"},
      {"add adds 1e-12", log_sum_exp<AddNotAssociative>(), "split trees"},
      {"reframe keeps the mass", log_sum_exp<ReframeKeepsMass>(), "tile fold"},
      {"reframe keeps the frame", log_sum_exp<ReframeKeepsFrame>(), "reframe"},
      {"accumulate in the element's frame", log_sum_exp<AccumulateInOwnFrame>(), "accumulate"},
      {"accumulate forgets", log_sum_exp<AccumulateForgets>(), "tile fold"},
      {"weight off by 1 percent", log_sum_exp<WeightOffByOnePercent>(), "weight"},
      {"weight ignores its frame", log_sum_exp<WeightIgnoresFrame>(), "weight"},
      {"mass off by 1 percent", log_sum_exp<MassOffByOnePercent>(), "share"},
      {"share off by 1 percent", log_sum_exp<ShareOffByOnePercent>(), "share"},
      {"share from a base-2 product", log_sum_exp<ShareInBaseTwo>(), "payload gradients"},
      {"D off by 1 percent", log_sum_exp<GradientOffByOnePercent>(), "local gradient"},
      {"D in the score's unit", log_sum_exp<GradientInScoreUnits>(), "local gradient"},
      {"D ignores upstream", log_sum_exp<GradientIgnoresUpstream>(), "local gradient"},
      {"D of a score that is not there", log_sum_exp<GradientOfOtherScore>(), "local gradient"},
      {"project in base 2", log_sum_exp<ProjectInBaseTwo>(), "local gradient"},
      {"float inside double", log_sum_exp<SinglePrecisionInside>(), "local gradient"},
      {"kNormalized false", log_sum_exp<PayloadNotNormalized>(), "share"},
      {"absent = 0", log_sum_exp<AbsentIsZero>(), "absent is neutral"},
      {"absent is the lowest finite number", log_sum_exp<AbsentIsLowestFinite>(), "absent is neutral"},
      {"absent = inf", log_sum_exp<AbsentIsInfinite>(), "absent is neutral"},
      {"frame of the magnitude", log_sum_exp<FrameOfMagnitude>(), "frames are monotone"},
      {"frame of the least score", log_sum_exp<FrameOfLeast>(), "frames are monotone"},
      {"low word dropped", log_sum_exp<LowWordDropped>(), "share"},
      {"low word negated", log_sum_exp<LowWordNegated>(), "share"},
      {"low word ignored", log_sum_exp<LowWordIgnored>(), "share"},
      {"low word of nothing NaN", log_sum_exp<LowWordOfNothingIsNan>(), "identity"},

      {"identity +0", sum<PositiveZeroIdentity>(""), "identity"},
      {"add subtracts", sum<AddSubtracts>(""), "commutativity"},
      {"add takes the maximum", sum<AddTakesMaximum>(""), "tile fold"},
      {"accumulate skips the activation", sum<AccumulateSkipsActivation>(""), "accumulate"},
      {"D is the value", sum<GradientIsValue>(""), "local gradient"},
      {"weight 1", sum<WeightOfOne>(""), "weight"},
      {"share 1", sum<ShareOfOne>(""), "payload gradients"},
      {"kNormalized true", sum<PayloadNormalized>(""), "payload gradients"},
      {"reframe negates", sum<ReframeNegates>(""), "reframe"},

      {"sign of the target term", cross_entropy<TargetGradientSign>(), "local gradient"},
      {"target term in every column", cross_entropy<TargetGradientEverywhere>(), "local gradient"},
      {"smoothing term missing", cross_entropy<SmoothingGradientMissing>(), "local gradient"},
      {"target identity +0", cross_entropy<PositiveZeroTarget>(), "identity"},
      {"target of the first only", cross_entropy<TargetFromFirstOnly>(), "commutativity"},
      {"target reframed", cross_entropy<TargetScaledWithMass>(), "accumulate"},
      {"target takes every column", cross_entropy<TargetTakesEveryColumn>(), "accumulate"},
      {"sum not moved with the frame", cross_entropy<SumNotMovedWithFrame>(), "accumulate"},
      {"sum skips the target", cross_entropy<SumSkipsTarget>(), "accumulate"},
      {"parts swapped", cross_entropy<ProjectSwapsParts>(), "local gradient"},
      {"weight not in the sum", weighted_cross_entropy<WeightNotInSum>(), "accumulate"},
      {"weight not in D", weighted_cross_entropy<WeightNotInGradient>(), "local gradient"},
      {"weights not counted", weighted_cross_entropy<WeightsNotCounted>(), "accumulate"},

      {"entropy not in its D", log_probs<EntropyNotCentred>(""), "local gradient"},
      {"temperature not in D", log_probs<TemperatureNotInGradient>(""), "local gradient"},
      {"temperature not in the frame", log_probs<TemperatureNotInFrame>(""), "tile fold"},
      {"surprises not moved with the frame", log_probs<SurprisesNotMovedWithFrame>(""), "accumulate"},
      {"0 times -inf", log_probs<FaintScoreTimesZero>(""), "tile fold"},
      {"top kept in a higher frame", log_probs<TopKeptInHigherFrame>(""), "tile fold"},
      {"top of the first", log_probs<TopOfFirst>(""), "commutativity"},

      {"tie keeps the first", arg_max<TieKeepsFirst>(), "commutativity"},
      {"NaN ignored", arg_max<NanIgnored>(), "NaN"},
      {"NaN tie keeps the first", arg_max<NanTieKeepsFirst>(), "NaN"},
      {"identity is column 0", arg_max<IdentityIsColumnZero>(), "identity"},
      {"identity is the lowest finite number", arg_max<IdentityIsLowestFinite>(), "identity"},
      {"D in every column", arg_max<GradientEverywhere>(), "local gradient"},
      {"D to near scores", arg_max<GradientToEqualScores>(), "local gradient"},

      {"weights averaged", weighted_sum<WeightsAveraged>(), "associativity"},
      {"mean's D not divided", weighted_sum<MeanGradientNotDivided>(), "local gradient"},
      {"mean's D not centred", weighted_sum<MeanGradientNotCentred>(), "local gradient"},
      {"mean of nothing NaN", weighted_sum<EmptyMeanIsNan>(), "identity"},
      {"sum not reframed", log_weighted_sum<SumNotReframed>(), "tile fold"},
      {"value's D missing", log_weighted_sum<ValueGradientMissing>(), "local gradient"},

      {"payload not rescaled", with_payload(softmax(), payload_not_rescaled), "payload"},
      {"payload not weighted", with_payload(gate(), payload_not_weighted), "payload gradients"},
      {"payload identity +0", with_payload(softmax(), payload_identity_is_positive_zero), "identity"},
      {"payload component lost", with_payload(gate(), payload_of_last_component_dropped), "commutativity"},
      {"mask ignored in fold_tile", with_member(softmax(), mask_ignored), "tile fold"},
      {"mask ignored in fold_tile, no frame", with_member(arg_max<Best>(), mask_ignored), "tile fold"},
      {"last element of a tile dropped", with_member(gate(), last_of_tile_dropped), "tile fold"},
      {"state before the tile dropped", with_member(softmax(), state_before_tile_dropped), "tile fold"},
      {"frame of the first element only", with_member(softmax(), frame_of_first_element_only), "tile fold"},
      {"mass not reframed in fold_tile", with_member(softmax(), mass_not_reframed), "tile fold"},
      {"pull without centre", with_member(softmax(), pull_without_centre), "payload gradients"},
      {"pull without payload", with_member(gate(), pull_without_payload), "payload gradients"},
      {"pull swapped", with_member(gate(), pull_swapped), "payload gradients"},
  };
  add_distillation<DistillationLoss::kCrossEntropy>(list);
  add_distillation<DistillationLoss::kForwardKL>(list);
  add_distillation<DistillationLoss::kReverseKL>(list);
  return list;
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce::test;
  Checks checks;
  const auto must_find = [&](const char* name, const Subject& subject, const char* law, const Checks& found) {
    checks.section(subject.name + ", " + name, law);
    std::vector<std::string> broken;
    for (const auto& [broken_law, times] : found.broken()) broken.push_back(broken_law);
    CHECK(checks, found.broken().contains(law), broken);
  };
  for (const Mutation& mutation : mutations()) {
    Checks found(true);
    check_laws(mutation.subject, found);
    must_find(mutation.name, mutation.subject, mutation.law, found);
  }
  for (const Subject& single : {log_sum_exp<TenBitProject>(), log_sum_exp<TenBitShare>()}) {
    Checks found(true);
    check_precision(single, log_sum_exp<Softmax>(), found);
    must_find("ten bits", single, "precision", found);
  }
  return checks.finish();
}

// Linear cross entropy: the loss of the logits softcap(logit_scale x weight^T + bias) against class indices.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/cross_entropy.h"
#include "monoidreduce/ops/kept.h"
#include "monoidreduce/ops/matrix.h"
#include "monoidreduce/ops/planes.h"
#include "monoidreduce/ops/rows.h"

namespace monoidreduce {

// weight and bias may be a slice of the classes, from first_class on. `classes` is the number of all classes: targets are
// indices among these, and label smoothing divides by their number.
struct CrossEntropyOptions {
  double logit_scale = 1, softcap = 0, label_smoothing = 0, z_loss = 0;
  std::int64_t ignore_index = -100;
  std::int64_t first_class = 0, classes = -1;  // -1: weight has all classes
};
template <std::same_as<CrossEntropyOptions> X>
constexpr auto describe(const X*) {
  return fields(option("logit_scale", &X::logit_scale),
                option("softcap", &X::softcap, "a number >= 0, 0 for none", [](double v) { return v >= 0; }),
                option("ignore_index", &X::ignore_index),
                option("label_smoothing", &X::label_smoothing, "a number in [0, 1]",
                       [](double v) { return v >= 0 && v <= 1; }),
                option("z_loss", &X::z_loss), option("first_class", &X::first_class),
                option("classes", &X::classes));
}
template <class Call>
std::int64_t all_classes(const Call& x) {
  return x.options.classes < 0 ? x.weight.size[0] : x.options.classes;
}

template <class Call>
constexpr auto cross_entropy_operands() {
  return fields(tensor("x", &Call::x, "N D"), tensor("weight", &Call::weight, "V D"),
                optional("bias", &Call::bias, "V"));
}
// The size of class_weight: the mean of all classes' weights, then the weights, padded to whole tiles of 256. It always has the
// weights of all classes, even if `weight` is a slice of them.
constexpr std::int64_t class_weights(std::int64_t classes) { return 1 + (classes + 255) / 256 * 256; }
template <class Call>
void check_slice(const Call& x) {
  const std::int64_t first = x.options.first_class, classes = all_classes(x);
  require(first >= 0 && first + x.weight.size[0] <= classes, "first_class: expected one of ", classes,
          " with ", x.weight.size[0], " from it on, got ", first);
  require(!x.class_weight.present() || x.class_weight.size[0] == class_weights(classes),
          "class_weight: expected ", classes, " weights and their mean, got shape [", x.class_weight.size[0],
          "]");
}
template <class Call>
constexpr auto class_weight_of() {
  const Axis weights{.name = "1 + 256 ceil(V / 256)", .of = "all V", .follows = &class_weights};
  return optional("class_weight", &Call::class_weight, {weights}, Type::kAccumulation)
      .dense()
      .where(&check_slice<Call>);
}
// The upstream gradients, and the row statistics that forward saved.
template <class Call>
constexpr auto cross_entropy_residuals() {
  return fields(optional("grad_loss", &Call::grad_loss, "N", Type::kAccumulation),
                optional("grad_lse", &Call::grad_lse, "N", Type::kAccumulation),
                tensor("lse", &Call::lse, "N", Type::kAccumulation).dense(),
                tensor("lse_low", &Call::lse_low, "N", Type::kAccumulation).dense());
}

struct CrossEntropyForward {
  TensorView x, weight, bias, target, class_weight, loss, lse, lse_low;
  // The sum of the weights with which the folded classes count in the row's loss; absent if not wanted. A rank's loss is
  // measured from the log-sum-exp of its own classes, and with this sum from that of all classes (ops/ranks.h).
  TensorView loss_weight;
  TensorView reduced;  // the sum or mean of the losses (LossReduction); absent if not wanted
  TensorView scratch;  // size: Plan::scratch
  // kept: the dlogits (local gradients) of the first K classes, which forward saves for backward. They are for an upstream
  // gradient of kept_upstream for every loss. Lines are padded to a multiple of 8. Only if Capabilities::keeps, and without a
  // bias, a softcap, or class weights together with label smoothing.
  // If kept_upstream is 0, kept receives the softmax weights from which dlogits are made later (CrossEntropyKeptGradients). The
  // last part of scratch, from SavedDlogits::frames on, then has their frames (row maxima).
  TensorView kept;
  TensorView row_planes, column_planes;  // of x and weight
  // An order of rows (rows.h), active ones first. Rows that are not active are not computed, and their statistics are 0. kept
  // is in this order; all other results are in the order of x. Absent: all rows are computed.
  TensorView order;
  // Present together with order: a buffer for the active rows of x, R at a time.
  TensorView gathered;
  bool mean = false;  // whether `reduced` is the mean or the sum
  double kept_upstream = 0;
  CrossEntropyOptions options;
  std::int64_t saved_columns = 0;  // read by planning, see saved_columns()
};
// Throws std::out_of_range (IndexError in Python) if a target is not a class. Only on the CPU: on a GPU the check would have
// to synchronize.
template <class Call>
void check_targets(const Call& x) {
  if (x.target.is_cuda()) return;
  const auto* values = static_cast<const std::int64_t*>(x.target.data);
  const std::int64_t classes = all_classes(x), ignored = x.options.ignore_index;
  for (std::int64_t i = 0; i < x.target.size[0]; ++i) {
    const std::int64_t value = values[i * x.target.stride[0]];
    if ((value < 0 || value >= classes) && value != ignored) {
      throw std::out_of_range(message("target[", i, "]: expected a class in [0, ", classes,
                                      ") or ignore_index=", ignored, ", got ", value));
    }
  }
}
// Whether a logit is more than a scaled dot product.
template <class Call>
bool has_bias_or_softcap(const Call& x) {
  return x.bias.present() || x.options.softcap != 0;
}
// Whether the weights of all classes count in a row's loss. Otherwise only the target's does.
template <class Call>
bool weighs_all_classes(const Call& x) {
  return x.class_weight.present() && x.options.label_smoothing != 0;
}
// True if the call must use the general LogitScores kernels (bias, softcap, or class weights with label smoothing). The
// monoid of the last reads column indices, and only the general kernels are compiled for such monoids.
template <class Call>
bool needs_general_scores(const Call& x) {
  return has_bias_or_softcap(x) || weighs_all_classes(x);
}
// Why the sm_80 kernels cannot take the call, or null. Their tiles lack registers for what such a row needs.
inline const char* sm80_obstacle(const CrossEntropyForward& x) {
  return weighs_all_classes(x) ? "label smoothing has weights of classes" : nullptr;
}
inline void check_kept_scores(const CrossEntropyForward& x) {
  check_kept(x);
  require(!x.kept.present() || !needs_general_scores(x),
          "kept: expected none where there is a bias or softcap, or class weights with label smoothing, got "
          "a tensor");
}
template <class Call>
void check_no_order_on_cpu(const Call& x) {
  require(!x.order.present() || x.order.is_cuda(), "order: expected none on the CPU, got a tensor");
}
template <class Call>
void check_gathered(const char* name, const Call& x, const TensorView& gathered) {
  require(gathered.present() == x.order.present(), name,
          ": expected a tensor if and only if there is an order, got ", gathered.present() ? "one" : "none");
  require(!gathered.present() || gathered.size[0] > 0, name, ": expected room for a row, got none");
}
template <std::same_as<CrossEntropyForward> X>
constexpr auto describe(const X*) {
  return pass("cross_entropy_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, cross_entropy_operands<X>(),
              tensor("target", &X::target, "N", Type::kInt64).where(&check_targets<X>), class_weight_of<X>(),
              result("loss", &X::loss, "N", Type::kAccumulation),
              result("loss_weight", &X::loss_weight, "N", Type::kAccumulation).maybe(),
              result("reduced", &X::reduced, "values=1", Type::kAccumulation).maybe(),
              result("lse", &X::lse, "N", Type::kAccumulation),
              result("lse_low", &X::lse_low, "N", Type::kAccumulation), scratch("scratch", &X::scratch),
              result("kept", &X::kept, "N K").maybe().strided().where(&check_kept_scores),
              order_of(&X::order, "N").where(&check_no_order_on_cpu<X>),
              optional("gathered", &X::gathered, "R D").dense().where([](const X& x) {
                check_gathered("gathered", x, x.gathered);
              }),
              planes_of_operands<X>("N", "V", "D"), option("mean", &X::mean),
              option("kept_upstream", &X::kept_upstream), options(&X::options),
              saved_columns(&X::saved_columns));
}

// Turns the softmax weights that forward saved in kept into dlogits, in place, once lse over the classes of all ranks is known.
// frames: as forward left them, then for each row its target's softmax probability among all classes, less 1.
struct CrossEntropyKeptGradients {
  TensorView x, weight, bias, target, class_weight, lse, lse_low, frames, kept, order;
  double kept_upstream = 1;
  CrossEntropyOptions options;
};
template <std::same_as<CrossEntropyKeptGradients> X>
constexpr auto describe(const X*) {
  return after<CrossEntropyForward>("cross_entropy_kept_gradients", kSm90, cross_entropy_operands<X>(),
                                    tensor("target", &X::target, "N", Type::kInt64), class_weight_of<X>(),
                                    tensor("lse", &X::lse, "N", Type::kAccumulation).dense(),
                                    tensor("lse_low", &X::lse_low, "N", Type::kAccumulation).dense(),
                                    tensor("frames", &X::frames, "F", Type::kAccumulation).dense(),
                                    result("kept", &X::kept, "N K").strided().where(&check_kept<X>),
                                    order_of(&X::order, "N"), option("kept_upstream", &X::kept_upstream),
                                    options(&X::options));
}

struct CrossEntropyBackward {
  TensorView grad_loss, grad_lse, x, weight, bias, target, class_weight, lse, lse_low;
  TensorView d_x, d_weight, d_bias;
  CrossEntropyOptions options;
  std::int64_t workspace = 0;  // bytes for dlogits
};
template <class Call>
void check_bias_gradient(const Call& x) {
  require(!x.d_bias.present() || x.bias.present(), "dbias: expected none where bias is none, got a tensor");
}
template <std::same_as<CrossEntropyBackward> X>
constexpr auto describe(const X*) {
  return pass("cross_entropy_backward", kCpu | kSimt, cross_entropy_operands<X>(),
              tensor("target", &X::target, "N", Type::kInt64), class_weight_of<X>(),
              cross_entropy_residuals<X>(), gradient("dx", &X::d_x, "N D"),
              gradient("dweight", &X::d_weight, "V D"),
              gradient("dbias", &X::d_bias, "V", Type::kAccumulation).where(&check_bias_gradient<X>),
              options(&X::options), workspace(&X::workspace));
}

// dlogits: the derivatives of the loss with respect to the dot products <x_i, weight_j>, for a slice of the classes.
// d_x and d_weight are matrix products of dlogits.
struct CrossEntropyLocalGradient {
  TensorView grad_loss, grad_lse, x, weight, bias, target, class_weight, lse, lse_low, out;
  // If there is a bias: out summed over groups of 16 rows, for rows and columns in whole tiles of 256. Groups of rows that are
  // not active are 0 or not written.
  TensorView sums;
  TensorView order;  // as in the forward pass; x (as scale_rows gathers it), out and sums are in this order
  TensorView row_planes, column_planes;  // of x and weight
  CrossEntropyOptions options;
};
// The results of such a call, and the order of its rows.
template <class Call>
constexpr auto logits_gradient() {
  constexpr Axis kGroups{.name = "16 ceil(N / 256)", .of = "N", .follows = [](std::int64_t rows) {
                           return 16 * ((rows + 255) / 256);
                         }};
  constexpr Axis kColumns{.name = "256 ceil(C / 256)", .of = "V", .follows = [](std::int64_t columns) {
                            return 256 * ((columns + 255) / 256);
                          }};
  return fields(result("out", &Call::out, "N V").strided(),
                result("sums", &Call::sums, {kGroups, kColumns}, Type::kAccumulation).strided().maybe(),
                order_of(&Call::order, "N"));
}
template <std::same_as<CrossEntropyLocalGradient> X>
constexpr auto describe(const X*) {
  return part<CrossEntropyBackward>(
      "cross_entropy_local_gradient", kSm80 | kSm90 | kPlanes, cross_entropy_operands<X>(),
      tensor("target", &X::target, "N", Type::kInt64), class_weight_of<X>(), cross_entropy_residuals<X>(),
      logits_gradient<X>(), planes_of_operands<X>("N", "V", "D"), options(&X::options));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem cross_entropy_problem(const Call& x) {
  FoldProblem p{.a = as_rows(x.x),
                .b = as_rows(x.weight),
                .bias = as_column_bias(x.bias, x.x.size[0]),
                .score = {.scale = x.options.logit_scale, .softcap = x.options.softcap, .bias_inside = true}};
  if constexpr (requires { x.order; }) p.order = x.order;
  if constexpr (requires { x.row_planes; }) return with_planes(x, p);
  return p;
}

// The targets of rows, for a fold over the classes from first_class on.
struct Targets {
  const std::int64_t* data;  // [rows]
  std::int64_t stride, ignore_index, classes;
  std::int64_t first_class = 0, columns = kAllColumns;  // the classes that are folded here
  static constexpr std::int64_t kAllColumns = std::int64_t{1} << 62;

  MR_HD std::int64_t operator[](std::int64_t row) const { return data[row * stride]; }
  // The column of the target; -1 if it is not among the classes that are folded.
  MR_HD std::int64_t label(std::int64_t row) const {
    const std::int64_t column = (*this)[row] - first_class;
    return 0 <= column && column < columns ? column : -1;
  }
  MR_HD bool ignored(std::int64_t row) const { return (*this)[row] == ignore_index; }
  // A target out of range makes its row NaN, because raising an error would have to synchronize on a GPU.
  MR_HD bool valid(std::int64_t row) const { return (*this)[row] >= 0 && (*this)[row] < classes; }
};
template <class Call>
[[gnu::always_inline]] inline Targets targets_of(const Call& x) {
  return {.data = static_cast<const std::int64_t*>(x.target.data),
          .stride = x.target.stride[0],
          .ignore_index = x.options.ignore_index,
          .classes = all_classes(x),
          .first_class = x.options.first_class,
          .columns = x.weight.size[0]};
}

// The rows of cross entropy. U: the type in which forward computes the statistics; they are stored as T.
template <class T, class U = T>
struct CrossEntropyRows {
  Targets target;
  CrossEntropyLoss<T> rule;
  const T* class_weight;    // as class_weights() lays it out; null: all weights are 1
  T *loss, *lse, *lse_low;  // [rows]; backward reads both words of lse
  RowVector<T> grad_loss, grad_lse;
  T* loss_weight = nullptr;  // [rows], or null
  using Output = typename CrossEntropy<T>::Output;
  using Upstream = typename CrossEntropy<T>::Upstream;

  MR_HD std::int64_t label(std::int64_t row) const { return target.label(row); }
  MR_HD bool active(std::int64_t row) const { return !target.ignored(row) || grad_lse.data; }
  template <class R>
  MR_HD RowWeights<R> weights(std::int64_t row) const {
    if (!class_weight || !target.valid(row)) return {};
    return {R(class_weight[1 + target[row]]), R(class_weight[0])};
  }
  MR_HD void store(std::int64_t row, typename CrossEntropy<U>::Output p) const {
    const CrossEntropyLoss<U> wide{U(rule.smoothing), U(rule.z_loss)};
    const LogNumber<T> kept = rounded<T>(p.lse);
    lse[row] = kept.high, lse_low[row] = kept.low;
    const bool here = label(row) >= 0;
    loss[row] = target.ignored(row) ? T(0)
                : target.valid(row) ? T(wide.value(p, U(target.classes), weights<U>(row), here))
                                    : T(NAN);
    if (loss_weight)
      loss_weight[row] =
          target.ignored(row) ? T(0) : T(wide.weight(p.count, U(target.classes), weights<U>(row), here));
  }
  // A row that is not active, and not computed.
  MR_HD void skip(std::int64_t row) const {
    loss[row] = lse[row] = lse_low[row] = T(0);
    if (loss_weight) loss_weight[row] = T(0);
  }
  MR_HD Output product(std::int64_t row) const {
    return {.lse = {lse[row], lse_low[row]}, .target = T(0), .mean = {T(0), T(0)}, .count = 0};
  }
  MR_HD Upstream upstream(std::int64_t row) const { return upstream(row, grad_loss[row]); }
  MR_HD Upstream upstream(std::int64_t row, T grad) const {
    const T g = target.ignored(row) ? T(0) : target.valid(row) ? grad : T(NAN);
    return rule.upstream(lse[row], T(target.classes), weights<T>(row), g, grad_lse[row]);
  }
};

// The rows of a call, forward or backward.
template <class T, class U = T, class Call>
[[gnu::always_inline]] inline CrossEntropyRows<T, U> cross_entropy_rows(const Call& x) {
  CrossEntropyRows<T, U> rows{
      .target = targets_of(x),
      .rule = {static_cast<T>(x.options.label_smoothing), static_cast<T>(x.options.z_loss)},
      .class_weight = static_cast<const T*>(x.class_weight.data),
      .loss = nullptr,
      .lse = static_cast<T*>(x.lse.data),
      .lse_low = static_cast<T*>(x.lse_low.data),
      .grad_loss = {},
      .grad_lse = {}};
  if constexpr (requires { x.loss; })
    rows.loss = static_cast<T*>(x.loss.data), rows.loss_weight = static_cast<T*>(x.loss_weight.data);
  if constexpr (requires { x.grad_loss; })
    rows.grad_loss = row_vector<T>(x.grad_loss), rows.grad_lse = row_vector<T>(x.grad_lse);
  return rows;
}

// Calls run(monoid) with the monoid that the call needs.
template <class R, class Call, class Run>
[[gnu::always_inline]] inline void with_cross_entropy(const Call& x, Run run) {
  if (weighs_all_classes(x)) {
    WeightedCrossEntropy<R> m{};
    m.softmax.weight = static_cast<const Scalar<R>*>(x.class_weight.data) + 1 + x.options.first_class;
    return run(m);
  }
  run(CrossEntropy<R>{});
}

}  // namespace monoidreduce

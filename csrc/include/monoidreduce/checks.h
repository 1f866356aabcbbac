// The checks of every operator's arguments, made before any work. After them no kernel reads or writes outside its
// tensors. Messages use the names of the Python arguments.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <ostream>
#include <utility>

#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {

// A named axis. The first tensor that has it sets its size.
struct OldAxis {
  const char* name;
  std::int64_t size = -1;
};

using OldAxes = std::initializer_list<std::reference_wrapper<OldAxis>>;

// Parts of messages, turned into text only when there is a message.
struct OldShapeText {
  const TensorView& tensor;
  friend std::ostream& operator<<(std::ostream& text, const OldShapeText& s) {
    text << '[';
    for (int d = 0; d < s.tensor.rank; ++d) text << (d ? ", " : "") << s.tensor.size[d];
    return text << ']';
  }
};
struct OldAxesText {
  const OldAxes& axes;
  friend std::ostream& operator<<(std::ostream& text, const OldAxesText& s) {
    const char* separator = "[";
    for (const OldAxis& axis : s.axes) {
      text << std::exchange(separator, ", ") << axis.name;
      if (axis.size != -1) text << '=' << axis.size;
    }
    return text << ']';
  }
};
struct OldDeviceText {
  const TensorView& tensor;
  friend std::ostream& operator<<(std::ostream& text, const OldDeviceText& s) {
    return s.tensor.is_cuda() ? text << "cuda:" << s.tensor.cuda_device : text << "the CPU";
  }
};

// Checks the tensors of one call against the leading tensor: the same device, and dtypes that follow from its dtype.
class Operands {
 public:
  Operands(const char* name, const TensorView& leading)
      : dtype(leading.dtype), accumulator(accumulation(leading.dtype)), name_(name), leading_(leading) {
    require(leading.present(), name, ": expected a tensor, got none");
    require(is_floating(dtype), name, ": expected a floating tensor, got ", monoidreduce::name(dtype));
  }

  const DType dtype, accumulator;

  // The dtype of gradients other than a bias's, see operators.h.
  DType gradient() const { return leading_.is_cuda() ? accumulator : dtype; }
  // The same where the dtype depends on the CUDA tier: both are accepted here.
  DType tier_gradient(const TensorView& t) const { return t.dtype == dtype ? dtype : gradient(); }
  // The dtype of a result that may be rounded or not.
  DType result(const TensorView& t) const { return t.dtype == accumulator ? accumulator : dtype; }

  // A tensor of any strides.
  void strided(const char* name, const TensorView& t, const OldAxes& axes, DType expected) const {
    require(t.present(), name, ": expected a tensor, got none");
    require(t.dtype == expected, name, ": expected ", monoidreduce::name(expected), ", got ",
            monoidreduce::name(t.dtype));
    require(t.cuda_device == leading_.cuda_device, name, ": expected a tensor on ", OldDeviceText{leading_},
            " as ", name_, ", got one on ", OldDeviceText{t});
    require(fits(t, axes), name, ": expected shape ", OldAxesText{axes}, ", got ", OldShapeText{t});
    require(t.data != nullptr || t.numel() == 0, name, ": expected memory, got a null pointer");
    for (int d = 0; d < t.rank; ++d) {
      require(t.stride[d] >= 0, name, ": expected strides >= 0, got ", t.stride[d], " in axis ", d);
    }
  }
  void optional_strided(const char* name, const TensorView& t, const OldAxes& axes, DType expected) const {
    if (t.present()) strided(name, t, axes, expected);
  }

  // A contiguous tensor: row statistics, and every result.
  void contiguous(const char* name, const TensorView& t, const OldAxes& axes, DType expected) const {
    strided(name, t, axes, expected);
    std::int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0 && t.numel() > 0; --d) {
      require(t.size[d] == 1 || t.stride[d] == stride, name, ": expected a contiguous tensor, got stride ",
              t.stride[d], " in axis ", d);
      stride *= t.size[d];
    }
  }
  void optional_contiguous(const char* name, const TensorView& t, const OldAxes& axes, DType expected) const {
    if (t.present()) contiguous(name, t, axes, expected);
  }

 private:
  static bool fits(const TensorView& t, const OldAxes& axes) {
    if (t.rank != static_cast<int>(axes.size())) return false;
    const std::int64_t* size = t.size;
    for (const OldAxis& axis : axes) {
      if (axis.size != *size && axis.size != -1) return false;
      ++size;
    }
    size = t.size;
    for (OldAxis& axis : axes) axis.size = *size++;
    return true;
  }

  const char* name_;
  const TensorView& leading_;
};

// Linear cross entropy

struct CrossEntropyAxes {
  OldAxis n{"N"}, d{"D"}, v{"V"};
};

template <class Arguments>
Operands check_cross_entropy_inputs(const Arguments& x, CrossEntropyAxes& s) {
  const Operands call("x", x.x);
  call.strided("x", x.x, {s.n, s.d}, call.dtype);
  call.strided("weight", x.weight, {s.v, s.d}, call.dtype);
  call.optional_strided("bias", x.bias, {s.v}, call.dtype);
  call.strided("target", x.target, {s.n}, DType::kInt64);
  const CrossEntropyOptions& o = x.options;
  require(o.softcap >= 0, "softcap: expected a number >= 0, 0 for none, got ", o.softcap);
  require(o.label_smoothing >= 0 && o.label_smoothing <= 1,
          "label_smoothing: expected a number in [0, 1], got ", o.label_smoothing);
  require(o.workspace >= 0, "workspace: expected bytes >= 0, got ", o.workspace);
  return call;
}

// Throws std::out_of_range (IndexError in Python) for a target that is no class. On the CPU alone: on a GPU the check
// would have to synchronize.
inline void check_targets(const TensorView& target, std::int64_t classes, std::int64_t ignore_index) {
  const auto* values = static_cast<const std::int64_t*>(target.data);
  for (std::int64_t i = 0; i < target.size[0]; ++i) {
    const std::int64_t value = values[i * target.stride[0]];
    if ((value < 0 || value >= classes) && value != ignore_index) {
      throw std::out_of_range(message("target[", i, "]: expected a class in [0, ", classes,
                                      ") or ignore_index=", ignore_index, ", got ", value));
    }
  }
}

// Local gradients (dlogits) of the first columns, stored by a forward pass.
inline void check_kept(const TensorView& kept, const TensorView& upstream, const Operands& call,
                       OldAxis& rows, const OldAxis& columns) {
  if (!kept.present()) return;
  require(kept.is_cuda(), "kept: expected none on the CPU, got a tensor");
  OldAxis some{"K"}, one{"values", 1};
  call.strided("kept", kept, {rows, some}, call.dtype);
  require(some.size <= columns.size, "kept: expected at most ", columns.size, " columns, got ", some.size);
  require(rows.size <= 1 || kept.stride[0] >= (some.size + 7) / 8 * 8,
          "kept: expected lines padded to a multiple of 8 elements, got stride ", kept.stride[0]);
  call.contiguous("kept_upstream", upstream, {one}, call.accumulator);
}

// Indices, as order_rows writes them.
inline void check_order(const TensorView& order, const Operands& call, const OldAxis& rows) {
  OldAxis places{"N + 1", rows.size + 1};
  require(!order.present() || order.is_cuda(), "order: expected none on the CPU, got a tensor");
  call.optional_contiguous("order", order, {places}, DType::kInt64);
}

// The buffer that active rows are gathered in.
inline void check_gathered(const char* name, const TensorView& gathered, const TensorView& order,
                           const Operands& call, OldAxis& width) {
  require(gathered.present() == order.present(), name,
          ": expected a tensor if and only if there is an order, got ", gathered.present() ? "one" : "none");
  OldAxis at_once{"R"};
  call.optional_contiguous(name, gathered, {at_once, width}, call.dtype);
  require(!gathered.present() || at_once.size > 0, name, ": expected room for a row, got none");
}

inline void check(const CrossEntropyForward& x) {
  CrossEntropyAxes s;
  const Operands call = check_cross_entropy_inputs(x, s);
  call.contiguous("loss", x.loss, {s.n}, call.accumulator);
  call.contiguous("lse", x.lse, {s.n}, call.accumulator);
  call.contiguous("lse_low", x.lse_low, {s.n}, call.accumulator);
  OldAxis elements{"elements"};
  call.optional_contiguous("scratch", x.scratch, {elements}, call.accumulator);
  check_kept(x.kept, x.kept_upstream, call, s.n, s.v);
  check_order(x.order, call, s.n);
  check_gathered("gathered", x.gathered, x.order, call, s.d);
  require(!x.kept.present() || (!x.bias.present() && x.options.softcap == 0),
          "kept: expected none where there is a bias or softcap, got a tensor");
  if (!x.target.is_cuda()) check_targets(x.target, s.v.size, x.options.ignore_index);
}

inline void check(const CrossEntropyBackward& x) {
  CrossEntropyAxes s;
  const Operands call = check_cross_entropy_inputs(x, s);
  call.optional_strided("grad_loss", x.grad_loss, {s.n}, call.accumulator);
  call.optional_strided("grad_lse", x.grad_lse, {s.n}, call.accumulator);
  call.contiguous("lse", x.lse, {s.n}, call.accumulator);
  call.contiguous("lse_low", x.lse_low, {s.n}, call.accumulator);
  call.optional_contiguous("dx", x.d_x, {s.n, s.d}, call.gradient());
  call.optional_contiguous("dweight", x.d_weight, {s.v, s.d}, call.gradient());
  call.optional_contiguous("dbias", x.d_bias, {s.v}, call.accumulator);
  require(!x.d_bias.present() || x.bias.present(), "dbias: expected none where bias is none, got a tensor");
}

inline void check(const CrossEntropyLocalGradient& x) {
  CrossEntropyAxes s;
  const Operands call = check_cross_entropy_inputs(x, s);
  require(x.x.is_cuda(), "x: expected a tensor on a CUDA device, got one on the CPU");
  call.optional_strided("grad_loss", x.grad_loss, {s.n}, call.accumulator);
  call.optional_strided("grad_lse", x.grad_lse, {s.n}, call.accumulator);
  call.contiguous("lse", x.lse, {s.n}, call.accumulator);
  call.contiguous("lse_low", x.lse_low, {s.n}, call.accumulator);
  call.strided("out", x.out, {s.n, s.v}, call.dtype);
  const auto tiles = [](std::int64_t n) { return (n + 255) / 256; };
  OldAxis groups{"16 ceil(N / 256)", 16 * tiles(s.n.size)},
      padded{"256 ceil(C / 256)", 256 * tiles(s.v.size)};
  call.optional_strided("sums", x.sums, {groups, padded}, call.accumulator);
  check_order(x.order, call, s.n);
  require(x.first_class >= 0 && x.first_class + s.v.size <= x.classes, "first_class: expected one of ",
          x.classes, " with ", s.v.size, " from it on, got ", x.first_class);
}

// Linear distillation

struct DistillationAxes {
  OldAxis n{"N"}, d{"D"}, e{"E"}, v{"V"}, statistics{"statistics", 6};
};

template <class Arguments>
Operands check_distillation_inputs(const Arguments& x, DistillationAxes& s) {
  const Operands call("x", x.x);
  call.strided("x", x.x, {s.n, s.d}, call.dtype);
  call.strided("weight", x.weight, {s.v, s.d}, call.dtype);
  call.strided("teacher_x", x.teacher_x, {s.n, s.e}, call.dtype);
  call.strided("teacher_weight", x.teacher_weight, {s.v, s.e}, call.dtype);
  call.optional_strided("mask", x.mask, {s.n}, DType::kBool);
  call.contiguous("stats", x.stats, {s.statistics, s.n}, call.accumulator);
  const DistillationOptions& o = x.options;
  require(o.loss >= DistillationLoss::kCrossEntropy && o.loss <= DistillationLoss::kReverseKL,
          "kind: expected 0, 1 or 2, got ", static_cast<int>(o.loss));
  require(o.temperature > 0 && std::isfinite(o.temperature),
          "temperature: expected a finite number > 0, got ", o.temperature);
  require(o.workspace >= 0, "workspace: expected bytes >= 0, got ", o.workspace);
  return call;
}

inline void check(const DistillationForward& x) {
  DistillationAxes s;
  const Operands call = check_distillation_inputs(x, s);
  call.contiguous("loss", x.loss, {s.n}, call.accumulator);
  OldAxis elements{"elements"};
  call.optional_contiguous("scratch", x.scratch, {elements}, call.accumulator);
  check_kept(x.kept, x.kept_upstream, call, s.n, s.v);
  check_order(x.order, call, s.n);
  check_gathered("gathered", x.gathered, x.order, call, s.d);
  check_gathered("teacher_gathered", x.teacher_gathered, x.order, call, s.e);
  require(!x.gathered.present() || x.gathered.size[0] == x.teacher_gathered.size[0],
          "teacher_gathered: expected as many rows as gathered, got ", x.teacher_gathered.size[0]);
  if (!x.kept.present()) return;
  OldAxis some{"K", x.kept.size[1]};
  call.strided("teacher_kept", x.teacher_kept, {s.n, some}, call.dtype);
  require(x.teacher_kept.stride[0] == x.kept.stride[0], "teacher_kept: expected the strides of kept, got ",
          x.teacher_kept.stride[0]);
  require(x.options.loss != DistillationLoss::kReverseKL,
          "kept: expected none for the reverse KL, got a tensor");
}

inline void check(const DistillationBackward& x) {
  DistillationAxes s;
  const Operands call = check_distillation_inputs(x, s);
  call.strided("grad_loss", x.grad_loss, {s.n}, call.accumulator);
  call.optional_contiguous("dx", x.d_x, {s.n, s.d}, call.gradient());
  call.optional_contiguous("dweight", x.d_weight, {s.v, s.d}, call.gradient());
  call.optional_contiguous("dteacher_x", x.d_teacher_x, {s.n, s.e}, call.gradient());
  call.optional_contiguous("dteacher_weight", x.d_teacher_weight, {s.v, s.e}, call.gradient());
}

inline void check(const DistillationLocalGradient& x) {
  DistillationAxes s;
  const Operands call = check_distillation_inputs(x, s);
  require(x.x.is_cuda(), "x: expected a tensor on a CUDA device, got one on the CPU");
  call.strided("grad_loss", x.grad_loss, {s.n}, call.accumulator);
  call.strided("out", x.out, {s.n, s.v}, call.dtype);
  call.optional_strided("teacher_out", x.teacher_out, {s.n, s.v}, call.dtype);
  check_order(x.order, call, s.n);
}

inline void check(const RowScaling& x) {
  OldAxis p{"P"}, d{"D"};
  const Operands call("x", x.x);
  require(x.x.is_cuda(), "x: expected a tensor on a CUDA device, got one on the CPU");
  require(call.dtype != DType::kFloat64, "x: expected float32 or a 16-bit type, got float64");
  require(x.order.present() || (x.factor.present() && !x.scatters), "order: expected a tensor, got none");
  call.strided("x", x.x, {p, d}, call.dtype);
  require(d.size % 8 == 0, "x: expected a width that is a multiple of 8, got ", d.size);
  call.optional_contiguous("factor", x.factor, {p}, DType::kFloat32);
  check_order(x.order, call, p);
  const DType out = x.out.dtype;
  require(is_floating(out) && out != DType::kFloat64, "out: expected float32 or a 16-bit type, got ",
          name(out));
  call.strided("out", x.out, {p, d}, out);
}

// The leading tensor holds indices here, and Operands requires a floating one: so it is not used.
inline void check(const RowOrdering& x) {
  require(x.order.present() && x.order.dtype == DType::kInt64 && x.order.rank == 1 && x.order.stride[0] == 1,
          "order: expected a dense vector of int64, got another tensor");
  require(x.order.is_cuda(), "order: expected a tensor on a CUDA device, got one on the CPU");
  require(x.target.present() != x.mask.present(), "target, mask: expected one of them, got both or neither");
  for (const TensorView& t : {x.target, x.mask}) {
    require(!t.present() || (t.rank == 1 && t.size[0] + 1 == x.order.size[0]), "order: expected a place for ",
            "each row and one more, got ", x.order.size[0]);
    require(!t.present() || t.cuda_device == x.order.cuda_device,
            "target, mask: expected a tensor on the device of order, got one on ", OldDeviceText{t});
  }
  require(!x.target.present() || x.target.dtype == DType::kInt64, "target: expected int64, got ",
          name(x.target.dtype));
  require(!x.mask.present() || x.mask.dtype == DType::kBool, "mask: expected bool, got ", name(x.mask.dtype));
}

inline Operands check_local(const TensorView& a, const TensorView& order, OldAxis& p, OldAxis& c) {
  const Operands call("a", a);
  require(a.is_cuda(), "a: expected a tensor on a CUDA device, got one on the CPU");
  require(item_size(call.dtype) == 2, "a: expected a 16-bit type, got ", name(call.dtype));
  call.strided("a", a, {p, c}, call.dtype);
  check_order(order, call, p);
  return call;
}
inline void check(const RowsProduct& x) {
  OldAxis p{"P"}, c{"C"}, d{"D"};
  const Operands call = check_local(x.a, x.order, p, c);
  call.strided("b", x.b, {c, d}, call.dtype);
  call.optional_contiguous("factor", x.factor, {p}, call.accumulator);
  call.strided("out", x.out, {p, d}, call.result(x.out));
}
inline void check(const ColumnsProduct& x) {
  OldAxis p{"P"}, c{"C"}, d{"D"};
  const Operands call = check_local(x.a, x.order, p, c);
  OldAxis one{"1", 1};
  call.strided("b", x.b, {p, d}, call.dtype);
  call.optional_contiguous("scale", x.scale, {one}, call.accumulator);
  call.strided("out", x.out, {c, d}, call.dtype);
}

inline void check(const LossReduction& x) {
  OldAxis n{"N"}, values{"values", 1};
  const Operands call("losses", x.losses);
  call.contiguous("losses", x.losses, {n}, call.accumulator);
  call.optional_strided("target", x.target, {n}, DType::kInt64);
  call.optional_strided("mask", x.mask, {n}, DType::kBool);
  call.contiguous("reduced", x.reduced, {values}, call.accumulator);
}

// MLP

struct MlpAxes {
  OldAxis b{"B"}, m{"M"}, k{"K"}, n{"N"};
};

template <class Arguments>
Operands check_mlp_inputs(const Arguments& x, MlpAxes& s) {
  const Operands call("x", x.x);
  call.strided("x", x.x, {s.b, s.m}, call.dtype);
  call.strided("w1", x.w1, {s.k, s.m}, call.dtype);
  if constexpr (requires { x.w2; }) call.strided("w2", x.w2, {s.n, s.k}, call.dtype);
  call.optional_strided("bias1", x.bias1, {s.k}, call.dtype);
  require(x.activation >= ActivationKind::kRelu && x.activation <= ActivationKind::kIdentity,
          "activation: expected an index in [0, ", static_cast<int>(ActivationKind::kIdentity), "], got ",
          static_cast<int>(x.activation));
  return call;
}

inline void check(const MlpForward& x) {
  MlpAxes s;
  const Operands call = check_mlp_inputs(x, s);
  call.optional_strided("bias2", x.bias2, {s.n}, call.dtype);
  call.contiguous("out", x.out, {s.b, s.n}, call.dtype);
  OldAxis elements{"elements"};
  call.optional_contiguous("scratch", x.scratch, {elements}, call.accumulator);
}

inline void check(const MlpBackward& x) {
  MlpAxes s;
  const Operands call = check_mlp_inputs(x, s);
  call.strided("grad_out", x.grad_out, {s.b, s.n}, call.dtype);
  call.optional_contiguous("dx", x.d_x, {s.b, s.m}, call.tier_gradient(x.d_x));
  call.optional_contiguous("dw1", x.d_w1, {s.k, s.m}, call.tier_gradient(x.d_w1));
  call.optional_contiguous("dw2", x.d_w2, {s.n, s.k}, call.tier_gradient(x.d_w2));
  call.optional_contiguous("dbias1", x.d_bias1, {s.k}, call.accumulator);
  require(!x.d_bias1.present() || x.bias1.present(),
          "dbias1: expected none where bias1 is none, got a tensor");
}

inline void check(const MlpHidden& x) {
  MlpAxes s;
  const Operands call = check_mlp_inputs(x, s);
  require(x.x.is_cuda(), "x: expected a tensor on a CUDA device, got one on the CPU");
  call.strided("out", x.out, {s.b, s.k}, call.dtype);
}

inline void check(const MlpLocalGradient& x) {
  MlpAxes s;
  const Operands call = check_mlp_inputs(x, s);
  require(x.x.is_cuda(), "x: expected a tensor on a CUDA device, got one on the CPU");
  call.strided("grad_out", x.grad_out, {s.b, s.n}, call.dtype);
  call.strided("out", x.out, {s.b, s.k}, call.dtype);
  call.strided("hidden", x.hidden, {s.b, s.k}, call.dtype);
  const auto tiles = [](std::int64_t n, std::int64_t of) { return (n + of - 1) / of; };
  OldAxis groups{"16 ceil(B / 256)", 16 * tiles(s.b.size, 256)},
      padded{"192 ceil(K / 192)", 192 * tiles(s.k.size, 192)};
  call.optional_strided("sums", x.sums, {groups, padded}, call.accumulator);
}

// logsumexp of a matrix product

struct LogSumExpAxes {
  OldAxis m{"M"}, n{"N"}, f{"F"};
};

template <class Arguments>
Operands check_logsumexp_inputs(const Arguments& x, LogSumExpAxes& s) {
  const Operands call("a", x.a);
  call.strided("a", x.a, {s.m, s.f}, call.dtype);
  call.strided("b", x.b, {s.n, s.f}, call.dtype);
  call.contiguous("lse", x.lse, {s.m}, call.accumulator);
  call.contiguous("lse_low", x.lse_low, {s.m}, call.accumulator);
  return call;
}

inline void check(const LogSumExpForward& x) {
  LogSumExpAxes s;
  const Operands call = check_logsumexp_inputs(x, s);
  OldAxis elements{"elements"};
  call.optional_contiguous("scratch", x.scratch, {elements}, call.accumulator);
}

inline void check(const LogSumExpBackward& x) {
  LogSumExpAxes s;
  const Operands call = check_logsumexp_inputs(x, s);
  call.strided("grad_lse", x.grad_lse, {s.m}, call.accumulator);
  call.optional_contiguous("da", x.d_a, {s.m, s.f}, call.gradient());
  call.optional_contiguous("db", x.d_b, {s.n, s.f}, call.gradient());
}

inline void check(const LogSumExpLocalGradient& x) {
  LogSumExpAxes s;
  const Operands call = check_logsumexp_inputs(x, s);
  require(x.a.is_cuda(), "a: expected a tensor on a CUDA device, got one on the CPU");
  call.strided("grad_lse", x.grad_lse, {s.m}, call.accumulator);
  call.strided("out", x.out, {s.m, s.n}, call.dtype);
}

}  // namespace monoidreduce

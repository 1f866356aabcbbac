#include "launches/calls.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <initializer_list>
#include <utility>

#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"

namespace monoidreduce::launches {
namespace {

using enum DType;
using Sizes = std::initializer_list<std::int64_t>;

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// ---- Tensors

// Makes the tensors of calls. Each has fake memory under its own name.
struct Tensors {
  int device;

  TensorView operator()(const std::string& name, DType dtype, Sizes sizes) const {
    TensorView t = shaped(dtype, sizes);
    std::int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0; --d) t.stride[d] = stride, stride *= t.size[d];
    t.data = allocate(name, t.numel() * item_size(dtype));
    return t;
  }
  // A matrix with lines padded to multiples of 16 elements.
  TensorView lines(const std::string& name, DType dtype, std::int64_t rows, std::int64_t columns) const {
    TensorView t = (*this)(name, dtype, {rows, round_up(columns, 16)});
    t.size[1] = columns;
    return t;
  }
  // A copy with the last axes padded to multiples of 8, or the tensor itself if they already are.
  TensorView padded(const std::string& name, const TensorView& given, int axes = 1) const {
    TensorView t = given;
    for (int d = t.rank - axes; d < t.rank && t.present(); ++d) t.size[d] = round_up(t.size[d], 8);
    if (t.numel() == given.numel()) return given;
    if (t.rank == 1) return (*this)(name + "_padded", t.dtype, {t.size[0]});
    if (t.rank == 2) return (*this)(name + "_padded", t.dtype, {t.size[0], t.size[1]});
    return (*this)(name + "_padded", t.dtype, {t.size[0], t.size[1], t.size[2], t.size[3]});
  }
  TensorView scratch(const Plan& plan, DType dtype) const {
    return plan.scratch ? (*this)("scratch", accumulation(dtype), {plan.scratch}) : TensorView{};
  }

 private:
  TensorView shaped(DType dtype, Sizes sizes) const {
    TensorView t;
    t.dtype = dtype, t.cuda_device = device, t.rank = static_cast<int>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), t.size);
    return t;
  }
};

TensorView part_of(TensorView t, int axis, std::int64_t first, std::int64_t count) {
  if (!t.present()) return t;
  t.data = static_cast<char*>(t.data) + first * t.stride[axis] * item_size(t.dtype);
  t.size[axis] = count;
  return t;
}

// ---- Calls

// The plan in words, without the reason for its tier.
std::string summary(const Plan& plan) {
  std::string result =
      message(plan.can().name, ", scratch ", plan.scratch, plan.adds_rows ? ", adds rows" : "");
  if (plan.part) result += message(", parts of ", plan.part->rows, " x ", plan.part->columns);
  return result;
}

class Recorder {
 public:
  explicit Recorder(int device) : tensors_{device} {}

  // Runs call(tensors) and records what it launches. The function returns the plan of the call, or an empty one if it has none.
  void run(const std::string& name, const std::function<Plan(const Tensors&)>& call) {
    free_all();
    Call& made = calls.emplace_back(name);
    try {
      const Plan plan = call(tensors_);
      if (*plan.call) made.tier = summary(plan), made.reason = text(plan);
    } catch (const std::exception& error) {
      made.error = error.what();
    }
    made.events = take_events();
  }

  std::vector<Call> calls;

 private:
  Tensors tensors_;
};

Launch launch_of(bool deterministic = false, bool tf32 = false, bool planes = false) {
  return {.stream = reinterpret_cast<void*>(kStream),
          .deterministic = deterministic,
          .tf32 = tf32,
          .planes = planes};
}

// ---- Attention

struct Attention {
  std::string name = "";
  DType dtype = kBFloat16;
  std::int64_t batch = 2, heads = 8, key_heads = 2, rows = 1024, columns = 1024;
  std::int64_t width = 64, payload_width = 64;
  std::int64_t left = -1, right = -1;
  double softcap = 0;
  bool biased = false;
  DType bias = kBool;
  bool shared_by_batches = false, shared_by_heads = false, shared_by_rows = false, shared_by_columns = false;
  bool tf32 = false, planes = false, deterministic = false, of_lse = false, of_lse_alone = false,
       whole = true;
  bool wants_d_k = true;  // false: nobody wants the gradient of k, and kernels that may leave it out do
};

// A bias [B, H, M, N], with stride 0 along the axes that share it.
TensorView attention_bias(const Attention& c, const Tensors& t, const std::string& name, DType dtype) {
  const bool shared[4] = {c.shared_by_batches, c.shared_by_heads, c.shared_by_rows, c.shared_by_columns};
  const std::int64_t sizes[4] = {c.batch, c.heads, c.rows, c.columns};
  const auto own = [&](int axis) { return shared[axis] ? 1 : sizes[axis]; };
  TensorView bias =
      t(name, dtype, {own(0), own(1), own(2), c.shared_by_columns ? 1 : round_up(c.columns, 16)});
  for (int axis = 0; axis < 4; ++axis) {
    bias.size[axis] = sizes[axis];
    if (shared[axis]) bias.stride[axis] = 0;
  }
  return bias;
}

template <class Arguments>
void fill_attention(const Attention& c, const Tensors& t, Arguments& x) {
  x.q = t("q", c.dtype, {c.batch, c.heads, c.rows, c.width});
  x.k = t("k", c.dtype, {c.batch, c.key_heads, c.columns, c.width});
  x.v = t("v", c.dtype, {c.batch, c.key_heads, c.columns, c.payload_width});
  if (c.biased) x.bias = attention_bias(c, t, "bias", c.bias);
  x.options = {.scale = 0.125, .softcap = c.softcap, .left = c.left, .right = c.right};
}
template <class Arguments>
void pad_attention(const Tensors& t, Arguments& x) {
  x.q = t.padded("q", x.q), x.k = t.padded("k", x.k), x.v = t.padded("v", x.v);
}
template <class Arguments>
void add_statistics(const Attention& c, const Tensors& t, Arguments& x) {
  const DType statistics = accumulation(c.dtype);
  x.out = t("out", c.dtype, {c.batch, c.heads, c.rows, x.v.size[3]});
  x.lse = t("lse", statistics, {c.batch, c.heads, c.rows});
  x.lse_low = t("lse_low", statistics, {c.batch, c.heads, c.rows});
}

Plan forward(const Attention& c, const Tensors& t) {
  AttentionForward x;
  fill_attention(c, t, x);
  const Launch launch = launch_of(c.deterministic, c.tf32, c.planes);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.can().tensor_cores) pad_attention(t, x);
  add_statistics(c, t, x);
  x.scratch = t.scratch(plan, c.dtype);
  run(x, launch, &plan);
  return plan;
}

Plan backward(const Attention& c, const Tensors& t) {
  AttentionBackward x;
  fill_attention(c, t, x);
  x.whole = c.whole;
  const DType sums = accumulation(c.dtype);
  if (!c.of_lse_alone) x.grad_out = t("grad_out", c.dtype, {c.batch, c.heads, c.rows, c.payload_width});
  if (c.of_lse || c.of_lse_alone) x.grad_lse = t("grad_lse", sums, {c.batch, c.heads, c.rows});
  if (c.biased && is_floating(c.bias)) x.d_bias = attention_bias(c, t, "d_bias", sums);
  if (!c.wants_d_k) x.d_q = x.q, x.d_v = x.v;
  const Launch launch = launch_of(c.deterministic, c.tf32, c.planes);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  const bool simt = !plan.can().tensor_cores;
  if (!simt) pad_attention(t, x), x.grad_out = t.padded("grad_out", x.grad_out);
  add_statistics(c, t, x);
  const auto gradient = [&](const char* name, const TensorView& of, bool adds) {
    return t(name, adds ? sums : c.dtype, {of.size[0], of.size[1], of.size[2], of.size[3]});
  };
  x.d_q = gradient("d_q", x.q, plan.adds_rows);
  if (c.wants_d_k || plan.computed.columns) x.d_k = gradient("d_k", x.k, simt);
  x.d_v = gradient("d_v", x.v, simt);
  x.scratch = t("scratch", sums, {plan.scratch});
  run(x, launch, &plan);
  return plan;
}

std::vector<Attention> attention_calls() {
  std::vector<Attention> calls;
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64}) {
    for (const std::int64_t width : {64, 128, 256, 60, 320}) {
      calls.push_back({.name = message(name(dtype), " width ", width),
                       .dtype = dtype,
                       .width = width,
                       .payload_width = width});
      if (dtype == kFloat32)
        calls.push_back(calls.back()), calls.back().tf32 = true, calls.back().name += " tf32";
    }
  }
  for (const DType dtype : {kBFloat16, kFloat32}) {
    for (const std::int64_t width : {64, 128, 256}) {
      const bool tf32 = dtype == kFloat32;
      const auto add = [&](const char* what, Attention call) {
        call.name = message(name(dtype), " width ", width, " ", what);
        call.dtype = dtype, call.tf32 = tf32, call.width = call.payload_width = width;
        calls.push_back(call);
      };
      add("causal", {.right = 0});
      add("window", {.left = 100, .right = 20});
      add("softcap", {.softcap = 30});
      add("deterministic", {.deterministic = true});
      add("causal deterministic", {.right = 0, .deterministic = true});
      add("lse", {.of_lse = true});
      add("mask", {.biased = true});
      add("float bias", {.biased = true, .bias = kFloat32});
      add("bias of its type", {.biased = true, .bias = dtype});
      add("bias of heads", {.biased = true, .bias = dtype, .shared_by_batches = true});
      add("bias of batches", {.biased = true, .bias = dtype, .shared_by_heads = true});
      add("bias of columns", {.biased = true, .bias = dtype, .shared_by_rows = true});
      add("bias of rows", {.biased = true, .bias = dtype, .shared_by_columns = true});
      add("shared bias deterministic",
          {.biased = true, .bias = dtype, .shared_by_heads = true, .deterministic = true});
      add("ragged", {.rows = 1000, .columns = 777});
      add("one row", {.batch = 8, .heads = 32, .key_heads = 8, .rows = 1, .columns = 32768});
      add("few rows", {.batch = 1, .heads = 16, .key_heads = 2, .rows = 48, .columns = 8192, .right = 0});
      add("few rows, mask", {.batch = 1, .rows = 48, .columns = 8192, .biased = true});
      add("many heads", {.batch = 16, .heads = 32, .key_heads = 32, .right = 0});
    }
  }
  for (const std::int64_t width : {64, 128, 256, 320}) {
    const auto add = [&](const char* what, Attention call) {
      call.name = message("float32 planes width ", width, what);
      call.dtype = kFloat32, call.planes = true, call.width = call.payload_width = width;
      calls.push_back(call);
    };
    add("", {});
    add(" causal", {.right = 0});
    add(" softcap", {.softcap = 30});
    add(" mask", {.biased = true});
    add(" bias", {.biased = true, .bias = kFloat32});
    add(" bias, softcap", {.softcap = 30, .biased = true, .bias = kFloat32, .shared_by_heads = true});
    add(" bias of columns", {.biased = true, .bias = kFloat32, .shared_by_rows = true});
    add(" bias of rows", {.biased = true, .bias = kFloat32, .shared_by_columns = true});
    add(" shared bias deterministic",
        {.biased = true, .bias = kFloat32, .shared_by_heads = true, .deterministic = true});
    add(" few keys", {.columns = 64});
    add(" few rows", {.batch = 1, .rows = 48, .columns = 8192});
  }
  calls.push_back({.name = "only lse", .of_lse_alone = true});
  calls.push_back({.name = "some columns", .of_lse = true, .whole = false});
  calls.push_back(
      {.name = "bfloat16 width 256 without d_k", .width = 256, .payload_width = 256, .wants_d_k = false});
  calls.push_back({.name = "two widths", .width = 192, .payload_width = 128});
  calls.push_back(
      {.name = "long", .batch = 1, .rows = 65536, .columns = 65536, .width = 128, .payload_width = 128});
  calls.push_back({.name = "empty", .rows = 0});
  return calls;
}

// ---- What the linear losses share

// An order of rows with the active ones first, as order_rows makes it; absent unless Hopper's kernels take the call, and enough rows.
TensorView ordered(bool wanted, const Plan& plan, const Tensors& t, const TensorView& target,
                   const TensorView& mask, std::int64_t rows) {
  if (!wanted || !plan.skips_rows()) return {};
  const TensorView order = t("order", kInt64, {rows + 1});
  run(RowOrdering{.target = target, .mask = mask, .order = order}, launch_of());
  return order;
}

// A weight [classes, width], row-major or transposed.
TensorView weight_of(const Tensors& t, const char* name, DType dtype, std::int64_t classes,
                     std::int64_t width, bool transposed) {
  TensorView w = transposed ? t(name, dtype, {width, classes}) : t(name, dtype, {classes, width});
  if (!transposed) return w;
  std::swap(w.size[0], w.size[1]);
  std::swap(w.stride[0], w.stride[1]);
  return w;
}

// The weight as the kernels read it: only Hopper's take a transposed one, for others it is copied.
TensorView readable_weight(const Tensors& t, const char* name, const TensorView& weight, const Plan& plan) {
  if (plan.can().transposed || weight.stride[1] == 1) return t.padded(name, weight);
  return t(message(name, "_copy"), weight.dtype, {weight.size[0], weight.size[1]});
}

// The number of columns whose dlogits fit into a workspace.
std::int64_t columns_in(std::int64_t workspace, std::int64_t rows, std::int64_t columns) {
  return std::min(workspace / (2 * 256 * rows) * 256, columns);
}

TensorView gathered_rows(const Tensors& t, const TensorView& rows, const TensorView& order) {
  if (!order.present()) return rows;
  const TensorView gathered = t("gathered", rows.dtype, {rows.size[0], rows.size[1]});
  run(RowScaling{.x = rows, .out = gathered, .factor = {}, .order = order}, launch_of());
  return gathered;
}

// Multiplies dlogits with rows and columns, and makes the rows' gradient from its sums.
void multiply(const Tensors& t, const TensorView& local, const TensorView& rows, const TensorView& columns,
              const TensorView& order) {
  const std::int64_t count = rows.size[0], width = rows.size[1];
  const Launch launch = launch_of();
  const TensorView sums = t("row_sums", kFloat32, {count, width}), factor = t("factor", kFloat32, {count});
  run(RowsProduct{.a = local, .b = columns, .out = sums, .factor = factor, .order = order, .adds = true},
      launch);
  run(ColumnsProduct{.a = local,
                     .b = rows,
                     .scale = t("scale", kFloat32, {1}),
                     .out = t("d_columns", rows.dtype, {columns.size[0], width}),
                     .order = order},
      launch);
  if (!order.present()) return;
  run(RowScaling{.x = sums,
                 .out = t("d_rows", rows.dtype, {count, width}),
                 .factor = {},
                 .order = order,
                 .scatters = true},
      launch);
}

// The frames (row maxima) of the weights that a loss's forward pass has saved: the last part of its scratch memory.
TensorView frames_of(TensorView scratch, const Plan& plan) {
  scratch.data = static_cast<float*>(scratch.data) + plan.saved.frames;
  scratch.size[0] -= plan.saved.frames;
  return scratch;
}

// ---- Linear cross entropy

struct LinearCrossEntropy {
  std::string name = "";
  DType dtype = kBFloat16;
  std::int64_t rows = 4096, classes = 32000, width = 1024;
  bool biased = false, weighted = false, transposed = false, ordered = false, deterministic = false,
       of_lse = false, of_rank = false;
  double softcap = 0, smoothing = 0;
  std::int64_t kept = 0;  // classes whose dlogits forward saves
  std::int64_t workspace = 64 << 20;
};

template <class Arguments>
void fill_cross_entropy(const LinearCrossEntropy& c, const Tensors& t, Arguments& x) {
  x.x = t("x", c.dtype, {c.rows, c.width});
  x.weight = weight_of(t, "weight", c.dtype, c.classes, c.width, c.transposed);
  if (c.biased) x.bias = t("bias", c.dtype, {c.classes});
  x.target = t("target", kInt64, {c.rows});
  if (c.weighted) x.class_weight = t("class_weight", accumulation(c.dtype), {class_weights(c.classes)});
  x.lse = t("lse", accumulation(c.dtype), {c.rows});
  x.lse_low = t("lse_low", accumulation(c.dtype), {c.rows});
  x.options = {.logit_scale = 0.5, .softcap = c.softcap, .label_smoothing = c.smoothing, .z_loss = 1e-4};
  if constexpr (requires { x.workspace; }) x.workspace = c.workspace;
}
template <class Arguments>
void pad_cross_entropy(const Tensors& t, const Plan& plan, Arguments& x) {
  x.x = t.padded("x", x.x), x.weight = readable_weight(t, "weight", x.weight, plan);
}

Plan forward(const LinearCrossEntropy& c, const Tensors& t) {
  CrossEntropyForward x;
  fill_cross_entropy(c, t, x);
  x.loss = t("loss", accumulation(c.dtype), {c.rows});
  const Launch launch = launch_of(c.deterministic);
  if (c.of_rank) x.loss_weight = t("loss_weight", accumulation(c.dtype), {c.rows});
  x.saved_columns = c.kept;
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.saved.columns > 0) {
    x.kept = t.lines("kept", c.dtype, c.rows, c.kept);
    if (!c.of_rank) x.kept_upstream = 1;
  }
  if (plan.can().tensor_cores) pad_cross_entropy(t, plan, x);
  x.scratch = t.scratch(plan, c.dtype);
  x.order = ordered(c.ordered, plan, t, x.target, {}, c.rows);
  if (x.order.present()) x.gathered = t("gathered", c.dtype, {c.rows * 5 / 8, x.x.size[1]});
  run(x, launch, &plan);
  if (c.of_rank && x.kept.present()) {
    CrossEntropyKeptGradients then;
    fill_cross_entropy(c, t, then);
    pad_cross_entropy(t, plan, then);
    then.frames = frames_of(x.scratch, plan);
    then.kept = x.kept, then.order = x.order;
    run(then, launch, &plan);
  }
  return plan;
}

Plan backward(const LinearCrossEntropy& c, const Tensors& t) {
  CrossEntropyBackward x;
  fill_cross_entropy(c, t, x);
  const DType sums = accumulation(c.dtype);
  x.grad_loss = t("grad_loss", sums, {c.rows});
  if (c.of_lse) x.grad_lse = t("grad_lse", sums, {c.rows});
  const Launch launch = launch_of(c.deterministic);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (!plan.can().tensor_cores) {
    x.d_x = t("d_x", sums, {c.rows, c.width});
    x.d_weight = t("d_weight", sums, {c.classes, c.width});
    if (c.biased) x.d_bias = t("d_bias", sums, {c.classes});
    run(x, launch, &plan);
    return plan;
  }
  pad_cross_entropy(t, plan, x);
  const TensorView order = ordered(c.ordered, plan, t, x.target, {}, c.rows);
  const TensorView rows = gathered_rows(t, x.x, order);
  const std::int64_t at_once = columns_in(c.workspace, c.rows, c.classes),
                     first = (c.classes - 1) / at_once * at_once;
  const TensorView room = t("local", c.dtype, {c.rows, round_up(at_once, 8)});
  const TensorView partial_sums = t("sums", sums, {round_up(c.rows, 256) / 16, round_up(at_once, 256)});
  const auto gradient = [&](std::int64_t from, std::int64_t count) {
    const TensorView local = part_of(room, 1, 0, count), columns = part_of(x.weight, 0, from, count);
    CrossEntropyOptions options = x.options;
    options.first_class = from, options.classes = c.classes;
    run(CrossEntropyLocalGradient{.grad_loss = x.grad_loss,
                                  .grad_lse = x.grad_lse,
                                  .x = rows,
                                  .weight = columns,
                                  .bias = part_of(x.bias, 0, from, count),
                                  .target = x.target,
                                  .class_weight = x.class_weight,
                                  .lse = x.lse,
                                  .lse_low = x.lse_low,
                                  .out = local,
                                  .sums = c.biased ? part_of(partial_sums, 1, 0, round_up(count, 256))
                                                   : TensorView{},
                                  .order = order,
                                  .row_planes = {},
                                  .column_planes = {},
                                  .options = options},
        launch, &plan);
    return local;
  };
  gradient(first, c.classes - first);
  const TensorView local = gradient(0, at_once);
  if (plan.can().multiplies) multiply(t, local, rows, part_of(x.weight, 0, 0, at_once), order);
  return plan;
}

std::vector<LinearCrossEntropy> cross_entropy_calls() {
  std::vector<LinearCrossEntropy> calls;
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64})
    calls.push_back({.name = name(dtype), .dtype = dtype});
  for (const DType dtype : {kBFloat16, kFloat16}) {
    const auto add = [&](const char* what, LinearCrossEntropy call) {
      call.name = message(name(dtype), " ", what), call.dtype = dtype;
      calls.push_back(call);
    };
    add("large", {.rows = 8192, .classes = 128256, .width = 4096});
    add("small", {.rows = 100, .classes = 300, .width = 64});
    add("odd sizes", {.rows = 1001, .classes = 5003, .width = 250});
    add("one row", {.rows = 1, .classes = 50000});
    add("bias", {.biased = true});
    add("softcap", {.softcap = 20});
    add("bias and softcap", {.biased = true, .ordered = true, .softcap = 20});
    add("smoothing", {.smoothing = 0.1});
    add("class weights", {.weighted = true});
    add("class weights, smoothing", {.weighted = true, .smoothing = 0.1});
    add("transposed weight", {.transposed = true});
    add("lse", {.of_lse = true});
    add("deterministic", {.deterministic = true});
    add("order", {.ordered = true});
    add("no workspace", {.workspace = 0});
    add("kept", {.kept = 32000});
    add("kept, order", {.ordered = true, .kept = 32000});
    add("kept, smoothing", {.smoothing = 0.1, .kept = 8192});
    add("some kept, large", {.rows = 8192, .classes = 128256, .width = 4096, .kept = 4096});
    add("some kept, order", {.rows = 8192, .width = 4096, .ordered = true, .kept = 2048});
    add("kept by a rank", {.ordered = true, .of_rank = true, .kept = 8192});
  }
  return calls;
}

// ---- Log-probabilities

struct LinearLogProbs {
  std::string name = "";
  DType dtype = kBFloat16;
  std::int64_t rows = 4096, classes = 32000, width = 1024;
  bool biased = false, ordered = false, top = false, each = false,
       deterministic = false;  // each: each row has its own temperature
  double softcap = 0;
  std::int64_t kept = 0;  // classes whose softmax weights forward saves, if it can
  std::int64_t workspace = 64 << 20;
};

template <class Arguments>
void fill_log_probs(const LinearLogProbs& c, const Tensors& t, Arguments& x) {
  const DType sums = accumulation(c.dtype);
  x.x = t("x", c.dtype, {c.rows, c.width}), x.weight = t("weight", c.dtype, {c.classes, c.width});
  if (c.biased) x.bias = t("bias", c.dtype, {c.classes});
  x.target = t("target", kInt64, {c.rows});
  if (c.each) x.temperatures = t("temperatures", sums, {c.rows});
  x.entropy = t("entropy", sums, {c.rows});
  x.lse = t("lse", sums, {c.rows}), x.lse_low = t("lse_low", sums, {c.rows});
  x.options = {.logit_scale = 0.5, .softcap = c.softcap, .temperature = 0.7};
  if constexpr (requires { x.workspace; }) x.workspace = c.workspace;
}

Plan forward(const LinearLogProbs& c, const Tensors& t) {
  LogProbsForward x;
  fill_log_probs(c, t, x);
  x.log_probs = t("log_probs", accumulation(c.dtype), {c.rows});
  if (c.top) x.top1 = t("top1", kInt64, {c.rows});
  x.saved_columns = c.kept;
  const Launch launch = launch_of(c.deterministic);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.saved.columns > 0) x.kept = t.lines("kept", c.dtype, c.rows, c.kept);
  if (plan.can().tensor_cores) pad_cross_entropy(t, plan, x);
  x.scratch = t.scratch(plan, c.dtype);
  x.order = ordered(c.ordered, plan, t, x.target, {}, c.rows);
  if (x.order.present()) x.gathered = t("gathered", c.dtype, {c.rows * 5 / 8, x.x.size[1]});
  run(x, launch, &plan);
  return plan;
}

Plan backward(const LinearLogProbs& c, const Tensors& t) {
  LogProbsBackward x;
  fill_log_probs(c, t, x);
  const DType sums = accumulation(c.dtype);
  x.grad_log_probs = t("grad_log_probs", sums, {c.rows});
  x.grad_entropy = t("grad_entropy", sums, {c.rows});
  const Launch launch = launch_of(c.deterministic);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (!plan.can().tensor_cores) {
    x.d_x = t("d_x", sums, {c.rows, c.width});
    x.d_weight = t("d_weight", sums, {c.classes, c.width});
    if (c.biased) x.d_bias = t("d_bias", sums, {c.classes});
    run(x, launch, &plan);
    return plan;
  }
  pad_cross_entropy(t, plan, x);
  const TensorView order = ordered(c.ordered, plan, t, x.target, {}, c.rows);
  const TensorView rows = gathered_rows(t, x.x, order);
  const bool keeps = c.kept && plan.can().keeps;
  const std::int64_t at_once = keeps ? c.kept : columns_in(c.workspace, c.rows, c.classes);
  const TensorView columns = part_of(x.weight, 0, 0, at_once);
  const TensorView local = part_of(t("local", c.dtype, {c.rows, round_up(at_once, 8)}), 1, 0, at_once);
  LogProbsOptions options = x.options;
  options.classes = c.classes;
  run(
      LogProbsLocalGradient{
          .grad_log_probs = x.grad_log_probs,
          .grad_entropy = x.grad_entropy,
          .grad_lse = {},
          .x = rows,
          .weight = columns,
          .bias = part_of(x.bias, 0, 0, at_once),
          .target = x.target,
          .temperatures = x.temperatures,
          .mask = {},
          .entropy = x.entropy,
          .lse = x.lse,
          .lse_low = x.lse_low,
          .out = local,
          .sums =
              c.biased ? t("sums", sums, {round_up(c.rows, 256) / 16, round_up(at_once, 256)}) : TensorView{},
          .order = order,
          .frames = keeps ? t("frames", sums, {c.rows, round_up(at_once, 256) / 256}) : TensorView{},
          .log_probs = keeps ? t("log_probs", sums, {c.rows}) : TensorView{},
          .row_planes = {},
          .column_planes = {},
          .options = options},
      launch, &plan);
  if (plan.can().multiplies) multiply(t, local, rows, columns, order);
  return plan;
}

std::vector<LinearLogProbs> log_probs_calls() {
  std::vector<LinearLogProbs> calls;
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64}) {
    const auto add = [&](const char* what, LinearLogProbs call) {
      call.name = message(name(dtype), *what ? " " : "", what), call.dtype = dtype;
      calls.push_back(call);
    };
    add("", {});
    add("top", {.top = true});
    add("temperatures", {.each = true});
    if (item_size(dtype) > 2) continue;
    add("odd sizes", {.rows = 1001, .classes = 5003, .width = 250, .top = true});
    add("softcap", {.softcap = 20});
    add("top, bias", {.biased = true, .top = true});
    add("order", {.ordered = true, .top = true});
    add("deterministic", {.deterministic = true});
    add("no workspace", {.workspace = 0});
    add("kept", {.kept = 32000});
    add("some kept, order", {.ordered = true, .each = true, .kept = 8192});
  }
  return calls;
}

// ---- Linear distillation

struct LinearDistillation {
  std::string name = "";
  DType dtype = kBFloat16;
  std::int64_t rows = 2048, classes = 32000, width = 512, teacher_width = 1024;
  bool masked = false, transposed = false, deterministic = false, of_teacher = false, of_rank = false;
  bool planes = false;
  DistillationLoss loss = DistillationLoss::kForwardKL;
  std::int64_t kept = 0;
  std::int64_t workspace = 64 << 20;
};

template <class Arguments>
void fill_distillation(const LinearDistillation& c, const Tensors& t, Arguments& x) {
  x.x = t("x", c.dtype, {c.rows, c.width});
  x.weight = weight_of(t, "weight", c.dtype, c.classes, c.width, c.transposed);
  x.teacher_x = t("teacher_x", c.dtype, {c.rows, c.teacher_width});
  x.teacher_weight = weight_of(t, "teacher_weight", c.dtype, c.classes, c.teacher_width, false);
  if (c.masked) x.mask = t("mask", kBool, {c.rows});
  x.stats = t("stats", accumulation(c.dtype), {6, c.rows});
  x.options = {.loss = c.loss, .temperature = 2};
  if constexpr (requires { x.workspace; }) x.workspace = c.workspace;
}
template <class Arguments>
void pad_distillation(const Tensors& t, const Plan& plan, Arguments& x) {
  x.x = t.padded("x", x.x), x.weight = readable_weight(t, "weight", x.weight, plan);
  x.teacher_x = t.padded("teacher_x", x.teacher_x);
  x.teacher_weight = t.padded("teacher_weight", x.teacher_weight);
}
// Lines of x in planes.
TensorView planes_of(const Tensors& t, const char* name, const TensorView& x) {
  return t(name, kFloat16, {x.size[0], planes_width(x.size[1])});
}
// Gives a call its operands in planes, if the plan's kernels read them.
template <class Arguments>
void split_distillation(const Tensors& t, const Plan& plan, Arguments& x) {
  if (!plan.can().planes) return;
  x.row_planes = planes_of(t, "row_planes", x.x);
  x.column_planes = planes_of(t, "column_planes", x.weight);
  x.other_row_planes = planes_of(t, "other_row_planes", x.teacher_x);
  x.other_column_planes = planes_of(t, "other_column_planes", x.teacher_weight);
}

Plan forward(const LinearDistillation& c, const Tensors& t) {
  DistillationForward x;
  fill_distillation(c, t, x);
  x.loss = t("loss", accumulation(c.dtype), {c.rows});
  const Launch launch = launch_of(c.deterministic, false, c.planes);
  x.saved_columns = c.kept;
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.saved.columns > 0) {
    x.kept = t.lines("kept", c.dtype, c.rows, c.kept);
    x.teacher_kept = t.lines("teacher_kept", c.dtype, c.rows, c.kept);
    if (!c.of_rank) x.kept_upstream = 1;
  }
  if (plan.can().tensor_cores) pad_distillation(t, plan, x);
  split_distillation(t, plan, x);
  x.scratch = t.scratch(plan, c.dtype);
  x.order = ordered(c.masked, plan, t, {}, x.mask, c.rows);
  if (x.order.present()) {
    x.gathered = t("gathered", c.dtype, {c.rows * 5 / 8, x.x.size[1]});
    x.teacher_gathered = t("teacher_gathered", c.dtype, {c.rows * 5 / 8, x.teacher_x.size[1]});
  }
  run(x, launch, &plan);
  if (c.of_rank && x.kept.present()) {
    DistillationKeptGradients then;
    fill_distillation(c, t, then);
    pad_distillation(t, plan, then);
    then.frames = frames_of(x.scratch, plan);
    then.kept = x.kept, then.teacher_kept = x.teacher_kept, then.order = x.order;
    run(then, launch, &plan);
  }
  return plan;
}

Plan backward(const LinearDistillation& c, const Tensors& t) {
  DistillationBackward x;
  fill_distillation(c, t, x);
  const DType sums = accumulation(c.dtype);
  x.grad_loss = t("grad_loss", sums, {c.rows});
  const Launch launch = launch_of(c.deterministic, false, c.planes);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (!plan.can().tensor_cores) {
    x.d_x = t("d_x", sums, {c.rows, c.width});
    x.d_weight = t("d_weight", sums, {c.classes, c.width});
    if (c.of_teacher) {
      x.d_teacher_x = t("d_teacher_x", sums, {c.rows, c.teacher_width});
      x.d_teacher_weight = t("d_teacher_weight", sums, {c.classes, c.teacher_width});
    }
    run(x, launch, &plan);
    return plan;
  }
  pad_distillation(t, plan, x);
  const TensorView order = ordered(c.masked, plan, t, {}, x.mask, c.rows);
  const TensorView rows = gathered_rows(t, x.x, order), teacher_rows = gathered_rows(t, x.teacher_x, order);
  const std::int64_t count = columns_in(c.workspace, c.rows, c.classes);
  const TensorView local = t.lines("local", c.dtype, c.rows, count), columns = part_of(x.weight, 0, 0, count);
  DistillationLocalGradient of_slice{
      .grad_loss = x.grad_loss,
      .x = rows,
      .weight = columns,
      .teacher_x = teacher_rows,
      .teacher_weight = part_of(x.teacher_weight, 0, 0, count),
      .mask = x.mask,
      .stats = x.stats,
      .out = local,
      .teacher_out = c.of_teacher ? t.lines("teacher_local", c.dtype, c.rows, count) : TensorView{},
      .order = order,
      .row_planes = {},
      .column_planes = {},
      .other_row_planes = {},
      .other_column_planes = {},
      .options = x.options};
  split_distillation(t, plan, of_slice);
  run(of_slice, launch, &plan);
  if (plan.can().multiplies && !plan.can().planes) multiply(t, local, rows, columns, order);
  return plan;
}

std::vector<LinearDistillation> distillation_calls() {
  using enum DistillationLoss;
  std::vector<LinearDistillation> calls;
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64})
    calls.push_back({.name = name(dtype), .dtype = dtype});
  for (const DType dtype : {kBFloat16, kFloat16}) {
    const auto add = [&](const char* what, LinearDistillation call) {
      call.name = message(name(dtype), " ", what), call.dtype = dtype;
      calls.push_back(call);
    };
    add("cross entropy", {.loss = DistillationLoss::kCrossEntropy});
    add("reverse KL", {.loss = kReverseKL});
    add("large", {.rows = 4096, .classes = 128256, .width = 2048, .teacher_width = 4096});
    add("odd sizes", {.rows = 1001, .classes = 5003, .width = 250, .teacher_width = 131});
    add("one row", {.rows = 1});
    add("mask", {.masked = true});
    add("mask, teacher", {.masked = true, .of_teacher = true});
    add("teacher", {.of_teacher = true});
    add("teacher, reverse KL", {.of_teacher = true, .loss = kReverseKL});
    add("transposed weight", {.transposed = true});
    add("deterministic", {.deterministic = true});
    add("no workspace", {.workspace = 0});
    add("kept", {.kept = 32000});
    add("some kept, mask", {.masked = true, .kept = 8192});
    add("kept, cross entropy", {.loss = DistillationLoss::kCrossEntropy, .kept = 32000});
    add("kept by a rank", {.masked = true, .of_rank = true, .kept = 8192});
  }
  const auto add_planes = [&](const char* what, LinearDistillation call) {
    call.name = message("float32 planes", *what ? " " : "", what), call.dtype = kFloat32, call.planes = true;
    calls.push_back(call);
  };
  add_planes("", {});
  add_planes("odd sizes", {.rows = 1001, .classes = 5003, .width = 250, .teacher_width = 131});
  add_planes("mask, teacher", {.masked = true, .of_teacher = true});
  add_planes("reverse KL, kept", {.loss = kReverseKL, .kept = 8192});
  add_planes("narrow teacher", {.teacher_width = 72});
  return calls;
}

// ---- logsumexp of a matrix product

struct LogSumExpOfProduct {
  std::string name = "";
  DType dtype = kBFloat16;
  std::int64_t rows = 4096, columns = 32000, width = 1024;
  bool transposed = false, deterministic = false, differentiated = true;  // differentiated: with respect to a
  double scale = 0.5;
  std::int64_t kept = 0;  // columns whose dlogits forward saves, if it can
  std::int64_t workspace = 64 << 20;
};

template <class Arguments>
void fill_logsumexp(const LogSumExpOfProduct& c, const Tensors& t, Arguments& x) {
  x.a = t("a", c.dtype, {c.rows, c.width});
  x.b = weight_of(t, "b", c.dtype, c.columns, c.width, c.transposed);
  x.lse = t("lse", accumulation(c.dtype), {c.rows});
  x.lse_low = t("lse_low", accumulation(c.dtype), {c.rows});
  x.scale = c.scale;
  if (c.differentiated) x.mean = x.a;  // only so that the plan knows that the mean is wanted
}

TensorView mean_of(const Tensors& t, const Plan& plan, const TensorView& a) {
  return plan.narrow ? t("mean", a.dtype, {a.size[0], a.size[1]}) : TensorView{};
}

Plan forward(const LogSumExpOfProduct& c, const Tensors& t) {
  LogSumExpForward x;
  fill_logsumexp(c, t, x);
  x.saved_columns = c.kept;
  const Launch launch = launch_of(c.deterministic);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.can().tensor_cores) x.a = t.padded("a", x.a), x.b = readable_weight(t, "b", x.b, plan);
  x.mean = mean_of(t, plan, x.a);
  if (plan.saved.columns > 0) x.kept = t.lines("kept", c.dtype, c.rows, c.kept);
  x.scratch = t.scratch(plan, c.dtype);
  run(x, launch, &plan);
  return plan;
}

Plan backward(const LogSumExpOfProduct& c, const Tensors& t) {
  LogSumExpBackward x;
  fill_logsumexp(c, t, x);
  x.workspace = c.workspace;
  const DType sums = accumulation(c.dtype);
  x.grad_lse = t("grad_lse", sums, {c.rows});
  x.d_a = x.a, x.d_b = x.b;  // only so that the plan knows that these gradients are wanted
  const Launch launch = launch_of(c.deterministic);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.can().tensor_cores) x.a = t.padded("a", x.a), x.b = readable_weight(t, "b", x.b, plan);
  x.mean = mean_of(t, plan, x.a);
  if (plan.narrow || !plan.can().tensor_cores) {
    const DType of_gradients = plan.narrow ? c.dtype : sums;
    x.d_a = t("d_a", of_gradients, {c.rows, x.a.size[1]});
    x.d_b = t("d_b", of_gradients, {c.columns, x.a.size[1]});
    x.scratch = t.scratch(plan, c.dtype);
    run(x, launch, &plan);
    return plan;
  }
  const std::int64_t count = columns_in(c.workspace, c.rows, c.columns);
  const TensorView local = t.lines("local", c.dtype, c.rows, count), columns = part_of(x.b, 0, 0, count);
  run(LogSumExpLocalGradient{.grad_lse = x.grad_lse,
                             .a = x.a,
                             .b = columns,
                             .lse = x.lse,
                             .lse_low = x.lse_low,
                             .out = local,
                             .row_planes = {},
                             .column_planes = {},
                             .scale = c.scale},
      launch, &plan);
  if (plan.can().multiplies) multiply(t, local, x.a, columns, {});
  return plan;
}

std::vector<LogSumExpOfProduct> logsumexp_calls() {
  std::vector<LogSumExpOfProduct> calls;
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64}) {
    calls.push_back({.name = name(dtype), .dtype = dtype});
    calls.push_back({.name = message(name(dtype), " deterministic"), .dtype = dtype, .deterministic = true});
  }
  calls.push_back({.name = "large", .rows = 8192, .columns = 128256, .width = 4096});
  calls.push_back({.name = "some kept, large", .rows = 8192, .columns = 128256, .width = 4096, .kept = 4096});
  calls.push_back({.name = "kept, odd sizes", .rows = 1001, .columns = 5003, .width = 250, .kept = 5003});
  calls.push_back({.name = "kept, short", .rows = 256, .columns = 2048, .width = 512, .kept = 2048});
  calls.push_back({.name = "odd sizes", .rows = 1001, .columns = 5003, .width = 250});
  calls.push_back({.name = "one row", .rows = 1});
  calls.push_back({.name = "transposed", .transposed = true});
  calls.push_back({.name = "no scale", .scale = 0});
  calls.push_back({.name = "no workspace", .workspace = 0});
  calls.push_back({.name = "narrow", .columns = 8192, .width = 64});
  calls.push_back({.name = "narrow, odd sizes", .rows = 1001, .columns = 503, .width = 99});
  calls.push_back({.name = "narrow, few rows", .rows = 100, .width = 64});
  calls.push_back({.name = "narrow, not differentiated",
                   .columns = 8192,
                   .width = 64,
                   .differentiated = false,
                   .kept = 8192});
  return calls;
}

// ---- MLP

struct Mlp {
  std::string name = "";
  DType dtype = kBFloat16;
  std::int64_t rows = 4096, inputs = 128, hidden = 4096, outputs = 128;
  ActivationKind activation = ActivationKind::kGeluTanh;
  bool biased = false, tf32 = false, planes = false, deterministic = false;
  std::int64_t workspace = 64 << 20;
};

template <class Arguments>
void fill_mlp(const Mlp& c, const Tensors& t, Arguments& x) {
  x.x = t("x", c.dtype, {c.rows, c.inputs});
  x.w1 = t("w1", c.dtype, {c.hidden, c.inputs});
  x.w2 = t("w2", c.dtype, {c.outputs, c.hidden});
  if (c.biased) x.bias1 = t("bias1", c.dtype, {c.hidden});
  x.activation = c.activation, x.workspace = c.workspace;
}
template <class Arguments>
void pad_mlp(const Tensors& t, Arguments& x) {
  x.x = t.padded("x", x.x), x.w1 = t.padded("w1", x.w1, 2), x.w2 = t.padded("w2", x.w2, 2);
  x.bias1 = t.padded("bias1", x.bias1);
}

// Rows and columns of a part's scores in planes, if the plan's kernels read them.
struct MlpPlanes {
  TensorView rows, columns;
  MlpPlanes(const Tensors& t, const Plan& plan, const TensorView& of_rows, const TensorView& of_columns) {
    if (!plan.can().planes) return;
    rows = planes_of(t, "row_planes", of_rows), columns = planes_of(t, "column_planes", of_columns);
  }
};

Plan forward(const Mlp& c, const Tensors& t) {
  MlpForward x;
  fill_mlp(c, t, x);
  if (c.biased) x.bias2 = t("bias2", c.dtype, {c.outputs});
  const Launch launch = launch_of(c.deterministic, c.tf32, c.planes);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  if (plan.can().tensor_cores) pad_mlp(t, x), x.bias2 = t.padded("bias2", x.bias2);
  if (plan.part) {
    const TensorView hidden = t("hidden", c.dtype, {plan.part->rows, x.w1.size[0]});
    const MlpPlanes planes(t, plan, x.x, x.w1);
    const auto store = [&](std::int64_t first) {
      const std::int64_t count = std::min(plan.part->rows, c.rows - first);
      run(MlpHidden{.x = part_of(x.x, 0, first, count),
                    .w1 = x.w1,
                    .bias1 = x.bias1,
                    .out = part_of(hidden, 0, 0, count),
                    .row_planes = part_of(planes.rows, 0, first, count),
                    .column_planes = planes.columns,
                    .activation = c.activation},
          launch, &plan);
    };
    store(0), store((c.rows - 1) / plan.part->rows * plan.part->rows);
    return plan;
  }
  x.out = t("out", c.dtype, {c.rows, x.w2.size[0]});
  x.scratch = t.scratch(plan, c.dtype);
  run(x, launch, &plan);
  return plan;
}

Plan backward(const Mlp& c, const Tensors& t) {
  MlpBackward x;
  fill_mlp(c, t, x);
  x.grad_out = t("grad_out", c.dtype, {c.rows, c.outputs});
  const DType sums = accumulation(c.dtype);
  const Launch launch = launch_of(c.deterministic, c.tf32, c.planes);
  const Plan plan = monoidreduce::plan(x, facts_of(t.device), launch);
  const bool simt = !plan.can().tensor_cores;
  if (!simt) pad_mlp(t, x), x.grad_out = t.padded("grad_out", x.grad_out);
  if (plan.part) {
    const auto [rows, units] = *plan.part;
    const TensorView local = t.lines("local", c.dtype, rows, units),
                     hidden = t.lines("hidden", c.dtype, rows, units);
    const MlpPlanes of_x(t, plan, x.x, x.w1), of_grad(t, plan, x.grad_out, transposed(x.w2));
    const TensorView partial_sums = t("sums", sums, {round_up(rows, 256) / 16, round_up(units, 192)});
    const auto store = [&](std::int64_t row, std::int64_t unit) {
      const std::int64_t count = std::min(rows, c.rows - row), there = std::min(units, x.w1.size[0] - unit);
      const auto corner = [&](const TensorView& of) {
        return part_of(part_of(of, 0, 0, count), 1, 0, there);
      };
      TensorView of_part;
      if (c.biased)
        of_part = part_of(part_of(partial_sums, 0, 0, round_up(count, 256) / 16), 1, 0, round_up(there, 192));
      run(MlpLocalGradient{.grad_out = part_of(x.grad_out, 0, row, count),
                           .x = part_of(x.x, 0, row, count),
                           .w1 = part_of(x.w1, 0, unit, there),
                           .w2 = part_of(x.w2, 1, unit, there),
                           .bias1 = part_of(x.bias1, 0, unit, there),
                           .out = corner(local),
                           .hidden = corner(hidden),
                           .sums = of_part,
                           .row_planes = part_of(of_x.rows, 0, row, count),
                           .column_planes = part_of(of_x.columns, 0, unit, there),
                           .other_row_planes = part_of(of_grad.rows, 0, row, count),
                           .other_column_planes = part_of(of_grad.columns, 0, unit, there),
                           .activation = c.activation},
          launch, &plan);
    };
    store(0, 0);
    store((c.rows - 1) / rows * rows, (x.w1.size[0] - 1) / units * units);
    return plan;
  }
  const auto gradient = [&](const char* name, const TensorView& of, bool adds) {
    return t(name, adds ? sums : c.dtype, {of.size[0], of.size[1]});
  };
  x.d_x = gradient("d_x", x.x, plan.adds_rows);
  x.d_w1 = gradient("d_w1", x.w1, simt), x.d_w2 = gradient("d_w2", x.w2, simt);
  if (c.biased) x.d_bias1 = t("d_bias1", sums, {x.bias1.size[0]});
  x.scratch = t.scratch(plan, c.dtype);
  run(x, launch, &plan);
  return plan;
}

std::vector<Mlp> mlp_calls() {
  using enum ActivationKind;
  std::vector<Mlp> calls;
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64}) {
    const bool tf32 = dtype == kFloat32;
    const auto add = [&](const std::string& what, Mlp call) {
      call.name = message(name(dtype), " ", what), call.dtype = dtype, call.tf32 = tf32;
      calls.push_back(call);
    };
    for (const std::int64_t width : {64, 128, 256, 60, 1024})
      add(message("width ", width), {.inputs = width, .outputs = width, .biased = width == 64});
    for (int kind = 0; kind <= static_cast<int>(kIdentity); ++kind)
      add(message("activation ", kind), {.activation = ActivationKind(kind), .biased = true});
    add("deterministic", {.deterministic = true});
    add("width 256 deterministic", {.inputs = 256, .outputs = 256, .deterministic = true});
    add("few rows", {.rows = 32, .hidden = 16384});
    add("few rows, width 256", {.rows = 100, .inputs = 256, .hidden = 16384, .outputs = 256});
    add("few rows deterministic", {.rows = 128, .hidden = 16384, .deterministic = true});
    add("few units", {.rows = 16384, .hidden = 1024, .biased = true});
    add("few tiles, in parts", {.rows = 1024, .inputs = 512, .hidden = 1000, .outputs = 512, .biased = true});
    add("odd sizes", {.rows = 1001, .inputs = 60, .hidden = 1003, .outputs = 70, .biased = true});
    add("two widths", {.inputs = 64, .outputs = 200});
    add("wide, in parts", {.rows = 16384, .inputs = 2048, .hidden = 16384, .outputs = 2048, .biased = true});
    add("wide, in parts of units", {.rows = 2000, .inputs = 512, .hidden = 65536, .outputs = 512});
    add("no workspace", {.inputs = 512, .workspace = 0});
  }
  const auto add_planes = [&](const std::string& what, Mlp call) {
    call.name = "float32 planes " + what, call.dtype = kFloat32, call.planes = true;
    calls.push_back(call);
  };
  for (const std::int64_t width : {64, 128, 256})
    add_planes(message("width ", width), {.inputs = width, .outputs = width});
  add_planes("wide, in parts", {.rows = 4096, .inputs = 512, .hidden = 4096, .outputs = 200, .biased = true});
  add_planes("wide, in parts of rows",
             {.rows = 9000, .inputs = 300, .hidden = 1001, .outputs = 64, .workspace = 12 << 20});
  add_planes("wide, deterministic", {.inputs = 512, .deterministic = true});
  add_planes("wide, no workspace", {.inputs = 512, .workspace = 0});
  add_planes("odd sizes", {.rows = 1001, .inputs = 60, .hidden = 1003, .outputs = 70, .biased = true});
  add_planes("deterministic", {.deterministic = true});
  add_planes("few rows", {.rows = 32, .hidden = 16384});
  return calls;
}

// ---- The elementwise work between the products of a gated MLP

void run_gated_calls(Recorder& recorder) {
  const Launch launch = launch_of();
  for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat64}) {
    recorder.run(message("gated_hidden ", name(dtype)), [&](const Tensors& t) {
      run(GatedHidden{.gate = t("gate", dtype, {1000, 1003}),
                      .up = t("up", dtype, {1000, 1003}),
                      .activation = ActivationKind::kSilu},
          launch);
      return Plan{};
    });
    recorder.run(message("gated_gradient ", name(dtype)), [&](const Tensors& t) {
      run(GatedGradient{.gate = t("gate", dtype, {1000, 1003}),
                        .up = t("up", dtype, {1000, 1003}),
                        .hidden = t("hidden", dtype, {1000, 1003}),
                        .activation = ActivationKind::kGelu},
          launch);
      return Plan{};
    });
  }
}

// ---- Products of float32 matrices in planes

void run_plane_products(Recorder& recorder) {
  const Launch launch = launch_of();
  const auto split = [](const Tensors& t, const char* name, std::int64_t lines, std::int64_t width) {
    return t(name, kFloat16, {lines, planes_width(width)});
  };
  recorder.run("plane_dots", [&](const Tensors& t) {
    run(PlaneDots{.a = split(t, "a", 5000, 1000),
                  .b = split(t, "b", 2000, 1000),
                  .out = t("out", kFloat32, {5000, 2000})},
        launch);
    return Plan{};
  });
  recorder.run("plane_product", [&](const Tensors& t) {
    run(PlaneProduct{.a = split(t, "a", 5000, 2000),
                     .b = split(t, "b", 2000, 1000),
                     .scales = {},
                     .out = t("out", kFloat32, {5000, 1000})},
        launch);
    return Plan{};
  });
}

// ---- Distillation by "jsd", which stores scores

void run_stored_scores(Recorder& recorder) {
  const Launch launch = launch_of();
  recorder.run("score_product", [&](const Tensors& t) {
    run(ScoreProduct{.a = t("a", kBFloat16, {1000, 512}),
                     .b = t("b", kBFloat16, {8000, 512}),
                     .out = t("out", kFloat32, {1000, 8000})},
        launch);
    return Plan{};
  });
  for (const bool gradients : {false, true}) {
    const std::int64_t classes = gradients ? 32000 : 8000;
    recorder.run(gradients ? "jsd_rows gradients" : "jsd_rows", [&](const Tensors& t) {
      run(JsdRows{.student = t("student", kFloat32, {1000, classes}),
                  .teacher = t("teacher", kFloat32, {1000, classes}),
                  .mask = t("mask", kBool, {1000}),
                  .loss = t("loss", kFloat32, {1000}),
                  .stats = t("stats", kFloat32, {1000, 5}),
                  .factor = gradients ? t("factor", kFloat32, {1}) : TensorView{}},
          launch);
      return Plan{};
    });
  }
  recorder.run("jsd_gradient", [&](const Tensors& t) {
    run(JsdGradient{.student = t("student", kFloat32, {1000, 8000}),
                    .teacher = t("teacher", kFloat32, {1000, 8000}),
                    .mask = {},
                    .stats = t("stats", kFloat32, {1000, 5}),
                    .factor = t("factor", kFloat32, {1})},
        launch);
    return Plan{};
  });
}

// ---- Packed sequences

void run_sequence_calls(Recorder& recorder) {
  const Launch launch = launch_of();
  recorder.run("sequence_spans", [&](const Tensors& t) {
    run(SequenceSpans{.row_spans = t("row_spans", kInt64, {1000, 2}),
                      .column_spans = t("column_spans", kInt64, {3000, 2}),
                      .row_starts = t("cu_seqlens_q", kInt64, {9}),
                      .column_starts = t("cu_seqlens_k", kInt64, {9})},
        launch);
    return Plan{};
  });
  recorder.run("undefine", [&](const Tensors& t) {
    run(Undefined{.result = t("result", kBFloat16, {64000}), .row_spans = t("row_spans", kInt64, {1000, 2})},
        launch);
    return Plan{};
  });
}

// ---- Passes over rows, and products of dlogits

void run_row_calls(Recorder& recorder) {
  const Launch launch = launch_of();
  for (const DType dtype : {kFloat32, kFloat64}) {
    for (const bool mean : {false, true}) {
      const auto reduce = [&](const std::string& what, bool targets, bool masked) {
        recorder.run(message("reduce_losses ", name(dtype), mean ? " mean" : " sum", what),
                     [&](const Tensors& t) {
                       run(LossReduction{.losses = t("losses", dtype, {5000}),
                                         .target = targets ? t("target", kInt64, {5000}) : TensorView{},
                                         .mask = masked ? t("mask", kBool, {5000}) : TensorView{},
                                         .reduced = t("reduced", dtype, {1}),
                                         .mean = mean},
                           launch);
                       return Plan{};
                     });
      };
      reduce("", false, false), reduce(", targets", true, false), reduce(", mask", false, true);
    }
  }
  for (const DType dtype : {kFloat32, kFloat64}) {
    const auto of = [dtype](const Tensors& t, const char* what) { return t(what, dtype, {5000}); };
    recorder.run(message("combine_logsumexp ", name(dtype)), [&](const Tensors& t) {
      run(
          CombinedLogSumExp{
              .states = t("states", dtype, {3, 2, 5000}), .lse = of(t, "lse"), .lse_low = of(t, "lse_low")},
          launch);
      return Plan{};
    });
    recorder.run(message("combine_cross_entropy ", name(dtype)), [&](const Tensors& t) {
      run(CombinedCrossEntropy{.states = t("states", dtype, {3, 4, 5000}),
                               .target = t("target", kInt64, {5000}),
                               .loss = of(t, "loss"),
                               .reduced = t("reduced", dtype, {1}),
                               .lse = of(t, "lse"),
                               .lse_low = of(t, "lse_low"),
                               .miss = of(t, "miss")},
          launch);
      return Plan{};
    });
    recorder.run(message("combine_log_probs ", name(dtype)), [&](const Tensors& t) {
      run(CombinedLogProbs{.states = t("states", dtype, {3, 4, 5000}),
                           .target = t("target", kInt64, {5000}),
                           .log_probs = of(t, "log_probs"),
                           .entropy = of(t, "entropy"),
                           .lse = of(t, "lse"),
                           .lse_low = of(t, "lse_low")},
          launch);
      return Plan{};
    });
    recorder.run(message("combine_distillation ", name(dtype)), [&](const Tensors& t) {
      run(CombinedDistillation{.states = t("states", dtype, {3, 5, 5000}),
                               .mask = t("mask", kBool, {5000}),
                               .loss = of(t, "loss"),
                               .reduced = {},
                               .stats = t("stats", dtype, {6, 5000})},
          launch);
      return Plan{};
    });
  }
  recorder.run("order_rows mask", [&](const Tensors& t) {
    run(RowOrdering{.target = {},
                    .mask = t("mask", kBool, {5000}),
                    .order = t("order", kInt64, {5001}),
                    .upstream = t("upstream", kFloat32, {1}),
                    .factors = t("factors", kFloat32, {5000}),
                    .mean = true},
        launch);
    return Plan{};
  });
  recorder.run("clear_rows", [&](const Tensors& t) {
    run(RowClearing{.target = t("target", kInt64, {200}),
                    .mask = {},
                    .x = t("x", kBFloat16, {200, 1000}),
                    .out = t("out", kBFloat16, {200, 1000}),
                    .upstream = t("upstream", kFloat32, {1}),
                    .factors = t("factors", kFloat32, {201}),
                    .mean = true},
        launch);
    return Plan{};
  });
  recorder.run("copy_fitted", [&](const Tensors& t) {
    run(FittedCopy{.x = t("x", kFloat32, {2, 3, 500, 64}), .out = t("out", kBFloat16, {2, 3, 500, 59})},
        launch);
    return Plan{};
  });
  for (const DType from : {kBFloat16, kFloat16, kFloat32}) {
    for (const DType to : {kBFloat16, kFloat16, kFloat32}) {
      recorder.run(message("scale_rows ", name(from), " to ", name(to)), [&](const Tensors& t) {
        run(RowScaling{.x = t("x", from, {5000, 1000}),
                       .out = t("out", to, {5000, 1000}),
                       .factor = t("factor", kFloat32, {5000}),
                       .order = {}},
            launch);
        return Plan{};
      });
    }
  }
}

void run_product_calls(Recorder& recorder) {
  const Launch launch = launch_of();
  for (const DType dtype : {kBFloat16, kFloat16}) {
    for (const bool in_order : {false, true}) {
      const std::string name_of_call = message(name(dtype), in_order ? " in order" : "");
      const auto order = [&](const Tensors& t) {
        return in_order ? t("order", kInt64, {5001}) : TensorView{};
      };
      for (const DType result : {dtype, kFloat32}) {
        recorder.run(message("rows_product to ", name(result), " ", name_of_call), [&](const Tensors& t) {
          run(RowsProduct{.a = t("a", dtype, {5000, 2048}),
                          .b = t("b", dtype, {2048, 768}),
                          .out = t("out", result, {5000, 768}),
                          .factor = {},
                          .order = order(t)},
              launch);
          return Plan{};
        });
      }
    }
  }
}

template <class Cases>
void run_cases(Recorder& recorder, const std::string& operation, const Cases& cases) {
  for (const auto& c : cases) {
    recorder.run(operation + "_forward " + c.name, [&](const Tensors& t) { return forward(c, t); });
    recorder.run(operation + "_backward " + c.name, [&](const Tensors& t) { return backward(c, t); });
  }
}

}  // namespace

std::vector<Call> calls_on(const Machine& machine) {
  setenv("MONOIDREDUCE_CUDA_TIER", machine.tier, 1);
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);  // without it torch multiplies no deterministic call
  Recorder recorder(machine.device);
  run_cases(recorder, "attention", attention_calls());
  run_cases(recorder, "cross_entropy", cross_entropy_calls());
  run_cases(recorder, "log_probs", log_probs_calls());
  run_cases(recorder, "distillation", distillation_calls());
  run_cases(recorder, "logsumexp", logsumexp_calls());
  run_cases(recorder, "mlp", mlp_calls());
  run_row_calls(recorder), run_gated_calls(recorder), run_sequence_calls(recorder);
  if (can_keep(2048, 0, 1, facts_of(machine.device)))
    run_product_calls(recorder), run_stored_scores(recorder), run_plane_products(recorder);
  return std::move(recorder.calls);
}

}  // namespace monoidreduce::launches

#include "../program_passes.cuh"
#include "monoidreduce/device/contraction/program_sm90.cuh"
#include "monoidreduce/device/resident/fold_payload_sm90.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/tensor_map.cuh"

namespace monoidreduce::cuda::sm90 {

using namespace monoidreduce::sm90;

template <int kScores>
using ManyRowsTile = ProgramFoldTile<kScores, 256>;
template <int kScores>
using FewRowsTile = ProgramFoldTile<kScores, tiles::kFewRows>;
static_assert(kSizesOf<ManyRowsTile<1>> == tiles::kSm90Loss);
static_assert(kSizesOf<ManyRowsTile<2>> == tiles::kSm90Distillation);
static_assert(kSizesOf<FewRowsTile<1>> == tiles::kSm90FewLoss);
static_assert(kSizesOf<FewRowsTile<2>> == tiles::kSm90FewDistillation);
static_assert(kSlab == tiles::kSlab && PayloadFold::kRowSlabs == tiles::kRowSlabs &&
              PayloadFold::kPayloadSlabs == tiles::kPayloadSlabs);

namespace {

// [batches * lines, width] as [batches, 1, lines, width].
TensorView by_batch(const TensorView& t, std::int64_t batches) {
  TensorView of = as_rows(t);
  of.size[0] = batches, of.size[2] /= batches, of.stride[0] = of.size[2] * of.stride[2];
  return of;
}

}  // namespace

template <>
void run(const StatisticsFold& x, const Plan& plan, const Launch& launch) {
  require(plan.tile.has_value(), "plan: expected one with a tile, got ", text(plan));
  if (plan.tile->rows == tiles::kFewRows)
    fold<FewRowsTile>(x, launch);
  else
    fold<ManyRowsTile>(x, launch);
}
template <>
void run(const StatisticsPayload& x, const Plan& plan, const Launch& launch) {
  require(plan.payload_slabs > 0, "plan: expected one with payload_slabs, got ", text(plan));
  require(x.a.size[0] % x.batches == 0 && x.b.size[0] % x.batches == 0,
          "batches: expected a divisor of the numbers of rows and columns, got ", x.batches);
  const auto map = [&](const TensorView& t) { return tensor_map(by_batch(t, x.batches), kSlab); };
  const auto slabs = [](const TensorView& t) { return static_cast<int>(parts_of(t.size[1], kSlab)); };
  const std::int64_t rows = x.a.size[0] / x.batches;
  PayloadFoldArguments arguments{.rows = {map(x.a)},
                                 .columns = {map(x.b)},
                                 .steps = {slabs(x.a), 0},
                                 .first_slab = static_cast<int>(x.first_slab),
                                 .row_blocks = static_cast<int>(parts_of(rows, PayloadFold::kRows)),
                                 .wanted = static_cast<const std::int64_t*>(x.wanted.data),
                                 .sums = static_cast<float*>(x.sums.data),
                                 .pitch = x.sums.stride[0]};
  if (x.other_a.present())
    arguments.rows[1] = map(x.other_a), arguments.columns[1] = map(x.other_b),
    arguments.steps[1] = slabs(x.other_a);
  if (x.payload.present()) {
    require(x.sums.size[1] > 0 && x.payload.size[1] % x.sums.size[1] == 0, "payload: expected a multiple of ",
            x.sums.size[1], " columns, got ", x.payload.size[1]);
    arguments.payload = map(x.payload);
  }
  ProgramData data = data_of(x);
  data.rows = rows, data.columns = x.b.size[0] / x.batches;
  const DeviceGuard guard(x.a.cuda_device);
  launch_loaded("statistics_payload", x.kernels, blocks_for(x.batches * arguments.row_blocks),
                PayloadFold::kThreads, sizeof(PayloadFoldMemory) + kSharedAlignment, launch.stream, arguments,
                data, results_of(x));
}
template <>
void run(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  local_gradient<ProgramGradientTile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90

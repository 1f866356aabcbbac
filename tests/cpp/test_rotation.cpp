// Jobs that add to the same tiles in turn: every tile once, every sum in the order of the jobs, nobody close behind another, and
// no more sums than there is memory for.
#include "monoidreduce/kernel/rotation.h"

#include <vector>

#include "check.h"

namespace monoidreduce::test {
namespace {

constexpr int kMultiprocessors = 132;

// What has been added to a tile of a sum.
struct Added {
  int jobs = 0, when = 0;  // when the last of them did, in tiles since the first round began
};

void check_order(const Rotation& r, int jobs, Checks& checks) {
  std::vector<Added> sums(static_cast<std::size_t>(r.sums()) * r.tiles);
  for (int job = 0; job < jobs; ++job) {
    const Rotation::Member member = r.member(job);
    std::vector<bool> seen(r.tiles);
    bool once = true, there = true, in_order = true, apart = true;
    for (int n = 0; n < r.tiles; ++n) {
      const int down = r.first(member) - n, tile = down < 0 ? down + r.tiles : down;
      once = once && tile >= 0 && tile < r.tiles && !seen[tile];
      if (!once) break;
      seen[tile] = true;
      const Rotation::Turn turn = r.turn(member, tile);
      there = there && turn.sum >= 0 && turn.sum < r.sums();
      if (!there) break;
      Added& added = sums[static_cast<std::size_t>(turn.sum) * r.tiles + tile];
      const int now = member.round * r.tiles + n;
      in_order = in_order && turn.before == added.jobs;
      apart = apart && (added.jobs == 0 || now - added.when >= r.spread / r.period);
      added = {added.jobs + 1, now};
    }
    checks.section("rotation", "a job adds to every tile once");
    CHECK(checks, once, jobs, r.tiles, r.groups, r.period, job);
    checks.section("rotation", "the sum is there");
    CHECK(checks, there, jobs, r.tiles, r.groups, r.period, job);
    checks.section("rotation", "jobs add to a sum in their order");
    CHECK(checks, in_order, jobs, r.tiles, r.groups, r.period, job);
    checks.section("rotation", "the job before has been there some tiles earlier");
    CHECK(checks, apart, jobs, r.tiles, r.groups, r.period, job);
  }
}

void check_choice(Checks& checks) {
  for (const int jobs : {1, 2, 7, 32, 127, 128, 132, 133, 160, 256, 264, 265, 400}) {
    for (const int tiles : {1, 2, 3, 8, 17, 64, 100, 256, 700}) {
      for (const Spacing apart : {Spacing{2, 2, 2}, Spacing{3, 4, 2}, Spacing{4, 6, 2}, Spacing{9, 9, 1}}) {
        const Rotation r = rotation(jobs, tiles, apart, kMultiprocessors, 1 << 20);
        checks.section("choice", "jobs are as far apart as they are to be");
        CHECK(checks, r.period == 1 || tiles * apart.tile >= r.period * apart.least, jobs, tiles, r.period);
        CHECK(checks, r.period == 1 || r.spread * apart.tile >= r.period * apart.least - apart.tile, jobs,
              tiles, r.period, r.spread);
        CHECK(checks, r.spread <= tiles && r.spread >= r.period, jobs, tiles, r.period, r.spread);
        CHECK(checks, r.period == 1 || r.spread * apart.tile <= r.period * apart.most, jobs, tiles, r.period,
              r.spread);
        checks.section("choice", "those of all groups run at the same time");
        CHECK(checks, jobs <= kMultiprocessors || r.groups * r.period <= kMultiprocessors, jobs, tiles,
              r.groups, r.period);
        checks.section("choice", "in no more rounds than without an order");
        CHECK(checks, r.member(jobs - 1).round < parts_of(jobs, kMultiprocessors), jobs, tiles, r.groups,
              r.period);
        check_order(r, jobs, checks);
      }
    }
  }
  checks.section("choice", "one sum where there is memory for no more");
  const Rotation one = rotation(128, 256, {3, 4, 2}, kMultiprocessors, 1);
  CHECK(checks, one.sums() == 1 && one.groups == 1 && one.period == 1);
  check_order(one, 128, checks);
  CHECK(checks, rotation(128, 256, {3, 4, 2}, kMultiprocessors, 2).sums() == 2);
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  monoidreduce::test::Checks checks;
  monoidreduce::test::check_choice(checks);
  return checks.finish();
}

// Tests parallel_for: each task runs once, on one worker, whoever else calls parallel_for and whatever a task does.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "monoidreduce/cpu/thread_pool.h"

using monoidreduce::cpu::parallel_for;

namespace {

void expect(bool condition, const char* what, std::int64_t value) {
  if (condition) return;
  std::fprintf(stderr, "expected: %s (got %lld)\n", what, static_cast<long long>(value));
  std::exit(1);
}

// Each index is called once, each worker is in range and in one call at a time. The counters are not atomic on purpose, so that
// TSan finds overlapping calls.
void check_loop(int threads, std::int64_t tasks) {
  std::vector<int> calls(tasks, 0);
  std::vector<std::int64_t> by_worker(threads, 0);
  parallel_for(threads, tasks, [&](std::int64_t i, int worker) {
    expect(0 <= worker && worker < threads, "a worker in [0, threads)", worker);
    ++calls[i];
    ++by_worker[worker];
  });
  for (const int n : calls) expect(n == 1, "one call a task", n);
  std::int64_t sum = 0;
  for (const std::int64_t n : by_worker) sum += n;
  expect(sum == tasks, "as many calls as tasks", sum);
}

void every_task_runs_once() {
  for (const int threads : {1, 2, 3, 8, 64}) {
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) check_loop(threads, tasks);
  }
}

void several_threads_work() {
  std::atomic<int> arrived = 0;
  parallel_for(3, 3, [&](std::int64_t, int) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();  // a loop on fewer than three threads would hang here
  });
  expect(arrived == 3, "three tasks at the same time", arrived);
}

void caller_is_worker_zero() {
  const auto caller = std::this_thread::get_id();
  parallel_for(4, 1000, [&](std::int64_t, int worker) {
    expect((std::this_thread::get_id() == caller) == (worker == 0),
           "the caller, and it alone, to be worker 0", worker);
  });
}

void small_loops_stay_on_the_caller() {
  const auto caller = std::this_thread::get_id();
  const auto stay = [&](std::int64_t, int worker) {
    expect(std::this_thread::get_id() == caller && worker == 0, "worker 0 on the caller", worker);
  };
  parallel_for(1, 100, stay);
  parallel_for(0, 100, stay);
  parallel_for(8, 1, stay);
}

void nested_loops_stay_on_their_task() {
  std::atomic<std::int64_t> sum = 0;
  parallel_for(4, 16, [&](std::int64_t i, int) {
    const auto outer = std::this_thread::get_id();
    parallel_for(4, 16, [&](std::int64_t j, int worker) {
      expect(std::this_thread::get_id() == outer && worker == 0, "a nested loop on its task's thread",
             worker);
      sum += 16 * i + j;
    });
  });
  expect(sum == 256 * 255 / 2, "every nested task once", sum);
}

void first_error_reaches_the_caller() {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> calls = 0;
    std::int64_t thrown = -1;
    try {
      parallel_for(4, 1'000'000, [&](std::int64_t i, int) {
        ++calls;
        if (i % 3 == 2) throw std::runtime_error(std::to_string(i));
      });
    } catch (const std::runtime_error& error) {
      thrown = std::atoll(error.what());
    }
    expect(thrown % 3 == 2, "a thrown task's number", thrown);
    expect(calls < 1000, "the rest of the loop to be dropped", calls);
  }
  check_loop(4, 1000);
}

void callers_do_not_disturb_each_other() {
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([c] {
      for (int round = 0; round < 300; ++round) check_loop(2 + c % 3, 1 + (7 * c + round) % 40);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// The tasks of a loop wait for the loop of another thread, which must therefore not wait for the first one.
void a_loop_may_depend_on_another() {
  parallel_for(2, 2, [](std::int64_t, int) { std::thread([] { check_loop(2, 100); }).join(); });
}

void sleeping_workers_wake() {
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    several_threads_work();
  }
}

// A forked child has none of its parent's workers; with the parent's pool, several_threads_work would hang.
[[maybe_unused]] void a_forked_child_has_its_own_workers() {
  const pid_t child = fork();
  expect(child >= 0, "a child process", child);
  if (child == 0) {
    alarm(20);
    several_threads_work();
    check_loop(4, 1000);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "the child to end well", status);
  several_threads_work();
}

}  // namespace

int main() {
  alarm(300);
  every_task_runs_once();
  several_threads_work();
  caller_is_worker_zero();
  small_loops_stay_on_the_caller();
  nested_loops_stay_on_their_task();
  first_error_reaches_the_caller();
  callers_do_not_disturb_each_other();
  a_loop_may_depend_on_another();
  sleeping_workers_wake();
#ifndef __SANITIZE_THREAD__  // TSan does not follow threads into a forked child
  a_forked_child_has_its_own_workers();
#endif
}

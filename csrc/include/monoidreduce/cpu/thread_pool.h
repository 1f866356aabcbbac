// parallel_for: a loop over independent tasks on several threads. It runs on the threads of the process's OpenMP runtime if
// there is one, as in every process that has loaded torch. Otherwise each shared object has its own workers. Header-only.
//
// The calling thread always works on its own loop, and workers help with any loop that has tasks left. So a loop ends whatever
// the workers do: it never waits for another caller's loop, and it needs no worker at all.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace monoidreduce::cpu {

// Hidden symbols, because two shared objects may be built from different versions of this header.
namespace [[gnu::visibility("hidden")]] pool {

// Waking a sleeping thread takes tens of microseconds; a spinning thread starts within one.
inline constexpr std::chrono::microseconds kSpin{30};

inline constinit thread_local bool in_task = false;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
void spin_until(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!condition() && std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 16 && !condition(); ++i) pause();
  }
}

// The state of one parallel_for, on its caller's stack.
struct Loop {
  using Work = void (*)(Loop& loop, int worker);

  Work work;
  void* task;
  std::int64_t tasks;
  int helpers;  // how many workers may join
  std::atomic<std::int64_t> next = 0;
  int joined = 0;               // workers that have joined, guarded by the pool's mutex
  std::atomic<int> active = 0;  // workers that have not left yet; written under the pool's mutex
  std::atomic<bool> failed = false;
  std::exception_ptr error = nullptr;

  bool open() const { return joined < helpers && next.load(std::memory_order_relaxed) < tasks; }

  template <class F>
  static void run(Loop& loop, int worker) {
    const bool nested = std::exchange(in_task, true);
    try {
      for (std::int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.tasks;) {
        (*static_cast<F*>(loop.task))(i, worker);
      }
    } catch (...) {
      if (!loop.failed.exchange(true)) loop.error = std::current_exception();
      loop.next.store(loop.tasks, std::memory_order_relaxed);
    }
    in_task = nested;
  }
};

// The function that `#pragma omp parallel` calls, from an OpenMP runtime that is loaded with global visibility, as torch loads
// its own. After a parallel region of torch, the threads of the runtime spin for milliseconds. They would compete with
// workers of ours for the processors, so we use those threads instead. open_mp() returns null if there is no runtime. It also
// does in a forked child: its copy of the runtime may have lost its threads, and a parallel region would then never end.
using OpenMpParallel = void (*)(void (*region)(void*), void* shared, unsigned threads, unsigned flags);

// Whether this process was forked and has not called exec since: PF_FORKNOEXEC in the flags of /proc/self/stat (Linux).
inline bool is_forked() {
  constexpr unsigned kForkedWithoutExec = 0x40;
  std::ifstream file("/proc/self/stat");
  std::string stat;
  std::getline(file, stat);
  std::istringstream after_name(stat.substr(stat.rfind(')') + 1));  // the name may have spaces
  char state;
  std::int64_t parent, group, session, terminal, foreground;
  unsigned flags = 0;
  after_name >> state >> parent >> group >> session >> terminal >> foreground >> flags;
  return flags & kForkedWithoutExec;
}

inline const pid_t process_at_load = getpid();
inline const bool forked_before_load = is_forked();

inline OpenMpParallel open_mp() {
  static const auto found = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return !forked_before_load && getpid() == process_at_load ? found : nullptr;
}

// threads: may be more than there are tasks. If the team were smaller than the previous one, the runtime would end the surplus
// threads.
inline void run_on_open_mp(OpenMpParallel parallel, Loop& loop, int threads) {
  struct Team {
    Loop* loop;
    std::thread::id caller;
    std::atomic<int> joined = 0;
  } team{&loop, std::this_thread::get_id()};
  parallel(
      [](void* shared) {
        Team& team = *static_cast<Team*>(shared);
        const bool caller = std::this_thread::get_id() == team.caller;
        team.loop->work(*team.loop, caller ? 0 : 1 + team.joined.fetch_add(1, std::memory_order_relaxed));
      },
      &team, static_cast<unsigned>(threads), 0);
}

class Pool {
 public:
  // This process's pool. A forked child has none of its parent's threads, and perhaps a locked mutex, so it makes a new
  // pool. A pool is never destroyed, since its threads may outlive every static object.
  static Pool& get() {
    Pool* pool = current.load(std::memory_order_acquire);
    while (pool == nullptr || pool->process_ != getpid()) {
      auto mine = std::make_unique<Pool>();
      if (current.compare_exchange_strong(pool, mine.get(), std::memory_order_acq_rel))
        return *mine.release();
    }
    return *pool;
  }

  void run(Loop& loop) {
    {
      const std::lock_guard lock(mutex_);
      grow(loop.helpers);
      loops_.push_back(&loop);
      posted_.fetch_add(1, std::memory_order_release);
      for (int i = std::min(loop.helpers, asleep_); i > 0; --i) work_.notify_one();
    }
    loop.work(loop, 0);
    {
      const std::lock_guard lock(mutex_);
      std::erase(loops_, &loop);
    }
    const auto finished = [&] { return loop.active.load(std::memory_order_acquire) == 0; };
    spin_until(finished);
    if (!finished()) {
      std::unique_lock lock(mutex_);
      finished_.wait(lock, finished);
    }
  }

 private:
  // If a thread cannot be created, the pool works with fewer.
  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto loop = std::ranges::find_if(loops_, [](const Loop* l) { return l->open(); });
      if (loop != loops_.end()) {
        help(**loop, lock);
        continue;
      }
      const auto posted = [this, seen = posted_.load()] {
        return posted_.load(std::memory_order_acquire) != seen;
      };
      lock.unlock();
      spin_until(posted);
      lock.lock();
      ++asleep_;
      work_.wait(lock, posted);
      --asleep_;
    }
  }

  void help(Loop& loop, std::unique_lock<std::mutex>& lock) {
    const int worker = ++loop.joined;
    ++loop.active;
    lock.unlock();
    loop.work(loop, worker);
    lock.lock();
    if (--loop.active == 0) finished_.notify_all();
  }

  static inline constinit std::atomic<Pool*> current = nullptr;

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable work_;      // a loop was posted
  std::condition_variable finished_;  // the last worker has left some loop
  std::vector<Loop*> loops_;
  std::atomic<std::uint64_t> posted_ = 0;  // loops posted so far; written under the mutex
  int workers_ = 0, asleep_ = 0;
};

}  // namespace pool

// Calls task(index, worker) once for every index in [0, tasks), on at most `threads` threads. worker is in [0, threads),
// 0 for the caller; no two calls with the same worker overlap. The first exception of a task ends the loop and is
// rethrown. Several threads may call parallel_for at once. Called within a task, it runs on that task's thread alone.
template <class F>
void parallel_for(int threads, std::int64_t tasks, F&& task) {
  if (threads <= 1 || tasks <= 1 || pool::in_task) {
    for (std::int64_t i = 0; i < tasks; ++i) task(i, 0);
    return;
  }
  using Task = std::remove_reference_t<F>;
  pool::Loop loop{.work = &pool::Loop::run<Task>,
                  .task = const_cast<void*>(static_cast<const void*>(std::addressof(task))),
                  .tasks = tasks,
                  .helpers = static_cast<int>(std::min<std::int64_t>(threads, tasks)) - 1};
  if (const auto parallel = pool::open_mp()) {
    pool::run_on_open_mp(parallel, loop, threads);
  } else {
    pool::Pool::get().run(loop);
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace monoidreduce::cpu

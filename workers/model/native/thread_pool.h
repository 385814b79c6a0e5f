// Threads that share a task's pieces: whoever runs takes the next one.
//
// The caller publishes a task, takes pieces until none is left, and waits only for pieces that a
// helper has begun. Helpers sleep soon when there is nothing to take. So busy processes on the same
// cores cost a share of the cores, and not a time slice at each barrier. Which thread takes a piece
// changes no result. See docs/decisions/shared-cores.md.
#pragma once

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <system_error>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int POOL_LINE = 64;                  // bytes of a cache line: no two share one
constexpr std::chrono::microseconds SPIN{20};  // before a thread sleeps: a wakeup takes as long

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while `at` has this value, or shorter. std::atomic's wait yields the core before that.
inline void sleep_while(std::atomic<uint32_t>& at, uint32_t value) {
#ifdef __linux__
  syscall(SYS_futex, &at, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  at.wait(value);
#endif
}

inline void wake(std::atomic<uint32_t>& at) {
#ifdef __linux__
  syscall(SYS_futex, &at, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
#else
  at.notify_one();
#endif
}

// The pieces of a task that one thread takes.
class Pieces {
 public:
  // All pieces of a task that is not shared.
  explicit Pieces(int64_t num_pieces) : num_pieces_(num_pieces) {}
  // Pieces of the task with this number, which begin with one that is taken.
  Pieces(std::atomic<uint64_t>* open, uint32_t task, int64_t num_pieces, int64_t first)
      : open_(open), task_(task), num_pieces_(num_pieces), next_(first) {}

  // The next piece, or -1 if none is left.
  int64_t take() {
    if (open_ && num_taken_) next_ = claim();
    if (next_ < 0 || next_ >= num_pieces_) return -1;
    num_taken_++;
    return open_ ? next_ : next_++;
  }
  uint32_t num_taken() const { return num_taken_; }

 private:
  int64_t claim() {
    uint64_t now = open_->load(std::memory_order_acquire);
    while (now >> 32 == task_ && uint32_t(now) != 0)
      if (open_->compare_exchange_weak(now, now - 1, std::memory_order_acq_rel))
        return num_pieces_ - uint32_t(now);
    return -1;
  }

  std::atomic<uint64_t>* open_ = nullptr;
  uint32_t task_ = 0, num_taken_ = 0;
  int64_t num_pieces_, next_ = 0;
};

class ThreadPool {
 public:
  // Sets the most threads that work, the caller included.
  void resize(int num_threads) { size_.store(num_threads, std::memory_order_relaxed); }

  int size() const { return size_.load(std::memory_order_relaxed); }

  // Calls work(Pieces&) in some threads, which take all pieces between them. A second caller at the
  // same time works alone.
  template <class F>
  void share(int64_t num_pieces, const F& work) {
    const int helpers = int(std::min<int64_t>(num_pieces, size())) - 1;
    if (helpers < 1 || is_used_.exchange(true, std::memory_order_acquire)) {
      Pieces all(num_pieces);
      work(all);
      return;
    }
    Pieces pieces = publish(num_pieces, helpers, &work, [](const void* given, Pieces& taken) {
      (*static_cast<const F*>(given))(taken);
    });
    work(pieces);
    wait(pieces.num_taken());
    is_used_.store(false, std::memory_order_release);
  }

 private:
  using Run = void (*)(const void* work, Pieces& pieces);

  struct alignas(POOL_LINE) Helper {
    std::atomic<uint32_t> sleeps{0};
  };

  // --- the caller, who has set is_used_ ---

  // Offers all pieces but the first, which is the caller's, to the first `helpers` helpers.
  Pieces publish(int64_t num_pieces, int helpers, const void* work, Run run) {
    work_.store(work, std::memory_order_relaxed);
    run_.store(run, std::memory_order_relaxed);
    num_pieces_.store(num_pieces, std::memory_order_relaxed);
    called_.store(helpers, std::memory_order_relaxed);
    unfinished_.store(uint32_t(num_pieces), std::memory_order_relaxed);
    task_++;
    open_.store(uint64_t(task_) << 32 | uint32_t(num_pieces - 1));
    for (int i = 0; i < helpers; i++) {
      if (i == int(helpers_.size())) hire();
      if (helpers_[i].sleeps.load() == 0) continue;
      helpers_[i].sleeps.store(0);
      wake(helpers_[i].sleeps);
    }
    return Pieces(&open_, task_, num_pieces, 0);
  }

  // Starts another helper. If no more threads are allowed, the others do its work.
  void hire() {
    Helper& helper = helpers_.emplace_back();
    const int number = int(helpers_.size());
    try {
      std::thread([this, &helper, number] { help(helper, number); }).detach();
    } catch (const std::system_error&) {
    }
  }

  // Waits until all pieces are finished.
  void wait(uint32_t num_taken) {
    uint32_t left = unfinished_.fetch_sub(num_taken) - num_taken;
    const auto start = Clock::now();
    while (left != 0 && Clock::now() - start < SPIN) {
      relax();
      left = unfinished_.load();
    }
    if (left == 0) return;
    waits_.store(true);
    while ((left = unfinished_.load()) != 0) sleep_while(unfinished_, left);
    waits_.store(false);
  }

  // --- a helper; numbers begin with 1 ---

  void help(Helper& me, int number) {
    auto idle_since = Clock::now();
    for (;;) {
      if (join(number)) {
        idle_since = Clock::now();
      } else if (Clock::now() - idle_since < SPIN) {
        relax();
      } else {
        me.sleeps.store(1);
        if (!is_called(open_.load(), number)) sleep_while(me.sleeps, 1);
        me.sleeps.store(0);
        idle_since = Clock::now();
      }
    }
  }

  bool is_called(uint64_t open, int number) const {
    return uint32_t(open) != 0 && number <= called_.load(std::memory_order_relaxed);
  }

  // Takes part in the current task, if a piece is left. Until this thread has taken one the task
  // may end and the next begin; then the exchange fails, as numbers of tasks differ.
  bool join(int number) {
    uint64_t now = open_.load(std::memory_order_acquire);
    while (is_called(now, number)) {
      const Run run = run_.load(std::memory_order_relaxed);
      const void* work = work_.load(std::memory_order_relaxed);
      const int64_t num_pieces = num_pieces_.load(std::memory_order_relaxed);
      if (!open_.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel)) continue;
      Pieces pieces(&open_, uint32_t(now >> 32), num_pieces, num_pieces - uint32_t(now));
      run(work, pieces);
      finish(pieces.num_taken());
      return true;
    }
    return false;
  }

  void finish(uint32_t num_taken) {
    if (unfinished_.fetch_sub(num_taken) == num_taken && waits_.load()) wake(unfinished_);
  }

  // The number of the task and how many of its pieces nobody has taken, 32 bits each.
  alignas(POOL_LINE) std::atomic<uint64_t> open_{0};
  std::atomic<const void*> work_{nullptr};
  std::atomic<Run> run_{nullptr};
  std::atomic<int64_t> num_pieces_{0};
  std::atomic<int> called_{0};
  alignas(POOL_LINE) std::atomic<uint32_t> unfinished_{0};
  std::atomic<bool> waits_{false};
  alignas(POOL_LINE) std::atomic<bool> is_used_{false};
  std::atomic<int> size_{1};
  uint32_t task_ = 0;
  std::deque<Helper> helpers_;
};

// Never destroyed: helpers outlive the process's exit handlers.
inline ThreadPool& thread_pool() {
  static ThreadPool& only = *new ThreadPool;
  return only;
}

// Calls work(i) for all i below `num`, `at_once` of them in a piece.
template <class F>
void for_each(int64_t num, int64_t at_once, const F& work) {
  thread_pool().share((num + at_once - 1) / at_once, [&](Pieces& pieces) {
    for (int64_t piece = pieces.take(); piece >= 0; piece = pieces.take())
      for (int64_t i = piece * at_once; i < std::min(num, (piece + 1) * at_once); i++) work(i);
  });
}

// Calls work(row) for all rows of `dim` elements; few elements are not worth a second thread.
template <class F>
void for_each_row(int64_t rows, int64_t dim, const F& work) {
  constexpr int64_t ELEMENTS = 8192;  // in a piece
  for_each(rows, std::max<int64_t>(1, ELEMENTS / dim), work);
}

}  // namespace

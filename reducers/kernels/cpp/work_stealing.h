// Threads, and how they share the work on a tensor.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#define EXPORT __attribute__((visibility("default")))
#define NAMED(name, elements) name##_##elements
#define EXPORTED(name, elements) NAMED(name, elements)  // the name of a function for elements of one dtype

// Functions of the OpenMP that PyTorch runs on, because threads of another one would be in the way of its own: to start a parallel
// region, and to ask for the number of a thread in it. Without them one thread does all.
struct OpenMP {
  void (*parallel)(void (*run)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread)();
};

extern OpenMP reducers_openmp;  // in common.cpp

namespace {

constexpr int MOST_RANGES = 64;

// Calls `act(thread)` in so many threads, and returns when all are done.
template <class Act> static void in_parallel(int64_t threads, const Act& act) {
  if (threads <= 1 || !reducers_openmp.parallel) return act(0);
  const auto run = [](void* told) { (*static_cast<const Act*>(told))(reducers_openmp.thread()); };
  reducers_openmp.parallel(run, const_cast<Act*>(&act), unsigned(threads), 0);
}

// Items, cut into one range for each thread, in order. PyTorch's loops cut a tensor alike, so a thread finds what it has written in
// its own cache, and finds it there again when it writes next; beside that, lines that two processors share take long to write to.
// A thread whose range is done takes items of the others: one of these may wait for its processor.
class Turns {
 public:
  Turns(int64_t items, int64_t threads, int64_t together = 1)
      : ranges_(int(std::max<int64_t>(1, std::min<int64_t>(threads, MOST_RANGES)))), together_(together) {
    for (int index = 0; index < ranges_; ++index) {
      range_[index].next = items * index / ranges_;
      range_[index].end = items * (index + 1) / ranges_;
    }
  }
  // Calls `act(item)` until no item is left; every thread of a parallel region does so.
  template <class Act> void take(int thread, const Act& act) {
    for (int turn = 0; turn < ranges_; ++turn) {
      Range& range = range_[(thread + turn) % ranges_];
      for (int64_t first; (first = range.next.fetch_add(together_, std::memory_order_relaxed)) < range.end;)
        for (int64_t item = first; item < std::min(first + together_, range.end); ++item) act(item);
    }
  }

 private:
  struct alignas(64) Range { std::atomic<int64_t> next; int64_t end; };
  Range range_[MOST_RANGES];
  const int ranges_;
  const int64_t together_;
};

}  // namespace

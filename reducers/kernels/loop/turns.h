// How threads share the work on a tensor.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" int omp_get_thread_num();

constexpr int MOST_RANGES = 64;

// Items, cut into one range for each thread, in order. PyTorch's loops cut a tensor alike, so a thread finds what it has written in
// its own cache, and finds it there again when it writes next; beside that, lines that two processors share take long to write to.
// A thread whose range is done takes items of the others: one of these may wait for its processor.
class Turns {
 public:
  Turns(int64_t items, int threads, int64_t together = 1) : ranges_(std::max(1, std::min(threads, MOST_RANGES))), together_(together) {
    for (int index = 0; index < ranges_; ++index) {
      range_[index].next = items * index / ranges_;
      range_[index].end = items * (index + 1) / ranges_;
    }
  }
  // Calls `act(item)` until no item is left; every thread of a parallel region does so.
  template <class Act> void take(const Act& act) {
    for (int turn = 0; turn < ranges_; ++turn) {
      Range& range = range_[(omp_get_thread_num() + turn) % ranges_];
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

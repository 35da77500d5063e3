// How a tensor is cut into parts, which threads read, and whose results are joined in order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

#include "work_stealing.h"

namespace {


constexpr int MOST_AXES = 8;
constexpr int MOST_RESULTS = 24;    // of any loop, with places for more
constexpr int64_t PART = 1 << 15;   // elements of a part, about
constexpr int64_t BLOCK = 1 << 12;  // elements between two looks at a sum: floats count them exactly
constexpr int64_t ROWS = 8;         // rows of all columns that are added before the next rows
constexpr int64_t WIDTH = 1 << 12;  // columns of a part: their sums stay in the cache
constexpr int64_t EXACT = 1 << 24;  // floats count exactly up to here
constexpr int64_t TABLE = 1 << 23;  // bytes of a table of parts, at most, if columns are kept
constexpr int64_t NEIGHBOURS = 16;   // kept positions that are joined together, because a join waits for the one before it
constexpr int64_t AHEAD = 1 << 12;  // bytes after the end of what is read, which are fetched

struct Axes {  // innermost first
  int64_t number;
  int64_t sizes[MOST_AXES], strides[MOST_AXES], mask_strides[MOST_AXES];

  void offsets(int64_t index, int64_t& x, int64_t& mask) const {
    for (int64_t axis = 0; axis < number; ++axis) {
      const bool last = axis + 1 == number;
      const int64_t rest = last ? 0 : index / sizes[axis], at = last ? index : index - rest * sizes[axis];
      index = rest;
      x += at * strides[axis];
      mask += at * mask_strides[axis];
    }
  }
};

struct Task {
  const void* x;
  const void* mask;     // bytes, or weights; null if there are none
  int64_t about_zero;   // whether the centre is 0, if there is no mask
  int64_t columns;      // whether neighbours in memory are kept, not reduced
  int64_t length;       // of the run of neighbours
  int64_t mask_stride;  // along the run: 0 or 1
  Axes kept, reduced;   // the other axes
  double threshold;
  void* results[MOST_RESULTS];    // of each result a number for each kept position; null if it is not asked for
  int64_t kinds[MOST_RESULTS];    // 0 double, 1 int64, 2 float
  const void* before[MOST_RESULTS];  // what was observed before, as the results; null if nothing was
};

static int64_t product(const Axes& axes) {
  int64_t found = 1;
  for (int64_t axis = 0; axis < axes.number; ++axis) found *= axes.sizes[axis];
  return found;
}

// How the work is cut: parts of one kept position (or one run of kept columns) lie one after another in the table.
struct Cut {
  int64_t owners, rows, row_parts, rows_a_part, run_parts, run_a_part;
  int64_t width;     // kept positions of a part, at most
  int64_t shares;    // parts of one kept position, which follow each other
  int64_t parts;     // in all
  int64_t together;  // small parts that a thread takes at once

  Cut(const Task& task, int64_t bytes) {  // of what is kept of a position
    owners = product(task.kept);
    rows = product(task.reduced);
    run_a_part = task.length;
    if (task.columns) run_a_part = std::min(task.length, WIDTH);
    else if (task.length > PART) run_a_part = PART * ((task.length + 256 * PART - 1) / (256 * PART));
    run_parts = (task.length + run_a_part - 1) / run_a_part;
    const int64_t fit = TABLE / (bytes * owners * task.length);
    const int64_t most = task.columns ? std::max(int64_t(1), std::min(int64_t(32), fit)) : 256;
    rows_a_part = std::max({task.columns ? 8 * ROWS : int64_t(1), PART / run_a_part, (rows + most - 1) / most});
    if (task.columns) rows_a_part = std::min(rows_a_part, EXACT);
    row_parts = (rows + rows_a_part - 1) / rows_a_part;
    width = task.columns ? run_a_part : 1;
    shares = task.columns ? row_parts : row_parts * run_parts;
    parts = owners * run_parts * row_parts;
    together = std::max(int64_t(1), PART / (rows_a_part * run_a_part));
  }
  // Returns the first of the kept positions of a part, and how many it has.
  int64_t begin(const Task& task, int64_t index, int64_t& number) const {
    if (!task.columns) return number = 1, index / shares;
    const int64_t run = index / shares % run_parts * run_a_part;
    number = std::min(run_a_part, task.length - run);
    return index / (shares * run_parts) * task.length + run;
  }
};

// Writes a result of a kept position: a number, or if it is an integer a count.
static void write_one(const Task& task, int result, int64_t position, double number, int64_t count) {
  void* all = task.results[result];
  if (task.kinds[result] == 0) static_cast<double*>(all)[position] = number;
  if (task.kinds[result] == 1) static_cast<int64_t*>(all)[position] = count;
  if (task.kinds[result] == 2) static_cast<float*>(all)[position] = float(number);
}

// Writes the results that are asked for. Counts are added to those before as integers: doubles are exact up to 2^53 only.
static void write_all(const Task& task, const double* found, int results, int64_t position) {
  for (int result = 0; result < results; ++result) {
    if (!task.results[result]) continue;
    const auto* before = static_cast<const int64_t*>(task.before[result]);
    const int64_t count = task.kinds[result] == 1 ? int64_t(found[result]) + (before ? before[position] : 0) : 0;
    write_one(task, result, position, found[result], count);
  }
}

// Returns a result that was observed before.
static double before(const Task& task, int result, int64_t position) {
  const void* all = task.before[result];
  if (task.kinds[result] == 1) return double(static_cast<const int64_t*>(all)[position]);
  return task.kinds[result] == 2 ? double(static_cast<const float*>(all)[position]) : static_cast<const double*>(all)[position];
}

// Returns whether there was memory. A kernel is what reads a part, says what it found, joins that of two,
// and writes it. A position that one part has needs no table: its results are written at once.
template <class Kernel> static bool run(const Task& task, int64_t most_threads) {
  typedef typename Kernel::Partial Partial;
  const Cut cut(task, sizeof(Partial));
  if (cut.parts == 1 && !task.columns) {  // without a parallel region, which would take longer than a small tensor
    Partial found;
    Kernel::rows(task, cut, 0, &found);
    Kernel::write(task, Kernel::found(found), 0);
    return true;
  }
  const int64_t threads = std::min(most_threads, (cut.parts + cut.together - 1) / cut.together);
  const bool joined = cut.shares > 1;
  Partial* table = joined ? new (std::nothrow) Partial[cut.parts * cut.width] : nullptr;
  std::atomic<bool> without_memory(joined && !table);
  Turns turns(cut.parts, threads, cut.together);
  in_parallel(threads, [&](int thread) {
    Partial* own = joined ? nullptr : new (std::nothrow) Partial[cut.width];
    if (!joined && !own) without_memory = true;
    turns.take(thread, [&](int64_t index) {
      Partial* found = joined ? table + index * cut.width : own;
      if ((joined && !table) || !found) return;
      task.columns ? Kernel::columns(task, cut, index, found) : Kernel::rows(task, cut, index, found);
      int64_t number, first = cut.begin(task, index, number);
      for (int64_t position = 0; !joined && position < number; ++position) Kernel::write(task, Kernel::found(found[position]), first + position);
    });
    delete[] own;
  });
  for (int64_t index = 0; joined && !without_memory && index < cut.parts; index += cut.shares) {
    int64_t number, first = cut.begin(task, index, number);
    for (int64_t start = 0; start < number; start += NEIGHBOURS) {
      const int64_t size = std::min(NEIGHBOURS, number - start);
      const Partial* shares = table + index * cut.width + start;
      std::decay_t<decltype(Kernel::found(*shares))> found[NEIGHBOURS];
      for (int64_t one = 0; one < size; ++one) found[one] = Kernel::found(shares[one]);
      for (int64_t share = 1; share < cut.shares; ++share)
        for (int64_t one = 0; one < size; ++one) Kernel::join(found[one], Kernel::found(shares[share * cut.width + one]));
      for (int64_t one = 0; one < size; ++one) Kernel::write(task, found[one], first + start + one);
    }
  }
  delete[] table;
  return !without_memory;
}

// Runs a task in several threads, or each of several small tasks in one. Returns how many lacked memory.
template <class Kernel> static int run_all(const Task* tasks, int64_t number, int64_t threads) {
  if (number == 1) return !run<Kernel>(*tasks, threads);
  std::atomic<int> failed(0);
  Turns turns(number, threads);
  in_parallel(threads, [&](int thread) { turns.take(thread, [&](int64_t index) { failed += !run<Kernel>(tasks[index], 1); }); });
  return failed;
}

}  // namespace

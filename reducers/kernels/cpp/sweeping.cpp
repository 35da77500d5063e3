// Statistics of a tensor in one read. Parts are cut by sizes only and are joined in order, so threads do not change a result.

#include "traverse.h"

namespace {

template <int W, class T> struct Statistics {
  typedef ::Partial<W> Partial;
  static void rows(const Task& task, const Cut& cut, int64_t index, Partial* found) { read_rows<W, T>(task, cut, index, found); }
  static void columns(const Task& task, const Cut& cut, int64_t index, Partial* found) { read_columns<W, T>(task, cut, index, found); }
  struct Found {
    Moments about;
    double sum, squares, nan, inf, zeros, low, high, total;
  };
  static Found found(const Partial& part) {
    const double third = HIGHER<W> ? *part.third : 0, fourth = HIGHER<W> ? *part.fourth : 0;  // else there is none to read
    return {
        moments_of<HIGHER<W>>(part.count, part.centre, part.first, part.second, third, fourth),
        part.first + part.count * part.centre,
        part.second + part.centre * (2 * part.first + part.count * part.centre),
        part.nan,
        part.inf,
        part.zeros,
        part.low,
        part.high,
        part.total,
    };
  }
  static void join(Found& earlier, Found later) {
    join_moments(later.about, earlier.about, HIGHER<W>);
    earlier.about = later.about;
    earlier.sum += later.sum;
    earlier.squares += later.squares;
    earlier.nan += later.nan;
    earlier.inf += later.inf;
    earlier.zeros += later.zeros;
    earlier.low = std::min(earlier.low, later.low);
    earlier.high = std::max(earlier.high, later.high);
    earlier.total += later.total;
  }
  static void write(const Task& task, const Found& found, int64_t position) {
    double numbers[RESULTS] = {
        found.about.weight,
        found.nan,
        found.inf,
        found.zeros,
        found.about.mean,
        std::max(0.0, found.about.second),
        found.sum,
        found.squares,
        found.low,
        found.high,
        std::max(0.0, std::max(-found.low, found.high)),
        found.total,
        found.about.third,
        std::max(0.0, found.about.fourth),
        found.nan + found.inf,
    };
    const Before old(task, position);
    if (old.any) join_results(numbers, old.numbers, old.asked);
    write_all(task, numbers, RESULTS, position);
  }
};

struct Rows {
  Task like;                   // the task of the first row, but for the tensor and its length
  const void* const* addresses;  // null if a row has no tensor, or no elements: it stays as it is
  const int64_t* lengths;
};

// Reads tensors that fill memory, and joins each to its row of what was observed before. Returns how many lacked memory.
template <int W, class T> static int read_rows_of(const Rows* told, int64_t rows, int64_t threads) {
  const auto read = [told](int64_t row, int64_t most_threads) {
    Task task = told->like;
    bool joined = false;
    for (int result = 0; result < RESULTS; ++result) {
      if (!task.results[result]) continue;
      const int64_t size = task.kinds[result] == 2 ? sizeof(float) : sizeof(double), offset = row * size;
      task.results[result] = static_cast<char*>(task.results[result]) + offset;
      if (task.before[result]) task.before[result] = static_cast<const char*>(task.before[result]) + offset;
      if (!told->addresses[row] && task.before[result]) std::memcpy(task.results[result], task.before[result], size);
      joined = joined || task.before[result];
    }
    task.x = told->addresses[row];
    task.length = told->lengths[row];
    if (!task.x || !task.length) {
      if (!joined) Statistics<W, T>::write(task, Statistics<W, T>::found(Partial<W>()), 0);
      return false;
    }
    return !run<Statistics<W, T>>(task, most_threads);
  };
  std::atomic<int> failed(0);
  for (int64_t row = 0; row < rows; ++row)
    if (told->lengths[row] > PART) failed += read(row, threads);
  Turns turns(rows, threads, 16);
  in_parallel(threads, [&](int thread) {
    turns.take(thread, [&](int64_t row) {
      if (told->lengths[row] <= PART) failed += read(row, 1);
    });
  });
  return failed;
}

typedef int (*Loop)(const Task*, int64_t number, int64_t threads);
typedef int (*RowsLoop)(const Rows*, int64_t rows, int64_t threads);

// What is compiled. The first family that adds up all that is asked for is taken.
template <int... W> struct Families {};
typedef Families<
    0, SUM_OF, SQUARES_OF, EXTREMES, MAGNITUDES, ACTIVE, SUMS, SUMS | POWERS, SUMS | EXTREMES | ZEROS,
    SUMS | EXTREMES | ZEROS | ACTIVE | POWERS, MAGNITUDES | EXTREMES | ZEROS>
    Compiled;

template <int... W> static Loop loop_for(Families<W...>, int asked) {
  Loop found = nullptr;
  ((found || (asked & ~W) ? void() : void(found = run_all<Statistics<W, ELEMENTS>>)), ...);
  return found;
}

template <int... W> static RowsLoop rows_loop_for(Families<W...>, int asked) {
  RowsLoop found = nullptr;
  ((found || (asked & ~W) ? void() : void(found = read_rows_of<W, ELEMENTS>)), ...);
  return found;
}

}  // namespace

// The loops that add up what is asked for, of elements of one dtype; null if there is none.
extern "C" EXPORT Loop EXPORTED(reducers_sweep, ELEMENTS)(int64_t asked) { return loop_for(Compiled(), int(asked)); }
extern "C" EXPORT RowsLoop EXPORTED(reducers_rows, ELEMENTS)(int64_t asked) { return rows_loop_for(Compiled(), int(asked)); }

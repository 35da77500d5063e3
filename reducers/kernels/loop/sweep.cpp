// Statistics of a tensor in one read. Parts are cut by sizes only and are joined in order, so threads do not change a result.

#include "joined.h"
#include "rows_and_columns.h"

template <int W, class T> struct Statistics {
  typedef ::Partial Partial;
  static void rows(const Task& task, const Cut& cut, int64_t index, Partial* found) { read_rows<W, T>(task, cut, index, found); }
  static void columns(const Task& task, const Cut& cut, int64_t index, Partial* found) { read_columns<W, T>(task, cut, index, found); }
  // Joins b to a, which is earlier.
  static void join(Partial& a, const Partial& b) {
    if (b.count > 0) {
      if (a.count == 0) a.centre = b.centre;
      if (a.centre == b.centre) {
        a.first += b.first;
        a.second += b.second;
        if (HIGHER) {
          *a.third += *b.third;
          *a.fourth += *b.fourth;
        }
      } else {  // about the mean of b, then about the centre of a
        const Central about(b);
        const double distance = (b.centre - a.centre) + about.shift, square = distance * distance;
        a.first += b.count * distance;
        a.second += about.second + b.count * square;
        if (HIGHER) {
          *a.third += about.third + distance * (3 * about.second + b.count * square);
          *a.fourth += about.fourth + distance * (4 * about.third + distance * (6 * about.second + b.count * square));
        }
      }
      a.low = std::min(a.low, b.low);
      a.high = std::max(a.high, b.high);
    }
    a.count += b.count;
    a.nan += b.nan;
    a.inf += b.inf;
    a.zeros += b.zeros;
    a.total += b.total;
  }
  static void write(const Task& task, const Partial& part, int64_t position) {
    const Central about(part);
    const double centre = part.centre;
    double found[RESULTS] = {
        part.count,
        part.nan,
        part.inf,
        part.zeros,
        centre + about.shift,
        std::max(0.0, about.second),
        part.first + part.count * centre,
        part.second + centre * (2 * part.first + part.count * centre),
        part.low,
        part.high,
        std::max(0.0, std::max(-part.low, part.high)),
        part.total,
        about.third,
        std::max(0.0, about.fourth),
        part.nan + part.inf,
    };
    const Before old(task, position);
    if (old.any) join_results(found, old.numbers, old.asked);
    write_all(task, found, RESULTS, position);
  }
};

extern "C" int reducers_sweep(const Task* tasks, int64_t number, int64_t threads) {
  return run_all<Statistics<STATISTICS, ELEMENTS>>(tasks, number, threads);
}

// Joins the rows of a table [rows, number, positions], in order, to what was observed before; if nothing was, to the first row.
// `columns` says which result each of the numbers is.
extern "C" int reducers_join(const Task* task, const double* table, int64_t rows, const int64_t* columns, int64_t number, int64_t positions) {
  for (int64_t position = 0; position < positions; ++position) {
    Before old(*task, position);
    int64_t counts[RESULTS] = {};
    for (int64_t column = 0; column < number; ++column) {
      const int result = int(columns[column]);
      old.asked[result] = task->kinds[result] != 1;
      if (!old.asked[result] && old.any) counts[result] = static_cast<const int64_t*>(task->before[result])[position];
    }
    for (int64_t row = 0; row < rows; ++row) {
      double found[RESULTS] = {};
      for (int64_t column = 0; column < number; ++column) found[columns[column]] = table[(row * number + column) * positions + position];
      if (old.any) join_results(found, old.numbers, old.asked);
      for (int64_t column = 0; column < number; ++column) {
        const int result = int(columns[column]);
        if (!old.asked[result]) counts[result] += int64_t(found[result]);
        old.numbers[result] = old.asked[result] ? found[result] : double(counts[result]);
      }
      old.any = true;
    }
    for (int64_t column = 0; column < number; ++column) {
      const int result = int(columns[column]);
      write_one(*task, result, position, old.numbers[result], counts[result]);
    }
  }
  return 0;
}

struct Rows {
  Task like;                   // the task of the first row, but for the tensor and its length
  const void* const* addresses;  // null if a row has no tensor, or no elements: it stays as it is
  const int64_t* lengths;
};

// Reads tensors that fill memory, and joins each to its row of what was observed before. Returns how many lacked memory.
extern "C" int reducers_rows(const Rows* told, int64_t rows, int64_t threads) {
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
      if (!joined) Statistics<STATISTICS, ELEMENTS>::write(task, EMPTY, 0);
      return false;
    }
    return !run<Statistics<STATISTICS, ELEMENTS>>(task, most_threads);
  };
  int failed = 0;
  for (int64_t row = 0; row < rows; ++row)
    if (told->lengths[row] > PART) failed += read(row, threads);
#pragma omp parallel for num_threads(int(threads)) if (threads > 1) schedule(dynamic, 16) reduction(+ : failed)
  for (int64_t row = 0; row < rows; ++row)
    if (told->lengths[row] <= PART) failed += read(row, 1);
  return failed;
}

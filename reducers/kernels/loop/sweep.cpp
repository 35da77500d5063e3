// Statistics of a tensor in one read: elements are added in double about a centre, in several lanes at once.
//
// Blocks of elements go through a loop that looks at none of them. If its sum shows that one was not finite, the block is read
// again by the loop that selects. Parts are cut by sizes only and are joined in order, so threads do not change a result.

#include <cmath>

#include "lanes.h"
#include "parts.h"

enum What { SUM_OF = 1, SQUARES_OF = 2, EXTREMES = 4, ZEROS = 8, MAGNITUDES = 16, ACTIVE = 32, POWERS = 64, SUMS = SUM_OF | SQUARES_OF };

constexpr bool HIGHER = STATISTICS & POWERS;  // the third and the fourth power, beside both sums: without them there is no memory for them

enum Result { COUNT, NAN_COUNT, INF_COUNT, ZERO_COUNT, MEAN, M2, SUM, SQUARES, MIN, MAX, PEAK, TOTAL, M3, M4, RESULTS };

struct Partial {
  double count, nan, inf, zeros, centre, first, second, low, high, total;
  double third[HIGHER], fourth[HIGHER];
};

const Partial EMPTY = {0, 0, 0, 0, 0, 0, 0, INFINITE, -INFINITE, 0};

// What is added up, lane by lane.
struct Sums {
  Doubles first[2], second[2], third[2 * HIGHER], fourth[2 * HIGHER];
  Floats low, high, zeros, probe, total;
};

static inline Floats magnitude(const Floats& x) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof(x));
  bits &= 0x7fffffff;
  Floats found;
  std::memcpy(&found, &bits, sizeof(x));
  return found;
}

template <int WHAT> static inline void add_powers(Sums& sums, int half, const Doubles& distance) {
  const Doubles square = distance * distance;
  if (WHAT & SUM_OF) sums.first[half] += distance;
  if (WHAT & SQUARES_OF) sums.second[half] += square;
  if (WHAT & POWERS) {
    sums.third[half] += square * distance;
    sums.fourth[half] += square * square;
  }
}

// Adds elements without a look at them. `zeros`, `probe` and `total` hold counts, which a block keeps exact, or NaN.
template <int WHAT> static inline void add(Sums& sums, const Floats& x, const Doubles* centre, float threshold) {
  if (WHAT & SUMS) {
    Doubles wide[2];
    halves(x, wide);
    for (int half = 0; half < 2; ++half) {
      const Doubles distance = wide[half] - centre[half];
      add_powers<WHAT>(sums, half, distance);
    }
  } else if (!(WHAT & MAGNITUDES)) {
    sums.probe += x - x;
  }
  if (WHAT & EXTREMES) {
    sums.low = x < sums.low ? x : sums.low;
    sums.high = x > sums.high ? x : sums.high;
  }
  if (WHAT & ZEROS) sums.zeros += x == 0.0f ? all_floats(1) : all_floats(0);
  if (WHAT & ACTIVE) sums.total += magnitude(x) > threshold ? all_floats(1) : all_floats(0);
  if (WHAT & MAGNITUDES) {
    Doubles wide[2];
    halves(magnitude(x), wide);
    sums.first[0] += wide[0];
    sums.first[1] += wide[1];
  }
}

template <int WHAT> static inline bool finite(const Sums& sums) {
  if (WHAT & (SUMS | MAGNITUDES)) {
    const Doubles* added = WHAT & (SUM_OF | MAGNITUDES) ? sums.first : sums.second;
    const Doubles both = (added[0] - added[0]) + (added[1] - added[1]);
    double found = 0;
    for (int lane = 0; lane < HALF; ++lane) found += both[lane];
    return found == 0;
  }
  float found = 0;
  for (int lane = 0; lane < LANES; ++lane) found += sums.probe[lane];
  return found == 0;
}

// Adds one element to a partial, if it is finite.
template <int WHAT> static inline void add_one(Partial& part, float x, float threshold) {
  if (!(std::fabs(x) < INFINITE)) {
    (x != x ? part.nan : part.inf) += 1;
    return;
  }
  part.count += 1;
  if (WHAT & SUMS) {
    const double distance = double(x) - part.centre;
    part.first += distance;
    part.second += distance * distance;
    if (WHAT & POWERS) {
      *part.third += distance * distance * distance;
      *part.fourth += distance * distance * distance * distance;
    }
  }
  if (WHAT & EXTREMES) {
    part.low = std::min(part.low, double(x));
    part.high = std::max(part.high, double(x));
  }
  if (WHAT & ZEROS) part.zeros += x == 0;
  if (WHAT & ACTIVE) part.total += std::fabs(x) > threshold;
  if (WHAT & MAGNITUDES) part.total += std::fabs(double(x));
}

template <int WHAT> static void gather(Partial& part, const Sums& sums, int64_t count) {
  part.count += double(count);
  for (int lane = 0; lane < HALF; ++lane) {
    if (WHAT & SUMS) {
      part.first += sums.first[0][lane] + sums.first[1][lane];
      part.second += sums.second[0][lane] + sums.second[1][lane];
    }
    if (WHAT & POWERS) {
      *part.third += sums.third[0][lane] + sums.third[1][lane];
      *part.fourth += sums.fourth[0][lane] + sums.fourth[1][lane];
    }
    if (WHAT & MAGNITUDES) part.total += sums.first[0][lane] + sums.first[1][lane];
  }
  for (int lane = 0; lane < LANES; ++lane) {
    if (WHAT & EXTREMES) {
      part.low = std::min(part.low, double(sums.low[lane]));
      part.high = std::max(part.high, double(sums.high[lane]));
    }
    if (WHAT & ZEROS) part.zeros += sums.zeros[lane];
    if (WHAT & ACTIVE) part.total += sums.total[lane];
  }
}

static Sums no_sums() {
  Sums sums = {};
  sums.low = all_floats(INFINITE);
  sums.high = all_floats(-INFINITE);
  return sums;
}

// Adds elements that are selected, several at a time, if they are finite.
template <int WHAT, class T>
static void select(Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t length, float threshold) {
  Sums sums = no_sums();
  Ints count = {}, chosen_count = {}, zeros = {}, active = {};
  const Floats none = {};
  const Doubles centre = all_doubles(part.centre);
  int64_t start = 0;
  for (; start + LANES <= length; start += LANES) {
    const Floats value = load<T>(x + start), size = magnitude(value);
    Ints chosen = Ints{} - 1;
    if (mask) chosen = selected(mask + start);
    const Ints good = chosen & (size < INFINITE);
    count -= good;
    chosen_count -= chosen;
    if (WHAT & EXTREMES) {
      const Floats least = good ? value : all_floats(INFINITE), most = good ? value : all_floats(-INFINITE);
      sums.low = least < sums.low ? least : sums.low;
      sums.high = most > sums.high ? most : sums.high;
    }
    if (WHAT & ZEROS) zeros -= good & (value == 0.0f);
    if (WHAT & ACTIVE) active -= good & (size > threshold);
    if (WHAT & (SUMS | MAGNITUDES)) {
      Doubles wide[2];
      halves(good ? (WHAT & SUMS ? value : size) : (WHAT & SUMS ? all_floats(float(part.centre)) : none), wide);
      for (int half = 0; half < 2; ++half) {
        if (WHAT & SUMS)
          add_powers<WHAT | SUM_OF>(sums, half, wide[half] - centre);
        else
          sums.first[half] += wide[half];
      }
    }
  }
  int64_t selected = 0, finite = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    selected += chosen_count[lane];
    finite += count[lane];
    part.zeros += zeros[lane];
    part.total += active[lane];
  }
  gather<WHAT & ~(ZEROS | ACTIVE)>(part, sums, finite);
  for (int64_t at = 0; finite < selected && at < start; ++at) {
    const float value = T::value(x[at]);
    if ((!mask || mask[at]) && !(std::fabs(value) < INFINITE)) (value != value ? part.nan : part.inf) += 1;
  }
  for (; start < length; ++start)
    if (!mask || mask[start]) add_one<WHAT>(part, T::value(x[start]), threshold);
}

// Adds a block of elements that are selected; returns false, and adds nothing, if one is not finite. The centre, which is one of
// those that are selected, is in the place of the others: so it changes neither the extremes nor the deviations.
template <int WHAT, class T>
static bool add_masked(Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t length, float threshold) {
  const float fill = float(part.centre);
  const Doubles centre[2] = {all_doubles(part.centre), all_doubles(part.centre)};
  Sums sums = no_sums();
  Ints chosen_count = {};
  int64_t at = 0, count = 0;
  for (; at + LANES <= length; at += LANES) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + at) + AHEAD);
    const Ints chosen = selected(mask + at);
    chosen_count -= chosen;
    add<WHAT>(sums, chosen ? load<T>(x + at) : all_floats(fill), centre, threshold);
  }
  if (!finite<WHAT>(sums)) return false;
  for (int lane = 0; lane < LANES; ++lane) count += chosen_count[lane];
  gather<WHAT>(part, sums, count);
  const double others = double(at - count);
  if (WHAT & ZEROS) part.zeros -= fill == 0 ? others : 0;
  if (WHAT & ACTIVE) part.total -= std::fabs(fill) > threshold ? others : 0;
  if (WHAT & MAGNITUDES) part.total -= others * std::fabs(fill);
  for (; at < length; ++at)
    if (mask[at]) add_one<WHAT>(part, T::value(x[at]), threshold);
  return true;
}

// Adds a run of neighbours in memory, all of which are reduced. `filled` is whether the centre is an element that is selected.
template <int WHAT, class T>
static void add_run(
    Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t length, float threshold, bool filled) {
  const Doubles centre[2] = {all_doubles(part.centre), all_doubles(part.centre)};
  for (int64_t start = 0; start < length; start += BLOCK) {
    const int64_t size = std::min(BLOCK, length - start), whole = size - size % LANES;
    if (mask) {
      if (!filled || !add_masked<WHAT, T>(part, x + start, mask + start, size, threshold))
        select<WHAT, T>(part, x + start, mask + start, size, threshold);
      continue;
    }
    Sums sums = no_sums();
    for (int64_t at = start; at < start + whole; at += LANES) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + at) + AHEAD);
      add<WHAT>(sums, load<T>(x + at), centre, threshold);
    }
    if (finite<WHAT>(sums)) {
      gather<WHAT>(part, sums, whole);
      for (int64_t at = start + whole; at < start + size; ++at) add_one<WHAT>(part, T::value(x[at]), threshold);
    } else {
      select<WHAT, T>(part, x + start, nullptr, size, threshold);
    }
  }
}

// Returns the first element that is finite and selected: no centre is further from the mean than sqrt(count) deviations then.
template <class T>
static bool find_centre(Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t length) {
  for (int64_t at = 0; at < length; ++at) {
    const float value = T::value(x[at]);
    if ((!mask || mask[at]) && std::fabs(value) < INFINITE) {
      part.centre = value;
      return true;
    }
  }
  return false;
}

// The sums of as many neighbouring columns as there are lanes. Of elements that a mask excludes the centre is in the place.
template <int WHAT> struct Lanes {
  Sums sums;
  Doubles centre[2];
  Floats fill;
  Ints count;  // of elements that a mask selects

  void begin(const Partial* parts) {
    sums = no_sums();
    count = Ints{};
    for (int lane = 0; lane < LANES; ++lane) {
      centre[lane / HALF][lane % HALF] = parts[lane].centre;
      fill[lane] = float(parts[lane].centre);
    }
  }
  void end(Partial* parts, int64_t rows, bool masked, float threshold) const {
    for (int lane = 0; lane < LANES; ++lane) {
      Partial& part = parts[lane];
      const int half = lane / HALF, place = lane % HALF;
      if (masked && count[lane] == 0) continue;
      const double others = masked ? double(rows - count[lane]) : 0, size = std::fabs(fill[lane]);
      if (WHAT & ZEROS) part.zeros -= fill[lane] == 0 ? others : 0;
      if (WHAT & ACTIVE) part.total -= size > threshold ? others : 0;
      if (WHAT & MAGNITUDES) part.total -= size * others;
      part.count += double(rows) - others;
      (WHAT & MAGNITUDES ? part.total : part.first) += sums.first[half][place];
      part.second += sums.second[half][place];
      if (WHAT & POWERS) {
        *part.third += sums.third[half][place];
        *part.fourth += sums.fourth[half][place];
      }
      part.low = std::min(part.low, double(sums.low[lane]));
      part.high = std::max(part.high, double(sums.high[lane]));
      part.zeros += sums.zeros[lane];
      part.total += sums.total[lane];
    }
  }
};

template <int WHAT, class T> static void read_rows(const Task& task, const Cut& cut, int64_t index, Partial* found) {
  const int64_t run_part = index % cut.run_parts, row_part = index / cut.run_parts % cut.row_parts;
  const int64_t owner = index / (cut.run_parts * cut.row_parts);
  const int64_t start = run_part * cut.run_a_part, size = std::min(cut.run_a_part, task.length - start);
  const int64_t stop = std::min(cut.rows, (row_part + 1) * cut.rows_a_part);
  Partial part = EMPTY;
  bool centred = !task.mask && (task.about_zero || !(WHAT & SUMS));
  for (int64_t row = row_part * cut.rows_a_part; row < stop; ++row) {
    int64_t offset = start, mask_offset = start * task.mask_stride;
    task.kept.offsets(owner, offset, mask_offset);
    task.reduced.offsets(row, offset, mask_offset);
    const auto* x = static_cast<const typename T::Type*>(task.x) + offset;
    const uint8_t* mask = task.mask ? static_cast<const uint8_t*>(task.mask) + mask_offset : nullptr;
    if (mask && !task.mask_stride) {  // it selects the row as a whole, or not at all
      if (!*mask) continue;
      mask = nullptr;
    }
    if (!centred) centred = find_centre<T>(part, x, mask, size);
    add_run<WHAT, T>(part, x, mask, size, float(task.threshold), centred);
  }
  *found = part;
}

template <int WHAT, class T> static void read_columns(const Task& task, const Cut& cut, int64_t index, Partial* parts) {
  const int64_t row_part = index % cut.row_parts, run_part = index / cut.row_parts % cut.run_parts;
  const int64_t owner = index / (cut.row_parts * cut.run_parts);
  const int64_t start = run_part * cut.run_a_part, size = std::min(cut.run_a_part, task.length - start);
  const int64_t first = row_part * cut.rows_a_part, stop = std::min(cut.rows, first + cut.rows_a_part);
  const float threshold = float(task.threshold);
  int64_t offset = start, mask_offset = start * task.mask_stride;
  task.kept.offsets(owner, offset, mask_offset);
  const auto* base = static_cast<const typename T::Type*>(task.x) + offset;
  const uint8_t* mask_base = task.mask ? static_cast<const uint8_t*>(task.mask) + mask_offset : nullptr;

  for (int64_t column = 0; column < size; ++column) parts[column] = EMPTY;
  if (task.mask || ((WHAT & SUMS) && !task.about_zero)) {
    int32_t without[WIDTH];  // the columns without a centre
    int64_t missing = size;
    for (int64_t column = 0; column < size; ++column) without[column] = int32_t(column);
    for (int64_t row = first; missing && row < stop; ++row) {
      int64_t at = 0, mask_at = 0, left = 0;
      task.reduced.offsets(row, at, mask_at);
      for (int64_t index = 0; index < missing; ++index) {
        const int32_t column = without[index];
        const float value = T::value(base[at + column]);
        const bool usable = std::fabs(value) < INFINITE && (!mask_base || mask_base[mask_at + column * task.mask_stride]);
        parts[column].centre = usable ? value : 0;
        without[left] = column;
        left += !usable;
      }
      missing = left;
    }
  }
  auto* lanes = new (std::nothrow) Lanes<WHAT>[size / LANES + 1];
  const int64_t groups = lanes ? size / LANES : 0, rest = groups * LANES;
  for (int64_t group = 0; group < groups; ++group) lanes[group].begin(parts + group * LANES);
  int64_t at[ROWS], mask_at[ROWS];
  for (int64_t begin = first; begin < stop; begin += ROWS) {
    const int64_t rows = std::min(ROWS, stop - begin);
    for (int64_t row = 0; row < rows; ++row) {
      at[row] = mask_at[row] = 0;
      task.reduced.offsets(begin + row, at[row], mask_at[row]);
    }
    const int64_t ahead = rows > 1 ? at[rows - 1] + at[1] - 2 * at[0] : 0;  // the next rows, usually
    const int64_t mask_ahead = rows > 1 ? mask_at[rows - 1] + mask_at[1] - 2 * mask_at[0] : 0;
    for (int64_t group = 0; group < groups; ++group) {
      Lanes<WHAT>& mine = lanes[group];
      Sums sums = mine.sums;
      Ints count = mine.count;
      const Floats fill = mine.fill;
      const Doubles centre[2] = {mine.centre[0], mine.centre[1]};
      for (int64_t row = 0; row < rows; ++row) {
        const auto* x = base + at[row] + group * LANES;
        __builtin_prefetch(x + ahead);
        Floats value = load<T>(x);
        if (mask_base) {
          const uint8_t* mask = mask_base + mask_at[row];
          __builtin_prefetch(mask + group * LANES + mask_ahead);
          const Ints chosen = task.mask_stride ? selected(mask + group * LANES) : Ints{} - (*mask ? 1 : 0);
          value = chosen ? value : fill;
          count -= chosen;
        }
        add<WHAT>(sums, value, centre, threshold);
      }
      mine.sums = sums;
      mine.count = count;
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = rest; column < size; ++column)
        if (!mask_base || mask_base[mask_at[row] + column * task.mask_stride])
          add_one<WHAT>(parts[column], T::value(base[at[row] + column]), threshold);
  }
  for (int64_t group = 0; group < groups; ++group) {
    Partial* mine = parts + group * LANES;
    if (finite<WHAT>(lanes[group].sums)) {
      lanes[group].end(mine, stop - first, mask_base, threshold);
      continue;
    }
    for (int64_t row = first; row < stop; ++row) {
      int64_t x_at = group * LANES, mask_offset = group * LANES * task.mask_stride;
      task.reduced.offsets(row, x_at, mask_offset);
      for (int lane = 0; lane < LANES; ++lane)
        if (!mask_base || mask_base[mask_offset + lane * task.mask_stride])
          add_one<WHAT>(mine[lane], T::value(base[x_at + lane]), threshold);
    }
  }
  delete[] lanes;
}

// Sums of powers of the distances from the mean, and how far it is from the centre.
struct Central {
  double shift, second, third = 0, fourth = 0;

  explicit Central(const Partial& part) {
    shift = part.count > 0 ? part.first / part.count : 0;
    second = part.second - part.first * shift;
    if (!HIGHER) return;
    third = *part.third - shift * (3 * part.second - 2 * shift * part.first);
    fourth = *part.fourth - shift * (4 * *part.third - shift * (6 * part.second - 3 * shift * part.first));
  }
};

// Joins what was observed before to the results, all but the counts that are integers: Chan, Golub and LeVeque 1983, and Pebay 2008.
// It is no part of its callers, so that all of them get the same bits.
__attribute__((noinline)) static void join_results(double* found, const double* old, const bool* asked) {
  for (int result : {SUM, SQUARES, TOTAL})
    if (asked[result]) found[result] += old[result];
  if (asked[MIN]) found[MIN] = std::min(old[MIN], found[MIN]);
  for (int result : {MAX, PEAK})
    if (asked[result]) found[result] = std::max(old[result], found[result]);
  const double a = old[COUNT], b = found[COUNT], count = a + b;
  if (!asked[MEAN] || a == 0) return;
  if (b == 0) {
    for (int result : {MEAN, M2, M3, M4}) found[result] = old[result];
    return;
  }
  const double delta = found[MEAN] - old[MEAN], square = delta * delta, share_a = a / count, share_b = b / count, product = share_a * share_b;
  if (asked[M4]) {
    const double spread = 6 * (share_a * share_a * found[M2] + share_b * share_b * old[M2]) + square * count * product * (1 - 3 * product);
    found[M4] += old[M4] + delta * (4 * (share_a * found[M3] - share_b * old[M3]) + delta * spread);
  }
  if (asked[M3])
    found[M3] += old[M3] + delta * (3 * (share_a * found[M2] - share_b * old[M2]) + square * count * product * (share_a - share_b));
  found[M2] += old[M2] + square * share_b * a;
  found[MEAN] = old[MEAN] + delta * share_b;
}

// What was observed before, of one kept position.
struct Before {
  double numbers[RESULTS] = {};
  bool asked[RESULTS] = {}, any = false;  // of results that are no integers

  Before(const Task& task, int64_t position) {
    for (int result = 0; result < RESULTS; ++result) {
      if (!task.before[result]) continue;
      numbers[result] = before(task, result, position);
      asked[result] = task.kinds[result] != 1;
      any = true;
    }
  }
};

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
  const void* const* addresses;  // null if a row has no tensor, and stays as it is
  const int64_t* lengths;
};

// Reads tensors that fill memory, and joins each to its row of what was observed before. Returns how many lacked memory.
extern "C" int reducers_rows(const Rows* told, int64_t rows, int64_t threads) {
  const auto read = [told](int64_t row, int64_t most_threads) {
    Task task = told->like;
    for (int result = 0; result < RESULTS; ++result) {
      if (!task.results[result]) continue;
      const int64_t size = task.kinds[result] == 2 ? sizeof(float) : sizeof(double), offset = row * size;
      task.results[result] = static_cast<char*>(task.results[result]) + offset;
      if (task.before[result]) task.before[result] = static_cast<const char*>(task.before[result]) + offset;
      if (!told->addresses[row]) std::memcpy(task.results[result], task.before[result], size);
    }
    task.x = told->addresses[row];
    task.length = told->lengths[row];
    return task.x && !run<Statistics<STATISTICS, ELEMENTS>>(task, most_threads);
  };
  int failed = 0;
  for (int64_t row = 0; row < rows; ++row)
    if (told->lengths[row] > PART) failed += read(row, threads);
#pragma omp parallel for num_threads(int(threads)) if (threads > 1) schedule(dynamic, 16) reduction(+ : failed)
  for (int64_t row = 0; row < rows; ++row)
    if (told->lengths[row] <= PART) failed += read(row, 1);
  return failed;
}

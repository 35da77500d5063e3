// What is added up of the elements of a part: in double about a centre, in several lanes at once. `WHAT` says what is needed.
//
// Blocks of elements go through a loop that looks at none of them. If its sum shows that one was not finite, the block is read
// again by the loop that selects.

#pragma once

#include <cmath>

#include "merge.h"
#include "partition.h"
#include "simd.h"

namespace {


// `reducers/kernels/columns.py` has both, and tests compare them.
enum What { SUM_OF = 1, SQUARES_OF = 2, EXTREMES = 4, ZEROS = 8, MAGNITUDES = 16, ACTIVE = 32, POWERS = 64, SUMS = SUM_OF | SQUARES_OF };

template <int WHAT> constexpr int HIGHER = (WHAT & POWERS) != 0;

enum Result { COUNT, NAN_COUNT, INF_COUNT, ZEROS_COUNT, MEAN, M2, SUM, SQUARES, MIN, MAX, PEAK, TOTAL, M3, M4, NONFINITE, RESULTS };
static_assert(RESULTS <= MOST_RESULTS, "a task has too few");

// Without the third and the fourth power, which are added up beside both sums, there is no memory for them.
template <int WHAT> struct Partial {
  double count = 0, nan = 0, inf = 0, zeros = 0, centre = 0, first = 0, second = 0, low = INFINITE, high = -INFINITE, total = 0;
  double third[HIGHER<WHAT>] = {}, fourth[HIGHER<WHAT>] = {};
};

// What is added up, lane by lane.
template <int WHAT> struct Sums {
  Doubles first[2], second[2], third[2 * HIGHER<WHAT>], fourth[2 * HIGHER<WHAT>];
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

template <int WHAT, bool SUM = (WHAT & SUM_OF) != 0> static inline void add_powers(Sums<WHAT>& sums, int half, const Doubles& distance) {
  const Doubles square = distance * distance;
  if (SUM) sums.first[half] += distance;
  if (WHAT & SQUARES_OF) sums.second[half] += square;
  if (WHAT & POWERS) {
    sums.third[half] += square * distance;
    sums.fourth[half] += square * square;
  }
}

// Adds elements without a look at them. `zeros`, `probe` and `total` hold counts, which a block keeps exact, or NaN.
template <int WHAT> static inline void add(Sums<WHAT>& sums, const Floats& x, const Doubles* centre, float threshold) {
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

template <int WHAT> static inline bool finite(const Sums<WHAT>& sums) {
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
template <int WHAT> static inline void add_one(Partial<WHAT>& part, float x, float threshold) {
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

// Adds up the lanes of what is `ASKED`.
template <int WHAT, int ASKED = WHAT> static void gather(Partial<WHAT>& part, const Sums<WHAT>& sums, int64_t count) {
  part.count += double(count);
  for (int lane = 0; lane < HALF; ++lane) {
    if (ASKED & SUMS) {
      part.first += sums.first[0][lane] + sums.first[1][lane];
      part.second += sums.second[0][lane] + sums.second[1][lane];
    }
    if (ASKED & POWERS) {
      *part.third += sums.third[0][lane] + sums.third[1][lane];
      *part.fourth += sums.fourth[0][lane] + sums.fourth[1][lane];
    }
    if (ASKED & MAGNITUDES) part.total += sums.first[0][lane] + sums.first[1][lane];
  }
  for (int lane = 0; lane < LANES; ++lane) {
    if (ASKED & EXTREMES) {
      part.low = std::min(part.low, double(sums.low[lane]));
      part.high = std::max(part.high, double(sums.high[lane]));
    }
    if (ASKED & ZEROS) part.zeros += sums.zeros[lane];
    if (ASKED & ACTIVE) part.total += sums.total[lane];
  }
}

template <int WHAT> static Sums<WHAT> no_sums() {
  Sums<WHAT> sums = {};
  sums.low = all_floats(INFINITE);
  sums.high = all_floats(-INFINITE);
  return sums;
}

// Adds elements that are selected, several at a time, if they are finite.
template <int WHAT, class T>
static void select(Partial<WHAT>& part, const typename T::Type* x, const uint8_t* mask, int64_t length, float threshold) {
  Sums<WHAT> sums = no_sums<WHAT>();
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
          add_powers<WHAT, true>(sums, half, wide[half] - centre);
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
  gather<WHAT, WHAT & ~(ZEROS | ACTIVE)>(part, sums, finite);
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
static bool add_masked(Partial<WHAT>& part, const typename T::Type* x, const uint8_t* mask, int64_t length, float threshold) {
  const float fill = float(part.centre);
  const Doubles centre[2] = {all_doubles(part.centre), all_doubles(part.centre)};
  Sums<WHAT> sums = no_sums<WHAT>();
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
    Partial<WHAT>& part, const typename T::Type* x, const uint8_t* mask, int64_t length, float threshold, bool filled) {
  const Doubles centre[2] = {all_doubles(part.centre), all_doubles(part.centre)};
  for (int64_t start = 0; start < length; start += BLOCK) {
    const int64_t size = std::min(BLOCK, length - start), whole = size - size % LANES;
    if (mask) {
      if (!filled || !add_masked<WHAT, T>(part, x + start, mask + start, size, threshold))
        select<WHAT, T>(part, x + start, mask + start, size, threshold);
      continue;
    }
    Sums<WHAT> sums = no_sums<WHAT>();
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
template <int WHAT, class T>
static bool find_centre(Partial<WHAT>& part, const typename T::Type* x, const uint8_t* mask, int64_t length) {
  for (int64_t at = 0; at < length; ++at) {
    const float value = T::value(x[at]);
    if ((!mask || mask[at]) && std::fabs(value) < INFINITE) {
      part.centre = value;
      return true;
    }
  }
  return false;
}

// Joins what was observed before to the results, all but the counts that are integers. It is no part of its callers, so that all of
// them get the same bits.
__attribute__((noinline)) static void join_results(double* found, const double* old, const bool* asked) {
  for (int result : {SUM, SQUARES, TOTAL})
    if (asked[result]) found[result] += old[result];
  if (asked[MIN]) found[MIN] = std::min(old[MIN], found[MIN]);
  for (int result : {MAX, PEAK})
    if (asked[result]) found[result] = std::max(old[result], found[result]);
  if (!asked[MEAN]) return;
  Moments moments = {found[COUNT], found[MEAN], found[M2], found[M3], found[M4]};
  join_moments(moments, {old[COUNT], old[MEAN], old[M2], old[M3], old[M4]}, asked[M3]);
  found[MEAN] = moments.mean;
  found[M2] = moments.second;
  found[M3] = moments.third;
  found[M4] = moments.fourth;
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

}  // namespace

// How the statistics of two parts, or of an observation and all before it, are joined.

#pragma once

#include "accumulate.h"

namespace {


// Sums of powers of the distances from the mean, and how far it is from the centre.
template <int WHAT> struct Central {
  double shift, second, third = 0, fourth = 0;

  explicit Central(const Partial<WHAT>& part) {
    shift = part.count > 0 ? part.first / part.count : 0;
    second = part.second - part.first * shift;
    if (!HIGHER<WHAT>) return;
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

}  // namespace

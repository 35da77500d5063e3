// How moments follow from sums about a centre, and how those of two parts, or of an observation and all before it, are joined.

#pragma once

namespace {

// A mean, and the sums of powers of the distances from it. The weight is the number of elements, unless these have weights.
struct Moments {
  double weight, mean, second, third, fourth;
};

// Returns the moments of what was added up about a centre. If weights add up to 0 or less, the mean is the sum, as with plain calls.
template <bool HIGHER> static inline Moments moments_of(double weight, double centre, double first, double second, double third = 0, double fourth = 0) {
  const double shift = weight > 0 ? first / weight : first + weight * centre - centre;
  Moments found = {weight, centre + shift, second - shift * (2 * first - weight * shift), 0, 0};
  if (!HIGHER) return found;
  found.third = third - shift * (3 * second - 2 * shift * first);
  found.fourth = fourth - shift * (4 * third - shift * (6 * second - 3 * shift * first));
  return found;
}

// Joins what is earlier: Chan, Golub and LeVeque 1983, and Pebay 2008 for the third and the fourth power; West 1979 has weights.
static inline void join_moments(Moments& later, const Moments& earlier, bool higher) {
  const double a = earlier.weight, b = later.weight, weight = a + b, divisor = weight > 0 ? weight : 1;
  if (a == 0) return;
  if (b == 0) {
    later = earlier;
    return;
  }
  const double delta = later.mean - earlier.mean, square = delta * delta, share_a = a / divisor, share_b = b / divisor;
  if (higher) {
    const double product = share_a * share_b, spread = square * weight * product;
    const double second = 6 * (share_a * share_a * later.second + share_b * share_b * earlier.second) + spread * (1 - 3 * product);
    later.fourth += earlier.fourth + delta * (4 * (share_a * later.third - share_b * earlier.third) + delta * second);
    later.third += earlier.third + delta * (3 * (share_a * later.second - share_b * earlier.second) + spread * (share_a - share_b));
  }
  later.second += earlier.second + square * share_b * a;
  later.mean = earlier.mean + delta * share_b;
  later.weight = weight;
}

}  // namespace

// Sums of a tensor's elements with random signs, in one read: the part of `reducers/kernels/sketches.py` that grows with the tensor,
// which has the definition. Parts are cut by sizes only and joined in order, so threads change no bit.

#include "simd.h"
#include "partition.h"

namespace {

constexpr int64_t GROUP = 64;       // elements whose signs are one word
constexpr int64_t MOST_PARTS = 64;  // each has a table of its own

struct Sketching {
  const void* x;
  int64_t length, buckets;  // the second is a multiple of GROUP
  double* sums;
};

static inline uint64_t mix(uint64_t x, uint64_t salt) {  // as `mix` of `reducers/kernels/hashing.py`
  x += salt * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

static Ints places_of_signs() {
  Ints found = {};
  for (int lane = 0; lane < LANES; ++lane) found[lane] = 31 - lane;
  return found;
}

static const Ints PLACES = places_of_signs();

// Adds the elements of a group to its buckets; what is not finite counts as 0.
template <class T> static inline void add(const typename T::Type* x, uint64_t signs, double* buckets) {
  for (int64_t at = 0; at < GROUP; at += LANES) {
    const Floats value = load<T>(x + at);
    Ints bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = (bits & 0x7f800000) == 0x7f800000 ? Ints{} : bits ^ (((Ints{} + int32_t(signs >> at)) << PLACES) & int32_t(0x80000000));
    Floats signed_value;
    std::memcpy(&signed_value, &bits, sizeof(bits));
    Doubles wide[2], sums[2];
    halves(signed_value, wide);
    std::memcpy(sums, buckets + at, sizeof(sums));
    sums[0] += wide[0];
    sums[1] += wide[1];
    std::memcpy(buckets + at, sums, sizeof(sums));
  }
}

// Adds the elements of some blocks to a table of twice as many buckets: those from the end on are the first again.
template <class T> static void add_blocks(const Sketching& all, int64_t first, int64_t stop, double* table) {
  const auto* x = static_cast<const typename T::Type*>(all.x);
  for (int64_t block = first; block < stop; ++block) {
    double* from = table + (mix(uint64_t(block), 8) >> 33) % uint64_t(all.buckets);
    for (int64_t place = 0; place < all.buckets; place += GROUP) {
      const int64_t start = block * all.buckets + place, left = all.length - start;
      if (left <= 0) return;
      const uint64_t signs = mix(uint64_t(start / GROUP), 7);
      if (left >= GROUP) {
        add<T>(x + start, signs, from + place);
      } else {
        typename T::Type padded[GROUP] = {};
        std::copy(x + start, x + all.length, padded);
        add<T>(padded, signs, from + place);
      }
    }
  }
}

template <class T> static int run_sketch(const Sketching& all, int64_t most_threads) {
  const int64_t blocks = (all.length + all.buckets - 1) / all.buckets, size = 2 * all.buckets;
  const int64_t parts = std::max(int64_t(1), std::min({MOST_PARTS, blocks, all.length / std::max(PART, 8 * size)}));
  double* tables = new (std::nothrow) double[parts * size]();
  if (!tables) return 1;
  const int64_t threads = std::min(most_threads, parts);
  Turns turns(parts, threads);
  in_parallel(threads, [&](int thread) {
    turns.take(thread, [&](int64_t part) { add_blocks<T>(all, blocks * part / parts, blocks * (part + 1) / parts, tables + part * size); });
  });
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t bucket = 0; bucket < size; ++bucket) tables[bucket] += tables[part * size + bucket];
  for (int64_t bucket = 0; bucket < all.buckets; ++bucket) all.sums[bucket] = tables[bucket] + tables[all.buckets + bucket];
  delete[] tables;
  return 0;
}

static int sketch(const Sketching* all, int64_t, int64_t threads) { return run_sketch<ELEMENTS>(*all, threads); }

typedef int (*Loop)(const Sketching*, int64_t, int64_t threads);

}  // namespace

extern "C" EXPORT Loop EXPORTED(reducers_sketch, ELEMENTS)() { return sketch; }

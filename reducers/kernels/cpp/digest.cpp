// Hashes of the bits of tensors, in one read: the part of `reducers/kernels/digests.py` that grows with the tensor, which has the
// definition. Sums of integers modulo 2^64 do not depend on their order, so how threads share the blocks changes nothing.

#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "work_stealing.h"

#define ALWAYS __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int LANES = BYTES / 8;
constexpr int AT_ONCE = 4;            // vectors, each with a sum of its own: an addition need not wait for the one before
constexpr int64_t WORDS = 1 << 10;    // of a block
constexpr int64_t BLOCK = 8 * WORDS;  // bytes
constexpr int64_t TOGETHER = 8;       // blocks that a thread takes at once
constexpr int64_t AHEAD = BLOCK;      // bytes after what is read, which are fetched

typedef uint64_t Words __attribute__((vector_size(BYTES)));

struct Digesting {
  const char* x;
  int64_t rows, bytes;              // tensors one after another, and the bytes of each
  int64_t first;                    // the number of the first block
  int64_t size;                     // bytes of an element
  int64_t magnitude, highest, nan;  // NaN is what is above `highest` of the bits `magnitude`, and counts as `nan`
  uint64_t* results;                // of each tensor
};

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, FIRST = 0xBF58476D1CE4E5B9, SECOND = 0x94D049BB133111EB;

// As `mix` of `reducers/kernels/hashing.py`.
static inline uint64_t mix(uint64_t x, uint64_t salt) {
  x += salt * GOLDEN;
  x = (x ^ (x >> 30)) * FIRST;
  x = (x ^ (x >> 27)) * SECOND;
  return x ^ (x >> 31);
}

struct Weights {
  alignas(64) uint64_t of[WORDS];
  Weights() {
    for (int64_t place = 0; place < WORDS; ++place) of[place] = mix(uint64_t(place), 1) | 1;
  }
};

static const Weights WEIGHTS;

// The NaNs among elements of the size of E. The sign is never one of the bits of a magnitude, so magnitudes are not negative.
template <class E> struct Nans {
  typedef E Vector __attribute__((vector_size(BYTES)));
  const Vector magnitude, highest, nan;

  explicit Nans(const Digesting& all)
      : magnitude(Vector{} + E(all.magnitude)), highest(Vector{} + E(all.highest)), nan(Vector{} + E(all.nan)) {}
  Vector magnitudes(const Words& words) const { return Vector(words) & magnitude; }
  Words replaced(const Words& words) const { return Words(magnitudes(words) > highest ? nan : Vector(words)); }
};

// Whether there was a NaN in any of many vectors, `AT_ONCE` at a time.
template <class E> struct Seen {
  typename Nans<E>::Vector most = {};

  void look(const Nans<E>& nans, const Words* words) {
    for (int one = 0; one < AT_ONCE; ++one) {
      const auto found = nans.magnitudes(words[one]);
      most = found > most ? found : most;
    }
  }
  bool any(const Nans<E>& nans) const {
    const Words above = Words(most > nans.highest);
    uint64_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= above[lane];
    return found;
  }
};

#if defined(__AVX512F__)
// Two vectors in one comparison, which is true of two numbers if one is NaN.
template <> struct Seen<int32_t> {
  unsigned lanes = 0;

  void look(const Nans<int32_t>&, const Words* words) {
    for (int one = 0; one < AT_ONCE; one += 2) lanes |= _mm512_cmp_ps_mask(__m512(words[one]), __m512(words[one + 1]), _CMP_UNORD_Q);
  }
  bool any(const Nans<int32_t>&) const { return lanes; }
};
template <> struct Seen<int64_t> {
  unsigned lanes = 0;

  void look(const Nans<int64_t>&, const Words* words) {
    for (int one = 0; one < AT_ONCE; one += 2) lanes |= _mm512_cmp_pd_mask(__m512d(words[one]), __m512d(words[one + 1]), _CMP_UNORD_Q);
  }
  bool any(const Nans<int64_t>&) const { return lanes; }
};
#endif

static inline Words loaded(const void* from) {
  Words found;
  std::memcpy(&found, from, BYTES);
  return found;
}

enum NaN { NONE, LOOK, REPLACE };

// Returns the sum over a block. To look for NaN is faster than to replace it, so it is replaced only if `found` says that there is one.
template <class E, NaN HOW> ALWAYS static inline uint64_t sum_of(const char* x, const Digesting& all, bool& found) {
  const Nans<E> nans(all);
  Seen<E> seen;
  Words sums[AT_ONCE] = {};
  for (int64_t place = 0; place < WORDS; place += AT_ONCE * LANES) {
    Words words[AT_ONCE];
#pragma GCC unroll 4
    for (int one = 0; one < AT_ONCE; ++one) {
      const char* from = x + 8 * place + one * BYTES;
      if (one * BYTES % 64 == 0) __builtin_prefetch(from + AHEAD);
      words[one] = HOW == REPLACE ? nans.replaced(loaded(from)) : loaded(from);
    }
    if (HOW == LOOK) seen.look(nans, words);
#pragma GCC unroll 4
    for (int one = 0; one < AT_ONCE; ++one) {
      Words word = words[one];
      word ^= word >> 32;
      word *= GOLDEN;
      word ^= word >> 32;
      sums[one] += word * loaded(WEIGHTS.of + place + one * LANES);
    }
  }
  if (HOW == LOOK) found = seen.any(nans);
  Words sum = {};
  for (int one = 0; one < AT_ONCE; ++one) sum += sums[one];
  uint64_t whole = 0;
  for (int lane = 0; lane < LANES; ++lane) whole += sum[lane];
  return whole;
}

template <class E, bool FLOATS> static uint64_t block_of(const char* x, int64_t bytes, const Digesting& all) {
  alignas(64) char padded[BLOCK];
  if (bytes < BLOCK) {
    std::memcpy(padded, x, bytes);
    std::memset(padded + bytes, 0, BLOCK - bytes);
    x = padded;
  }
  bool found = false;
  const uint64_t sum = sum_of<E, FLOATS ? LOOK : NONE>(x, all, found);
  return found ? sum_of<E, REPLACE>(x, all, found) : sum;
}

template <class E, bool FLOATS> static int run(const Digesting& all, int64_t most_threads) {
  const int64_t blocks = (all.bytes + BLOCK - 1) / BLOCK, items = all.rows * blocks;
  const int64_t threads = std::min(most_threads, (items + 2 * TOGETHER - 1) / (2 * TOGETHER));
  std::fill(all.results, all.results + all.rows, 0);
  Turns turns(items, threads, TOGETHER);
  in_parallel(threads, [&](int thread) {
    int64_t row = 0;
    uint64_t sum = 0;
    const auto end = [&] { __atomic_fetch_add(all.results + row, sum, __ATOMIC_RELAXED); };
    turns.take(thread, [&](int64_t item) {
      if (item / blocks != row) {
        end();
        row = item / blocks, sum = 0;
      }
      const int64_t block = item % blocks, start = block * BLOCK;
      const uint64_t hash = block_of<E, FLOATS>(all.x + row * all.bytes + start, std::min(BLOCK, all.bytes - start), all);
      sum += mix(mix(hash, 2) + uint64_t(all.first + block), 3);
    });
    end();
  });
  return 0;
}

template <class E> static int run(const Digesting& all, int64_t threads) {
  return all.magnitude ? run<E, true>(all, threads) : run<E, false>(all, threads);
}

static int digest(const Digesting* all, int64_t, int64_t threads) {
  if (all->size == 1) return run<int8_t>(*all, threads);
  if (all->size == 2) return run<int16_t>(*all, threads);
  return all->size == 4 ? run<int32_t>(*all, threads) : run<int64_t>(*all, threads);
}

typedef int (*Loop)(const Digesting*, int64_t, int64_t threads);

}  // namespace

extern "C" EXPORT Loop reducers_digest() { return digest; }

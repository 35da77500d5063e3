// Hashes of the bits of tensors, in one read: the part of `reducers/kernels/digests.py` that grows with the tensor, which has the
// definition. Sums of integers modulo 2^64 do not depend on their order, so how threads share the blocks changes nothing.
// A tensor is runs of bytes, each with its place in a whole of which there may be more.

#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "work_stealing.h"

#define ALWAYS __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int LANES = BYTES / 8;
constexpr int AT_ONCE = 4;            // vectors, each with sums of its own: an addition need not wait for the one before
constexpr int64_t STEP = 4 * 64;      // bytes, to a multiple of which what is read of a block is filled up with zeros
constexpr int64_t WORDS = 1 << 9;     // of a block
constexpr int64_t BLOCK = 8 * WORDS;  // bytes
constexpr int64_t TOGETHER = 16;      // blocks that a thread takes at once
constexpr int64_t AHEAD = BLOCK;      // bytes after what is read, which are fetched

typedef uint64_t Words __attribute__((vector_size(BYTES)));

struct Digesting {
  const char* x;
  int64_t rows, runs, bytes;        // tensors one after another, the runs of each, and the bytes of a run
  int64_t start, stride;            // where in the whole the first run begins, and how far from there the next does
  int64_t size;                     // bytes of an element
  int64_t magnitude, highest, nan;  // NaN is what is above `highest` of the bits `magnitude`, and counts as `nan`
  uint64_t kinds[2];                // what is added to the sums of each tensor
  uint64_t* results;                // two of each tensor
};

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, FIRST = 0xBF58476D1CE4E5B9, SECOND = 0x94D049BB133111EB;

// As `mix` of `reducers/kernels/hashing.py`.
static inline uint64_t mix(uint64_t x, uint64_t salt) {
  x += salt * GOLDEN;
  x = (x ^ (x >> 30)) * FIRST;
  x = (x ^ (x >> 27)) * SECOND;
  return x ^ (x >> 31);
}

// The coefficients of each word of a block, in each sum.
struct Coefficients {
  alignas(64) uint64_t of[2][WORDS];
  Coefficients() {
    for (int sum = 0; sum < 2; ++sum)
      for (int64_t place = 0; place < WORDS; ++place) of[sum][place] = mix(uint64_t(place), sum + 1) | 1;
  }
};

static const Coefficients TABLE;

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

// Words with their bytes in the opposite order.
static inline Words reversed(const Words& words) {
#if defined(__AVX512BW__)
  const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  return Words(_mm512_shuffle_epi8(__m512i(words), order));
#elif defined(__AVX2__)
  const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  return Words(_mm256_shuffle_epi8(__m256i(words), order));
#else
  Words found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = __builtin_bswap64(words[lane]);
  return found;
#endif
}

struct Sums { Words first = {}, second = {}; };

enum NaN { NONE, LOOK, REPLACE };

// Adds what is in a block from one byte to another, multiples of STEP. To look for NaN is faster than to replace it, so it is replaced
// only if this returns that there is one.
template <class E, NaN HOW> ALWAYS static inline bool add_block(const char* x, int64_t from, int64_t to, uint64_t factor, const Digesting& all, Sums& sums) {
  const Nans<E> nans(all);
  Seen<E> seen;
  Words first[AT_ONCE] = {}, second[AT_ONCE] = {};
  for (int64_t place = from; place < to; place += AT_ONCE * BYTES) {
    Words words[AT_ONCE];
#pragma GCC unroll 4
    for (int one = 0; one < AT_ONCE; ++one) {
      const char* here = x + place + one * BYTES;
      if (one * BYTES % 64 == 0) __builtin_prefetch(here + AHEAD);
      words[one] = HOW == REPLACE ? nans.replaced(loaded(here)) : loaded(here);
    }
    if (HOW == LOOK) seen.look(nans, words);
#pragma GCC unroll 4
    for (int one = 0; one < AT_ONCE; ++one) {
      const int64_t word = place / 8 + one * LANES;
      first[one] += words[one] * loaded(TABLE.of[0] + word);
      second[one] += reversed(words[one]) * loaded(TABLE.of[1] + word);
    }
  }
  if (HOW == LOOK && seen.any(nans)) return true;
  for (int one = 1; one < AT_ONCE; ++one) first[0] += first[one], second[0] += second[one];
  sums.first += first[0] * factor;
  sums.second += second[0] * (factor << 32 | factor >> 32 | 1);
  return false;
}

// Adds bytes of one block, which begin in it at `from`.
template <class E, bool FLOATS> static void add(const char* x, int64_t block, int64_t from, int64_t bytes, const Digesting& all, Sums& sums) {
  alignas(64) char padded[BLOCK];
  int64_t begin = 0, end = BLOCK;
  if (bytes < BLOCK) {
    begin = from / STEP * STEP, end = (from + bytes + STEP - 1) / STEP * STEP;
    std::memset(padded + begin, 0, from - begin);
    std::memcpy(padded + from, x, bytes);
    std::memset(padded + from + bytes, 0, end - from - bytes);
    x = padded;
  }
  uint64_t factor = uint64_t(block) * GOLDEN;
  factor = ((factor ^ (factor >> 32)) * SECOND) | 1;
  if (add_block<E, FLOATS ? LOOK : NONE>(x, begin, end, factor, all, sums)) add_block<E, REPLACE>(x, begin, end, factor, all, sums);
}

// Adds what a run has in one of the blocks that it touches.
template <class E, bool FLOATS> static void add_in_block(const char* x, int64_t start, int64_t number, const Digesting& all, Sums& sums) {
  const int64_t block = start / BLOCK + number, from = std::max(start, block * BLOCK), to = std::min(start + all.bytes, (block + 1) * BLOCK);
  if (from < to) add<E, FLOATS>(x + (from - start), block, from - block * BLOCK, to - from, all, sums);
}

template <class E, bool FLOATS> static int run(const Digesting& all, int64_t most_threads) {
  // A run touches at most so many blocks; an item is one of them.
  const int64_t blocks = (all.bytes - 1) / BLOCK + 1 + (all.runs > 1 || all.start % BLOCK);
  const int64_t items = all.rows * all.runs * blocks, work = all.rows * all.runs * all.bytes / BLOCK;
  const int64_t threads = std::max(int64_t(1), std::min(most_threads, (work + 2 * TOGETHER - 1) / (2 * TOGETHER)));
  for (int64_t one = 0; one < 2 * all.rows; ++one) all.results[one] = all.kinds[one % 2];
  Turns turns(items, threads, TOGETHER);
  in_parallel(threads, [&](int thread) {
    int64_t row = 0;
    Sums sums{};
    const auto end = [&] {
      uint64_t whole[2] = {};
      for (int lane = 0; lane < LANES; ++lane) whole[0] += sums.first[lane], whole[1] += sums.second[lane];
      for (int one = 0; one < 2; ++one) __atomic_fetch_add(all.results + 2 * row + one, whole[one], __ATOMIC_RELAXED);
      sums = Sums{};
    };
    turns.take(thread, [&](int64_t item) {
      const int64_t run = item / blocks, block = item % blocks;
      if (run / all.runs != row) {
        end();
        row = run / all.runs;
      }
      add_in_block<E, FLOATS>(all.x + run * all.bytes, all.start + run % all.runs * all.stride, block, all, sums);
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

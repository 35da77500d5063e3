// Sums of elements with random signs, and what else a sketch tells of tensors, in one read: the part of `reducers/kernels/sketches.py`
// that grows with the tensors, which has the definition. Parts are cut by sizes only and joined in order, so threads change no bit.

#include <utility>

#include "simd.h"
#include "partition.h"

#define ALWAYS __attribute__((always_inline))

namespace {

constexpr int64_t GROUP = 64;             // elements whose signs are one word
constexpr int64_t MOST_PARTS = 64;        // of one tensor
constexpr int64_t LEAST = 1 << 17;        // elements of a part
constexpr int64_t TABLES = 8;             // a block is turned by a multiple of this in one of as many tables: all that is added is aligned
constexpr int CHAINS = 4;                 // sums of squares that do not wait for each other, of pairs of vectors
constexpr int64_t AHEAD_OF = 1 << 12;     // bytes after what is read, which are fetched
enum { COUNT, NONFINITE, POWER, MIN, MAX, FACTS };

struct Sketching {
  const void* x;
  int64_t rows, length, buckets;  // tensors one after another, the elements of each, and sums of each: a multiple of GROUP
  double* sums;                   // [rows, buckets]
  double* facts;                  // [rows, FACTS]
};

static inline uint64_t mix(uint64_t x, uint64_t salt) {  // as `mix` of `reducers/kernels/hashing.py`
  x += salt * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct Float64 { typedef double Type; };

typedef int64_t Longs __attribute__((vector_size(8 * HALF)));

// The vectors of elements: doubles of those that are, floats of all others; and integers of their size, with their bits.
template <class T, bool DOUBLE = sizeof(typename T::Type) == 8> struct Vectors {
  typedef Floats Numbers;
  typedef Ints Bits;
  static constexpr int32_t EXPONENT = 0x7f800000, SIGN = INT32_MIN;
};
template <class T> struct Vectors<T, true> {
  typedef Doubles Numbers;
  typedef Longs Bits;
  static constexpr int64_t EXPONENT = 0x7ff0000000000000, SIGN = INT64_MIN;
};

#if defined(__AVX512F__)
static inline Floats lesser(const Floats& a, const Floats& b) { return Floats(_mm512_min_ps(__m512(a), __m512(b))); }
static inline Floats greater(const Floats& a, const Floats& b) { return Floats(_mm512_max_ps(__m512(a), __m512(b))); }
static inline Doubles lesser(const Doubles& a, const Doubles& b) { return Doubles(_mm512_min_pd(__m512d(a), __m512d(b))); }
static inline Doubles greater(const Doubles& a, const Doubles& b) { return Doubles(_mm512_max_pd(__m512d(a), __m512d(b))); }
static inline Doubles multiplied(const Doubles& a, const Doubles& b, const Doubles& c) {
  return Doubles(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
}
static inline Floats turned(const Floats& x, uint64_t signs) {
  const __m512i bits = _mm512_castps_si512(__m512(x));
  return Floats(_mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, __mmask16(signs), bits, _mm512_set1_epi32(INT32_MIN))));
}
static inline Doubles turned(const Doubles& x, uint64_t signs) {
  const __m512i bits = _mm512_castpd_si512(__m512d(x));
  return Doubles(_mm512_castsi512_pd(_mm512_mask_xor_epi64(bits, __mmask8(signs), bits, _mm512_set1_epi64(INT64_MIN))));
}
#else
#if defined(__AVX__)
static inline Floats lesser(const Floats& a, const Floats& b) { return Floats(_mm256_min_ps(__m256(a), __m256(b))); }
static inline Floats greater(const Floats& a, const Floats& b) { return Floats(_mm256_max_ps(__m256(a), __m256(b))); }
static inline Doubles lesser(const Doubles& a, const Doubles& b) { return Doubles(_mm256_min_pd(__m256d(a), __m256d(b))); }
static inline Doubles greater(const Doubles& a, const Doubles& b) { return Doubles(_mm256_max_pd(__m256d(a), __m256d(b))); }
#else
template <class V> static inline V lesser(const V& a, const V& b) { return a < b ? a : b; }
template <class V> static inline V greater(const V& a, const V& b) { return a > b ? a : b; }
#endif
static inline Doubles multiplied(const Doubles& a, const Doubles& b, const Doubles& c) { return a * b + c; }

template <class Bits, int NUMBER, int LAST> static Bits places_of_signs() {
  Bits found = {};
  for (int lane = 0; lane < NUMBER; ++lane) found[lane] = LAST - lane;
  return found;
}
static const Ints PLACES = places_of_signs<Ints, LANES, 31>();
static const Longs LONG_PLACES = places_of_signs<Longs, HALF, 63>();

static inline Floats turned(const Floats& x, uint64_t signs) {
  return Floats(Ints(x) ^ (((Ints{} + int32_t(signs)) << PLACES) & INT32_MIN));
}
static inline Doubles turned(const Doubles& x, uint64_t signs) {
  return Doubles(Longs(x) ^ (((Longs{} + int64_t(signs)) << LONG_PLACES) & INT64_MIN));
}
#endif

template <class E> static E not_a_number() { return 0x7fff; }  // of both dtypes of 16 bits
template <> float not_a_number<float>() { return std::numeric_limits<float>::quiet_NaN(); }
template <> double not_a_number<double>() { return std::numeric_limits<double>::quiet_NaN(); }

// What is found of a part beside the sums. Several of each do not wait for each other.
template <class T> struct Found {
  typedef typename Vectors<T>::Numbers Numbers;
  static constexpr int WIDTH = sizeof(Numbers) / sizeof(Numbers{}[0]);

  Doubles squares[CHAINS][2];
  Numbers least[2], greatest[2];
  typename Vectors<T>::Bits nonfinite;

  void write(int64_t length, int64_t padding, double* facts) const {
    Doubles whole = {};
    for (const auto& chain : squares) whole += chain[0] + chain[1];
    double power = 0, low = INFINITE, high = -INFINITE;
    int64_t others = -padding;
    for (int lane = 0; lane < HALF; ++lane) power += whole[lane];
    for (int lane = 0; lane < WIDTH; ++lane) {
      low = std::min(low, double(std::min(least[0][lane], least[1][lane])));
      high = std::max(high, double(std::max(greatest[0][lane], greatest[1][lane])));
      others += nonfinite[lane];
    }
    facts[COUNT] = double(length - others), facts[NONFINITE] = double(others);
    facts[POWER] = power, facts[MIN] = low, facts[MAX] = high;
  }
};

static inline void put(double* to, const Doubles& number) { std::memcpy(to, &number, sizeof(number)); }

static inline void add_to(double* to, const Doubles& number) {
  Doubles sum;
  std::memcpy(&sum, to, sizeof(sum));
  sum += number;
  put(to, sum);
}

// Adds a number to its bucket, and its square.
template <int ONE> ALWAYS static inline void add_wide(const Doubles& wide, double* to, Doubles (*squares)[2]) {
  add_to(to, wide);
  squares[ONE / 2 % CHAINS][ONE % 2] = multiplied(wide, wide, squares[ONE / 2 % CHAINS][ONE % 2]);
}
template <int ONE> ALWAYS static inline void add_signed(const Doubles& value, double* buckets, Doubles (*squares)[2]) {
  add_wide<ONE>(value, buckets + ONE * HALF, squares);
}
template <int ONE> ALWAYS static inline void add_signed(const Floats& value, double* buckets, Doubles (*squares)[2]) {
  Doubles wide[2];
  halves(value, wide);
  add_wide<2 * ONE>(wide[0], buckets + ONE * LANES, squares);
  add_wide<2 * ONE + 1>(wide[1], buckets + ONE * LANES + HALF, squares);
}

template <class T> ALWAYS static inline Floats numbers(const typename T::Type* x, const Floats&) { return load<T>(x); }
template <class T> ALWAYS static inline Doubles numbers(const double* x, const Doubles&) {
  Doubles found;
  std::memcpy(&found, x, sizeof(found));
  return found;
}

// Adds a vector of a group to its buckets. What is not finite counts as 0 if it is looked for.
template <class T, bool LOOK, int ONE> ALWAYS static inline void add(const typename T::Type* x, uint64_t signs, double* buckets, Found<T>& found) {
  typedef Vectors<T> V;
  typedef typename V::Numbers Numbers;
  constexpr int WIDTH = Found<T>::WIDTH;
  Numbers value = numbers<T>(x + ONE * WIDTH, Numbers{}), low = value, high = value;
  if (LOOK) {
    const auto without = (typename V::Bits(value) & V::EXPONENT) == V::EXPONENT;
    found.nonfinite -= without;
    low = without ? Numbers{} + INFINITE : value, high = without ? Numbers{} - INFINITE : value;
    value = without ? Numbers{} : value;
  }
  found.least[ONE % 2] = lesser(low, found.least[ONE % 2]);
  found.greatest[ONE % 2] = greater(high, found.greatest[ONE % 2]);
  add_signed<ONE>(turned(value, signs >> (ONE * WIDTH)), buckets, found.squares);
}

template <class T, bool LOOK, int... ALL>
ALWAYS static inline void add_group(const typename T::Type* x, uint64_t signs, double* buckets, Found<T>& found, std::integer_sequence<int, ALL...>) {
  (add<T, LOOK, ALL>(x, signs, buckets, found), ...);  // no loop, in which the numbers would not stay in registers
}

// The sums of one thread. A block that is turned by r is added to table r modulo TABLES, turned by the rest of r; the other turn is made
// when all tables become one. A table begins with zeros, and ends with the places that a group has beyond the last bucket.
class Tables {
 public:
  explicit Tables(int64_t buckets)
      : buckets_(buckets), stride_(TABLES + buckets + GROUP), all_(new (ALIGNED, std::nothrow) double[(TABLES + 1) * stride_]) {}
  ~Tables() { operator delete[](all_, ALIGNED, std::nothrow); }
  bool any() const { return all_; }
  void clear() { used_ = 0; }
  // Returns the table of a block; `at` is where its elements begin.
  double* of(int64_t block, int64_t& at) {
    const int64_t turn = int64_t(mix(uint64_t(block), 8) >> 33) % buckets_, which = turn % TABLES;
    double* table = all_ + which * stride_;
    if (!(used_ >> which & 1))
      for (int64_t place = 0; place < stride_; place += HALF) put(table + place, Doubles{});
    used_ |= 1u << which;
    at = turn - which;
    return table + TABLES;
  }
  void write(double* sums) const {
    const double* turned[TABLES];
    int tables = 0;
    for (int which = 0; which < TABLES; ++which)
      if (used_ >> which & 1) turned[tables++] = all_ + which * stride_ + TABLES - which;
    double* whole = all_ + TABLES * stride_;
    for (int64_t place = 0; place < buckets_ + GROUP; place += HALF) {
      Doubles sum = {};
      for (int table = 0; table < tables; ++table) {
        Doubles one;
        std::memcpy(&one, turned[table] + place, sizeof(one));
        sum += one;
      }
      put(whole + place, sum);
    }
    for (int64_t place = 0; place < GROUP; ++place) whole[place] += whole[buckets_ + place];
    std::memcpy(sums, whole, buckets_ * sizeof(double));
  }

 private:
  static constexpr std::align_val_t ALIGNED{64};
  const int64_t buckets_, stride_;
  double* const all_;
  unsigned used_ = 0;
};

// Adds blocks of a tensor, of which so many elements are left; writes what is found beside the sums.
template <class T, bool LOOK> static void add_blocks(const typename T::Type* x, int64_t first, int64_t length, int64_t buckets, Tables& tables, double* facts) {
  typedef typename Found<T>::Numbers Numbers;
  constexpr std::make_integer_sequence<int, GROUP / Found<T>::WIDTH> all;
  const Numbers least = Numbers{} + INFINITE, greatest = Numbers{} - INFINITE;
  Found<T> found = {{}, {least, least}, {greatest, greatest}, {}};
  uint64_t group = first * (buckets / GROUP);
  int64_t left = length, padding = 0;
  tables.clear();
  for (int64_t block = first; left > 0; ++block) {
    int64_t at;
    double* table = tables.of(block, at);
    const int64_t size = std::min(left, buckets);
    for (const auto* end = x + size / GROUP * GROUP; x < end; x += GROUP) {
      __builtin_prefetch(reinterpret_cast<const char*>(x) + AHEAD_OF);
      add_group<T, LOOK>(x, mix(group++, 7), table + at, found, all);
      at += GROUP;
      if (at >= buckets) at -= buckets;
    }
    left -= size;
    if (size % GROUP == 0) continue;
    typename T::Type padded[GROUP];
    std::fill(padded, padded + GROUP, not_a_number<typename T::Type>());
    std::copy(x, x + size % GROUP, padded);
    add_group<T, true>(padded, mix(group, 7), table + at, found, all);
    padding = GROUP - size % GROUP;
  }
  found.write(length, padding, facts);
}

// Writes what a part of a tensor adds. To look for what is not finite takes longer than the sums, so it is done only if there is any.
template <class T> static void add_part(const typename T::Type* x, int64_t first, int64_t length, int64_t buckets, Tables& tables, double* sums, double* facts) {
  x += first * buckets;
  add_blocks<T, false>(x, first, length, buckets, tables, facts);
  if (!(facts[POWER] < INFINITE)) add_blocks<T, true>(x, first, length, buckets, tables, facts);
  tables.write(sums);
}

template <class T> static int run_sketch(const Sketching& all, int64_t most_threads) {
  const int64_t buckets = all.buckets, blocks = (all.length + buckets - 1) / buckets;
  const int64_t parts = std::max(int64_t(1), std::min({MOST_PARTS, blocks, all.length / std::max(LEAST, 64 * buckets)}));
  double* table = parts > 1 ? new (std::nothrow) double[all.rows * parts * (buckets + FACTS)] : nullptr;
  std::atomic<bool> without_memory(parts > 1 && !table);
  const int64_t threads = std::max(int64_t(1), std::min(most_threads, all.rows * all.length / LEAST));
  Turns turns(all.rows * parts, threads, std::max(int64_t(1), LEAST / std::max(int64_t(1), all.length)));
  in_parallel(without_memory ? 0 : threads, [&](int thread) {
    Tables tables(buckets);
    if (!tables.any()) without_memory = true;
    turns.take(thread, [&](int64_t item) {
      if (without_memory) return;
      const int64_t row = item / parts, part = item % parts, first = blocks * part / parts, stop = blocks * (part + 1) / parts;
      double* sums = parts > 1 ? table + item * (buckets + FACTS) : all.sums + row * buckets;
      double* facts = parts > 1 ? sums + buckets : all.facts + row * FACTS;
      const auto* x = static_cast<const typename T::Type*>(all.x) + row * all.length;
      add_part<T>(x, first, std::min(stop * buckets, all.length) - first * buckets, buckets, tables, sums, facts);
    });
  });
  for (int64_t item = 0; parts > 1 && !without_memory && item < all.rows * parts; ++item) {
    const double* from = table + item * (buckets + FACTS);
    double *sums = all.sums + item / parts * buckets, *facts = all.facts + item / parts * FACTS;
    if (item % parts == 0) {
      std::copy(from, from + buckets, sums);
      std::copy(from + buckets, from + buckets + FACTS, facts);
      continue;
    }
    for (int64_t bucket = 0; bucket < buckets; ++bucket) sums[bucket] += from[bucket];
    for (int fact = 0; fact < MIN; ++fact) facts[fact] += from[buckets + fact];
    facts[MIN] = std::min(facts[MIN], from[buckets + MIN]);
    facts[MAX] = std::max(facts[MAX], from[buckets + MAX]);
  }
  delete[] table;
  return without_memory;
}

static int sketch(const Sketching* all, int64_t, int64_t threads) { return run_sketch<ELEMENTS>(*all, threads); }

typedef int (*Loop)(const Sketching*, int64_t, int64_t threads);

}  // namespace

extern "C" EXPORT Loop EXPORTED(reducers_sketch, ELEMENTS)() { return sketch; }

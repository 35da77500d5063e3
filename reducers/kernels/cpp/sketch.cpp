// Sums of elements with random signs, and what else a sketch tells of tensors, in one read: the part of `reducers/kernels/sketches.py`
// that grows with the tensors, which has the definition. Parts are cut by sizes only and joined in order, so threads change no bit.
// A tensor is runs of elements, each with its place in a whole of which there may be more.

#include <utility>

#include "simd.h"
#include "partition.h"

#define ALWAYS __attribute__((always_inline))

namespace {

constexpr int64_t GROUP = 64;             // neighbouring buckets; of a block, the signs of what they are added are one word
constexpr int64_t MOST_PARTS = 64;        // of one tensor
constexpr int64_t LEAST = 1 << 17;        // elements of a part
constexpr int CHAINS = 4;                 // sums of squares that do not wait for each other, of pairs of vectors
constexpr int64_t BATCH = 1 << 14;        // bytes of blocks that are gone through group by group, while sums of one group are in registers
enum { COUNT, NONFINITE, POWER, MIN, MAX, FACTS };

struct Sketching {
  const void* x;
  int64_t rows, runs, length;     // tensors one after another, the runs of each, and the elements of a run
  int64_t start, stride;          // where in the whole the first run begins, and how far from there the next does
  int64_t buckets;                // sums of each tensor: a multiple of GROUP
  double* sums;                   // [rows, buckets]
  double* facts;                  // [rows, FACTS]
};

typedef uint64_t Words __attribute__((vector_size(8 * HALF)));

template <class W> static inline W mix(W x, uint64_t salt) {  // as `mix` of `reducers/kernels/hashing.py`
  x += salt * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// The lower three bits of the number by which places in blocks are turned.
static inline Words within_eight(const Words& block) {
  const Words chosen = mix(block >> 3, 9);
  Words factor = ((chosen >> 32) * 7 >> 32) + 1, found = chosen & 7;
  for (int bit = 0; bit < 3; ++bit) {
    found ^= (Words{} - (block >> bit & 1)) & factor;
    factor = (factor << 1 & 7) ^ (factor >> 2) * 3;
  }
  return found;
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

// The sums of a group of buckets.
constexpr int VECTORS = GROUP / HALF;

// Each vector by itself: of an array that is copied as a whole, none would stay in registers.
ALWAYS static inline void read(const double* from, Doubles* sums) {
#pragma GCC unroll 32
  for (int one = 0; one < VECTORS; ++one) std::memcpy(sums + one, from + one * HALF, sizeof(Doubles));
}
ALWAYS static inline void write(const Doubles* sums, double* to) {
#pragma GCC unroll 32
  for (int one = 0; one < VECTORS; ++one) std::memcpy(to + one * HALF, sums + one, sizeof(Doubles));
}

template <int ONE> ALWAYS static inline void add_wide(const Doubles& wide, Doubles* sums, Doubles (*squares)[2]) {
  sums[ONE] += wide;
  squares[ONE / 2 % CHAINS][ONE % 2] = multiplied(wide, wide, squares[ONE / 2 % CHAINS][ONE % 2]);
}
template <int ONE> ALWAYS static inline void add_signed(const Doubles& value, Doubles* sums, Doubles (*squares)[2]) {
  add_wide<ONE>(value, sums, squares);
}
template <int ONE> ALWAYS static inline void add_signed(const Floats& value, Doubles* sums, Doubles (*squares)[2]) {
  Doubles wide[2];
  halves(value, wide);
  add_wide<2 * ONE>(wide[0], sums, squares);
  add_wide<2 * ONE + 1>(wide[1], sums, squares);
}

// The elements of a group, in the order in which they are added to a group of buckets: that of bucket i is element i xor `by`.
// Lanes of a vector are put in order by a permutation, vectors by their address.
template <class T> class Elements {
  typedef typename T::Type Element;
  typedef typename Vectors<T>::Numbers Numbers;
  typedef typename Vectors<T>::Bits Bits;
  static constexpr int WIDTH = sizeof(Numbers) / sizeof(Numbers{}[0]);

#if defined(__AVX512BW__)
  static constexpr bool WIDENED = std::is_same<T, BFloat16>::value;  // 16 bits come to lie in the upper half of a float, by the same permutation
#else
  static constexpr bool WIDENED = false;
#endif

  struct Orders {
    Bits of[WIDTH];
    Orders() {
      for (int by = 0; by < WIDTH; ++by)
        for (int lane = 0; lane < WIDTH; ++lane) of[by][lane] = (lane ^ by) << (WIDENED ? 16 : 0);
    }
  };
  static const Orders ORDERS;

 public:
  ALWAYS Elements(const Element* x, uint64_t by) : x_(x), apart_(by & (GROUP - WIDTH)), order_(ORDERS.of[by & (WIDTH - 1)]) {}
  template <int ONE> ALWAYS Numbers vector() const {
#if defined(__AVX512BW__)
    if constexpr (WIDENED) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x_ + (uint64_t(ONE * WIDTH) ^ apart_)));
      return Numbers(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, __m512i(order_), _mm512_castsi256_si512(bits)));
    }
#endif
    return shuffled(loaded(x_ + (uint64_t(ONE * WIDTH) ^ apart_), Numbers{}), order_);
  }

 private:
  ALWAYS static Numbers shuffled(const Numbers& numbers, const Bits& order) {
#if defined(__clang__)  // which has no shuffle by a vector
    Numbers found;
    for (int lane = 0; lane < WIDTH; ++lane) found[lane] = numbers[order[lane]];
    return found;
#else
    return __builtin_shuffle(numbers, order);
#endif
  }
  ALWAYS static Floats loaded(const Element* x, const Floats&) { return load<T>(x); }
  ALWAYS static Doubles loaded(const Element* x, const Doubles&) {
    Doubles found;
    std::memcpy(&found, x, sizeof(found));
    return found;
  }
  const Element* const x_;
  const uint64_t apart_;
  const Bits order_;
};

template <class T> const typename Elements<T>::Orders Elements<T>::ORDERS;

// Adds a vector of elements to a group. What is not finite counts as 0 if it is looked for.
template <class T, bool LOOK, int ONE> ALWAYS static inline void add(const Elements<T>& elements, uint64_t signs, Doubles* sums, Found<T>& found) {
  typedef Vectors<T> V;
  typedef typename V::Numbers Numbers;
  constexpr int WIDTH = Found<T>::WIDTH;
  Numbers value = elements.template vector<ONE>(), low = value, high = value;
  if (LOOK) {
    const auto without = (typename V::Bits(value) & V::EXPONENT) == V::EXPONENT;
    found.nonfinite -= without;
    low = without ? Numbers{} + INFINITE : value, high = without ? Numbers{} - INFINITE : value;
    value = without ? Numbers{} : value;
  }
  found.least[ONE % 2] = lesser(low, found.least[ONE % 2]);
  found.greatest[ONE % 2] = greater(high, found.greatest[ONE % 2]);
  add_signed<ONE>(turned(value, signs >> (ONE * WIDTH)), sums, found.squares);
}

template <class T, bool LOOK, int... ALL>
ALWAYS static inline void add_group(const Elements<T>& elements, uint64_t signs, Doubles* sums, Found<T>& found, std::integer_sequence<int, ALL...>) {
  (add<T, LOOK, ALL>(elements, signs, sums, found), ...);  // no loop, in which the numbers would not stay in registers
}

// What a thread adds up of one part: sums, and the rest.
template <class T, bool LOOK> class Adding {
  typedef typename T::Type Element;
  typedef typename Found<T>::Numbers Numbers;
  static constexpr std::make_integer_sequence<int, GROUP / Found<T>::WIDTH> ALL{};

 public:
  // How many blocks there are in a batch.
  static int64_t together(int64_t buckets) { return std::max(int64_t(1), BATCH / int64_t(buckets * sizeof(Element))); }
  // How many numbers of 8 bytes there is to be room for: sums, and the signs and turns of a batch.
  static int64_t room(int64_t buckets) { return buckets + padded(together(buckets) * buckets / GROUP) + padded(together(buckets)); }

  Adding(int64_t buckets, double* memory)
      : buckets_(buckets), groups_(buckets / GROUP), together_(together(buckets)), sums_(memory),
        signs_(reinterpret_cast<uint64_t*>(memory + buckets)), turns_(signs_ + padded(together_ * groups_)) {
    const Numbers least = Numbers{} + INFINITE, greatest = Numbers{} - INFINITE;
    found_ = Found<T>{{}, {least, least}, {greatest, greatest}, {}};
    std::fill(sums_, sums_ + buckets, 0.0);
  }

  // Adds elements from one place in the whole to another; `x` is the first of them.
  void add_elements(const Element* x, int64_t from, int64_t to) {
    number_ += to - from;
    const int64_t first = (from + buckets_ - 1) / buckets_, stop = to / buckets_;  // of the blocks that are there as a whole
    if (first > stop) return add_some(x, first - 1, from, to);
    if (from < first * buckets_) add_some(x, first - 1, from, first * buckets_);
    for (int64_t block = first; block < stop; block += together_)
      add_blocks(x + (block * buckets_ - from), block, std::min(together_, stop - block));
    if (stop * buckets_ < to) add_some(x + (stop * buckets_ - from), stop, stop * buckets_, to);
  }

  void write(double* sums, double* facts) const {
    std::memcpy(sums, sums_, buckets_ * sizeof(double));
    found_.write(number_, padding_, facts);
  }

 private:
  static int64_t padded(int64_t number) { return (number + HALF - 1) / HALF * HALF; }

  // Writes the signs of each group of some blocks, and for each block which of its elements is added to its first bucket.
  void look_up(int64_t first, int64_t number) {
    Words lane;
    for (int one = 0; one < HALF; ++one) lane[one] = one;
    for (int64_t group = 0; group < number * groups_; group += HALF) {
      const Words found = mix(Words{} + uint64_t(first * groups_ + group) + lane, 7);
      std::memcpy(signs_ + group, &found, sizeof(found));
    }
    for (int64_t block = 0; block < number; block += HALF) {
      const Words place = Words{} + uint64_t(first + block) + lane, hash = mix(place, 8);
      const Words found = ((hash >> 32) * uint64_t(groups_) >> 32) * GROUP + (hash & (GROUP - 8)) + within_eight(place);
      std::memcpy(turns_ + block, &found, sizeof(found));
    }
  }

  // Adds blocks that are there as a whole.
  void add_blocks(const Element* x, int64_t first, int64_t number) {
    look_up(first, number);
    const int64_t buckets = buckets_, groups = groups_;
    Found<T> found = found_;  // in registers
    const char* next = reinterpret_cast<const char*>(x + number * buckets);
    for (int64_t group = 0; group < groups; ++group) {
      Doubles sums[VECTORS];
      read(sums_ + group * GROUP, sums);
      for (int64_t one = 0; one < number; ++one) {
        const uint64_t turn = turns_[one];
        int64_t at = int64_t(turn / GROUP * GROUP) + group * GROUP;
        if (at >= buckets) at -= buckets;
#pragma GCC unroll 8
        for (int64_t line = 0; line < GROUP * int64_t(sizeof(Element)); line += 64) __builtin_prefetch(next + line);
        next += GROUP * sizeof(Element);
        add_group<T, LOOK>(Elements<T>(x + one * buckets + at, turn), signs_[one * groups + group], sums, found, ALL);
      }
      ::write(sums, sums_ + group * GROUP);
    }
    found_ = found;
  }

  // Adds what there is of a block.
  void add_some(const Element* x, int64_t block, int64_t from, int64_t to) {
    look_up(block, 1);
    const int64_t begin = from - block * buckets_, end = to - block * buckets_, turn = int64_t(turns_[0]) / GROUP;
    for (int64_t place = begin / GROUP; place * GROUP < end; ++place) {
      const int64_t low = std::max(place * GROUP, begin), high = std::min((place + 1) * GROUP, end);
      Element padded[GROUP];
      std::fill(padded, padded + GROUP, not_a_number<Element>());
      std::copy(x + (low - begin), x + (high - begin), padded + (low - place * GROUP));
      const int64_t group = place < turn ? place - turn + groups_ : place - turn;
      Doubles sums[VECTORS];
      read(sums_ + group * GROUP, sums);
      add_group<T, true>(Elements<T>(padded, turns_[0]), signs_[group], sums, found_, ALL);
      ::write(sums, sums_ + group * GROUP);
      padding_ += GROUP - (high - low);
    }
  }

  const int64_t buckets_, groups_, together_;
  double* const sums_;
  uint64_t *const signs_, *const turns_;
  Found<T> found_;
  int64_t number_ = 0, padding_ = 0;
};

// Writes what a part of a tensor adds: so many of its runs, or blocks of its only one.
template <class T, bool LOOK> static void add_part(const Sketching& all, int64_t row, int64_t first, int64_t stop, double* table, double* sums, double* facts) {
  Adding<T, LOOK> adding(all.buckets, table);
  const auto* x = static_cast<const typename T::Type*>(all.x) + row * all.runs * all.length;
  if (all.runs == 1) {
    const int64_t block = all.start / all.buckets, end = all.start + all.length;
    const int64_t from = std::max(all.start, (block + first) * all.buckets), to = std::min(end, (block + stop) * all.buckets);
    adding.add_elements(x + (from - all.start), from, to);
  } else {
    for (int64_t run = first; run < stop; ++run) {
      const int64_t from = all.start + run * all.stride;
      adding.add_elements(x + run * all.length, from, from + all.length);
    }
  }
  adding.write(sums, facts);
}

template <class T> static int run_sketch(const Sketching& all, int64_t most_threads) {
  const int64_t buckets = all.buckets, number = all.runs * all.length;  // elements of a tensor
  const int64_t blocks = all.length ? (all.start + all.length - 1) / buckets - all.start / buckets + 1 : 0, units = all.runs == 1 ? blocks : all.runs;
  const int64_t parts = std::max(int64_t(1), std::min({MOST_PARTS, units, number / std::max(LEAST, 64 * buckets)}));
  double* table = parts > 1 ? new (std::nothrow) double[all.rows * parts * (buckets + FACTS)] : nullptr;
  std::atomic<bool> without_memory(parts > 1 && !table);
  const int64_t threads = std::max(int64_t(1), std::min(most_threads, all.rows * number / LEAST));
  Turns turns(all.rows * parts, threads, std::max(int64_t(1), LEAST / std::max(int64_t(1), number)));
  in_parallel(without_memory ? 0 : threads, [&](int thread) {
    constexpr std::align_val_t ALIGNED{64};
    double* const mine = new (ALIGNED, std::nothrow) double[Adding<T, false>::room(buckets)];
    if (!mine) without_memory = true;
    turns.take(thread, [&](int64_t item) {
      if (without_memory) return;
      const int64_t row = item / parts, part = item % parts, first = units * part / parts, stop = units * (part + 1) / parts;
      double* sums = parts > 1 ? table + item * (buckets + FACTS) : all.sums + row * buckets;
      double* facts = parts > 1 ? sums + buckets : all.facts + row * FACTS;
      add_part<T, false>(all, row, first, stop, mine, sums, facts);
      // To look for what is not finite takes longer than the sums, so it is done only if there is any.
      if (!(facts[POWER] < INFINITE)) add_part<T, true>(all, row, first, stop, mine, sums, facts);
    });
    operator delete[](mine, ALIGNED, std::nothrow);
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

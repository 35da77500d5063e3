// Statistics of a tensor in one read: elements are added in double about a centre, in several lanes at once.
//
// Blocks of elements go through a loop that looks at none of them. If its sum shows that one was not finite, the block is read
// again by the loop that selects. Parts are cut by sizes only and are joined in order, so threads do not change a result.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int HALF = LANES / 2;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * HALF)));

constexpr int MOST_AXES = 8;
constexpr int64_t PART = 1 << 15;   // elements of a part, about
constexpr int64_t BLOCK = 1 << 12;  // elements between two looks at a sum: floats count them exactly
constexpr int64_t ROWS = 8;         // rows of all columns that are added before the next rows
constexpr int64_t WIDTH = 1 << 12;  // columns of a part: their sums stay in the cache
constexpr int64_t EXACT = 1 << 24;  // floats count exactly up to here
constexpr int64_t TABLE = 1 << 23;  // bytes of a table of parts, at most, if columns are kept
constexpr int64_t AHEAD = 1 << 12;  // bytes after the end of what is read, which are fetched
constexpr float INFINITE = std::numeric_limits<float>::infinity();

enum What { SUM_OF = 1, SQUARES_OF = 2, EXTREMES = 4, ZEROS = 8, MAGNITUDES = 16, ACTIVE = 32, SUMS = SUM_OF | SQUARES_OF };

struct Axes {  // innermost first
  int64_t number;
  int64_t sizes[MOST_AXES], strides[MOST_AXES], mask_strides[MOST_AXES];

  void offsets(int64_t index, int64_t& x, int64_t& mask) const {
    for (int64_t axis = 0; axis < number; ++axis) {
      const bool last = axis + 1 == number;
      const int64_t rest = last ? 0 : index / sizes[axis], at = last ? index : index - rest * sizes[axis];
      index = rest;
      x += at * strides[axis];
      mask += at * mask_strides[axis];
    }
  }
};

struct Task {
  const void* x;
  const uint8_t* mask;  // null if all elements are observed
  int64_t about_zero;   // whether the centre is 0, if there is no mask
  int64_t columns;      // whether neighbours in memory are kept, not reduced
  int64_t length;       // of the run of neighbours
  int64_t mask_stride;  // along the run: 0 or 1
  Axes kept, reduced;   // the other axes
  double threshold;
  void* results[12];    // in the order of enum Result: for each kept position a number; null if it is not asked for
  int64_t kinds[12];    // 0 double, 1 int64, 2 float
};
enum Result { COUNT, NAN_COUNT, INF_COUNT, ZERO_COUNT, MEAN, M2, SUM, SQUARES, MIN, MAX, PEAK, TOTAL, RESULTS };

struct Partial {
  double count, nan, inf, zeros, centre, first, second, low, high, total;
};

const Partial EMPTY = {0, 0, 0, 0, 0, 0, 0, INFINITE, -INFINITE, 0};

struct Float32 { typedef float Type; static float value(float x) { return x; } };
struct BFloat16 {
  typedef uint16_t Type;
  static float value(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
  }
};
struct Float16 {
  typedef uint16_t Type;
  static float value(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
    uint32_t bits = rest << 13;
    float found;
    if (rest >= 0x7c00) {
      bits = 0x7f800000 | bits;
    } else {
      bits += 112u << 23;
      if (rest < 0x0400) {  // no leading 1
        bits += 1u << 23;
        std::memcpy(&found, &bits, 4);
        found -= 6.103515625e-05f;
        std::memcpy(&bits, &found, 4);
      }
    }
    bits |= sign;
    std::memcpy(&found, &bits, 4);
    return found;
  }
};

static Floats all_floats(float value) { return Floats{} + value; }
static Doubles all_doubles(double value) { return Doubles{} + value; }

template <class T> static inline Floats load(const typename T::Type* x) {
  Floats found;
  if (sizeof(*x) == sizeof(float)) {
    std::memcpy(&found, x, sizeof(found));
    return found;
  }
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  if (std::is_same<T, Float16>::value) return Floats(_mm512_cvtph_ps(bits));
  return Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  if (std::is_same<T, Float16>::value) return Floats(_mm256_cvtph_ps(bits));
  return Floats(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
#else
  float lanes[LANES];
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = T::value(x[lane]);
  std::memcpy(&found, lanes, sizeof(found));
  return found;
#endif
}

// What is added up, lane by lane.
struct Sums {
  Doubles first[2], second[2];
  Floats low, high, zeros, probe, total;
};

static inline void halves(const Floats& x, Doubles* wide) {
#if defined(__AVX512F__)
  const __m512d bits = _mm512_castps_pd(__m512(x));
  wide[0] = Doubles(_mm512_cvtps_pd(_mm512_castps512_ps256(__m512(x))));
  wide[1] = Doubles(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1))));
#elif defined(__AVX__)
  wide[0] = Doubles(_mm256_cvtps_pd(_mm256_castps256_ps128(__m256(x))));
  wide[1] = Doubles(_mm256_cvtps_pd(_mm256_extractf128_ps(__m256(x), 1)));
#else
  typedef float Narrow __attribute__((vector_size(4 * HALF)));
  Narrow narrow[2];
  std::memcpy(narrow, &x, sizeof(x));
  wide[0] = __builtin_convertvector(narrow[0], Doubles);
  wide[1] = __builtin_convertvector(narrow[1], Doubles);
#endif
}

static inline Floats magnitude(const Floats& x) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof(x));
  bits &= 0x7fffffff;
  Floats found;
  std::memcpy(&found, &bits, sizeof(x));
  return found;
}

// Returns all bits of the lanes that a mask selects.
static inline Ints selected(const uint8_t* mask) {
#if defined(__AVX512F__)
  return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(mask)))) != 0;
#elif defined(__AVX2__)
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask)))) != 0;
#else
  int32_t lanes[LANES];
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = mask[lane] ? -1 : 0;
  Ints found;
  std::memcpy(&found, lanes, sizeof(found));
  return found;
#endif
}

// Adds elements without a look at them. `zeros`, `probe` and `total` hold counts, which a block keeps exact, or NaN.
template <int WHAT> static inline void add(Sums& sums, const Floats& x, const Doubles* centre, float threshold) {
  if (WHAT & SUMS) {
    Doubles wide[2];
    halves(x, wide);
    for (int half = 0; half < 2; ++half) {
      const Doubles distance = wide[half] - centre[half];
      if (WHAT & SUM_OF) sums.first[half] += distance;
      if (WHAT & SQUARES_OF) sums.second[half] += distance * distance;
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
static void select(Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t mask_stride, int64_t length, float threshold) {
  Sums sums = no_sums();
  Ints count = {}, chosen_count = {}, zeros = {}, active = {};
  const Floats none = {};
  const Doubles centre = all_doubles(part.centre);
  if (mask && !mask_stride && !*mask) return;
  int64_t start = 0;
  for (; start + LANES <= length; start += LANES) {
    const Floats value = load<T>(x + start), size = magnitude(value);
    Ints chosen = Ints{} - 1;
    if (mask && mask_stride) chosen = selected(mask + start);
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
        const Doubles distance = WHAT & SUMS ? wide[half] - centre : wide[half];
        sums.first[half] += distance;
        if (WHAT & SQUARES_OF) sums.second[half] += distance * distance;
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
    if ((!mask || mask[at * mask_stride]) && !(std::fabs(value) < INFINITE)) (value != value ? part.nan : part.inf) += 1;
  }
  for (; start < length; ++start)
    if (!mask || mask[start * mask_stride]) add_one<WHAT>(part, T::value(x[start]), threshold);
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
    Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t mask_stride, int64_t length, float threshold, bool filled) {
  const Doubles centre[2] = {all_doubles(part.centre), all_doubles(part.centre)};
  for (int64_t start = 0; start < length; start += BLOCK) {
    const int64_t size = std::min(BLOCK, length - start), whole = size - size % LANES;
    if (mask) {
      if (!mask_stride || !filled || !add_masked<WHAT, T>(part, x + start, mask + start, size, threshold))
        select<WHAT, T>(part, x + start, mask + start * mask_stride, mask_stride, size, threshold);
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
      select<WHAT, T>(part, x + start, nullptr, 0, size, threshold);
    }
  }
}

// Returns the first element that is finite and selected: no centre is further from the mean than sqrt(count) deviations then.
template <class T>
static bool find_centre(Partial& part, const typename T::Type* x, const uint8_t* mask, int64_t mask_stride, int64_t length) {
  for (int64_t at = 0; at < length; ++at) {
    const float value = T::value(x[at]);
    if ((!mask || mask[at * mask_stride]) && std::fabs(value) < INFINITE) {
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
      part.low = std::min(part.low, double(sums.low[lane]));
      part.high = std::max(part.high, double(sums.high[lane]));
      part.zeros += sums.zeros[lane];
      part.total += sums.total[lane];
    }
  }
};

// Joins b to a, which is earlier.
static void join(Partial& a, const Partial& b) {
  if (b.count > 0) {
    if (a.count == 0) {
      a.centre = b.centre;
      a.first = b.first;
      a.second = b.second;
    } else if (a.centre == b.centre) {
      a.first += b.first;
      a.second += b.second;
    } else {  // about the mean of b, then about the centre of a
      const double shift = b.first / b.count, deviations = b.second - b.first * shift;
      const double distance = (b.centre - a.centre) + shift;
      a.first += b.count * distance;
      a.second += deviations + b.count * distance * distance;
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

static int64_t product(const Axes& axes) {
  int64_t found = 1;
  for (int64_t axis = 0; axis < axes.number; ++axis) found *= axes.sizes[axis];
  return found;
}

// How the work is cut: parts of one kept position (or one run of kept columns) lie one after another in the table.
struct Cut {
  int64_t owners, rows, row_parts, rows_a_part, run_parts, run_a_part;
  int64_t width;     // kept positions of a part, at most
  int64_t shares;    // parts of one kept position, which follow each other
  int64_t parts;     // in all
  int64_t together;  // small parts that a thread takes at once

  explicit Cut(const Task& task) {
    owners = product(task.kept);
    rows = product(task.reduced);
    run_a_part = task.length;
    if (task.columns) run_a_part = std::min(task.length, WIDTH);
    else if (task.length > PART) run_a_part = PART * ((task.length + 256 * PART - 1) / (256 * PART));
    run_parts = (task.length + run_a_part - 1) / run_a_part;
    const int64_t fit = TABLE / (int64_t(sizeof(Partial)) * owners * task.length);
    const int64_t most = task.columns ? std::max(int64_t(1), std::min(int64_t(32), fit)) : 256;
    rows_a_part = std::max({task.columns ? 8 * ROWS : int64_t(1), PART / run_a_part, (rows + most - 1) / most});
    if (task.columns) rows_a_part = std::min(rows_a_part, EXACT);
    row_parts = (rows + rows_a_part - 1) / rows_a_part;
    width = task.columns ? run_a_part : 1;
    shares = task.columns ? row_parts : row_parts * run_parts;
    parts = owners * run_parts * row_parts;
    together = std::max(int64_t(1), PART / (rows_a_part * run_a_part));
  }
  // Returns the first of the kept positions of a part, and how many it has.
  int64_t begin(const Task& task, int64_t index, int64_t& number) const {
    if (!task.columns) return number = 1, index / shares;
    const int64_t run = index / shares % run_parts * run_a_part;
    number = std::min(run_a_part, task.length - run);
    return index / (shares * run_parts) * task.length + run;
  }
};

template <int WHAT, class T> static void rows_part(const Task& task, const Cut& cut, int64_t index, Partial* found) {
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
    const uint8_t* mask = task.mask ? task.mask + mask_offset : nullptr;
    if (!centred) centred = find_centre<T>(part, x, mask, task.mask_stride, size);
    add_run<WHAT, T>(part, x, mask, task.mask_stride, size, float(task.threshold), centred);
  }
  *found = part;
}

template <int WHAT, class T> static void columns_part(const Task& task, const Cut& cut, int64_t index, Partial* parts) {
  const int64_t row_part = index % cut.row_parts, run_part = index / cut.row_parts % cut.run_parts;
  const int64_t owner = index / (cut.row_parts * cut.run_parts);
  const int64_t start = run_part * cut.run_a_part, size = std::min(cut.run_a_part, task.length - start);
  const int64_t first = row_part * cut.rows_a_part, stop = std::min(cut.rows, first + cut.rows_a_part);
  const float threshold = float(task.threshold);
  int64_t offset = start, mask_offset = start * task.mask_stride;
  task.kept.offsets(owner, offset, mask_offset);
  const auto* base = static_cast<const typename T::Type*>(task.x) + offset;
  const uint8_t* mask_base = task.mask ? task.mask + mask_offset : nullptr;

  for (int64_t column = 0; column < size; ++column) parts[column] = EMPTY;
  if (task.mask || ((WHAT & SUMS) && !task.about_zero)) {
    int64_t missing = size;
    for (int64_t row = first; missing && row < stop; ++row) {
      int64_t at = 0, mask_at = 0;
      task.reduced.offsets(row, at, mask_at);
      for (int64_t column = 0; column < size; ++column) {
        const float value = T::value(base[at + column]);
        const bool usable = std::fabs(value) < INFINITE && (!mask_base || mask_base[mask_at + column * task.mask_stride]);
        if (parts[column].count || !usable) continue;
        parts[column].centre = value;
        parts[column].count = 1;  // found
        --missing;
      }
    }
    for (int64_t column = 0; column < size; ++column) parts[column].count = 0;
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
    for (int64_t group = 0; group < groups; ++group) {
      Lanes<WHAT>& mine = lanes[group];
      Sums sums = mine.sums;
      for (int64_t row = 0; row < rows; ++row) {
        const auto* x = base + at[row] + group * LANES;
        __builtin_prefetch(x + ahead);
        Floats value = load<T>(x);
        if (mask_base) {
          const uint8_t* mask = mask_base + mask_at[row];
          const Ints chosen = task.mask_stride ? selected(mask + group * LANES) : Ints{} - (*mask ? 1 : 0);
          value = chosen ? value : mine.fill;
          mine.count -= chosen;
        }
        add<WHAT>(sums, value, mine.centre, threshold);
      }
      mine.sums = sums;
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

static void write(const Task& task, const Partial& part, int64_t position) {
  const double shift = part.count > 0 ? part.first / part.count : 0, centre = part.centre;
  const double found[RESULTS] = {
      part.count,
      part.nan,
      part.inf,
      part.zeros,
      centre + shift,
      std::max(0.0, part.second - part.first * shift),
      part.first + part.count * centre,
      part.second + centre * (2 * part.first + part.count * centre),
      part.low,
      part.high,
      std::max(0.0, std::max(-part.low, part.high)),
      part.total,
  };
  for (int result = 0; result < RESULTS; ++result) {
    if (!task.results[result]) continue;
    if (task.kinds[result] == 0) static_cast<double*>(task.results[result])[position] = found[result];
    if (task.kinds[result] == 1) static_cast<int64_t*>(task.results[result])[position] = int64_t(found[result]);
    if (task.kinds[result] == 2) static_cast<float*>(task.results[result])[position] = float(found[result]);
  }
}

// Returns whether there was memory. A position that one part has needs no table: its results are written at once.
template <int WHAT, class T> static bool run(const Task& task, int64_t most_threads) {
  const Cut cut(task);
  const int threads = int(std::min<int64_t>(most_threads, (cut.parts + cut.together - 1) / cut.together));
  const bool joined = cut.shares > 1;
  Partial* table = joined ? new (std::nothrow) Partial[cut.parts * cut.width] : nullptr;
  int without_memory = joined && !table;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : without_memory)
  {
    Partial* own = joined ? nullptr : new (std::nothrow) Partial[cut.width];
    if (!joined && !own) ++without_memory;
#pragma omp for schedule(dynamic, cut.together)
    for (int64_t index = 0; index < cut.parts; ++index) {
      Partial* found = joined ? table + index * cut.width : own;
      if ((joined && !table) || !found) continue;
      task.columns ? columns_part<WHAT, T>(task, cut, index, found) : rows_part<WHAT, T>(task, cut, index, found);
      int64_t number, first = cut.begin(task, index, number);
      for (int64_t position = 0; !joined && position < number; ++position) write(task, found[position], first + position);
    }
    delete[] own;
  }
  for (int64_t index = 0; joined && !without_memory && index < cut.parts; index += cut.shares) {
    int64_t number, first = cut.begin(task, index, number);
    for (int64_t position = 0; position < number; ++position) {
      const Partial* shares = table + index * cut.width + position;
      Partial found = shares[0];
      for (int64_t share = 1; share < cut.shares; ++share) join(found, shares[share * cut.width]);
      write(task, found, first + position);
    }
  }
  delete[] table;
  return !without_memory;
}

// Runs a task in several threads, or each of several small tasks in one. Returns how many lacked memory.
extern "C" int reducers_sweep(const Task* tasks, int64_t number, int64_t threads) {
  if (number == 1) return !run<STATISTICS, ELEMENTS>(*tasks, threads);
  int failed = 0;
#pragma omp parallel for num_threads(int(threads)) if (threads > 1) schedule(dynamic) reduction(+ : failed)
  for (int64_t index = 0; index < number; ++index) failed += !run<STATISTICS, ELEMENTS>(tasks[index], 1);
  return failed;
}

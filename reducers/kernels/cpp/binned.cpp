// Counts of a tensor's elements in bins, in one read: by the leading bits of floating-point numbers, or by edges.
//
// Counts are exact, so how the work is cut changes none. A block is a kept position, or as many neighbouring ones as there are
// lanes. If there are enough blocks, a thread counts a block into the result; if not, several count shares of it, each into a
// table of its own, of half as many bytes, which is added to the result in the end.

#include <mutex>
#include <string>

#include "simd.h"
#include "partition.h"

#define ALWAYS __attribute__((always_inline))  // whole vectors are a loop of their own then, without a look at their sizes

namespace {

enum Result { COUNTS, LOW, HIGH, NONFINITE };

constexpr int64_t WORTHWHILE = 16;          // elements a bin: fewer are counted into the result at once
constexpr int64_t MOST = (int64_t(1) << 31) - PART;  // elements after which a table is added to the result: as many more still fit

struct Bins {
  int64_t number;               // of a kept position
  int64_t shift, zero, middle;  // by bits: how many are left out, where zero ends, the bin of zero
  const float* edges;           // by edges: ascending; the last one that is counted to is the next number above the last edge
  int64_t last;                 // the index of the last edge
  int64_t half;                 // of the edges, with those that fill up: a power of two
  double low, scale;            // the first edge, and bins a unit, if the bins have one width
};

struct Binning {
  Task task;
  Bins bins;
};

struct Seen {
  Floats low = all_floats(INFINITE), high = all_floats(-INFINITE);
  Ints excluded = {};  // not 0 in a lane in which an element is in no bin
};

static inline Ints bits_of(const Floats& x) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}

// Each way to find bins returns the bin of each lane, also of elements that are in none: they are taken back later. COMMON is
// whether the bin in the middle may have many more elements than others, as that of zero has after a ReLU.
struct Bits {
  static const bool EXTREMES = true, COMMON = true;
  static inline Ints excluded(const Floats& x) { return (bits_of(x) & 0x7fffffff) >= 0x7f800000; }
  static inline Ints find(const Bins& bins, const Floats& x, Seen& seen) {
    const Ints bits = bits_of(x), good = ~excluded(x);
    const Floats least = good ? x : all_floats(INFINITE), most = good ? x : all_floats(-INFINITE);
    seen.low = least < seen.low ? least : seen.low;
    seen.high = most > seen.high ? most : seen.high;
    seen.excluded |= ~good;
    const int32_t zero = int32_t(bins.zero), middle = int32_t(bins.middle);
    // Without the sign's complement, the order of integers is that of floats.
    Ints number = (((bits >> 31) & 0x7fffffff) ^ bits) >> int32_t(bins.shift);
    number -= clamped(number, -zero, zero - 1);
    return clamped(number, -middle, middle) + middle;
  }
  static inline Ints clamped(const Ints& x, int32_t low, int32_t high) {
    const Ints least = Ints{} + low, most = Ints{} + high, raised = x > least ? x : least;
    return raised < most ? raised : most;
  }
};

// Bins of one width: division finds the bin, or the one beside it. NaN is counted after all bins.
struct Even {
  static const bool EXTREMES = false, COMMON = false;
  static inline Ints excluded(const Floats&) { return Ints{}; }
  static inline Ints find(const Bins& bins, const Floats& x, Seen&) {
    const Floats place = (x - float(bins.low)) * float(bins.scale), none = all_floats(0), most = all_floats(float(bins.last - 1));
    const Floats raised = place > none ? place : none;
    const Ints bin = truncated(raised < most ? raised : most);
    const Ints above = x >= at_places(bins.edges + 1, bin), below = x < at_places(bins.edges, bin);  // -1 if so
    return x == x ? bin + 1 - above + below : Ints{} + int32_t(bins.last + 2);
  }
};

// The number of edges that are at most the element, by bisection. After the last there are so many infinite ones that each step
// halves what is left.
struct Edges {
  static const bool EXTREMES = false, COMMON = false;
  static inline Ints excluded(const Floats&) { return Ints{}; }
  static inline Ints find(const Bins& bins, const Floats& x, Seen&) {
    const Ints most = Ints{} + int32_t(bins.last + 1);
    Ints number = {};
    for (int32_t half = int32_t(bins.half); half > 0; half /= 2) {
      const Ints beyond = x >= at_places(bins.edges + half - 1, number);  // -1 if so
      number -= beyond * half;
    }
    number = number < most ? number : most;
    return x == x ? number : most + 1;
  }
};

static Ints numbered() {
  Ints found = {};
  for (int lane = 0; lane < LANES; ++lane) found[lane] = lane;
  return found;
}

static const Ints NUMBERED = numbered();

template <class T> static Floats padded(const typename T::Type* x, int64_t size) {
  Floats found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = T::value(x[lane < size ? lane : 0]);
  return found;
}

// Counts `size` elements, at most as many as there are lanes. `apart` is the distance between the tables of neighbours. If ZEROS,
// each lane has a number of its own for the bin in the middle, after all bins: to add to one number again and again takes long.
template <class B, class T, bool ZEROS, class C>
ALWAYS static inline void count(const Bins& bins, const typename T::Type* x, int64_t size, C* counts, int64_t apart, Seen& seen) {
  Ints found = B::find(bins, size == LANES ? load<T>(x) : padded<T>(x, size), seen);
  if (ZEROS) found = found == int32_t(bins.middle) ? NUMBERED + int32_t(bins.number) : found;
  if (size < LANES) {
    for (int lane = 0; lane < size; ++lane) ++counts[lane * apart + found[lane]];
  } else if (apart) {
    for (int lane = 0; lane < LANES; ++lane) ++counts[lane * apart + found[lane]];
  } else {  // two numbers a load: loads are what takes time
    uint64_t pairs[HALF];
    std::memcpy(pairs, &found, sizeof(found));
#pragma GCC unroll 8
    for (int pair = 0; pair < HALF; ++pair) {
      ++counts[uint32_t(pairs[pair])];
      ++counts[pairs[pair] >> 32];
    }
  }
}

// Takes back those that are in no bin, and counts them: of each lane if lanes are kept apart.
template <class B, class T, class C>
static void take_back(const Bins& bins, const typename T::Type* x, int64_t size, C* counts, int64_t apart, int64_t* others) {
  Seen unused;
  const Floats value = size == LANES ? load<T>(x) : padded<T>(x, size);
  const Ints found = B::find(bins, value, unused);
  const Ints excluded = B::excluded(value);
  for (int lane = 0; lane < size; ++lane)
    if (excluded[lane]) {
      --counts[lane * apart + found[lane]];
      ++others[apart ? lane : 0];
    }
}

struct Blocks {
  int64_t wide;                   // kept positions of a block, at most
  int64_t a_run;                  // blocks in a run of neighbours that are kept
  int64_t number;
  int64_t run_parts, run_a_part;  // of neighbours that are reduced
  int64_t pieces;                 // of a block, each a row or part of one
  int64_t shares;                 // that a block is cut into, for threads
  int64_t elements;               // in all, about

  Blocks(const Task& task, int64_t threads) {
    wide = task.columns ? LANES : 1;
    a_run = task.columns ? (task.length + LANES - 1) / LANES : 1;
    number = product(task.kept) * a_run;
    run_a_part = task.columns ? 1 : std::min(task.length, PART);
    run_parts = task.columns ? 1 : (task.length + run_a_part - 1) / run_a_part;
    pieces = product(task.reduced) * run_parts;
    const int64_t a_block = wide * pieces * run_a_part, worthwhile = (a_block + PART - 1) / PART;
    shares = number >= 4 * threads || threads == 1 ? 1 : std::min({(8 * threads + number - 1) / number, worthwhile, pieces});
    shares = std::max(shares, (pieces * run_a_part + MOST - 1) / MOST);
    elements = number * a_block;
  }
  // Returns the first of the kept positions of a block, and how many it has.
  int64_t begin(const Task& task, int64_t block, int64_t& found) const {
    if (!task.columns) return found = 1, block;
    const int64_t column = block % a_run * wide;
    found = std::min(wide, task.length - column);
    return block / a_run * task.length + column;
  }
};

// Calls a function with the vectors of a run, and how many elements each has.
template <class Place, class F> ALWAYS static inline void each_vector(Place x, int64_t length, F function) {
  int64_t at = 0;
  for (; at + LANES <= length; at += LANES) function(x + at, int64_t(LANES));
  if (at < length) function(x + at, length - at);
}

// Calls a function with the pieces of a share, and how many elements each has.
template <class T, class F>
static inline void each_piece(const Task& task, const Blocks& blocks, int64_t block, int64_t share, F function) {
  const int64_t column = block % blocks.a_run * blocks.wide, owner = block / blocks.a_run;
  const int64_t first = blocks.pieces * share / blocks.shares, stop = blocks.pieces * (share + 1) / blocks.shares;
  int64_t base = 0, unused = 0;
  task.kept.offsets(owner, base, unused);
  for (int64_t piece = first; piece < stop; ++piece) {
    const int64_t start = task.columns ? column : piece % blocks.run_parts * blocks.run_a_part;
    int64_t offset = base + start;
    task.reduced.offsets(piece / blocks.run_parts, offset, unused);
    const auto* x = static_cast<const typename T::Type*>(task.x) + offset;
    function(x, std::min(task.columns ? blocks.wide : blocks.run_a_part, task.length - start));
  }
}

// Returns whether many of the first elements are in the bin in the middle.
template <class B, class T> static inline bool has_zeros(const Bins& bins, const typename T::Type* x, int64_t length) {
  if (!B::COMMON || length < LANES) return false;
  Seen unused;
  const Ints there = B::find(bins, load<T>(x), unused) == int32_t(bins.middle);
  int32_t number = 0;
  for (int lane = 0; lane < LANES; ++lane) number -= there[lane];
  return number >= LANES / 4;
}

template <class B, class T, class C>
static void count_share(const Binning& all, const Blocks& blocks, int64_t block, int64_t share, C* counts, Seen& seen, int64_t* others) {
  typedef const typename T::Type* Place;
  constexpr bool IN_TABLE = sizeof(C) < sizeof(int64_t);
  const int64_t apart = all.task.columns ? all.bins.number : 0;
  Seen own = seen;
  own.excluded = Ints{};
  const auto add = [&](Place x, int64_t size) ALWAYS { count<B, T, false>(all.bins, x, size, counts, 0, own); };
  const auto add_zeros = [&](Place x, int64_t size) ALWAYS { count<B, T, true>(all.bins, x, size, counts, 0, own); };
  const auto add_columns = [&](Place x, int64_t size) ALWAYS { count<B, T, false>(all.bins, x, size, counts, apart, own); };
  const auto take = [&](Place x, int64_t size) { take_back<B, T>(all.bins, x, size, counts, apart, others); };
  const auto add_piece = [&](Place x, int64_t length) {
    if (apart) each_vector(x, length, add_columns);
    else if (IN_TABLE && has_zeros<B, T>(all.bins, x, length)) each_vector(x, length, add_zeros);
    else each_vector(x, length, add);
  };
  each_piece<T>(all.task, blocks, block, share, add_piece);
  seen = own;
  bool excluded = false;
  for (int lane = 0; lane < LANES; ++lane) excluded |= own.excluded[lane] != 0;
  if (excluded) each_piece<T>(all.task, blocks, block, share, [&](Place x, int64_t length) { each_vector(x, length, take); });
}

// Joins the extremes of a block, and the numbers of those in no bin, to the results.
static void join_extremes(const Task& task, int64_t first, int64_t size, const Seen& seen, const int64_t* others) {
  float* low = static_cast<float*>(task.results[LOW]) + first;
  float* high = static_cast<float*>(task.results[HIGH]) + first;
  int64_t* nonfinite = static_cast<int64_t*>(task.results[NONFINITE]) + first;
  for (int64_t at = 0; at < size; ++at) nonfinite[at] += others[at];
  for (int lane = 0; lane < LANES; ++lane) {
    const int64_t at = task.columns ? lane : 0;
    if (at >= size) break;
    low[at] = std::min(low[at], seen.low[lane]);
    high[at] = std::max(high[at], seen.high[lane]);
  }
}

// Counts into the results, or into a table of its own if there is one.
template <class B, class T> struct Counter {
  const Binning& all;
  const Blocks& blocks;
  std::mutex& results_mutex;  // held while results are added to
  uint32_t* const own;
  int64_t block, first, size;  // block: -1 at first
  int64_t held;                // elements of a position that the table holds, at most
  Seen seen;
  int64_t others[LANES];

  void count(int64_t item) {
    const int64_t share = item % blocks.shares;
    if (item / blocks.shares != block || held >= MOST) {
      end();
      block = item / blocks.shares;
      first = blocks.begin(all.task, block, size);
    }
    own ? count_share<B, T>(all, blocks, block, share, own, seen, others)
        : count_share<B, T>(all, blocks, block, share, results(), seen, others);
    held += (blocks.pieces / blocks.shares + 1) * blocks.run_a_part;
  }
  void end() {
    if (block < 0) return;
    const int64_t number = size * all.bins.number;
    int64_t* counts = results();
    {
      const std::lock_guard<std::mutex> lock(results_mutex);
      for (int64_t bin = 0; own && bin < number; ++bin) counts[bin] += own[bin];
      for (int lane = 0; own && B::COMMON && lane < LANES; ++lane) counts[all.bins.middle] += own[number + lane];
      if (B::EXTREMES) join_extremes(all.task, first, size, seen, others);
    }
    if (own) std::fill(own, own + number + LANES, 0);
    seen = Seen();
    std::fill(others, others + LANES, 0);
    block = -1;
    held = 0;
  }
  int64_t* results() const { return static_cast<int64_t*>(all.task.results[COUNTS]) + first * all.bins.number; }
};

template <class B, class T> static int run_bins(const Binning& all, int64_t most_threads) {
  const Blocks blocks(all.task, most_threads);
  const int64_t items = blocks.number * blocks.shares;
  const int64_t threads = std::min({most_threads, items, (blocks.elements + PART - 1) / PART});
  std::atomic<int> failed(0);
  std::mutex mutex;  // of this call alone: a process that is forked in the meantime has none that is held
  Turns turns(items, threads);
  in_parallel(threads, [&](int thread) {
    const bool apart = blocks.shares > 1 || (blocks.number == 1 && blocks.elements > WORTHWHILE * all.bins.number);
    uint32_t* own = apart ? new (std::nothrow) uint32_t[blocks.wide * all.bins.number + LANES]() : nullptr;
    const bool ready = own || !apart;
    failed += !ready;
    Counter<B, T> counter{all, blocks, mutex, own, -1, 0, 0, 0, Seen(), {}};
    turns.take(thread, [&](int64_t item) {
      if (ready) counter.count(item);
    });
    counter.end();
    delete[] own;
  });
  return failed;
}

template <class B> static int sweep(const Binning* all, int64_t, int64_t threads) { return run_bins<B, ELEMENTS>(*all, threads); }

typedef int (*Loop)(const Binning*, int64_t, int64_t threads);

}  // namespace

// The loop that counts elements of one dtype in bins, by the name of the way to find them; null if there is none.
extern "C" EXPORT Loop EXPORTED(reducers_binned, ELEMENTS)(const char* way) {
  const std::string name(way);
  return name == "Bits" ? sweep<Bits> : name == "Even" ? sweep<Even> : name == "Edges" ? sweep<Edges> : nullptr;
}

extern "C" EXPORT int64_t EXPORTED(reducers_binning_size, ELEMENTS)() { return sizeof(Binning); }

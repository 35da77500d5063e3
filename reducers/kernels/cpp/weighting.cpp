// Weighted statistics of a tensor in one read of elements and weights: added in double about a centre, in several lanes at once.
//
// Blocks go through a loop that looks at no element. If its sum shows that an element or a weight was not finite, the block is
// read again without those. If the centre proves far from the mean, beside the deviations, the part is read again about its mean.

#include <cmath>
#include <string>

#include "merge.h"
#include "partition.h"
#include "simd.h"

namespace {

constexpr double FAR = 1e-6;  // share of the squares about the centre that is left about the mean: below, digits were lost

enum Result { WEIGHT, SQUARES, MEAN, M2, SUM, NONFINITE, RESULTS };

struct Partial {
  double weight, squares, centre, first, second, nonfinite;
};

struct Float64 { typedef double Type; static double value(double x) { return x; } };
struct Byte { typedef uint8_t Type; static double value(uint8_t x) { return x != 0; } };

template <class T> struct Wide {
  static void load(const typename T::Type* x, Doubles* wide) { halves(::load<T>(x), wide); }
};
template <> struct Wide<Float64> {
  static void load(const double* x, Doubles* wide) { std::memcpy(wide, x, 2 * sizeof(*wide)); }
};
template <> struct Wide<Byte> {
  static void load(const uint8_t* x, Doubles* wide) { halves(selected(x) ? all_floats(1) : all_floats(0), wide); }
};

// What is added up, lane by lane.
struct Sums {
  Doubles weight[2], squares[2], first[2], second[2], nonfinite[2];
};

// Adds elements; a `CHECKED` one only if it is finite, and so is its weight.
template <bool CHECKED> static inline void add(Sums& sums, const Doubles* x, const Doubles* weights, const Doubles* centre) {
#pragma GCC unroll 2  // or the sums would be in memory
  for (int half = 0; half < 2; ++half) {
    Doubles weight = weights[half], distance = x[half] - centre[half];
    if (CHECKED) {
      const auto good = (distance - distance == 0.0) & (weight - weight == 0.0);
      weight = good ? weight : all_doubles(0);
      distance = good ? distance : all_doubles(0);
      sums.nonfinite[half] += good ? all_doubles(0) : all_doubles(1);
    }
    const Doubles weighted = weight * distance;
    sums.weight[half] += weight;
    sums.squares[half] += weight * weight;
    sums.first[half] += weighted;
    sums.second[half] += weighted * distance;
  }
}

static void add_one(Partial& part, double x, double weight) {
  if (!std::isfinite(x) || !std::isfinite(weight)) {
    part.nonfinite += 1;
    return;
  }
  const double distance = x - part.centre, weighted = weight * distance;
  part.weight += weight;
  part.squares += weight * weight;
  part.first += weighted;
  part.second += weighted * distance;
}

static bool finite(const Sums& sums) {
  const Doubles both = (sums.first[0] - sums.first[0]) + (sums.first[1] - sums.first[1]);
  double found = 0;
  for (int lane = 0; lane < HALF; ++lane) found += both[lane];
  return found == 0;
}

static void gather(Partial& part, const Sums& sums, int lane) {
  const int half = lane / HALF, place = lane % HALF;
  part.weight += sums.weight[half][place];
  part.squares += sums.squares[half][place];
  part.first += sums.first[half][place];
  part.second += sums.second[half][place];
  part.nonfinite += sums.nonfinite[half][place];
}

static bool is_usable(double x, double weight) { return std::isfinite(x) && std::isfinite(weight) && weight > 0; }

// Takes the sums about another centre, which has about the distance of the elements.
static void move(Partial& part, double centre) {
  const double distance = part.centre - centre;
  part.second += distance * (2 * part.first + part.weight * distance);
  part.first += part.weight * distance;
  part.centre = centre;
}

// Returns whether digits were lost, and forgets the sums for those about the mean.
static bool move_centre(Partial& part) {
  const double shift = part.weight > 0 ? part.first / part.weight : 0;
  if (!(part.second - part.first * shift < FAR * part.second) || !std::isfinite(part.centre + shift)) return false;
  part = {0, 0, part.centre + shift, 0, 0, 0};
  return true;
}

// Elements and their weights, from a place in memory on.
template <class T, class W> struct Pair {
  const typename T::Type* x;
  const typename W::Type* weights;
  int64_t stride;  // of the weights, from an element to its neighbour
  Doubles same;    // the weight of all, if that is 0

  Pair(const Task& task, int64_t offset, int64_t weight_offset)
      : x(static_cast<const typename T::Type*>(task.x) + offset),
        weights(static_cast<const typename W::Type*>(task.mask) + weight_offset),
        stride(task.mask_stride),
        same(all_doubles(W::value(*weights))) {}
  double value(int64_t at) const { return T::value(x[at]); }
  double weight(int64_t at) const { return W::value(weights[at * stride]); }
  template <bool CHECKED> void add_to(Sums& sums, int64_t at, const Doubles* centre) const {
    Doubles wide[2], weight[2] = {same, same};
    Wide<T>::load(x + at, wide);
    if (stride) Wide<W>::load(weights + at, weight);
    add<CHECKED>(sums, wide, weight, centre);
  }
};

// The rows of a part, from `first` to `stop`: of each a run of so many neighbours in memory.
template <class T, class W> struct Rows {
  const Task& task;
  int64_t owner, start, size, first, stop;

  Rows(const Task& of, const Cut& cut, int64_t owner, int64_t run_part, int64_t row_part)
      : task(of),
        owner(owner),
        start(run_part * cut.run_a_part),
        size(std::min(cut.run_a_part, of.length - start)),
        first(row_part * cut.rows_a_part),
        stop(std::min(cut.rows, first + cut.rows_a_part)) {}
  Pair<T, W> at(int64_t row) const {
    int64_t offset = start, weight_offset = start * task.mask_stride;
    task.kept.offsets(owner, offset, weight_offset);
    task.reduced.offsets(row, offset, weight_offset);
    return Pair<T, W>(task, offset, weight_offset);
  }
};

// Adds a run of neighbours in memory, all of which are reduced.
template <class T, class W> static void add_run(Partial& part, const Pair<T, W>& pair, int64_t length) {
  const Doubles centre[2] = {all_doubles(part.centre), all_doubles(part.centre)};
  for (int64_t start = 0; start < length; start += BLOCK) {
    const int64_t size = std::min(BLOCK, length - start), whole = start + size - size % LANES;
    Sums sums = {};
    for (int64_t at = start; at < whole; at += LANES) {
      __builtin_prefetch(reinterpret_cast<const char*>(pair.x + at) + AHEAD);
      __builtin_prefetch(reinterpret_cast<const char*>(pair.weights + at * pair.stride) + AHEAD);
      pair.template add_to<false>(sums, at, centre);
    }
    if (!finite(sums)) {
      sums = {};
      for (int64_t at = start; at < whole; at += LANES) pair.template add_to<true>(sums, at, centre);
    }
    for (int lane = 0; lane < LANES; ++lane) gather(part, sums, lane);
    for (int64_t at = whole; at < start + size; ++at) add_one(part, pair.value(at), pair.weight(at));
  }
}

template <class T, class W> static void read_rows(const Task& task, const Cut& cut, int64_t index, Partial* found) {
  const int64_t run_part = index % cut.run_parts, row_part = index / cut.run_parts % cut.row_parts;
  const Rows<T, W> rows(task, cut, index / (cut.run_parts * cut.row_parts), run_part, row_part);
  Partial part = {};
  bool centred = false;
  for (int64_t row = rows.first; row < rows.stop && !centred; ++row) {
    const auto pair = rows.at(row);
    for (int64_t at = 0; at < rows.size && !centred; ++at)
      if ((centred = is_usable(pair.value(at), pair.weight(at)))) part.centre = pair.value(at);
  }
  const auto read = [&] { for (int64_t row = rows.first; row < rows.stop; ++row) add_run(part, rows.at(row), rows.size); };
  read();
  if (move_centre(part)) read();
  *found = part;
}

// The sums of as many neighbouring columns as there are lanes.
struct Lanes {
  Sums sums;
  Doubles centre[2];

  void begin(const Partial* parts) {
    sums = {};
    for (int lane = 0; lane < LANES; ++lane) centre[lane / HALF][lane % HALF] = parts[lane].centre;
  }
  void end(Partial* parts) const {
    for (int lane = 0; lane < LANES; ++lane) gather(parts[lane], sums, lane);
  }
};

template <class T, class W> static void read_columns(const Task& task, const Cut& cut, int64_t index, Partial* parts) {
  const int64_t row_part = index % cut.row_parts, run_part = index / cut.row_parts % cut.run_parts;
  const Rows<T, W> part(task, cut, index / (cut.row_parts * cut.run_parts), run_part, row_part);
  const int64_t size = part.size, first = part.first, stop = part.stop;
  for (int64_t column = 0; column < size; ++column) parts[column] = {};
  int64_t missing = size;
  for (int64_t row = first; missing && row < stop; ++row) {
    const auto pair = part.at(row);
    for (int64_t column = 0; column < size; ++column) {
      if (parts[column].weight > 0 || !is_usable(pair.value(column), pair.weight(column))) continue;
      parts[column] = {1, 0, pair.value(column), 0, 0, 0};  // found
      --missing;
    }
  }
  for (int64_t column = 0; column < size; ++column) parts[column].weight = 0;
  auto* lanes = new (std::nothrow) Lanes[size / LANES + 1];
  const int64_t groups = lanes ? size / LANES : 0, rest = groups * LANES;
  for (int64_t group = 0; group < groups; ++group) lanes[group].begin(parts + group * LANES);
  for (int64_t begin = first; begin < stop; begin += ROWS) {
    const int64_t rows = std::min(ROWS, stop - begin);
    const Pair<T, W> base = part.at(begin);
    int64_t at[ROWS], weight_at[ROWS];
    for (int64_t row = 0; row < rows; ++row) {
      const Pair<T, W> pair = part.at(begin + row);
      at[row] = pair.x - base.x;
      weight_at[row] = pair.weights - base.weights;
    }
    const int64_t ahead = rows > 1 ? at[rows - 1] + at[1] : 0, weight_ahead = rows > 1 ? weight_at[rows - 1] + weight_at[1] : 0;
    for (int64_t group = 0; group < groups; ++group) {
      Lanes& mine = lanes[group];
      Sums sums = mine.sums;
      Pair<T, W> pair = base;
      for (int64_t row = 0; row < rows; ++row) {
        pair.x = base.x + at[row];
        pair.weights = base.weights + weight_at[row];
        if (!pair.stride) pair.same = all_doubles(W::value(*pair.weights));
        __builtin_prefetch(pair.x + ahead + group * LANES);
        __builtin_prefetch(pair.weights + weight_ahead + group * LANES * pair.stride);
        pair.template add_to<false>(sums, group * LANES, mine.centre);
      }
      mine.sums = sums;
    }
  }
  for (int64_t group = 0; group < groups; ++group) {
    Partial* mine = parts + group * LANES;
    const auto read = [&] {
      lanes[group].begin(mine);
      for (int64_t row = first; row < stop; ++row) part.at(row).template add_to<true>(lanes[group].sums, group * LANES, lanes[group].centre);
    };
    if (!finite(lanes[group].sums)) read();
    lanes[group].end(mine);
    bool moved = false;
    for (int lane = 0; lane < LANES; ++lane) moved |= move_centre(mine[lane]);
    if (!moved) continue;
    for (int lane = 0; lane < LANES; ++lane) mine[lane] = {0, 0, mine[lane].centre, 0, 0, 0};
    read();
    lanes[group].end(mine);
  }
  for (int64_t column = rest; column < size; ++column) {
    const auto read = [&] {
      for (int64_t row = first; row < stop; ++row) {
        const auto pair = part.at(row);
        add_one(parts[column], pair.value(column), pair.weight(column));
      }
    };
    read();
    if (move_centre(parts[column])) read();
  }
  delete[] lanes;
}

template <class T, class W> struct Weighted {
  typedef ::Partial Partial;
  static void rows(const Task& task, const Cut& cut, int64_t index, Partial* found) { read_rows<T, W>(task, cut, index, found); }
  static void columns(const Task& task, const Cut& cut, int64_t index, Partial* found) { read_columns<T, W>(task, cut, index, found); }
  static const Partial& found(const Partial& part) { return part; }
  // Joins b to a, which is earlier.
  static void join(Partial& a, const Partial& b) {
    if (a.weight > 0 && b.weight > 0) {  // about the mean of both together, which is the centre then
      Moments both = moments(b);
      join_moments(both, moments(a), false);
      a.centre = both.mean;
      a.first = 0;
      a.second = both.second;
    } else {  // there is no mean: about the centre of one of them
      Partial other = b;
      move(b.weight > 0 ? a : other, b.weight > 0 ? b.centre : a.centre);
      a.first += other.first;
      a.second += other.second;
    }
    a.weight += b.weight;
    a.squares += b.squares;
    a.nonfinite += b.nonfinite;
  }
  static Moments moments(const Partial& part) { return moments_of<false>(part.weight, part.centre, part.first, part.second); }
  static void write(const Task& task, const Partial& part, int64_t position) {
    Moments all = moments(part);
    if (all.second < 0 && all.second > -FAR * std::fabs(part.second)) all.second = 0;  // rounded
    if (task.before[MEAN])
      join_moments(all, {before(task, WEIGHT, position), before(task, MEAN, position), before(task, M2, position), 0, 0}, false);
    const double sum = part.first + part.weight * part.centre;
    double found[RESULTS] = {part.weight, part.squares, all.mean, all.second, sum, part.nonfinite};
    for (int result : {WEIGHT, SQUARES, SUM})
      if (task.before[result]) found[result] += before(task, result, position);
    write_all(task, found, RESULTS, position);
  }
};

typedef int (*Loop)(const Task*, int64_t number, int64_t threads);

}  // namespace

// The loop for elements of one dtype with weights of another, by the name of that; null if there is none.
extern "C" EXPORT Loop EXPORTED(reducers_weighted, ELEMENTS)(const char* weights) {
  const std::string name(weights);
  if (name == "Float32") return run_all<Weighted<ELEMENTS, Float32>>;
  if (name == "BFloat16") return run_all<Weighted<ELEMENTS, BFloat16>>;
  if (name == "Float16") return run_all<Weighted<ELEMENTS, Float16>>;
  if (name == "Float64") return run_all<Weighted<ELEMENTS, Float64>>;
  if (name == "Byte") return run_all<Weighted<ELEMENTS, Byte>>;
  return nullptr;
}

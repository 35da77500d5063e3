// How the statistics of a part are read: if neighbours in memory are reduced, by rows; if they are kept, by columns.

#pragma once

#include "accumulate.h"

namespace {


// The sums of as many neighbouring columns as there are lanes. Of elements that a mask excludes the centre is in the place.
template <int WHAT> struct Lanes {
  Sums<WHAT> sums;
  Doubles centre[2];
  Floats fill;
  Ints count;  // of elements that a mask selects

  void begin(const Partial<WHAT>* parts) {
    sums = no_sums<WHAT>();
    count = Ints{};
    for (int lane = 0; lane < LANES; ++lane) {
      centre[lane / HALF][lane % HALF] = parts[lane].centre;
      fill[lane] = float(parts[lane].centre);
    }
  }
  void end(Partial<WHAT>* parts, int64_t rows, bool masked, float threshold) const {
    for (int lane = 0; lane < LANES; ++lane) {
      Partial<WHAT>& part = parts[lane];
      const int half = lane / HALF, place = lane % HALF;
      if (masked && count[lane] == 0) continue;
      const double others = masked ? double(rows - count[lane]) : 0, size = std::fabs(fill[lane]);
      if (WHAT & ZEROS) part.zeros -= fill[lane] == 0 ? others : 0;
      if (WHAT & ACTIVE) part.total -= size > threshold ? others : 0;
      if (WHAT & MAGNITUDES) part.total -= size * others;
      part.count += double(rows) - others;
      (WHAT & MAGNITUDES ? part.total : part.first) += sums.first[half][place];
      part.second += sums.second[half][place];
      if (WHAT & POWERS) {
        *part.third += sums.third[half][place];
        *part.fourth += sums.fourth[half][place];
      }
      part.low = std::min(part.low, double(sums.low[lane]));
      part.high = std::max(part.high, double(sums.high[lane]));
      part.zeros += sums.zeros[lane];
      part.total += sums.total[lane];
    }
  }
};

template <int WHAT, class T> static void read_rows(const Task& task, const Cut& cut, int64_t index, Partial<WHAT>* found) {
  const int64_t run_part = index % cut.run_parts, row_part = index / cut.run_parts % cut.row_parts;
  const int64_t owner = index / (cut.run_parts * cut.row_parts);
  const int64_t start = run_part * cut.run_a_part, size = std::min(cut.run_a_part, task.length - start);
  const int64_t stop = std::min(cut.rows, (row_part + 1) * cut.rows_a_part);
  Partial<WHAT> part;
  bool centred = !task.mask && (task.about_zero || !(WHAT & SUMS));
  for (int64_t row = row_part * cut.rows_a_part; row < stop; ++row) {
    int64_t offset = start, mask_offset = start * task.mask_stride;
    task.kept.offsets(owner, offset, mask_offset);
    task.reduced.offsets(row, offset, mask_offset);
    const auto* x = static_cast<const typename T::Type*>(task.x) + offset;
    const uint8_t* mask = task.mask ? static_cast<const uint8_t*>(task.mask) + mask_offset : nullptr;
    if (mask && !task.mask_stride) {  // it selects the row as a whole, or not at all
      if (!*mask) continue;
      mask = nullptr;
    }
    if (!centred) centred = find_centre<WHAT, T>(part, x, mask, size);
    add_run<WHAT, T>(part, x, mask, size, float(task.threshold), centred);
  }
  *found = part;
}

template <int WHAT, class T> static void read_columns(const Task& task, const Cut& cut, int64_t index, Partial<WHAT>* parts) {
  const int64_t row_part = index % cut.row_parts, run_part = index / cut.row_parts % cut.run_parts;
  const int64_t owner = index / (cut.row_parts * cut.run_parts);
  const int64_t start = run_part * cut.run_a_part, size = std::min(cut.run_a_part, task.length - start);
  const int64_t first = row_part * cut.rows_a_part, stop = std::min(cut.rows, first + cut.rows_a_part);
  const float threshold = float(task.threshold);
  int64_t offset = start, mask_offset = start * task.mask_stride;
  task.kept.offsets(owner, offset, mask_offset);
  const auto* base = static_cast<const typename T::Type*>(task.x) + offset;
  const uint8_t* mask_base = task.mask ? static_cast<const uint8_t*>(task.mask) + mask_offset : nullptr;

  for (int64_t column = 0; column < size; ++column) parts[column] = {};
  if (task.mask || ((WHAT & SUMS) && !task.about_zero)) {
    int32_t without[WIDTH];  // the columns without a centre
    int64_t missing = size;
    for (int64_t column = 0; column < size; ++column) without[column] = int32_t(column);
    for (int64_t row = first; missing && row < stop; ++row) {
      int64_t at = 0, mask_at = 0, left = 0;
      task.reduced.offsets(row, at, mask_at);
      for (int64_t index = 0; index < missing; ++index) {
        const int32_t column = without[index];
        const float value = T::value(base[at + column]);
        const bool usable = std::fabs(value) < INFINITE && (!mask_base || mask_base[mask_at + column * task.mask_stride]);
        parts[column].centre = usable ? value : 0;
        without[left] = column;
        left += !usable;
      }
      missing = left;
    }
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
    const int64_t mask_ahead = rows > 1 ? mask_at[rows - 1] + mask_at[1] - 2 * mask_at[0] : 0;
    for (int64_t group = 0; group < groups; ++group) {
      Lanes<WHAT>& mine = lanes[group];
      Sums<WHAT> sums = mine.sums;
      Ints count = mine.count;
      const Floats fill = mine.fill;
      const Doubles centre[2] = {mine.centre[0], mine.centre[1]};
      for (int64_t row = 0; row < rows; ++row) {
        const auto* x = base + at[row] + group * LANES;
        __builtin_prefetch(x + ahead);
        Floats value = load<T>(x);
        if (mask_base) {
          const uint8_t* mask = mask_base + mask_at[row];
          __builtin_prefetch(mask + group * LANES + mask_ahead);
          const Ints chosen = task.mask_stride ? selected(mask + group * LANES) : Ints{} - (*mask ? 1 : 0);
          value = chosen ? value : fill;
          count -= chosen;
        }
        add<WHAT>(sums, value, centre, threshold);
      }
      mine.sums = sums;
      mine.count = count;
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = rest; column < size; ++column)
        if (!mask_base || mask_base[mask_at[row] + column * task.mask_stride])
          add_one<WHAT>(parts[column], T::value(base[at[row] + column]), threshold);
  }
  for (int64_t group = 0; group < groups; ++group) {
    Partial<WHAT>* mine = parts + group * LANES;
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

}  // namespace

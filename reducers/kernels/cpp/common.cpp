// What the library has once: the threads, how rows of a table are joined, and the sizes of what both sides know.

#include <dlfcn.h>

#include "accumulate.h"

OpenMP reducers_openmp;

// Finds the functions of the OpenMP that PyTorch runs on, with a handle of PyTorch's library; returns whether it has one.
extern "C" EXPORT int reducers_set_openmp(void* library) {
  OpenMP found = {};
  found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(library, "GOMP_parallel"));
  found.thread = reinterpret_cast<decltype(found.thread)>(dlsym(library, "omp_get_thread_num"));
  if (found.parallel && found.thread) reducers_openmp = found;
  return reducers_openmp.parallel != nullptr;
}

// The sizes of the structs that Python fills in: a library that was built from other sources would read beyond their ends.
// What identifies the sources that this was built from.
extern "C" EXPORT const char* reducers_sources() { return SOURCES; }

extern "C" EXPORT int64_t reducers_task_size() { return sizeof(Task); }

// Joins the rows of a table [rows, number, positions], in order, to what was observed before; if nothing was, to the first row.
// `columns` says which result each of the numbers is.
extern "C" EXPORT int reducers_join(const Task* task, const double* table, int64_t rows, const int64_t* columns, int64_t number, int64_t positions) {
  for (int64_t position = 0; position < positions; ++position) {
    Before old(*task, position);
    int64_t counts[RESULTS] = {};
    for (int64_t column = 0; column < number; ++column) {
      const int result = int(columns[column]);
      old.asked[result] = task->kinds[result] != 1;
      if (!old.asked[result] && old.any) counts[result] = static_cast<const int64_t*>(task->before[result])[position];
    }
    for (int64_t row = 0; row < rows; ++row) {
      double found[RESULTS] = {};
      for (int64_t column = 0; column < number; ++column) found[columns[column]] = table[(row * number + column) * positions + position];
      if (old.any) join_results(found, old.numbers, old.asked);
      for (int64_t column = 0; column < number; ++column) {
        const int result = int(columns[column]);
        if (!old.asked[result]) counts[result] += int64_t(found[result]);
        old.numbers[result] = old.asked[result] ? found[result] : double(counts[result]);
      }
      old.any = true;
    }
    for (int64_t column = 0; column < number; ++column) {
      const int result = int(columns[column]);
      write_one(*task, result, position, old.numbers[result], counts[result]);
    }
  }
  return 0;
}

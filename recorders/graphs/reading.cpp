// Reads tensors by the loops, and an operator of PyTorch that reads its tensors into the next row of a table, without any Python.

#include "partition.h"

#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>
#include <stdexcept>
#include <time.h>
#include <unordered_map>

// PyTorch's stable C interface: torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h. Compiling those would take
// longer than all else. A call returns 0 if it succeeds. Whoever is called has to delete the arguments, and what is in a list of them.
typedef uint64_t Argument;
constexpr uint64_t INTERFACE = (uint64_t(2) << 56) | (uint64_t(10) << 48);  // the release of PyTorch that these are of
#define OF_PYTORCH(function) \
  function(int32_t, torch_list_size, (void* list, size_t* size)) \
  function(int32_t, torch_list_get_item, (void* list, size_t index, Argument* item)) \
  function(int32_t, torch_delete_list, (void* list)) \
  function(int32_t, torch_string_c_str, (void* string, const char** characters)) \
  function(int32_t, torch_string_length, (void* string, size_t* length)) \
  function(int32_t, torch_delete_string, (void* string)) \
  function(int32_t, aoti_torch_get_data_ptr, (void* tensor, void** data)) \
  function(int32_t, aoti_torch_get_dtype, (void* tensor, int32_t* dtype)) \
  function(int32_t, aoti_torch_get_dim, (void* tensor, int64_t* axes)) \
  function(int32_t, aoti_torch_get_sizes, (void* tensor, int64_t** sizes)) \
  function(int32_t, aoti_torch_get_strides, (void* tensor, int64_t** strides)) \
  function(int32_t, aoti_torch_delete_tensor_object, (void* tensor)) \
  function(int32_t, torch_get_num_threads, (uint32_t* threads)) \
  function(int32_t, torch_call_dispatcher, (const char* name, const char* overload, Argument* arguments, uint64_t interface)) \
  function(const char*, torch_exception_get_what_without_backtrace, ())

// They are found when the library is loaded: it is built without PyTorch, and serves all releases that have them.
#define DECLARED(result, name, arguments) static result(*name) arguments;
OF_PYTORCH(DECLARED)

typedef int (*Loop)(const Task*, int64_t number, int64_t threads);

constexpr int MOST_TENSORS = 512;        // of one call
constexpr int64_t A_THREAD = 1 << 15;    // elements that are worth another thread

struct Metadata { int64_t dtype, axes, sizes[MOST_AXES], strides[MOST_AXES]; };

struct Family {             // tensors that one loop reads
  Loop loop;
  int64_t number, big;      // how many tensors, and how many of these, the first ones, several threads read together
  Task* tasks;
  const int64_t* sources;   // which tensors they are
};

struct Layout {             // how tensors like these are read
  const Metadata* metadata;
  int64_t families;
  const Family* family;
};

struct Reader {
  int64_t tensors, bytes;   // how many tensors, and the bytes of what is found
  char* row;                // memory that the tasks write to
  int64_t layouts;
  const Layout* layout[16];
};

struct Table {
  const Reader* reader;
  int64_t sinks;
  const int64_t* numbers;   // those of the sinks
  char key[16];             // what the text begins with
  char* rows;
  int64_t capacity;
  int64_t anywhere;         // whether calls inside a backward count, too
  int64_t ready;            // whether nothing has to be asked before a row is added
  int64_t count;            // of the rows
  int64_t timed;            // whether calls of the operator that no Python sees are timed
  int64_t nanoseconds;      // that these took
};

struct Pace { double alone_until, alone, slowest, wait; };  // see threads.py

static std::mutex mutex;      // held while anything below is used
static Pace* pace;
static int (*backward_under_way)();  // returns -1 if none is

static int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

static int64_t elements(const Task* tasks, int64_t number) {
  int64_t found = 0;
  for (int64_t index = 0; index < number; ++index) found += product(tasks[index].kept) * product(tasks[index].reduced) * tasks[index].length;
  return found;
}

static int in_threads(Loop loop, const Task* tasks, int64_t number, int64_t threads) {
  const int64_t bytes = 4 * elements(tasks, number);
  const double started = 1e-9 * nanoseconds();
  if (threads <= 1 || started < pace->alone_until) return loop(tasks, number, 1);
  const int failed = loop(tasks, number, threads);
  const double ended = 1e-9 * nanoseconds();
  if (ended - started > pace->wait + bytes / pace->slowest) pace->alone_until = ended + pace->alone;
  return failed;
}

// Returns whether there was memory.
static bool read(const Reader& reader, const Layout& layout, const void* const* tensors, char* row) {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  int failed = 0;
  for (int64_t index = 0; index < layout.families; ++index) {
    const Family& family = layout.family[index];
    for (int64_t task = 0; task < family.number; ++task) family.tasks[task].x = tensors[family.sources[task]];
    for (int64_t task = 0; task < family.big; ++task) failed += in_threads(family.loop, family.tasks + task, 1, threads);
    if (const int64_t small = family.number - family.big) {
      const Task* tasks = family.tasks + family.big;
      failed += in_threads(family.loop, tasks, small, std::min<int64_t>(threads, elements(tasks, small) / A_THREAD));
    }
  }
  std::memcpy(row, reader.row, reader.bytes);
  return !failed;
}

// Lets the reader know this layout by a number, in place of the one that had the number before.
extern "C" EXPORT void reducers_set_layout(Reader* reader, int64_t number, const Layout* layout) {
  const std::lock_guard<std::mutex> lock(mutex);
  reader->layout[number] = layout;
  reader->layouts = std::max(reader->layouts, number + 1);
}

// Reads tensors of a layout into the next row, and counts it. Returns whether there was room, and memory for the loops.
extern "C" EXPORT int reducers_add(Table* table, int64_t layout, const void* const* tensors) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Reader& reader = *table->reader;
  if (table->count >= table->capacity || !read(reader, *reader.layout[layout], tensors, table->rows + table->count * reader.bytes)) return 0;
  ++table->count;
  return 1;
}

struct Key {
  int64_t number;
  uint64_t text[2];
  bool operator==(const Key& other) const { return number == other.number && text[0] == other.text[0] && text[1] == other.text[1]; }
};
struct Hash { size_t operator()(const Key& key) const { return size_t(key.text[0] ^ key.text[1]) * 31 + size_t(key.number); } };

static std::unordered_map<Key, Table*, Hash>& tables() {
  static auto* found = new std::unordered_map<Key, Table*, Hash>();  // never freed: threads may use it to the very end
  return *found;
}

static Key key_of(int64_t number, const char* text) {
  Key key{number, {0, 0}};
  std::memcpy(key.text, text, sizeof(key.text));
  return key;
}

// When this returns, no thread adds to a table that is not ready.
extern "C" EXPORT void reducers_set_ready(Table* table, int64_t ready) {
  const std::lock_guard<std::mutex> lock(mutex);
  table->ready = ready;
}

// No row is added to a table that is sealed, not even by another thread.
extern "C" EXPORT void reducers_seal(Table* table) {
  const std::lock_guard<std::mutex> lock(mutex);
  table->ready = 0;
  table->capacity = std::min(table->count, table->capacity);
}

static thread_local bool filled;  // whether the call of the operator in this thread added the last row of a table

// For the slow operator: its observation is in a table then, whatever other threads have done since.
extern "C" EXPORT int reducers_filled() { return filled; }

// From now on the operator finds this table by the number of the first sink, and what the text begins with.
extern "C" EXPORT void reducers_add_table(Table* table) {
  const std::lock_guard<std::mutex> lock(mutex);
  tables()[key_of(table->numbers[0], table->key)] = table;
}

extern "C" EXPORT void reducers_remove_table(Table* table) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = tables().find(key_of(table->numbers[0], table->key));
  if (found != tables().end() && found->second == table) tables().erase(found);
}

class Tensors {  // a list of tensors that is an argument
 public:
  explicit Tensors(Argument list) : list_(reinterpret_cast<void*>(list)) { torch_list_size(list_, &size_); }
  size_t size() const { return size_; }
  template <class Look> bool all(const Look& look) const {  // whether `look(index, tensor)` is true for all of them
    for (size_t index = 0; index < size_; ++index) {
      Argument tensor = 0;
      if (torch_list_get_item(list_, index, &tensor) || !look(index, reinterpret_cast<void*>(tensor))) return false;
    }
    return true;
  }
  void free() const {  // what it holds, too
    all([](size_t, void* tensor) { return !aoti_torch_delete_tensor_object(tensor); });
    torch_delete_list(list_);
  }

 private:
  void* list_;
  size_t size_ = 0;
};

static bool has(void* tensor, const Metadata& told) {
  int32_t dtype = 0;
  int64_t axes = 0, *sizes = nullptr, *strides = nullptr;
  if (aoti_torch_get_dtype(tensor, &dtype) || dtype != told.dtype) return false;
  if (aoti_torch_get_dim(tensor, &axes) || axes != told.axes) return false;
  if (aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_strides(tensor, &strides)) return false;
  for (int64_t axis = 0; axis < axes; ++axis)
    if (sizes[axis] != told.sizes[axis] || (strides[axis] != told.strides[axis] && sizes[axis] > 1)) return false;
  return true;
}

// Returns the table that takes an observation now; null if Python has to look.
static Table* table_of(const Tensors& sinks, const char* text) {
  Table* table = nullptr;
  const bool found = sinks.all([&](size_t index, void* tensor) {
    void* data = nullptr;
    if (aoti_torch_get_data_ptr(tensor, &data) || !data) return false;
    const int64_t number = *static_cast<const int64_t*>(data);
    if (!index) {
      const auto place = tables().find(key_of(number, text));
      table = place == tables().end() ? nullptr : place->second;
    }
    return table && size_t(table->sinks) == sinks.size() && table->numbers[index] == number;
  });
  if (!found || !table || !table->ready || table->count >= table->capacity) return nullptr;
  return table->anywhere || backward_under_way() == -1 ? table : nullptr;
}

// Returns whether a row was added, and there is room for another one.
static bool add_row(const Argument* arguments) {
  filled = false;
  const Tensors sinks(arguments[0]), tensors(arguments[1]);
  const char* text = nullptr;
  size_t length = 0;
  void* string = reinterpret_cast<void*>(arguments[2]);
  if (torch_string_length(string, &length) || length < sizeof(Table::key) || torch_string_c_str(string, &text)) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  Table* table = table_of(sinks, text);
  if (!table || size_t(table->reader->tensors) != tensors.size() || tensors.size() > MOST_TENSORS) return false;
  const int64_t started = table->timed ? nanoseconds() : 0;
  const void* data[MOST_TENSORS];
  const Reader& reader = *table->reader;
  for (int64_t number = 0; number < reader.layouts; ++number) {
    const Layout& layout = *reader.layout[number];
    const bool fits = tensors.all([&](size_t index, void* tensor) {
      void* address = nullptr;
      if (!has(tensor, layout.metadata[index]) || aoti_torch_get_data_ptr(tensor, &address)) return false;
      return (data[index] = address) != nullptr;
    });
    if (!fits) continue;
    if (!read(reader, layout, data, table->rows + table->count * reader.bytes)) return false;
    ++table->count;
    if (started) table->nanoseconds += nanoseconds() - started;
    if (table->count < table->capacity) return true;
    table->ready = 0;
    filled = true;
    return false;
  }
  return false;
}

struct Python {  // functions of CPython
  int (*ensure_lock)();
  void (*release_lock)(int state);
  int (*raise_in_thread)(unsigned long thread, void* type);
  void (*release)(void* object);
};

static const Python* python;
static const char* slow_operator;
static thread_local void* error;  // a class whose instance is to be raised in this thread

// Called by the slow operator, which must not raise anything: nothing that is raised below C++ stays what it is.
extern "C" EXPORT void reducers_raise_after(void* type) { error = type; }

static void raise_error() {
  const int state = python->ensure_lock();
  python->raise_in_thread((unsigned long)pthread_self(), error);
  python->release(error);
  error = nullptr;
  python->release_lock(state);
}

// The operator: (Tensor[] sinks, Tensor[] tensors, str text) -> (). What it does not do, the slow one does, in Python.
extern "C" EXPORT void reducers_operator(Argument* arguments, uint64_t, uint64_t) {
  if (!add_row(arguments)) {
    const bool failed = torch_call_dispatcher(slow_operator, "", arguments, INTERFACE);
    filled = false;
    if (error) raise_error();
    else if (failed) throw std::runtime_error(torch_exception_get_what_without_backtrace());
    return;
  }
  Tensors(arguments[0]).free();
  Tensors(arguments[1]).free();
  torch_delete_string(reinterpret_cast<void*>(arguments[2]));
}

extern "C" EXPORT void reducers_set_slow(const char* slow, int (*backward)(), const Python* functions) {
  slow_operator = slow;
  backward_under_way = backward;
  python = functions;
}

// What identifies the sources that this was built from.
extern "C" EXPORT const char* reducers_sources() { return SOURCES; }

// Called once, before anything is read, with a handle of PyTorch's library. Returns whether that has all functions.
extern "C" EXPORT int reducers_set_pytorch(void* library, Pace* shared) {
#define FOUND(result, name, arguments) \
  if (!(name = reinterpret_cast<decltype(name)>(dlsym(library, #name)))) return 0;
  OF_PYTORCH(FOUND)
  pace = shared;
  // A fork waits until no thread holds it: in the child there is none that would let go of it.
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  return 1;
}

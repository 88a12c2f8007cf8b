// A threadgroup on one CPU thread: every GPU thread is a fiber, barriers and collectives are where fibers change.
//
// What runs next is drawn from the launch's seed, so a kernel whose result depends on the order of its threads shows it.
// Between two such places a thread is not interrupted; a race within one (each thread reads back what it just wrote to a
// place that all write) stays hidden.
// A wait that can never end (a barrier or a collective that not all threads reach) is an error that says who waits where.

#pragma once

#include <cstddef>
#include <cstdint>

namespace machine {

// One launch as the Python side lays it out. Buffers (their names, their sizes) are the inputs, then the outputs; shapes
// are the inputs'.
struct Launch {
  int64_t seed;
  uint32_t grid[3]; // in threads, as Metal's dispatch_threads
  uint32_t threadgroup[3];
  void** buffers;
  const char* const* names;
  const uint64_t* bytes;
  uint64_t input_count;
  uint64_t buffer_count;
  const int32_t* const* shapes;
  const int64_t* const* strides;
  const int32_t* ndims;
};

struct uint3 {
  uint32_t x, y, z;
};

// The attributes that MLX hands to a kernel on demand, under Metal's names.
struct Position {
  uint3 grid_size, threads_per_grid, threadgroups_per_grid, threadgroup_position_in_grid;
  uint3 threads_per_threadgroup, dispatch_threads_per_threadgroup, grid_origin;
  uint3 thread_position_in_grid, thread_position_in_threadgroup;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
  uint32_t threads_per_simdgroup, thread_execution_width;
};

// Where a thread waits.
struct Site {
  const char* name;
  const char* file;
  int line;
};

struct Simdgroup {
  uint32_t alive;   // lanes that exist and have not returned
  uint32_t arrived; // lanes that wait at `site`
  Site site;
  void (*complete)(Simdgroup&); // makes `received` out of `brought`
  uint32_t operand[32];
  // Apart, since a fast lane brings to the next collective before a slow one has received from this one.
  alignas(16) unsigned char brought[32 * 16];
  alignas(16) unsigned char received[32 * 16];
};

// What a generated file exports.
struct Kernel {
  const char* name;
  void (*run_thread)(const Launch& launch, const Position& at);
  unsigned char* threadgroup_begin; // all of its threadgroup memory
  unsigned char* threadgroup_end;
};

// What kernels/dialect/host.h builds on.
uint32_t lane();
Simdgroup& simdgroup();
void meet(Site site); // returns when every live lane of the simdgroup has come
void simdgroup_barrier(Site site);
void threadgroup_barrier(Site site);
[[noreturn]] void fail(const char* what);

template <typename T>
struct Lanes {
  const T* brought;
  T* received;
  const uint32_t* operand;
  uint32_t active;
};

template <typename T, void (*Combine)(Lanes<T>)>
T collective(T value, uint32_t operand, Site site) {
  static_assert(sizeof(T) <= 16, "a collective moves at most 16 bytes per lane");
  Simdgroup& group = simdgroup();
  reinterpret_cast<T*>(group.brought)[lane()] = value;
  group.operand[lane()] = operand;
  group.complete = [](Simdgroup& g) {
    Combine({reinterpret_cast<const T*>(g.brought), reinterpret_cast<T*>(g.received), g.operand, g.arrived});
  };
  meet(site);
  return reinterpret_cast<const T*>(group.received)[lane()];
}

template <typename T>
void shuffle(Lanes<T> lanes) {
  for (uint32_t i = 0; i < 32; i++) {
    if (!(lanes.active >> i & 1)) continue;
    uint32_t from = lanes.operand[i];
    if (from >= 32 || !(lanes.active >> from & 1)) fail("a lane reads from a lane that takes no part");
    lanes.received[i] = lanes.brought[from];
  }
}

struct Sum {
  template <typename T>
  static T join(T a, T b) {
    return a + b;
  }
};

struct Max {
  template <typename T>
  static T join(T a, T b) {
    return a < b ? b : a;
  }
};

struct Min {
  template <typename T>
  static T join(T a, T b) {
    return b < a ? b : a;
  }
};

// As a tree over lanes, as hardware does it: the order of a float sum does not depend on who came when.
template <typename T, typename Operation>
void reduce(Lanes<T> lanes) {
  T value[32];
  uint32_t held = lanes.active;
  for (uint32_t i = 0; i < 32; i++) {
    if (held >> i & 1) value[i] = lanes.brought[i];
  }
  for (uint32_t step = 16; step > 0; step /= 2) {
    for (uint32_t i = 0; i < step; i++) {
      if (!(held >> (i + step) & 1)) continue;
      value[i] = held >> i & 1 ? Operation::join(value[i], value[i + step]) : value[i + step];
      held |= 1u << i;
    }
  }
  for (uint32_t i = 0; i < 32; i++) lanes.received[i] = value[0];
}

template <typename T>
void prefix_exclusive_sum(Lanes<T> lanes) {
  T sum = T(0);
  for (uint32_t i = 0; i < 32; i++) {
    if (!(lanes.active >> i & 1)) continue;
    lanes.received[i] = sum;
    sum = sum + lanes.brought[i];
  }
}

} // namespace machine

// Returns 0, or 1 with a message in `error`.
extern "C" int run_kernel(const machine::Kernel* kernel, machine::Launch* launch, char* error, size_t error_bytes);

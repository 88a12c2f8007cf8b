// Metal's idiom for the test host: tests/host/machine.h runs every thread, this header gives it Metal's names.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.h"

#define METAL_FUNC inline
// One copy per threadgroup: threadgroups run one after the other, and the machine poisons this section before each.
#define threadgroup static __attribute__((section("threadgroup")))

using std::fabs;
using std::fma;
using std::isnan;
using uint = uint32_t;
using ushort = uint16_t;
using half = _Float16;
using uint3 = machine::uint3;

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  bfloat(float x) {
    uint32_t wide = as_type<uint32_t>(x);
    bits = uint16_t(x != x ? wide >> 16 | 0x40 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    return as_type<float>(uint32_t(bits) << 16);
  }
};

using float16_t = half;
using bfloat16_t = bfloat;

namespace metal {
namespace precise {
using std::cos;
using std::exp;
using std::log;
using std::sin;
using std::sqrt;
} // namespace precise
} // namespace metal

template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}

inline uint popcount(uint x) {
  return uint(__builtin_popcount(x));
}

inline uint clz(uint x) {
  return x ? uint(__builtin_clz(x)) : 32;
}

namespace mem_flags {
enum Flags { mem_none, mem_device, mem_threadgroup };
}

// Where a collective or a barrier stands, for threads that meet to compare and for messages.
#define SITE(name) \
  machine::Site { name, file, line }
#define CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void threadgroup_barrier(int, CALLER) {
  machine::threadgroup_barrier(SITE("threadgroup_barrier"));
}

inline void simdgroup_barrier(int, CALLER) {
  machine::simdgroup_barrier(SITE("simdgroup_barrier"));
}

template <typename T>
T simd_shuffle(T x, uint lane, CALLER) {
  return machine::collective<T, machine::shuffle<T>>(x, lane, SITE("simd_shuffle"));
}

template <typename T>
T simd_broadcast(T x, uint lane, CALLER) {
  return machine::collective<T, machine::shuffle<T>>(x, lane, SITE("simd_broadcast"));
}

template <typename T>
T simd_shuffle_xor(T x, uint mask, CALLER) {
  return machine::collective<T, machine::shuffle<T>>(x, machine::lane() ^ mask, SITE("simd_shuffle_xor"));
}

template <typename T>
T simd_shuffle_down(T x, uint delta, CALLER) {
  uint lane = machine::lane();
  return machine::collective<T, machine::shuffle<T>>(x, lane + delta < 32 ? lane + delta : lane, SITE("simd_shuffle_down"));
}

template <typename T>
T simd_sum(T x, CALLER) {
  return machine::collective<T, machine::reduce<T, machine::Sum>>(x, 0, SITE("simd_sum"));
}

template <typename T>
T simd_max(T x, CALLER) {
  return machine::collective<T, machine::reduce<T, machine::Max>>(x, 0, SITE("simd_max"));
}

template <typename T>
T simd_min(T x, CALLER) {
  return machine::collective<T, machine::reduce<T, machine::Min>>(x, 0, SITE("simd_min"));
}

template <typename T>
T simd_prefix_exclusive_sum(T x, CALLER) {
  return machine::collective<T, machine::prefix_exclusive_sum<T>>(x, 0, SITE("simd_prefix_exclusive_sum"));
}

// Metal's idiom for mx.fast.cuda_kernel. Threadgroups are whole simdgroups (a warp is one), and every lane takes part.
// The address spaces device, constant and thread have no name here: as macros they would break __device__ itself.

#define METAL_FUNC __device__ __forceinline__
#define threadgroup __shared__

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#endif

using uint = unsigned int;
using ushort = unsigned short;
using half = __half;
using bfloat = __nv_bfloat16;
using float16_t = half;
using bfloat16_t = bfloat;

#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup % 32)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup / 32)
#define simdgroups_per_threadgroup (blockDim.x * blockDim.y * blockDim.z / 32)
#define thread_position_in_grid \
  (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
         blockIdx.z * blockDim.z + threadIdx.z})

namespace mem_flags {
enum Flags { mem_none, mem_device, mem_threadgroup };
}

METAL_FUNC void threadgroup_barrier(int) {
  __syncthreads();
}

METAL_FUNC void simdgroup_barrier(int) {
  __syncwarp();
}

namespace metal {
namespace precise {
// MLX compiles without fast-math, so these are the precise ones.
using ::cos;
using ::exp;
using ::log;
using ::sin;
using ::sqrt;
} // namespace precise
} // namespace metal

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

METAL_FUNC uint popcount(uint x) {
  return __popc(x);
}

METAL_FUNC uint clz(uint x) {
  return __clz(x);
}

template <typename T>
METAL_FUNC T simd_shuffle(T x, uint lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T>
METAL_FUNC T simd_broadcast(T x, uint lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, uint mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename T>
METAL_FUNC T simd_shuffle_down(T x, uint delta) {
  return __shfl_down_sync(0xffffffffu, x, delta);
}

template <typename T>
METAL_FUNC T simd_sum(T x) {
  for (uint step = 16; step > 0; step /= 2) {
    x += simd_shuffle_xor(x, step);
  }
  return x;
}

template <typename T>
METAL_FUNC T simd_max(T x) {
  for (uint step = 16; step > 0; step /= 2) {
    x = max(x, simd_shuffle_xor(x, step));
  }
  return x;
}

template <typename T>
METAL_FUNC T simd_min(T x) {
  for (uint step = 16; step > 0; step /= 2) {
    x = min(x, simd_shuffle_xor(x, step));
  }
  return x;
}

#if __CUDA_ARCH__ >= 800 // one instruction instead of five shuffles
METAL_FUNC uint simd_sum(uint x) {
  return __reduce_add_sync(0xffffffffu, x);
}

METAL_FUNC uint simd_max(uint x) {
  return __reduce_max_sync(0xffffffffu, x);
}

METAL_FUNC uint simd_min(uint x) {
  return __reduce_min_sync(0xffffffffu, x);
}
#endif

template <typename T>
METAL_FUNC T simd_prefix_exclusive_sum(T x) {
  T sum = x;
  for (uint step = 1; step < 32; step *= 2) {
    T below = __shfl_up_sync(0xffffffffu, sum, step);
    sum += thread_index_in_simdgroup >= step ? below : T(0);
  }
  T before = __shfl_up_sync(0xffffffffu, sum, 1);
  return thread_index_in_simdgroup > 0 ? before : T(0);
}

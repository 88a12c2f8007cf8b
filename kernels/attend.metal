#include "attend.h"

// Causal attention of the last T tokens of a cache, head by head and chunk by chunk of CHUNK keys. Chunks begin at fixed places,
// so that the bits of a token do not depend on the window that it is in. A simdgroup takes KEYS keys at a time.
threadgroup float tops[SIMDGROUPS];
threadgroup float totals[SIMDGROUPS];
threadgroup float sums[SIMDGROUPS * D];

uint tokens = queries_shape[2];
uint capacity = keys_shape[2];
uint lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
uint head = threadgroup_position_in_grid.x;
uint token = threadgroup_position_in_grid.y;
uint chunk = threadgroup_position_in_grid.z;
uint chunks = threadgroups_per_grid.z;
uint begin = chunk * CHUNK;
uint seen = uint(offset[0]) + token + 1; // keys that this token sees
uint end = min(begin + CHUNK, seen);
size_t row = size_t(head / (H / G)) * capacity;

float query[D / 32];
for (int i = 0; i < D / 32; i++) {
  query[i] = float(queries[(head * tokens + token) * D + i * 32 + lane]) * SCALE;
}
Share share = {-INFINITY, 0};
float sum[D / 32] = {};
for (uint block = begin + simdgroup * KEYS; block < end; block += SIMDGROUPS * KEYS) {
  float score[KEYS];
  for (int j = 0; j < KEYS; j++) {
    uint key = min(block + j, end - 1);
    score[j] = 0;
    for (int i = 0; i < D / 32; i++) {
      score[j] = fma(query[i], float(keys[(row + key) * D + i * 32 + lane]), score[j]);
    }
  }
  float top = share.top;
  for (int j = 0; j < KEYS; j++) {
    score[j] = simd_sum(score[j]);
    top = block + j < end ? max(top, score[j]) : top;
  }
  float old = share_weight(share.top, top);
  share = {top, share.total * old};
  for (int i = 0; i < D / 32; i++) {
    sum[i] *= old;
  }
  for (int j = 0; j < KEYS; j++) {
    float weight = block + j < end ? metal::precise::exp(score[j] - top) : 0;
    uint key = min(block + j, end - 1);
    share.total += weight;
    for (int i = 0; i < D / 32; i++) {
      sum[i] = fma(weight, float(values[(row + key) * D + i * 32 + lane]), sum[i]);
    }
  }
}
if (lane == 0) {
  tops[simdgroup] = share.top;
  totals[simdgroup] = share.total;
}
for (int i = 0; i < D / 32; i++) {
  sums[simdgroup * D + i * 32 + lane] = sum[i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float top = -INFINITY;
for (int s = 0; s < SIMDGROUPS; s++) {
  top = max(top, tops[s]);
}
uint place = (token * H + head) * chunks + chunk;
for (uint d = thread_position_in_threadgroup.x; d < uint(D); d += 32 * SIMDGROUPS) {
  float total = 0;
  for (int s = 0; s < SIMDGROUPS; s++) {
    total = fma(sums[s * D + d], share_weight(tops[s], top), total);
  }
  partial[size_t(place) * D + d] = total;
}
if (thread_position_in_threadgroup.x == 0) {
  float total = 0;
  for (int s = 0; s < SIMDGROUPS; s++) {
    total = fma(totals[s], share_weight(tops[s], top), total);
  }
  shares[2 * place] = top;
  shares[2 * place + 1] = total;
}

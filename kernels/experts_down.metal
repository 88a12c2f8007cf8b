#include "experts.h"

// What the experts of each row make of experts_up's values, mixed in the order of ranks, then the shared expert's, then what is
// passed by. APART: the experts' own outputs instead, by rank. Each expert has a simdgroup, so that all read at the same time.
threadgroup float parts[(K + 1) * OUT];

uint outputs = down_w_shape[1];
uint columns = down_w_shape[2] * SPAN;
uint index = thread_index_in_simdgroup;
uint rank = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.y;
uint first = threadgroup_position_in_grid.x * OUT;
auto mine = x + row * x_shape[2] + rank * columns;

Products<1, OUT> out = {};
if (rank < uint(K)) {
  size_t expert = ids[row * K + rank];
  size_t words = expert * outputs * (columns / SPAN);
  size_t groups = expert * outputs * (columns / GROUP);
  out = multiply<BITS, GROUP, 1, OUT, false>(
      down_w + words, down_s + groups, down_b + groups, columns, first, outputs, mine, 1, x, 0, index);
} else if (SHARED) {
  out = multiply<SHARED_BITS, SHARED_GROUP, 1, OUT, false>(
      shared_down_w, shared_down_s, shared_down_b, x_shape[2] - K * columns, first, outputs, mine, 1, x, 0, index);
}
for (int o = 0; o < OUT; o++) {
  if (index == uint(o) && first + o < outputs) {
    if (APART) {
      y[(row * K + rank) * outputs + first + o] = Y(out.of[o]);
    } else {
      parts[rank * OUT + o] = out.of[o];
    }
  }
}
if (!APART) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (rank == 0 && index < uint(OUT) && first + index < outputs) {
    uint at = row * outputs + first + index;
    y[at] = Y(mix<K, SHARED, GATED>(
        weights + row * K, parts + index, OUT, SHARED ? parts[K * OUT + index] : 0,
        GATED ? float(logits[(row + 1) * LOGITS - 1]) : 0, float(residual[at])));
  }
}

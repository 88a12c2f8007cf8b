#include "experts.h"

// experts_down where the experts' own outputs, pairs[row][rank], are known: the same operations, to the same bits.
uint outputs = pairs_shape[3];
uint columns = SHARED ? uint(x_shape[2]) : 0;
uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.y;
uint first = (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * OUT;

if (first < outputs) {
  Products<1, OUT> out = {};
  if (SHARED) {
    out = multiply<SHARED_BITS, SHARED_GROUP, 1, OUT, false>(
        shared_down_w, shared_down_s, shared_down_b, columns, first, outputs, x + row * columns, 1, x, 0, lane);
  }
  for (int o = 0; o < OUT; o++) {
    if (lane == uint(o) && first + o < outputs) {
      uint at = row * outputs + first + o;
      y[at] = Y(mix<K, SHARED, GATED>(
          weights + row * K, pairs + size_t(row) * K * outputs + first + o, outputs, out.of[o],
          GATED ? float(logits[(row + 1) * LOGITS - 1]) : 0, float(residual[at])));
    }
  }
}

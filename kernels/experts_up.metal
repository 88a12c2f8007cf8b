#include "route.h"
#include "matrix.h"

// silu(gate x) * up x of the experts of each row, K that are chosen and the shared one, after an RMS normalisation (RMS).
// A threadgroup works for one expert of one row: y[row] holds K * I values by rank, then those of the shared expert. ROUTED:
// every threadgroup chooses by the logits itself, which takes no longer than to be told by a launch before.
threadgroup uint chosen;

uint columns = x_shape[2];
uint width = up_w_shape[1];
uint shared_width = SHARED ? uint(shared_up_w_shape[0]) : 0;
uint lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.z;
uint rank = threadgroup_position_in_grid.y;
uint first = (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup) * OUT;
auto mine = x + row * columns;

if (rank < uint(K) && simdgroup == 0) {
  if (ROUTED) {
    Pick pick = select_row<E, K, ROUTER, NORM, false, HAS_BIAS, N_GROUP, TOPK_GROUP>(
        logits + size_t(row) * LOGITS, logits, logits, bias, SCALE, lane);
    if (lane == rank) {
      chosen = pick.id;
    }
    if (rank == 0 && threadgroup_position_in_grid.x == 0 && lane < uint(K)) {
      picked[row * K + lane] = Picked(pick.id);
      weights[row * K + lane] = Weight(pick.weight);
    }
  } else if (lane == 0) {
    chosen = uint(ids[row * K + rank]);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

uint outputs = rank < uint(K) ? width : shared_width;
if (first < outputs) {
  Products<1, OUT> gate = {};
  Products<1, OUT> up = {};
  if (rank < uint(K)) {
    size_t words = size_t(chosen) * width * (columns / SPAN);
    size_t groups = size_t(chosen) * width * (columns / GROUP);
    gate = multiply<BITS, GROUP, 1, OUT, RMS>(
        gate_w + words, gate_s + groups, gate_b + groups, columns, first, width, mine, 1, norm, EPS, lane);
    up = multiply<BITS, GROUP, 1, OUT, RMS>(
        up_w + words, up_s + groups, up_b + groups, columns, first, width, mine, 1, norm, EPS, lane);
  } else if (SHARED) {
    gate = multiply<SHARED_BITS, SHARED_GROUP, 1, OUT, RMS>(
        shared_gate_w, shared_gate_s, shared_gate_b, columns, first, shared_width, mine, 1, norm, EPS, lane);
    up = multiply<SHARED_BITS, SHARED_GROUP, 1, OUT, RMS>(
        shared_up_w, shared_up_s, shared_up_b, columns, first, shared_width, mine, 1, norm, EPS, lane);
  }
  for (int o = 0; o < OUT; o++) {
    if (lane == uint(o) && first + o < outputs) {
      y[row * (K * width + shared_width) + rank * width + first + o] = Y(silu(gate.of[o]) * up.of[o]);
    }
  }
}

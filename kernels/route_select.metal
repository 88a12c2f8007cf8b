#include "route.h"

uint row = threadgroup_position_in_grid.x;
uint lane = thread_index_in_simdgroup;

Pick pick = select_row<E, K, ROUTER, NORM, HAS_RESIDENCY, HAS_BIAS, N_GROUP, TOPK_GROUP>(
    logits + size_t(row) * WIDTH, resident, tables + row_kind[row] * 2 * K, bias, tables[4 * K], lane);

if (lane < uint(K)) {
  ids[row * K + lane] = pick.id;
  weights[row * K + lane] = pick.weight;
}

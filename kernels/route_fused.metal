#include "route.h"
#include "plan.h"

threadgroup uint chosen[T * K];
threadgroup uint partial[4 * T];

uint row = simdgroup_index_in_threadgroup;
uint lane = thread_index_in_simdgroup;

Pick pick = select_row<E, K, ROUTER, NORM, HAS_RESIDENCY, HAS_BIAS, N_GROUP, TOPK_GROUP>(
    logits + row * WIDTH, resident, tables + row_kind[row] * 2 * K, bias, tables[4 * K], lane);

if (lane < uint(K)) {
  ids[row * K + lane] = pick.id;
  weights[row * K + lane] = pick.weight;
  chosen[row * K + lane] = pick.id;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

plan_groups<E, 32 * T, SPLIT>(
    chosen, T * K, resident, partial, thread_position_in_threadgroup.x, plan);

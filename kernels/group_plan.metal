#include "plan.h"

threadgroup uint partial[4 * THREADS / 32];

plan_groups<E, THREADS, SPLIT>(
    ids, ids_shape[0] * ids_shape[1], resident, partial, thread_position_in_threadgroup.x, plan);

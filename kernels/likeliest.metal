// The largest logit of each row, the first of equal ones, and its probability. A threadgroup looks at one row.
threadgroup float tops[SIMDGROUPS];
threadgroup uint places[SIMDGROUPS];
threadgroup float sums[SIMDGROUPS];

uint columns = logits_shape[1];
uint index = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
auto mine = logits + size_t(threadgroup_position_in_grid.x) * columns;

float top = -INFINITY;
uint place = 0xffffffffu;
for (uint v = index; v < columns; v += 32 * SIMDGROUPS) {
  float logit = float(mine[v]);
  place = logit > top || place == 0xffffffffu ? v : place;
  top = max(top, logit);
}
float best = simd_max(top);
uint first = simd_min(top == best ? place : 0xffffffffu);
if (lane == 0) {
  tops[simdgroup] = best;
  places[simdgroup] = first;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float highest = tops[0];
uint winner = places[0];
for (int s = 1; s < SIMDGROUPS; s++) {
  bool better = tops[s] > highest || (tops[s] == highest && places[s] < winner);
  winner = better ? places[s] : winner;
  highest = max(highest, tops[s]);
}

float sum = 0;
for (uint v = index; v < columns; v += 32 * SIMDGROUPS) {
  sum += metal::precise::exp(float(mine[v]) - highest);
}
sum = simd_sum(sum);
if (lane == 0) {
  sums[simdgroup] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (index == 0) {
  float total = 0;
  for (int s = 0; s < SIMDGROUPS; s++) {
    total += sums[s];
  }
  token[threadgroup_position_in_grid.x] = winner;
  probability[threadgroup_position_in_grid.x] = 1 / total;
}

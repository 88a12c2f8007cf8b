#include "matrix.h"
#include "attend.h"

// The chunks of attend joined, each head behind its output gate. A threadgroup makes one head of one token.
uint chunks = partial_shape[2];
uint head = threadgroup_position_in_grid.x;
uint token = threadgroup_position_in_grid.y;
uint place = (token * H + head) * chunks;

float highest = -INFINITY;
for (uint c = 0; c < chunks; c++) {
  highest = max(highest, shares[2 * (place + c)]);
}
float total = 0;
for (uint c = 0; c < chunks; c++) {
  total = fma(shares[2 * (place + c) + 1], share_weight(shares[2 * (place + c)], highest), total);
}
for (uint d = thread_position_in_threadgroup.x; d < uint(D); d += threads_per_threadgroup.x) {
  float sum = 0;
  for (uint c = 0; c < chunks; c++) {
    sum = fma(partial[size_t(place + c) * D + d], share_weight(shares[2 * (place + c)], highest), sum);
  }
  float gate = sigmoid(float(projected[token * projected_shape[2] + head * 2 * D + D + d]));
  y[(token * H + head) * D + d] = X(sum / total * gate);
}

#include "matrix.h"

// Up to four matrices times the rows of x, side by side in y, after an RMS normalisation (NORM) and before the addition of
// what is passed by (RESIDUAL). A simdgroup makes OUT outputs of one matrix.
uint rows = x_shape[0] * x_shape[1];
uint columns = x_shape[2];
uint lane = thread_index_in_simdgroup;
uint block = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup;

uint outputs[4] = {uint(w0_shape[0]), MATRICES > 1 ? uint(w1_shape[0]) : 0u, MATRICES > 2 ? uint(w2_shape[0]) : 0u,
                   MATRICES > 3 ? uint(w3_shape[0]) : 0u};
uint width = outputs[0] + outputs[1] + outputs[2] + outputs[3];
uint matrix = 0;
uint before = 0; // outputs of the matrices before this one
while (matrix < uint(MATRICES) && block >= (outputs[matrix] + OUT - 1) / OUT) {
  block -= (outputs[matrix] + OUT - 1) / OUT;
  before += outputs[matrix];
  matrix += 1;
}
if (matrix < uint(MATRICES)) {
  uint first = block * OUT;
  Products<ROWS, OUT> sums = {};
  if (ALIKE) { // one piece of code for all of them
    auto w = pick(matrix > 1, pick(matrix > 2, w3, w2), pick(matrix > 0, w1, w0));
    auto s = pick(matrix > 1, pick(matrix > 2, s3, s2), pick(matrix > 0, s1, s0));
    auto b = pick(matrix > 1, pick(matrix > 2, b3, b2), pick(matrix > 0, b1, b0));
    sums = multiply<BITS0, GROUP0, ROWS, OUT, NORM>(w, s, b, columns, first, outputs[matrix], x, rows, norm, EPS, lane);
  } else if (matrix == 0) {
    sums = multiply<BITS0, GROUP0, ROWS, OUT, NORM>(w0, s0, b0, columns, first, outputs[0], x, rows, norm, EPS, lane);
  } else if (MATRICES > 1 && matrix == 1) {
    sums = multiply<BITS1, GROUP1, ROWS, OUT, NORM>(w1, s1, b1, columns, first, outputs[1], x, rows, norm, EPS, lane);
  } else if (MATRICES > 2 && matrix == 2) {
    sums = multiply<BITS2, GROUP2, ROWS, OUT, NORM>(w2, s2, b2, columns, first, outputs[2], x, rows, norm, EPS, lane);
  } else if (MATRICES > 3) {
    sums = multiply<BITS3, GROUP3, ROWS, OUT, NORM>(w3, s3, b3, columns, first, outputs[3], x, rows, norm, EPS, lane);
  }
  for (int r = 0; r < ROWS; r++) {
    for (int o = 0; o < OUT; o++) {
      if (lane == uint(r * OUT + o) % 32 && uint(r) < rows && first + o < outputs[matrix]) {
        uint at = r * width + before + first + o;
        float value = sums.of[r * OUT + o];
        y[at] = Y(RESIDUAL ? value + float(residual[at]) : value);
      }
    }
  }
}

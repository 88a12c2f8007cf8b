#include "matrix.h"

// The mixture of one output: the experts' `parts` by rank, `stride` apart, then the shared expert's behind its `gate`, then
// what is passed by.
template <int K, bool SHARED, bool GATED, typename Weights, typename Parts>
METAL_FUNC float mix(Weights weights, Parts parts, uint stride, float shared, float gate, float residual) {
  float sum = 0;
  for (uint rank = 0; rank < uint(K); rank++) {
    sum = fma(float(weights[rank]), float(parts[rank * stride]), sum);
  }
  return (SHARED ? fma(GATED ? sigmoid(gate) : 1, shared, sum) : sum) + residual;
}

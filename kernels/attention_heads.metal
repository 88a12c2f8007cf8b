#include "matrix.h"

// From the projections of each token, q and output gate by head, then k, then v: q and k normalised by head and rotated in
// their first 2 * ROTATED dimensions, and v, each as [head, token, dimension]. A simdgroup makes one head of one token.
uint tokens = projected_shape[1];
uint lane = thread_index_in_simdgroup;
uint head = threadgroup_position_in_grid.x; // of q, then of k, then of v
uint token = threadgroup_position_in_grid.y;
bool is_query = head < uint(H);
bool is_key = !is_query && head < uint(H + G);
uint width = projected_shape[2];
uint at = token * width + (is_query ? head * 2 * D : 2 * H * D + (head - H) * D);

float value[D / 32];
float squares = 0;
for (int i = 0; i < D / 32; i++) {
  value[i] = float(projected[at + i * 32 + lane]);
  squares = fma(value[i], value[i], squares);
}
float inverse = 1 / metal::precise::sqrt(simd_sum(squares) / D + EPS);
if (is_query || is_key) {
  for (int i = 0; i < D / 32; i++) {
    value[i] *= inverse * float(is_query ? q_norm[i * 32 + lane] : k_norm[i * 32 + lane]);
  }
  float turned[D / 32];
  for (int i = 0; i < D / 32; i++) {
    uint d = i * 32 + lane;
    bool second = d >= uint(ROTATED);
    uint other = second ? d - ROTATED : d + ROTATED; // its partner, where it is rotated
    turned[i] = value[i];
    float partner = 0;
    for (int j = 0; j < D / 32; j++) {
      float brought = simd_shuffle(value[j], other % 32);
      partner = other / 32 == uint(j) ? brought : partner;
    }
    if (d < uint(2 * ROTATED)) {
      float angle = float(offset[0] + int(token)) * frequencies[second ? d - ROTATED : d];
      float c = metal::precise::cos(angle);
      float s = metal::precise::sin(angle);
      turned[i] = second ? fma(partner, s, value[i] * c) : fma(-partner, s, value[i] * c);
    }
  }
  for (int i = 0; i < D / 32; i++) {
    value[i] = turned[i];
  }
}
for (int i = 0; i < D / 32; i++) {
  uint d = i * 32 + lane;
  if (is_query) {
    queries[(head * tokens + token) * D + d] = X(value[i]);
  } else if (is_key) {
    keys[((head - H) * tokens + token) * D + d] = X(value[i]);
  } else {
    values[((head - H - G) * tokens + token) * D + d] = X(value[i]);
  }
}

#include "matrix.h"

// A Gated DeltaNet layer between its projections: the causal convolution, the normalisation of q and k, the gated delta rule
// and the gated normalisation of its output. A threadgroup takes one value head of one sequence through all its tokens, with
// DV / SIMDGROUPS rows of the state in each simdgroup's registers.
//
// `projected` holds for each token q, k, v, z, b and a. INTERLEAVED: in two pieces by key head, q k v z of each, then b a of
// each (Qwen3-Next); else each by head in the order q k v z b a (Qwen3.5).
constexpr int RATIO = HV / HK;
constexpr int KEYS = HK * DK;
constexpr int CHANNELS = 2 * KEYS + HV * DV;
constexpr int WIDTH = CHANNELS + HV * DV + 2 * HV;
constexpr int MINE = 2 * DK + DV; // channels of this head: q, k, v
constexpr int OWNED = DV / SIMDGROUPS;
constexpr int HELD = DK / 32;

threadgroup float values[ROWS * MINE];
threadgroup float decay[ROWS];
threadgroup float beta[ROWS];

uint head = threadgroup_position_in_grid.x;
uint sequence = threadgroup_position_in_grid.y;
uint tokens = projected_shape[1];
uint key_head = head / RATIO;
uint inside = head % RATIO;
uint index = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
auto rows = projected + size_t(sequence) * tokens * WIDTH;
auto before = tail + sequence * (TAPS - 1) * CHANNELS;
auto after = new_tail + sequence * (TAPS - 1) * CHANNELS;

constexpr int PIECE = 2 * DK + 2 * RATIO * DV; // of a key head, interleaved
uint z_at = INTERLEAVED ? key_head * PIECE + 2 * DK + RATIO * DV + inside * DV : CHANNELS + head * DV;
uint b_at = INTERLEAVED ? CHANNELS + HV * DV + key_head * 2 * RATIO + inside : CHANNELS + HV * DV + head;
uint a_at = INTERLEAVED ? b_at + RATIO : b_at + HV;

// Read before anything is waited for.
size_t place = (size_t(sequence) * HV + head) * DV * DK;
float memory[OWNED * HELD];
for (int row = 0; row < OWNED; row++) {
  for (int i = 0; i < HELD; i++) {
    memory[row * HELD + i] = state[place + (simdgroup * OWNED + row) * DK + i * 32 + lane];
  }
}

for (uint c = index; c < uint(MINE); c += 32 * SIMDGROUPS) {
  bool is_value = c >= uint(2 * DK);
  uint channel = is_value ? 2 * KEYS + head * DV + (c - 2 * DK) : c < uint(DK) ? key_head * DK + c
                                                                              : KEYS + key_head * DK + (c - DK);
  uint at = !INTERLEAVED ? channel : is_value ? key_head * PIECE + 2 * DK + inside * DV + (c - 2 * DK)
                                              : key_head * PIECE + c;
  float seen[TAPS]; // the inputs under the convolution
  for (int j = 0; j < TAPS - 1; j++) {
    seen[j + 1] = float(before[j * CHANNELS + channel]);
  }
  for (uint t = 0; t < tokens; t++) {
    float sum = 0;
    for (int j = 0; j < TAPS - 1; j++) {
      seen[j] = seen[j + 1];
      sum = fma(seen[j], float(conv[channel * TAPS + j]), sum);
    }
    seen[TAPS - 1] = float(rows[t * WIDTH + at]);
    sum = fma(seen[TAPS - 1], float(conv[channel * TAPS + TAPS - 1]), sum);
    values[t * MINE + c] = silu(sum);
  }
  if (is_value || inside == 0) { // one of the heads that share a key head writes its channels
    for (int j = 0; j < TAPS - 1; j++) {
      after[j * CHANNELS + channel] = X(seen[j + 1]);
    }
  }
}
if (index < tokens) {
  float x = float(rows[index * WIDTH + a_at]) + float(dt_bias[head]);
  float softplus = max(x, 0.0f) + metal::precise::log(1 + metal::precise::exp(-fabs(x)));
  decay[index] = metal::precise::exp(-metal::precise::exp(float(A_log[head])) * softplus);
  beta[index] = sigmoid(float(rows[index * WIDTH + b_at]));
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint job = simdgroup; job < 2 * tokens; job += SIMDGROUPS) { // q and k of each token
  uint at = job / 2 * MINE + job % 2 * DK;
  float squares = 0;
  for (int i = 0; i < HELD; i++) {
    float v = values[at + i * 32 + lane];
    squares = fma(v, v, squares);
  }
  float root = metal::precise::sqrt(simd_sum(squares) + 1e-6f);
  float scale = job % 2 == 0 ? 1 / (root * metal::precise::sqrt(float(DK))) : 1 / root; // q has the scale of the readout
  for (int i = 0; i < HELD; i++) {
    values[at + i * 32 + lane] *= scale;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint t = 0; t < tokens; t++) {
  float q[HELD];
  float k[HELD];
  for (int i = 0; i < HELD; i++) {
    q[i] = values[t * MINE + i * 32 + lane];
    k[i] = values[t * MINE + DK + i * 32 + lane];
  }
  for (int row = 0; row < OWNED; row++) {
    uint at = t * MINE + 2 * DK + simdgroup * OWNED + row;
    float recalled = 0;
    for (int i = 0; i < HELD; i++) {
      memory[row * HELD + i] *= decay[t];
      recalled = fma(memory[row * HELD + i], k[i], recalled);
    }
    float delta = (values[at] - simd_sum(recalled)) * beta[t];
    float out = 0;
    for (int i = 0; i < HELD; i++) {
      memory[row * HELD + i] = fma(k[i], delta, memory[row * HELD + i]);
      out = fma(memory[row * HELD + i], q[i], out);
    }
    out = simd_sum(out); // to which every lane brings what it has made of v, whose place the output takes
    if (lane == 0) {
      values[at] = out;
    }
  }
}
for (int row = 0; row < OWNED; row++) {
  for (int i = 0; i < HELD; i++) {
    new_state[place + (simdgroup * OWNED + row) * DK + i * 32 + lane] = memory[row * HELD + i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint t = simdgroup; t < tokens; t += SIMDGROUPS) {
  uint at = t * MINE + 2 * DK;
  float squares = 0;
  for (uint i = lane; i < uint(DV); i += 32) {
    squares = fma(values[at + i], values[at + i], squares);
  }
  float inverse = 1 / metal::precise::sqrt(simd_sum(squares) / DV + EPS);
  for (uint i = lane; i < uint(DV); i += 32) {
    float gate = silu(float(rows[t * WIDTH + z_at + i]));
    y[((size_t(sequence) * tokens + t) * HV + head) * DV + i] = X(values[at + i] * inverse * float(norm[i]) * gate);
  }
}

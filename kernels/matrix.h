// A few rows of activations times a matrix whose rows are the outputs, as MLX stores them: dense, or affine with 32 / BITS
// values in a word. What comes out for a row does not depend on how many rows there are: a lane adds the same columns in the
// same order, so that a window gives the bits of as many plain steps.
//
// Pointers are template parameters because MLX binds an input of fewer than 8 elements to another address space.

template <int ROWS, int OUT>
struct Products {
  float of[ROWS * OUT]; // row * OUT + output
};

// The first or the second of two pointers; of different types, always the second.
template <typename P>
METAL_FUNC P pick(bool first, P a, P b) {
  return first ? a : b;
}

template <typename A, typename B>
METAL_FUNC B pick(bool, A, B b) {
  return b;
}

// Outputs `first` to first + OUT - 1 of `outputs`, by one simdgroup; those past the last repeat it. NORM: rows are RMS
// normalised first, with weights `norm`: since the lanes see all of a row, its sum of squares costs no pass of its own.
// BITS is 0 for a dense matrix.
template <
    int BITS, int GROUP, int ROWS, int OUT, bool NORM,
    typename Weight, typename Scales, typename Biases, typename X, typename Norm>
METAL_FUNC Products<ROWS, OUT> multiply(
    Weight weight, Scales scales, Biases biases, uint columns, uint first, uint outputs,
    X x, uint rows, Norm norm, float eps, uint lane) {
  constexpr int WIDE = BITS > 0 ? 32 / (BITS > 0 ? BITS : 1) : 4; // columns that a lane takes at a time
  constexpr uint MASK = (1u << BITS % 32) - 1;

  Products<ROWS, OUT> sums = {};
  float squares[ROWS] = {};
  for (uint k = lane * WIDE; k < columns; k += 32 * WIDE) {
    float value[ROWS * WIDE];
    float total[ROWS];
    for (int r = 0; r < ROWS; r++) {
      uint at = min(uint(r), rows - 1) * columns + k;
      total[r] = 0;
      for (int i = 0; i < WIDE; i++) {
        float v = float(x[at + i]);
        float w = NORM ? float(norm[k + i]) : 1;
        squares[r] = NORM ? fma(v, v, squares[r]) : 0;
        value[r * WIDE + i] = v * w;
        total[r] = fma(v, w, total[r]); // no compiler is left to choose whether it fuses
      }
    }
    for (int o = 0; o < OUT; o++) {
      uint row = min(first + o, outputs - 1);
      if (BITS > 0) {
        uint word = uint(weight[row * (columns / WIDE) + k / WIDE]);
        uint group = row * (columns / GROUP) + k / GROUP;
        float scale = float(scales[group]);
        float bias = float(biases[group]);
        for (int r = 0; r < ROWS; r++) {
          float dot = 0;
          for (int i = 0; i < WIDE; i++) {
            dot = fma(float(word >> (i * BITS) & MASK), value[r * WIDE + i], dot);
          }
          float sum = fma(bias, total[r], sums.of[r * OUT + o]);
          sums.of[r * OUT + o] = fma(scale, dot, sum);
        }
      } else {
        for (int i = 0; i < WIDE; i++) {
          float w = float(weight[row * columns + k + i]);
          for (int r = 0; r < ROWS; r++) {
            sums.of[r * OUT + o] = fma(w, value[r * WIDE + i], sums.of[r * OUT + o]);
          }
        }
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    float inverse = NORM ? 1 / metal::precise::sqrt(simd_sum(squares[r]) / columns + eps) : 1;
    for (int o = 0; o < OUT; o++) {
      float sum = simd_sum(sums.of[r * OUT + o]);
      sums.of[r * OUT + o] = NORM ? sum * inverse : sum;
    }
  }
  return sums;
}

METAL_FUNC float sigmoid(float x) {
  return 1 / (1 + metal::precise::exp(-x));
}

METAL_FUNC float silu(float x) {
  return x * sigmoid(x);
}

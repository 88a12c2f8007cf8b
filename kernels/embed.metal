// Rows of an affine embedding, BITS bits a value. A threadgroup makes one row.
uint words = weight_shape[1];
uint row = threadgroup_position_in_grid.x;
size_t token = tokens[row];
constexpr uint WIDE = 32 / BITS;

for (uint w = thread_position_in_threadgroup.x; w < words; w += threads_per_threadgroup.x) {
  uint word = uint(weight[token * words + w]);
  size_t group = (token * words + w) * WIDE / GROUP;
  for (uint i = 0; i < WIDE; i++) {
    float value = fma(float(scales[group]), float(word >> i * BITS & ((1u << BITS) - 1)), float(biases[group]));
    y[(row * words + w) * WIDE + i] = Y(value);
  }
}

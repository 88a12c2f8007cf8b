// Word `at` of a slot's field, of SIZE words, if it has that many. Not on Metal, where a pointer's type names its address
// space, and where slots need no such copies.
template <int SIZE, typename Field>
METAL_FUNC void put(Field field, size_t slot, uint at, uint value) {
  if (at < uint(SIZE)) {
    ((uint*)field)[slot * SIZE + at] = value;
  }
}

// One query and a chunk of the keys that it sees: what a softmax over all chunks needs of each.

struct Share {
  float top; // the largest score, -infinity where no key of the chunk is seen
  float total; // of the exponentials, relative to it
};

// The weight with which a chunk enters, and 0 for one that saw nothing.
METAL_FUNC float share_weight(float top, float highest) {
  return top == -INFINITY ? 0 : metal::precise::exp(top - highest);
}

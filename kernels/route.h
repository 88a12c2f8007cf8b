// Routing, one simdgroup per row: the lane with index `lane` holds experts lane, lane + 32, lane + 64, ...
// Pointers are template parameters because MLX binds an input of fewer than 8 elements to another address space.

enum Router { SOFTMAX, SIGMOID };

struct Pick {
  uint id;
  float weight;
};

// A float's bits so rearranged that unsigned order is float order. Never 0 for a number, so 0 marks "no candidate".
METAL_FUNC uint order_key(float x) {
  uint bits = as_type<uint>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Of N_GROUP equal groups of experts, those TOPK_GROUP whose two best scores have the largest sums, as a bit each.
template <int E, int N_GROUP, int TOPK_GROUP, typename Scores>
METAL_FUNC uint best_groups(Scores p, Scores added, uint lane) {
  constexpr int SIZE = E / N_GROUP;

  float value = 0; // lane g holds the value of group g
  for (uint g = 0; g < uint(N_GROUP); g++) {
    float first = -INFINITY;
    float second = -INFINITY;
    for (int i = 0; i < (E + 31) / 32; i++) {
      float score = (i * 32 + lane) / SIZE == g ? p[i] + added[i] : -INFINITY;
      second = max(second, min(first, score));
      first = max(first, score);
    }
    float best = simd_max(first);
    uint holder = simd_min(first == best ? lane : 32u);
    float next = simd_max(lane == holder ? second : first);
    value = lane == g ? best + (SIZE > 1 ? next : 0) : value;
  }

  uint kept = 0;
  for (int pick = 0; pick < TOPK_GROUP; pick++) {
    uint key = lane < uint(N_GROUP) && !(kept >> lane & 1) ? order_key(value) : 0;
    uint winner = simd_max(key);
    kept |= 1u << simd_min(key == winner ? lane : 32u);
  }
  return kept;
}

// The K experts of one row: lane r < K returns the expert of rank r and its weight.
//
// `table` holds the row's K factors, then their K inverses. When rank r is picked, a resident's score is its probability
// times factors[r]; its probability is recovered as that score times inverses[r]. The rule behind the numbers stands in
// strata_mlx/routing/policy.py alone. A selection bias is added to scores for the choice and never reaches the weights;
// experts of groups that are left out come after all others. The router's own scores decide which groups those are.
template <
    int E, int K, int ROUTER, bool NORM, bool HAS_RESIDENCY, bool HAS_BIAS, int N_GROUP, int TOPK_GROUP,
    typename Logits, typename Resident, typename Table, typename Bias>
METAL_FUNC Pick select_row(Logits logits, Resident resident, Table table, Bias bias, float scale, uint lane) {
  constexpr int SLOTS = (E + 31) / 32;
  constexpr float LOWEST = -FLT_MAX;
  constexpr float LEAST_SUM = 1.0f / 16384;

  // All that is read is read here, so that its latency is paid once. Per slot: the logit, later the probability; whether
  // it can still be picked; whether it is favoured; what is added for the choice. Infinite logits are the extreme finite
  // ones. NaN is the lowest, and so are the slots past the last expert.
  float p[SLOTS];
  uint left = 0;
  uint favoured = 0;
  float added[SLOTS];
  float top = LOWEST;
  for (int i = 0; i < SLOTS; i++) {
    uint e = i * 32 + lane;
    bool exists = e < uint(E);
    float x = exists ? float(logits[e]) : LOWEST;
    p[i] = isnan(x) ? LOWEST : max(LOWEST, min(x, FLT_MAX));
    top = max(top, p[i]);
    left |= uint(exists) << i;
    favoured |= uint(HAS_RESIDENCY && exists && float(resident[e]) != 0) << i;
    added[i] = HAS_BIAS && exists ? float(bias[e]) : 0;
  }
  float entry = HAS_RESIDENCY && lane < uint(2 * K) ? float(table[lane]) : 1; // 2 * K <= 32
  top = simd_max(top);

  if (ROUTER == SOFTMAX) {
    // The largest terms are exactly 1. Counted apart and the others added in pairs, no small term is lost beside a large.
    float part[SLOTS];
    uint ones = 0;
    for (int i = 0; i < SLOTS; i++) {
      p[i] = metal::precise::exp(p[i] - top);
      part[i] = p[i] < 1 ? p[i] : 0;
      ones += p[i] == 1;
    }
    for (int step = 1; step < SLOTS; step *= 2) {
      for (int i = 0; i + step < SLOTS; i += 2 * step) {
        part[i] += part[i + step];
      }
    }
    float total = simd_sum(part[0]) + simd_sum(ones);
    for (int i = 0; i < SLOTS; i++) {
      p[i] /= total;
    }
  } else {
    for (int i = 0; i < SLOTS; i++) {
      p[i] = 1 / (1 + metal::precise::exp(-p[i]));
    }
  }

  bool silent = top == LOWEST; // no logit says anything: the experts share the row, whatever is resident
  favoured = silent ? 0 : favoured;
  for (int i = 0; i < SLOTS; i++) {
    p[i] = silent ? 1.0f / E : p[i] < FLT_MIN ? 0 : p[i]; // some GPUs flush subnormal numbers, so all count as 0
    added[i] = silent ? 0 : added[i];
  }
  if (N_GROUP > 1 && !silent) {
    uint kept = best_groups<E, N_GROUP, TOPK_GROUP>(p, added, lane);
    for (int i = 0; i < SLOTS; i++) {
      added[i] = kept >> (i * 32 + lane) / (E / N_GROUP) & 1 ? added[i] : -INFINITY;
    }
  }

  Pick pick = {0, 0};
  for (int rank = 0; rank < K; rank++) {
    float factor = HAS_RESIDENCY ? simd_shuffle(entry, rank) : 1;
    float inverse = HAS_RESIDENCY ? simd_shuffle(entry, K + rank) : 1;
    uint best = 0;
    uint slot = 0;
    float score = 0;
    for (int i = 0; i < SLOTS; i++) {
      float candidate = favoured >> i & 1 ? p[i] * factor : p[i];
      uint key = order_key(HAS_BIAS || N_GROUP > 1 ? candidate + added[i] : candidate);
      if ((left >> i & 1) && key > best) { // strictly: the lowest id wins a tie
        best = key;
        slot = i;
        score = candidate;
      }
    }
    uint winner = simd_max(best);
    uint id = simd_min(best == winner ? slot * 32 + lane : 0xffffffffu);
    float weight = simd_shuffle(favoured >> slot & 1 ? score * inverse : score, id % 32);

    left &= id % 32 == lane ? ~(1u << id / 32) : 0xffffffffu;
    if (lane == uint(rank)) {
      pick = {id, weight};
    }
  }
  if (NORM) {
    pick.weight /= max(simd_sum(pick.weight), LEAST_SUM);
  }
  pick.weight *= scale;
  return pick;
}

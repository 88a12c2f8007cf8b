// The group plan of a window.

struct Scan {
  uint before;
  uint total;
};

// Sums `value` over the threads before this one, and over all of them. `partial` has one place per simdgroup.
template <int SIMDGROUPS, typename Partial>
METAL_FUNC Scan scan_threads(uint value, Partial partial, uint lane, uint simdgroup) {
  uint before = simd_prefix_exclusive_sum(value);
  if (lane == 31) {
    partial[simdgroup] = before + value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Scan scan = {before, 0};
  for (int g = 0; g < SIMDGROUPS; g++) {
    scan.before += uint(g) < simdgroup ? partial[g] : 0;
    scan.total += partial[g];
  }
  return scan;
}

// Groups the `n` entries of `ids` (entry = token * K + rank) by expert, with the whole threadgroup.
//
// The plan is one array, since each output of a launch costs the host time: the experts of the G = min(E, n) groups, their
// offsets, their counts, the n entries, and how many groups are used. Groups ascend by expert; with SPLIT the residents' come
// first. Entries ascend inside a group. Groups past the last one are empty: expert 0, offset n, count 0.
//
// Each thread owns a run of experts, so a sum over the threads before it is a sum over lower experts. `partial` has
// 4 * THREADS / 32 places.
template <int E, int THREADS, bool SPLIT, typename Ids, typename Resident, typename Partial, typename Plan>
METAL_FUNC void plan_groups(Ids ids, uint n, Resident resident, Partial partial, uint index, Plan plan) {
  uint size = min(uint(E), n);
  Plan experts = plan;
  Plan offsets = plan + size;
  Plan counts = plan + 2 * size;
  Plan entries = plan + 3 * size;
  constexpr int OWNED = (E + THREADS - 1) / THREADS;
  constexpr int SIMDGROUPS = THREADS / 32;
  uint first = index * OWNED;

  uint tally[OWNED] = {};
  for (uint j = 0; j < n; j++) {
    for (int i = 0; i < OWNED; i++) {
      tally[i] += ids[j] == first + i;
    }
  }

  uint next[OWNED] = {};
  uint groups = 0;
  uint placed = 0;
  for (int part = 0; part < (SPLIT ? 2 : 1); part++) {
    uint mine = 0;
    uint my_groups = 0;
    uint my_entries = 0;
    for (int i = 0; i < OWNED; i++) {
      if (tally[i] > 0 && (!SPLIT || (resident[first + i] != 0) == (part == 0))) {
        mine |= 1u << i;
        my_groups += 1;
        my_entries += tally[i];
      }
    }
    Scan group = scan_threads<SIMDGROUPS>(my_groups, partial + 2 * part * SIMDGROUPS, index % 32, index / 32);
    Scan entry = scan_threads<SIMDGROUPS>(my_entries, partial + (2 * part + 1) * SIMDGROUPS, index % 32, index / 32);
    uint g = groups + group.before;
    uint offset = placed + entry.before;
    for (int i = 0; i < OWNED; i++) {
      if (mine >> i & 1) {
        experts[g] = first + i;
        offsets[g] = offset;
        counts[g] = tally[i];
        next[i] = offset;
        offset += tally[i];
        g += 1;
      }
    }
    groups += group.total;
    placed += entry.total;
  }

  for (uint j = 0; j < n; j++) {
    for (int i = 0; i < OWNED; i++) {
      if (ids[j] == first + i) {
        entries[next[i]] = j;
        next[i] += 1;
      }
    }
  }

  for (uint g = groups + index; g < size; g += THREADS) {
    experts[g] = 0;
    offsets[g] = n;
    counts[g] = 0;
  }
  if (index == 0) {
    entries[n] = groups;
  }
}

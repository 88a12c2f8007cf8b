// The launch floor of benchmarks/route_kernel.py.
if (thread_index_in_simdgroup == 0) {
  weights[threadgroup_position_in_grid.x] = 0;
}

// The sanitised build is a program of its own: reads one launch from standard input, writes the outputs to standard
// output. Buffers have their exact size, so that the address sanitiser sees every step beyond them.

#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" const machine::Kernel strata_host_kernel;

namespace {

void read(void* to, size_t bytes) {
  if (bytes && std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

template <typename T>
std::vector<T> read_list(size_t count) {
  std::vector<T> list(count);
  read(list.data(), count * sizeof(T));
  return list;
}

} // namespace

int main() {
  // seed, grid, threadgroup, counts; per input: ndim, shape, strides; per buffer: bytes, content
  auto head = read_list<int64_t>(9);
  size_t inputs = size_t(head[7]);
  size_t outputs = size_t(head[8]);
  std::vector<std::vector<int32_t>> shapes;
  std::vector<std::vector<int64_t>> strides;
  std::vector<int32_t> ndims;
  for (size_t i = 0; i < inputs; i++) {
    size_t ndim = size_t(read_list<int64_t>(1)[0]);
    ndims.push_back(int32_t(ndim));
    shapes.push_back(read_list<int32_t>(ndim));
    strides.push_back(read_list<int64_t>(ndim));
  }
  std::vector<void*> buffers;
  std::vector<uint64_t> sizes;
  for (size_t i = 0; i < inputs + outputs; i++) {
    sizes.push_back(read_list<uint64_t>(1)[0]);
    buffers.push_back(std::malloc(sizes.back()));
    read(buffers.back(), sizes.back());
  }
  std::vector<const int32_t*> shape_list;
  std::vector<const int64_t*> stride_list;
  for (size_t i = 0; i < inputs; i++) {
    shape_list.push_back(shapes[i].data());
    stride_list.push_back(strides[i].data());
  }
  machine::Launch launch = {
      head[0],
      {uint32_t(head[1]), uint32_t(head[2]), uint32_t(head[3])},
      {uint32_t(head[4]), uint32_t(head[5]), uint32_t(head[6])},
      buffers.data(),
      nullptr,
      sizes.data(),
      inputs,
      buffers.size(),
      shape_list.data(),
      stride_list.data(),
      ndims.data()};
  char error[4096];
  if (run_kernel(&strata_host_kernel, &launch, error, sizeof error)) {
    std::fputs(error, stderr);
    return 2;
  }
  for (size_t i = inputs; i < inputs + outputs; i++) {
    if (sizes[i]) std::fwrite(buffers[i], 1, sizes[i], stdout);
  }
  return 0;
}

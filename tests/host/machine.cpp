#include "machine.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace machine {
namespace {

constexpr size_t STACK_BYTES = 256 * 1024; // touched pages only are ever backed by memory
constexpr size_t GUARD_BYTES = 64 * 1024;

enum class State { Runnable, Waiting, Returned };

// Somewhere that control can go to. After its start a fiber changes by _longjmp, which spares the system call that
// swapcontext makes each time; the sanitiser follows swapcontext alone.
struct Context {
  ucontext_t context;
  jmp_buf jump;
  void* stack = nullptr;
  size_t stack_bytes = 0;
};

struct Thread : Context {
  State state = State::Returned;
  Site site{};
  Position at{};
};

struct Machine {
  Context home;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Simdgroup> simdgroups;
  std::vector<Thread*> runnable;
  const Kernel* kernel = nullptr;
  const Launch* launch = nullptr;
  Thread* current = nullptr;
  uint32_t size = 0;       // threads of this threadgroup
  uint32_t at_barrier = 0;
  uint32_t returned = 0;
  uint64_t random = 0;
  bool shuffled = false;
  std::string failure;
};

Machine* self = nullptr;

void change(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(nullptr, to.stack, to.stack_bytes);
  swapcontext(&from.context, &to.context);
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
#else
  if (!_setjmp(from.jump)) _longjmp(to.jump, 1);
#endif
}

uint32_t draw(uint32_t bound) {
  // xorshift64*
  uint64_t& x = self->random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return uint32_t((x * 0x2545f4914f6cdd1dULL >> 32) * bound >> 32);
}

// Seed 0 runs threads in ascending order, which is the easiest to follow in a debugger.
void make_runnable(uint32_t first, uint32_t count) {
  for (uint32_t i = count; i-- > 0;) {
    Thread* thread = self->threads[first + i].get();
    if (thread->state == State::Returned) continue;
    thread->state = State::Runnable;
    self->runnable.push_back(thread);
  }
}

Context& next() {
  auto& runnable = self->runnable;
  if (runnable.empty() || !self->failure.empty()) return self->home;
  if (self->shuffled) std::swap(runnable[draw(uint32_t(runnable.size()))], runnable.back());
  self->current = runnable.back();
  runnable.pop_back();
  return *self->current;
}

void pause() {
  Thread& thread = *self->current;
  Context& to = next();
  if (&to != &thread) change(thread, to);
}

bool same(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.name, b.name) == 0 && std::strcmp(a.file, b.file) == 0;
}

std::string place(const Site& site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(site.name) + " (" + (slash ? slash + 1 : site.file) + ":" + std::to_string(site.line) + ")";
}

// "threads 0..15 wait at simd_sum (a.metal:3), threads 16..31 have returned"
std::string whereabouts() {
  std::string text;
  for (uint32_t i = 0; i < self->size;) {
    const Thread& thread = *self->threads[i];
    uint32_t end = i + 1;
    while (end < self->size) {
      const Thread& other = *self->threads[end];
      if (other.state != thread.state) break;
      if (thread.state == State::Waiting && !same(other.site, thread.site)) break;
      end++;
    }
    text += text.empty() ? "" : ", ";
    text += end == i + 1 ? "thread " + std::to_string(i) : "threads " + std::to_string(i) + ".." + std::to_string(end - 1);
    bool one = end == i + 1;
    if (thread.state == State::Waiting) text += (one ? " waits at " : " wait at ") + place(thread.site);
    if (thread.state == State::Returned) text += one ? " has returned" : " have returned";
    if (thread.state == State::Runnable) text += one ? " is on its way" : " are on their way";
    i = end;
  }
  return text;
}

void set_failure(const std::string& what) {
  if (!self->failure.empty()) return;
  uint3 group = self->threads[0]->at.threadgroup_position_in_grid;
  self->failure = std::string("kernel ") + self->kernel->name + ", threadgroup (" + std::to_string(group.x) + ", " +
      std::to_string(group.y) + ", " + std::to_string(group.z) + "): " + what + ": " + whereabouts();
}

void complete(uint32_t group_index) {
  Simdgroup& group = self->simdgroups[group_index];
  if (group.complete) group.complete(group);
  group.arrived = 0;
  make_runnable(group_index * 32, self->size - group_index * 32 < 32 ? self->size - group_index * 32 : 32);
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!self->home.stack) {
    self->home.stack = const_cast<void*>(bottom);
    self->home.stack_bytes = bytes;
  }
#endif
  for (;;) {
    self->kernel->run_thread(*self->launch, self->current->at);
    Thread& thread = *self->current;
    thread.state = State::Returned;
    self->returned++;
    uint32_t index = thread.at.simdgroup_index_in_threadgroup;
    Simdgroup& group = self->simdgroups[index];
    group.alive &= ~(1u << thread.at.thread_index_in_simdgroup);
    if (group.arrived && group.arrived == group.alive) complete(index);
    pause();
  }
}

Thread* made = nullptr;

void fiber_start() {
#if !defined(__SANITIZE_ADDRESS__)
  if (!_setjmp(made->jump)) setcontext(&self->home.context); // from now on reached by _longjmp
#endif
  fiber_main();
}

void prepare(Thread& thread) {
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack;
  thread.context.uc_stack.ss_size = thread.stack_bytes;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, fiber_start, 0);
#if !defined(__SANITIZE_ADDRESS__)
  made = &thread;
  swapcontext(&self->home.context, &thread.context);
#endif
}

void require_threads(uint32_t count) {
  while (self->threads.size() < count) {
    auto thread = std::make_unique<Thread>();
    void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("mmap");
      std::abort();
    }
    mprotect(memory, GUARD_BYTES, PROT_NONE); // stacks grow down: an overflow faults
    thread->stack = static_cast<char*>(memory) + GUARD_BYTES;
    thread->stack_bytes = STACK_BYTES;
    prepare(*thread);
    self->threads.push_back(std::move(thread));
  }
}

#if defined(__SANITIZE_ADDRESS__)
__attribute__((no_sanitize("address")))
#endif
void poison_threadgroup_memory(unsigned char pattern) {
  // By hand: memset is watched, and the sanitiser's red zones lie in between.
  for (volatile unsigned char* at = self->kernel->threadgroup_begin; at != self->kernel->threadgroup_end; at++) {
    *at = pattern;
  }
}

#if !defined(__SANITIZE_ADDRESS__)
// A buffer in memory of its own. Writes a little outside show on the canaries; beyond them there is nothing for as far as
// a 32-bit index reaches, so a wild access faults instead of spoiling the process.
class Guarded {
 public:
  Guarded(void* original, size_t bytes, bool read_only) : original_(original), bytes_(bytes) {
    pages_ = (bytes + 2 * CANARIES + 4095) / 4096 * 4096;
    void* memory = mmap(nullptr, BEFORE + pages_ + AFTER, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("mmap");
      std::abort();
    }
    region_ = static_cast<unsigned char*>(memory);
    mprotect(region_ + BEFORE, pages_, PROT_READ | PROT_WRITE);
    std::memset(region_ + BEFORE, CANARY, pages_);
    std::memcpy(data(), original, bytes);
    if (read_only) mprotect(region_ + BEFORE, pages_, PROT_READ);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() {
    munmap(region_, BEFORE + pages_ + AFTER);
  }

  unsigned char* data() const {
    return region_ + BEFORE + CANARIES;
  }
  void copy_back() const {
    std::memcpy(original_, data(), bytes_);
  }
  // Where a canary is dead: "before", "after", or null.
  const char* trespass() const {
    const unsigned char* begin = region_ + BEFORE;
    for (const unsigned char* at = begin; at != begin + pages_; at++) {
      if (at == data()) at += bytes_;
      if (at != begin + pages_ && *at != CANARY) return at < data() ? "before" : "after";
    }
    return nullptr;
  }

 private:
  static constexpr size_t BEFORE = size_t(1) << 33;
  static constexpr size_t AFTER = size_t(1) << 35;
  static constexpr size_t CANARIES = 256;
  static constexpr unsigned char CANARY = 0x5a;

  void* original_;
  size_t bytes_, pages_;
  unsigned char* region_;
};

// A wild access ends the launch with a message instead of the process. (The sanitiser has a better report.)
class FaultTrap {
 public:
  FaultTrap() {
    stack_t stack{};
    stack.ss_sp = memory_;
    stack.ss_size = sizeof memory_;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action{};
    action.sa_handler = [](int) {
      self->current->state = State::Runnable;
      set_failure("thread " + std::to_string(self->current->at.thread_index_in_threadgroup) +
                  " touched memory that is not there, or not its to write");
      _longjmp(self->home.jump, 1);
    };
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv_);
    sigaction(SIGBUS, &action, &old_bus_);
  }
  ~FaultTrap() {
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static inline unsigned char memory_[64 * 1024];
  stack_t old_stack_{};
  struct sigaction old_segv_{}, old_bus_{};
};
#else
struct FaultTrap {};
#endif

uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

// Runs one threadgroup to its end, or to a failure.
void run_threadgroup(uint3 group, uint3 groups, uint3 full) {
  const Launch& launch = *self->launch;
  uint3 grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
  uint3 origin = {group.x * full.x, group.y * full.y, group.z * full.z};
  // As with dispatch_threads, a threadgroup at the far edge of the grid is smaller.
  uint3 size = {least(full.x, grid.x - origin.x), least(full.y, grid.y - origin.y), least(full.z, grid.z - origin.z)};
  self->size = size.x * size.y * size.z;
  self->at_barrier = self->returned = 0;
  require_threads(self->size);
  uint32_t simdgroup_count = (self->size + 31) / 32;
  self->simdgroups.resize(simdgroup_count);
  for (uint32_t i = 0; i < simdgroup_count; i++) {
    uint32_t lanes = least(32, self->size - 32 * i);
    self->simdgroups[i].alive = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    self->simdgroups[i].arrived = 0;
  }
  for (uint32_t i = 0; i < self->size; i++) {
    uint3 place = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    Position at{};
    at.grid_size = at.threads_per_grid = grid;
    at.threadgroups_per_grid = groups;
    at.threadgroup_position_in_grid = group;
    at.threads_per_threadgroup = size;
    at.dispatch_threads_per_threadgroup = full;
    at.thread_position_in_threadgroup = place;
    at.thread_position_in_grid = {origin.x + place.x, origin.y + place.y, origin.z + place.z};
    at.thread_index_in_threadgroup = i;
    at.thread_index_in_simdgroup = i % 32;
    at.simdgroup_index_in_threadgroup = i / 32;
    at.simdgroups_per_threadgroup = simdgroup_count;
    at.dispatch_simdgroups_per_threadgroup = (full.x * full.y * full.z + 31) / 32;
    at.threads_per_simdgroup = at.thread_execution_width = 32;
    self->threads[i]->at = at;
    self->threads[i]->state = State::Runnable;
  }
  poison_threadgroup_memory(launch.seed % 2 ? 0xff : 0xa5);
  self->runnable.clear();
  make_runnable(0, self->size);
  change(self->home, next());
  if (self->returned < self->size) set_failure("threads wait for others that never come");
}

} // namespace

uint32_t lane() {
  return self->current->at.thread_index_in_simdgroup;
}

Simdgroup& simdgroup() {
  return self->simdgroups[self->current->at.simdgroup_index_in_threadgroup];
}

void fail(const char* what) {
  set_failure(what);
  change(*self->current, self->home);
  std::abort();
}

void meet(Site site) {
  Thread& thread = *self->current;
  Simdgroup& group = simdgroup();
  thread.state = State::Waiting;
  thread.site = site;
  if (group.arrived && !same(group.site, site)) fail("lanes of one simdgroup wait at different places");
  group.site = site;
  group.arrived |= 1u << lane();
  if (group.arrived == group.alive) complete(thread.at.simdgroup_index_in_threadgroup);
  pause();
}

void simdgroup_barrier(Site site) {
  simdgroup().complete = nullptr;
  meet(site);
}

void threadgroup_barrier(Site site) {
  Thread& thread = *self->current;
  thread.state = State::Waiting;
  thread.site = site;
  if (++self->at_barrier == self->size) {
    for (uint32_t i = 0; i < self->size; i++) {
      if (!same(self->threads[i]->site, site)) fail("threads of one threadgroup wait at different barriers");
    }
    self->at_barrier = 0;
    make_runnable(0, self->size);
  }
  pause();
}

} // namespace machine

namespace machine {
namespace {

// Whether all threadgroups came to their end.
bool run_threadgroups(const Launch& launch) {
  uint3 full = {least(launch.threadgroup[0], launch.grid[0]), least(launch.threadgroup[1], launch.grid[1]),
                least(launch.threadgroup[2], launch.grid[2])};
  uint3 groups = {(launch.grid[0] + full.x - 1) / full.x, (launch.grid[1] + full.y - 1) / full.y,
                  (launch.grid[2] + full.z - 1) / full.z};
  std::vector<uint32_t> order(size_t(groups.x) * groups.y * groups.z);
  for (uint32_t i = 0; i < order.size(); i++) {
    order[i] = i;
    if (self->shuffled) std::swap(order[i], order[draw(i + 1)]);
  }
  [[maybe_unused]] FaultTrap trap;
  for (uint32_t i : order) {
    run_threadgroup({i % groups.x, i / groups.x % groups.y, i / groups.x / groups.y}, groups, full);
    if (self->failure.empty()) continue;
    for (auto& thread : self->threads) prepare(*thread); // some are in the middle of a kernel
    return false;
  }
  return true;
}

} // namespace
} // namespace machine

extern "C" int run_kernel(const machine::Kernel* kernel, machine::Launch* launch, char* error, size_t error_bytes) {
  using namespace machine;
  static Machine instance;
  self = &instance;
  self->kernel = kernel;
  self->launch = launch;
  self->shuffled = launch->seed != 0;
  self->random = 0x9e3779b97f4a7c15ULL * uint64_t(launch->seed) | 1;
  self->failure.clear();

#if defined(__SANITIZE_ADDRESS__)
  run_threadgroups(*launch);
#else
  std::vector<std::unique_ptr<Guarded>> guarded;
  for (uint64_t i = 0; i < launch->buffer_count; i++) {
    guarded.push_back(std::make_unique<Guarded>(launch->buffers[i], launch->bytes[i], i < launch->input_count));
    launch->buffers[i] = guarded.back()->data();
  }
  if (run_threadgroups(*launch)) {
    for (uint64_t i = launch->input_count; i < launch->buffer_count; i++) {
      if (const char* where = guarded[i]->trespass()) {
        self->failure = std::string("kernel ") + kernel->name + ": wrote " + where + " the bounds of " + launch->names[i];
        break;
      }
      guarded[i]->copy_back();
    }
  }
#endif
  std::snprintf(error, error_bytes, "%s", self->failure.c_str());
  return self->failure.empty() ? 0 : 1;
}

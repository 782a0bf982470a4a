// The scheduler of the emulation, and the program around a kernel: `PROGRAM CALL RESULTS` runs one kernel call.
//
// CALL: int64 grid[3], threadgroup[3], order, number of buffers; then per buffer int64 bytes, int64 whether it is an
// output, and an input's content. RESULTS: the content of the outputs.
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "metal_emulation.h"

void run_kernel(void** buffers, const emulation::Position& position);  // made for each kernel

namespace emulation {

constexpr size_t STACK = 256 * 1024, THREADGROUP_LIMIT = 32 * 1024;

[[noreturn]] static void fail(const char* message) {
  std::fprintf(stderr, "metal emulation: %s\n", message);
  std::exit(3);
}

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool finished;
  size_t arrays;   // threadgroup arrays declared so far
  uint64_t trace;  // of the simdgroup functions called since the last barrier
};

struct Array {
  std::unique_ptr<char[]> data;
  size_t bytes;
};

unsigned current = 0;
static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<Array> arrays;
static std::vector<void*> places;
static Position position;

void* threadgroup_memory(size_t bytes) {
  const size_t number = fibers[current].arrays++;
  if (number == arrays.size()) {
    arrays.push_back({std::unique_ptr<char[]>(new char[bytes]), bytes});
    std::memset(arrays.back().data.get(), 0xff, bytes);  // NaN
    size_t total = 0;
    for (const Array& array : arrays) total += array.bytes;
    if (total > THREADGROUP_LIMIT) fail("a threadgroup uses more than 32 KB of threadgroup memory");
  }
  return arrays[number].data.get();
}

void barrier() { swapcontext(&fibers[current].context, &scheduler); }

bool leads(uint64_t function, const void* place, uint64_t detail) {
  uint64_t& trace = fibers[current].trace;
  for (uint64_t value : {function, uint64_t(reinterpret_cast<uintptr_t>(place)), detail}) {
    trace = (trace ^ value) * 0x100000001b3;
  }
  return current % SIMDGROUP == 0;
}

static void fiber_main() {
  run_kernel(places.data(), position);
  fibers[current].finished = true;
}

// `order` 0: threads in their order, 1: reversed, more: shuffled, anew after every barrier.
static void run_threadgroup(int order, std::mt19937& random) {
  arrays.clear();
  for (Fiber& fiber : fibers) {
    fiber.finished = false;
    fiber.arrays = fiber.trace = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, fiber_main, 0);
  }
  std::vector<size_t> turn(fibers.size());
  std::iota(turn.begin(), turn.end(), 0);
  if (order == 1) std::reverse(turn.begin(), turn.end());
  for (size_t finished = 0; finished < fibers.size();) {
    if (order > 1) std::shuffle(turn.begin(), turn.end(), random);
    finished = 0;
    for (size_t index : turn) {
      current = unsigned(index);
      swapcontext(&scheduler, &fibers[index].context);
      finished += fibers[index].finished;
    }
    if (finished != 0 && finished != fibers.size()) fail("some threads end while others wait at a barrier");
    for (size_t i = 0; i < fibers.size(); i++) {
      if (fibers[i].trace != fibers[i / SIMDGROUP * SIMDGROUP].trace) {
        fail("the threads of a simdgroup call different simdgroup functions");
      }
    }
    for (Fiber& fiber : fibers) fiber.trace = 0;
  }
}

}  // namespace emulation

using namespace emulation;

static void read(std::FILE* file, void* target, size_t bytes) {
  if (std::fread(target, 1, bytes, file) != bytes) fail("the call's file is too short");
}

int main(int, char** arguments) {
  std::FILE* file = std::fopen(arguments[1], "rb");
  if (!file) fail("cannot read the call");
  int64_t head[8], groups[3], threads = 1;
  read(file, head, sizeof head);
  std::vector<Array> buffers, outputs;
  for (int64_t i = 0; i < head[7]; i++) {
    int64_t about[2];
    read(file, about, sizeof about);
    Array buffer = {std::unique_ptr<char[]>(new char[about[0]]), size_t(about[0])};
    std::memset(buffer.data.get(), 0xff, buffer.bytes);  // NaN
    if (!about[1]) read(file, buffer.data.get(), buffer.bytes);
    places.push_back(buffer.data.get());
    (about[1] ? outputs : buffers).push_back(std::move(buffer));
  }
  std::fclose(file);
  for (int i = 0; i < 3; i++) {
    if (head[i] % head[3 + i]) fail("the grid, which counts threads, is not a multiple of the threadgroup");
    groups[i] = head[i] / head[3 + i];
    threads *= head[3 + i];
  }
  if (threads % SIMDGROUP || threads > 1024) fail("a threadgroup is not a multiple of 32 threads up to 1024");
  fibers = std::vector<Fiber>(threads);
  position.threadgroups_per_grid = {uint(groups[0]), uint(groups[1]), uint(groups[2])};
  std::mt19937 random(head[6]);
  const int64_t all = groups[0] * groups[1] * groups[2];
  for (int64_t number = 0; number < all; number++) {
    const int64_t g = head[6] == 1 ? all - 1 - number : number;
    position.threadgroup_position_in_grid = {
        uint(g % groups[0]), uint(g / groups[0] % groups[1]), uint(g / groups[0] / groups[1])};
    run_threadgroup(int(head[6]), random);
  }
  file = std::fopen(arguments[2], "wb");
  if (!file) fail("cannot write the results");
  for (const Array& output : outputs) {
    if (std::fwrite(output.data.get(), 1, output.bytes, file) != output.bytes) fail("cannot write the results");
  }
  std::fclose(file);
}

// The part of the Metal Shading Language that the kernels use, on a CPU, so that g++ compiles their text and runs it.
//
// Every thread of a threadgroup is a fiber. A fiber runs until it reaches a barrier, then the next one runs; all must
// reach the same number of barriers. Running the fibers in another order shows a missing barrier as another result.
// A simdgroup matrix lives in the first fiber of its simdgroup, which alone computes; the others only take part in the
// check that the whole simdgroup calls the same functions in the same order on the same places, between two barriers.
// Memory of threadgroups and outputs starts as NaN. All buffers have their exact size on the heap, where the address
// sanitizer sees an access outside of them.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Address spaces mean nothing here.
#define device
#define constant
#define thread
#define threadgroup

typedef unsigned int uint;
typedef unsigned long ulong;
struct uint3 {
  uint x, y, z;
};
struct ulong2 {
  ulong x, y;
  ulong2(ulong x, ulong y) : x(x), y(y) {}
};

// The 16-bit floats are only ever read.
struct bfloat16_t {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};
struct float16_t {
  uint16_t bits;
  explicit operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 0 ? ldexp(float(fraction), -24) : ldexp(float(fraction + 1024), exponent - 25);
    if (exponent == 31) value = fraction ? NAN : INFINITY;
    return bits >> 15 ? -value : value;
  }
};

namespace emulation {

constexpr unsigned SIMDGROUP = 32;

// What the kernel's thread that runs now may know and do; runner.cpp.
extern unsigned current;  // index in its threadgroup
void barrier();
void* threadgroup_memory(size_t bytes);                                             // see threadgroup_array
bool leads(uint64_t function, const void* place = nullptr, uint64_t detail = 0);    // see simdgroup functions

// A threadgroup's array of `count` elements, declared by each of its threads and shared by all.
template <typename T>
T* threadgroup_array(size_t count) {
  return static_cast<T*>(threadgroup_memory(count * sizeof(T)));
}

struct Position {
  uint3 threadgroup_position_in_grid, threadgroups_per_grid;
  uint thread_index_in_threadgroup() const { return current; }
  uint simdgroup_index_in_threadgroup() const { return current / SIMDGROUP; }
  uint thread_index_in_simdgroup() const { return current % SIMDGROUP; }
};

}  // namespace emulation

namespace metal {

namespace precise {
inline float exp(float x) { return expf(x); }
inline float tanh(float x) { return tanhf(x); }
}  // namespace precise

inline float max(float a, float b) { return fmaxf(a, b); }

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { emulation::barrier(); }

template <typename T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  T at[ROWS][COLUMNS];
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <typename T, int COLUMNS, int ROWS>
simdgroup_matrix<T, COLUMNS, ROWS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, COLUMNS, ROWS> result;
  if (emulation::leads(1)) {
    for (auto& row : result.at) {
      for (T& entry : row) entry = value;
    }
  }
  return result;
}

template <typename T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong row_length = 8,
                    ulong2 origin = ulong2(0, 0), bool transpose = false) {
  if (!emulation::leads(transpose ? 2 : 3, source + origin.y * row_length + origin.x, row_length)) return;
  for (int i = 0; i < 8; i++) {
    for (int j = 0; j < 8; j++) {
      (transpose ? matrix.at[j][i] : matrix.at[i][j]) = source[(origin.y + i) * row_length + origin.x + j];
    }
  }
}

template <typename T>
void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target, ulong row_length = 8,
                     ulong2 origin = ulong2(0, 0), bool transpose = false) {
  if (!emulation::leads(transpose ? 4 : 5, target + origin.y * row_length + origin.x, row_length)) return;
  for (int i = 0; i < 8; i++) {
    for (int j = 0; j < 8; j++) {
      target[(origin.y + i) * row_length + origin.x + j] = transpose ? matrix.at[j][i] : matrix.at[i][j];
    }
  }
}

// result = a b + c
template <typename T>
void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& result, const simdgroup_matrix<T, 8, 8>& a,
                                   const simdgroup_matrix<T, 8, 8>& b, const simdgroup_matrix<T, 8, 8>& c) {
  if (!emulation::leads(6)) return;
  simdgroup_matrix<T, 8, 8> sum = c;
  for (int i = 0; i < 8; i++) {
    for (int k = 0; k < 8; k++) {
      for (int j = 0; j < 8; j++) sum.at[i][j] += a.at[i][k] * b.at[k][j];
    }
  }
  result = sum;
}

}  // namespace metal

using namespace metal;

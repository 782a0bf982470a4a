"""Metal text of the flash linear cross-entropy kernels; `flash_metal` says what they compute and calls them.

Conventions of `mx.fast.metal_kernel`: a body names its inputs and outputs, uses `NAME_shape` and Metal's thread
attributes freely, and MLX writes the function's signature around it. An input of fewer than 8 elements arrives in the
constant address space, every other one in device memory, so the types of pointers to inputs are always deduced.

A threadgroup is 4 simdgroups of 32 threads. It computes tiles of 64 x 64 results in float32; each simdgroup owns one
quarter of a tile as 4 x 4 simdgroup matrices. Both operands pass through threadgroup memory, 16 columns at a time.
"""

from __future__ import annotations

THREADS = 128
TILE = 64

HEADER = """
#include <metal_simdgroup_matrix>

#define UNROLL _Pragma("clang loop unroll(full)")  // matrices indexed in loops stay in registers only when unrolled

static constant constexpr int TILE = 64;            // rows and columns of a tile of results
static constant constexpr int DEPTH = 16;           // length of the inner dimension staged at a time
static constant constexpr int NARROW = DEPTH + 4;   // row lengths in threadgroup memory, padded against bank conflicts
static constant constexpr int WIDE = TILE + 4;
static constant constexpr int RESULT = TILE + 2;
static constant constexpr float LOWEST = -3.0e38f;  // below every logit; finite, so that no difference is NaN

// A matrix [rows, columns] in full precision, read 8 consecutive entries of a row at a time.
template <typename Weight>
struct Dense {
  Weight weight;
  int columns;

  void load(int row, int column, thread float* values) const {
    const size_t first = size_t(row) * columns + column;
    UNROLL for (int i = 0; i < 8; i++) {
      values[i] = float(weight[first + i]);
    }
  }
};

template <typename Weight>
inline Dense<Weight> dense(Weight weight, int columns) {
  return Dense<Weight>{weight, columns};
}

// A matrix as mx.quantize packs it: entry = scale * q + bias, 32 / BITS values q per word, lowest bits first.
template <int BITS, int GROUP, typename Words, typename Scales, typename Biases>
struct Quantized {
  Words words;
  Scales scales;
  Biases biases;
  int columns;

  void load(int row, int column, thread float* values) const {
    const size_t group = size_t(row) * (columns / GROUP) + column / GROUP;
    const float scale = float(scales[group]);
    const float bias = float(biases[group]);
    const size_t first = size_t(row) * (columns / 32 * BITS) + column / 8 * (BITS / 4);
    UNROLL for (int w = 0; w < BITS / 4; w++) {
      const uint word = words[first + w];
      UNROLL for (int i = 0; i < 32 / BITS; i++) {
        values[w * (32 / BITS) + i] = scale * float((word >> (BITS * i)) & ((1u << BITS) - 1u)) + bias;
      }
    }
  }
};

template <int BITS, int GROUP, typename Words, typename Scales, typename Biases>
inline Quantized<BITS, GROUP, Words, Scales, Biases> quantized(Words words, Scales scales, Biases biases, int columns) {
  return Quantized<BITS, GROUP, Words, Scales, Biases>{words, scales, biases, columns};
}

// 8 entries of a row of a matrix into threadgroup memory, or zeros outside of it.
template <typename Matrix>
inline void stage(thread const Matrix& matrix, bool inside, int row, int column, threadgroup float* place) {
  float values[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  if (inside) {
    matrix.load(row, column, values);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    place[i] = values[i];
  }
}

// The 32 x 32 quarter of a tile that one simdgroup accumulates.
struct Quarter {
  simdgroup_float8x8 parts[16];
  int row;
  int column;

  void clear(uint owner) {
    row = int(owner / 2) * 32;
    column = int(owner % 2) * 32;
    UNROLL for (int i = 0; i < 16; i++) {
      parts[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  // += a b for staged a [64, 16] and b [16, 64], or TRANSPOSED: += a b^T for b [64, 16]
  template <bool TRANSPOSED>
  void add_product(const threadgroup float* a, const threadgroup float* b) {
    UNROLL for (int k = 0; k < DEPTH; k += 8) {
      simdgroup_float8x8 right[4];
      UNROLL for (int j = 0; j < 4; j++) {
        if (TRANSPOSED) {
          simdgroup_load(right[j], b + (column + 8 * j) * NARROW + k, NARROW, ulong2(0, 0), true);
        } else {
          simdgroup_load(right[j], b + k * WIDE + column + 8 * j, WIDE);
        }
      }
      UNROLL for (int i = 0; i < 4; i++) {
        simdgroup_float8x8 left;
        simdgroup_load(left, a + (row + 8 * i) * NARROW + k, NARROW);
        UNROLL for (int j = 0; j < 4; j++) {
          simdgroup_multiply_accumulate(parts[4 * i + j], left, right[j], parts[4 * i + j]);
        }
      }
    }
  }

  void store(threadgroup float* tile) {
    UNROLL for (int i = 0; i < 4; i++) {
      UNROLL for (int j = 0; j < 4; j++) {
        simdgroup_store(parts[4 * i + j], tile + (row + 8 * i) * RESULT + column + 8 * j, RESULT);
      }
    }
  }
};

// memory [64, RESULT] = the tile of h W^T at (row, entry); the staged operands use the same memory before.
// Ends with a barrier: every thread may read the tile.
template <typename Hidden, typename Matrix>
inline void product_tile(
    thread const Hidden& hidden, int row, int rows, thread const Matrix& matrix, int entry, int entries, int columns,
    threadgroup float* memory, uint index, uint owner) {
  Quarter quarter;
  quarter.clear(owner);
  const int line = int(index) / 2;
  const int offset = int(index) % 2 * 8;
  threadgroup float* a = memory;
  threadgroup float* b = memory + TILE * NARROW;
  for (int k = 0; k < columns; k += DEPTH) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what was here before has been read
    stage(hidden, row + line < rows, row + line, k + offset, a + line * NARROW + offset);
    stage(matrix, entry + line < entries, entry + line, k + offset, b + line * NARROW + offset);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    quarter.add_product<true>(a, b);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  quarter.store(memory);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// softcap * tanh(scale * z / softcap), or scale * z
template <bool SOFTCAP>
inline float logit(float z, float scale, float softcap) {
  return SOFTCAP ? softcap * metal::precise::tanh(scale * z / softcap) : scale * z;
}
"""

# How a body reads the weights: `columns` is H.
DENSE = "auto matrix = dense(weight, columns);"
QUANTIZED = "auto matrix = quantized<BITS, GROUP>(weight, scales, biases, columns);"

# Grid: blocks of the vocabulary, tiles of rows. Two threads share a row of a tile, one for its even and one for its odd
# columns; each keeps its own running maximum and sum, so 2 * blocks partial results per row are left to merge.
FORWARD = """
  threadgroup float memory[TILE * RESULT];
  const int rows = hidden_shape[0], columns = hidden_shape[1], entries = weight_shape[0];
  $MATRIX
  auto states = dense(hidden, columns);
  const int line = int(thread_index_in_threadgroup) / 2, parity = int(thread_index_in_threadgroup) % 2;
  const int row = int(threadgroup_position_in_grid.y) * TILE, mine = row + line;
  const int blocks = int(threadgroups_per_grid.x), block = int(threadgroup_position_in_grid.x);
  const int tiles = (entries + TILE - 1) / TILE;
  const int target = mine < rows ? int(targets[mine]) : -1;
  const float scale = scaling[0], softcap = scaling[1];

  float peak = LOWEST, total = 0.0f, picked = 0.0f;
  for (int tile = tiles * block / blocks; tile < tiles * (block + 1) / blocks; tile++) {
    product_tile(states, row, rows, matrix, tile * TILE, entries, columns, memory,
                 thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
    float new_peak = peak;
    for (int c = parity; c < TILE; c += 2) {
      const int entry = tile * TILE + c;
      if (entry < entries) {
        const float z = logit<SOFTCAP>(memory[line * RESULT + c]$BIAS, scale, softcap);
        memory[line * RESULT + c] = z;
        new_peak = metal::max(new_peak, z);
        if (entry == target) {
          picked = z;
        }
      }
    }
    total *= metal::precise::exp(peak - new_peak);
    for (int c = parity; c < TILE; c += 2) {
      if (tile * TILE + c < entries) {
        total += metal::precise::exp(memory[line * RESULT + c] - new_peak);
      }
    }
    peak = new_peak;
  }
  if (mine < rows) {
    const size_t place = size_t(2 * block + parity) * rows + mine;
    part_peak[place] = peak;
    part_total[place] = total;
    part_target[place] = picked;
  }
"""

# Grid: tiles of the vocabulary, tiles of rows. coefficients [rows, entries] = gradient at the raw products h W^T.
COEFFICIENTS = """
  threadgroup float memory[TILE * RESULT];
  const int rows = hidden_shape[0], columns = hidden_shape[1], entries = weight_shape[0];
  $MATRIX
  auto states = dense(hidden, columns);
  const int row = int(threadgroup_position_in_grid.y) * TILE, start = int(threadgroup_position_in_grid.x) * TILE;
  const float scale = scaling[0], softcap = scaling[1];
  product_tile(states, row, rows, matrix, start, entries, columns, memory,
               thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
  const int c = int(thread_index_in_threadgroup) % TILE, entry = start + c;
  for (int line = int(thread_index_in_threadgroup) / TILE; line < TILE; line += 2) {
    const int mine = row + line;
    if (mine < rows && entry < entries) {
      const float z = logit<SOFTCAP>(memory[line * RESULT + c]$BIAS, scale, softcap);
      const float onehot = entry == int(targets[mine]) ? 1.0f : 0.0f;
      const float probability = metal::precise::exp((z - peak[mine]) - log_sum[mine]);
      const float slope = SOFTCAP ? 1.0f - (z / softcap) * (z / softcap) : 1.0f;
      coefficients[size_t(mine) * entries + entry] = (onehot - probability) * cotangent[mine] * slope * scale;
    }
  }
"""

# Grid: tiles of the hidden dimension, tiles of rows. sum [rows, columns] = gradient + coefficients W.
ACCUMULATE = """
  threadgroup float memory[TILE * RESULT];
  const int rows = gradient_shape[0], columns = gradient_shape[1], entries = coefficients_shape[1];
  $MATRIX
  const int index = int(thread_index_in_threadgroup);
  const int row = int(threadgroup_position_in_grid.y) * TILE, column = int(threadgroup_position_in_grid.x) * TILE;
  const int line = index / 2, offset = index % 2 * 8;         // of the staged coefficients [64, 16]
  const int weight_line = index / 8, weight_offset = index % 8 * 8;  // of the staged weights [16, 64]
  threadgroup float* a = memory;
  threadgroup float* b = memory + TILE * NARROW;
  Quarter quarter;
  quarter.clear(simdgroup_index_in_threadgroup);
  for (int k = 0; k < entries; k += DEPTH) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < 8; i++) {
      const int entry = k + offset + i;
      const bool inside = row + line < rows && entry < entries;
      a[line * NARROW + offset + i] = inside ? coefficients[size_t(row + line) * entries + entry] : 0.0f;
    }
    stage(matrix, k + weight_line < entries && column + weight_offset < columns, k + weight_line,
          column + weight_offset, b + weight_line * WIDE + weight_offset);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    quarter.add_product<false>(a, b);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  quarter.store(memory);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int c = index % TILE;
  for (int out = index / TILE; out < TILE; out += 2) {
    if (row + out < rows && column + c < columns) {
      const size_t place = size_t(row + out) * columns + column + c;
      sum[place] = gradient[place] + memory[out * RESULT + c];
    }
  }
"""

"""CUDA source of the flash head's kernels: one tiled product in two roles, with its epilogues.

Both roles multiply a tile of rows, staged by asynchronous copies, with a tile of the projection that is dequantized on
its way into shared memory. Every 128-byte line of shared memory holds 64 numbers, its eight 16-byte chunks permuted by
chunk ^ (line % 8): free of bank conflicts, and the 128-byte swizzle that the matrix instructions of sm_90a expect.

    logits        rows of hidden [192, H] x rows of W [192, H]: both run along H, the summed dimension
    backproject   coefficients [192, range] x W [range, 192 columns of H]: W runs along the columns of the result

Thread layout of the accumulators, for both kinds of instructions: `accumulator[i][j][2 h + e]` is row `row_of(i, h)`
and column `first_column() + 8 j + 2 (lane % 4) + e` of the tile.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DEPTH = 64  # of the summed dimension in one pipeline stage
RANGES_IN_FLIGHT = 3  # coefficient buffers of the backward kernel
PARAMETERS = (
    "rows", "vocabulary", "columns", "vocabulary_tiles_per_part",  # of both kernels
    "row_tiles", "virtual_tiles", "range_tiles", "ranges", "steps", "tiles_per_item",  # of the backward kernel
)  # fmt: skip
_SCALE_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}


@dataclass(frozen=True)
class Options:
    """What is fixed when a kernel is compiled.

    Args:
        bits: 4 or 8, or 0 for a dense bfloat16 projection.
        group_size: numbers that share a scale and a bias (32, 64 or 128); ignored if dense.
        scale_type: of scales and biases: bfloat16, float16 or float32; ignored if dense.
        softcap: whether logits pass through softcap * tanh(z / softcap).
        bias: whether the projection has a bias [V].
        aligned: whether H is a multiple of 256, so that the scales of 256 numbers are one aligned load.
        wgmma: the warp-group instructions of sm_90a, else mma.sync (sm_80 and later).
        stages: tiles in flight in shared memory, 48 KiB each.
    """

    bits: int = 4
    group_size: int = 64
    scale_type: str = "bfloat16"
    softcap: bool = False
    bias: bool = False
    aligned: bool = True
    wgmma: bool = True
    stages: int = 4

    def __post_init__(self) -> None:
        allowed = {"bits": (0, 4, 8), "group_size": (32, 64, 128), "scale_type": tuple(_SCALE_TYPES)}
        allowed["stages"] = (4,) if self.wgmma else (2, 3, 4)
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)!r}")

    @property
    def rows(self) -> int:
        """Rows of a tile. A square tile needs the least dequantization and traffic for its size."""
        return 192 if self.wgmma else 128

    @property
    def columns(self) -> int:
        """Columns of a tile: vocabulary entries, or columns of the gradient."""
        return 192 if self.wgmma else 256

    @property
    def threads(self) -> int:
        return 384 if self.wgmma else 256

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory, with room to align it to the 1024 bytes that the swizzle repeats after."""
        return self.stages * (self.rows + self.columns) * DEPTH * 2 + 1024


def header(options: Options) -> str:
    """Device functions for these options."""
    defines = {
        "BITS": options.bits,
        "GROUP": options.group_size,
        "SCALE": _SCALE_TYPES[options.scale_type],
        "FAST_SCALE": int(options.scale_type == "bfloat16"),
        "SOFTCAP": int(options.softcap),
        "BIAS": int(options.bias),
        "ALIGNED": int(options.aligned),
        "WGMMA": int(options.wgmma),
        "STAGES": options.stages,
        "ROWS": options.rows,
        "COLUMNS": options.columns,
        "THREADS": options.threads,
        "IN_FLIGHT": RANGES_IN_FLIGHT,
    }
    lines = [f"#define FLASH_{name} {value}" for name, value in defines.items()]
    wgmma = _wgmma(options.columns, 0) + _wgmma(options.columns, 1) if options.wgmma else ""
    return "\n".join(lines) + _HEADER.replace("$WGMMA", wgmma)


def body(kind: str, options: Options) -> str:
    """The statements of kernel "forward" or "backward"."""
    text = {"forward": _FORWARD, "backward": _BACKWARD}[kind]
    matrix = "weight, scales, biases" if options.bits else "weight, nullptr, nullptr"
    names = [f"const int {name} = parameters[{i}];" for i, name in enumerate(PARAMETERS)]
    bias = "bias" if options.bias else "nullptr"
    return "\n".join(names) + text.replace("$MATRIX", matrix).replace("$BIAS", bias)


def name(kind: str, options: Options) -> str:
    """Unique to the source: MLX keeps compiled kernels under their names, also on disk."""
    text = header(options) + body(kind, options)
    return f"flash_{kind}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _wgmma(columns: int, transposed: int) -> str:
    """A product [64, 16] x [16, columns] of a warp group, from shared memory; `transposed`: B runs along columns."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[0][{i // 4}][{i % 4}])' for i in range(count))
    return f"""
template <> __device__ __forceinline__ void warp_group_product<{str(bool(transposed)).lower()}>(
    Accumulator& d, uint64_t a, uint64_t b, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{registers}}}, "
    "%{count}, %{count + 1}, p, 1, 1, 0, {transposed};\\n}}\\n"
    : {operands}
    : "l"(a), "l"(b), "r"(keep));
}}
"""


_HEADER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash {

constexpr int kRows = FLASH_ROWS, kColumns = FLASH_COLUMNS, kDepth = 64;
constexpr int kThreads = FLASH_THREADS, kStages = FLASH_STAGES;
constexpr int kInFlight = FLASH_IN_FLIGHT;
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
// Copies run ahead of the products by this many stages. A warp-group product may still run one stage behind.
constexpr int kAhead = FLASH_WGMMA ? kStages - 2 : kStages - 1;
constexpr float kLog2E = 1.4426950408889634f, kLowest = -1e30f;

#if FLASH_WGMMA
constexpr int kI = 1, kJ = kColumns / 8, kWarpsAcross = 1;
#else
constexpr int kI = 4, kJ = 8, kWarpsAcross = 4;
#endif
using Accumulator = float[kI][kJ][4];

struct Matrix {
#if FLASH_BITS
  const uint32_t* weight;
  const FLASH_SCALE* scales;
  const FLASH_SCALE* biases;
#else
  const __nv_bfloat16* weight;
  const void* scales;
  const void* biases;
#endif
  int vocabulary, columns;
};

__device__ __forceinline__ int lane() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp() { return threadIdx.x >> 5; }

__device__ __forceinline__ int row_of(int i, int h) {
#if FLASH_WGMMA
  return 16 * warp() + (lane() >> 2) + 8 * h;
#else
  return 64 * (warp() >> 2) + 16 * i + (lane() >> 2) + 8 * h;
#endif
}

__device__ __forceinline__ int first_column() { return FLASH_WGMMA ? 0 : 64 * (warp() & 3); }

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t chunk_address(uint32_t base, int line, int chunk) {
  return base + line * 128 + ((chunk ^ (line & 7)) << 4);
}

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Dequantization. Numbers become scale * q + bias in one rounding to bfloat16.

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

#if FLASH_BITS
constexpr int kUnits = kColumns * kDepth / 32 / kThreads;  // of a tile of W, per thread

// 32 numbers of one row of W as they lie in device memory: half a line, and part of one group.
// A warp takes 16 rows and both halves, so that its loads touch 16 lines of memory instead of 32.
struct Packed {
  uint4 word[FLASH_BITS / 4];

  __device__ __forceinline__ void fetch(const uint4* from) {
#pragma unroll
    for (int i = 0; i < FLASH_BITS / 4; ++i) word[i] = __ldg(from + i);
  }

  __device__ __forceinline__ uint32_t bits(int i) const {
    const uint4& w = word[i >> 2];
    return (i & 3) == 0 ? w.x : (i & 3) == 1 ? w.y : (i & 3) == 2 ? w.z : w.w;
  }

  // Chunks 4 half .. 4 half + 3 of a line.
  __device__ __forceinline__ void store(uint32_t base, int line, int half, FLASH_SCALE s, FLASH_SCALE b) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) store_shared(chunk_address(base, line, 4 * half + c), expand(c, s, b));
  }

  __device__ __forceinline__ uint4 expand(int c, FLASH_SCALE s, FLASH_SCALE b) const {
    uint32_t r[4];
#if FLASH_BITS == 4
    const uint32_t even = bits(c), odd = even >> 4;  // byte i: number 2 i or 2 i + 1 in its lower half
#if FLASH_FAST_SCALE
    // 0x4300 + q is the bfloat16 number 128 + q; taking 128 away is exact.
    const __nv_bfloat162 s2 = __bfloat162bfloat162(s), b2 = __bfloat162bfloat162(b);
    const uint32_t minus_128 = 0xc300c300u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t q;  // (x & 0x000f000f) | 0x43004300
      asm("lop3.b32 %0, %1, %2, %3, 0xea;\n"
          : "=r"(q) : "r"(__byte_perm(even, odd, 0x0400 + 0x1111 * i)), "r"(0x000f000fu), "r"(0x43004300u));
      __nv_bfloat162 x = __hadd2(*reinterpret_cast<__nv_bfloat162*>(&q),
                                 *reinterpret_cast<const __nv_bfloat162*>(&minus_128));
      x = __hfma2(x, s2, b2);
      r[i] = *reinterpret_cast<uint32_t*>(&x);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = pack(number(even & 0x0f0f0f0fu, i, s, b), number(odd & 0x0f0f0f0fu, i, s, b));
#endif
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = bits(2 * c + (i >> 1));
      r[i] = pack(number(w, 2 * (i & 1), s, b), number(w, 2 * (i & 1) + 1, s, b));
    }
#endif
    return make_uint4(r[0], r[1], r[2], r[3]);
  }

  // 0x4b000000 + q is the float 2^23 + q.
  __device__ __forceinline__ static float number(uint32_t w, int byte, FLASH_SCALE s, FLASH_SCALE b) {
    return fmaf(__uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + byte)) - 8388608.0f, as_float(s), as_float(b));
  }
};
#endif

// One stage of the product.

#if FLASH_WGMMA
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#ifdef __CUDA_ARCH__
#error "the warp-group instructions need the target sm_90a"
#endif
#endif

template <bool transposed> __device__ void warp_group_product(Accumulator& d, uint64_t a, uint64_t b, int keep);
$WGMMA

// leading, stride: distances between neighbouring 128-byte atoms, in bytes (see the PTX manual, matrix descriptor).
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int leading, int stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
      uint64_t(1) << 62;
}

__device__ __forceinline__ void hold(Accumulator& d) {
#pragma unroll
  for (int j = 0; j < kJ; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[0][j][e])::"memory");
}

template <bool transposed>
__device__ __forceinline__ void product(Accumulator& d, uint32_t a, uint32_t b, bool keep) {
  a += (warp() >> 2) * 64 * 128;
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
  const uint64_t left = descriptor(a, 16, 1024), right = descriptor(b, transposed ? 8192 : 16, 1024);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k)  // addresses count in 16 bytes
    warp_group_product<transposed>(d, left + 2 * k, right + (transposed ? 128 : 2) * k, k > 0 || keep);
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int pending> __device__ __forceinline__ void wait_product(Accumulator& d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
  if (pending == 0) hold(d);
}
#else
__device__ __forceinline__ void load_fragments(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_fragments_transposed(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

template <bool transposed>
__device__ __forceinline__ void product(Accumulator& d, uint32_t a, uint32_t b, bool keep) {
  const int l = lane(), down = 64 * (warp() >> 2), across = warp() & 3;
  if (!keep) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t left[kI][4];
#pragma unroll
    for (int i = 0; i < kI; ++i)
      load_fragments(left[i], chunk_address(a, down + 16 * i + (l & 15), 2 * k + (l >> 4)));
#pragma unroll
    for (int p = 0; p < kJ / 2; ++p) {
      uint32_t right[4];
      if (transposed)
        load_fragments_transposed(
            right, chunk_address(b + 8192 * across, 16 * k + (l & 7) + ((l >> 3) & 1) * 8, 2 * p + (l >> 4)));
      else
        load_fragments(
            right, chunk_address(b, 64 * across + 16 * p + (l & 7) + (l >> 4) * 8, 2 * k + ((l >> 3) & 1)));
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          float(&c)[4] = d[i][2 * p + q];
          asm volatile(
              "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
              "{%0, %1, %2, %3};\n"
              : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
              : "r"(left[i][0]), "r"(left[i][1]), "r"(left[i][2]), "r"(left[i][3]), "r"(right[2 * q]),
                "r"(right[2 * q + 1]));
        }
    }
  }
}
#endif

// What the stages of a product are filled with: step t covers summed numbers 64 t .. 64 t + 63.

// Places outside the matrices are read from the nearest place inside: the products' rows and columns that this reaches
// are not used, and the summed numbers that it reaches are multiplied by zeros of the other operand.

// Logits of a tile of rows: after H / 64 steps comes the next tile of the vocabulary.
struct LogitTiles {
  static constexpr bool transposed = false;
  const __nv_bfloat16* hidden;  // where this thread copies from next, for the first of its rows
  Matrix m;
  int valid_rows, copy_at = 0, copy_entry;

  __device__ __forceinline__ LogitTiles(const __nv_bfloat16* hidden, const Matrix& m, int rows, int row, int entry)
      : m(m), copy_entry(entry) {
    row += threadIdx.x >> 3;
    valid_rows = rows - row;
    this->hidden = hidden + size_t(row) * m.columns + 8 * (threadIdx.x & 7);
#if FLASH_BITS
    fetch_entry = entry;
    seek();
#endif
  }

  __device__ __forceinline__ void copy(uint32_t a, uint32_t b) {
    const int line = threadIdx.x >> 3, chunk = threadIdx.x & 7, column = copy_at + 8 * chunk;
    const int valid = column < m.columns ? valid_rows : 0;
#pragma unroll
    for (int i = 0; i < kRows * 8 / kThreads; ++i)
      copy_async(chunk_address(a, line + kThreads / 8 * i, chunk), hidden + kThreads / 8 * i * m.columns,
                 kThreads / 8 * i < valid);
#if !FLASH_BITS
#pragma unroll
    for (int i = 0; i < kColumns * 8 / kThreads; ++i) {
      const int r = min(copy_entry + line + kThreads / 8 * i, m.vocabulary - 1);
      copy_async(chunk_address(b, line + kThreads / 8 * i, chunk),
                 m.weight + size_t(r) * m.columns + min(column, m.columns - 8), true);
    }
#endif
    copy_at += kDepth, hidden += kDepth;
    if (copy_at >= m.columns) hidden -= copy_at, copy_at = 0, copy_entry += kColumns;
  }

#if FLASH_BITS
  static constexpr int kTogether = FLASH_ALIGNED ? 4 * kDepth / FLASH_GROUP : 1;  // scales per load
  Packed packed[kUnits];
  FLASH_SCALE scales[kUnits][kTogether], biases[kUnits][kTogether];
  const uint4* words[kUnits];
  int group[kUnits];
  int fetch_at = 0, fetch_entry, store_at = 0;

  // The beginning of this thread's rows.
  __device__ __forceinline__ void seek() {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int r = min(fetch_entry + 16 * warp() + (lane() & 15) + kThreads / 2 * i, m.vocabulary - 1);
      words[i] = reinterpret_cast<const uint4*>(m.weight) + size_t(r) * (m.columns * FLASH_BITS / 32 / 4);
      group[i] = r * (m.columns / FLASH_GROUP);
    }
  }

  __device__ __forceinline__ static void load(FLASH_SCALE (&to)[kTogether], const FLASH_SCALE* from) {
    constexpr int bytes = kTogether * sizeof(FLASH_SCALE);
    if constexpr (bytes % 16 == 0) {
#pragma unroll
      for (int i = 0; i < bytes / 16; ++i)
        reinterpret_cast<uint4*>(to)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    } else if constexpr (bytes == 8) {
      *reinterpret_cast<uint2*>(to) = __ldg(reinterpret_cast<const uint2*>(from));
    } else if constexpr (kTogether == 2) {
      *reinterpret_cast<uint32_t*>(to) = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
      to[0] = *from;
    }
  }

  __device__ __forceinline__ void fetch() {
    const int column = min(fetch_at + 32 * (lane() >> 4), m.columns - 32);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      packed[i].fetch(words[i] + column * FLASH_BITS / 32 / 4);
      if (!FLASH_ALIGNED || (fetch_at & 3 * kDepth) == 0) {
        const int at = group[i] + (FLASH_ALIGNED ? fetch_at : column) / FLASH_GROUP;
        load(scales[i], m.scales + at), load(biases[i], m.biases + at);
      }
    }
    fetch_at += kDepth;
    if (fetch_at >= m.columns) fetch_at = 0, fetch_entry += kColumns, seek();
  }

  __device__ __forceinline__ void store(uint32_t b) {
    const int half = lane() >> 4;
    const int wanted = FLASH_ALIGNED ? ((store_at & 3 * kDepth) + 32 * half) / FLASH_GROUP : 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      FLASH_SCALE s = scales[i][0], o = biases[i][0];
#pragma unroll
      for (int g = 1; g < kTogether; ++g) s = wanted == g ? scales[i][g] : s, o = wanted == g ? biases[i][g] : o;
      packed[i].store(b, 16 * warp() + (lane() & 15) + kThreads / 2 * i, half, s, o);
    }
    store_at += kDepth;
  }
#endif
};

// Coefficients lie in the order in which threads hold them: place p of a block of 32 belongs to this vocabulary row.
__device__ __forceinline__ int row_at(int p) {
  return (p & ~31) + 8 * ((p >> 1) & 3) + 2 * ((p >> 3) & 3) + (p & 1);
}

struct CoefficientTiles {
  static constexpr bool transposed = true;
  const __nv_bfloat16* coefficients;  // of the first row and column
  Matrix m;
  int stride, entry, column;
  int copied = 0, fetched = 0;
#if FLASH_BITS
  Packed packed[kUnits];
  FLASH_SCALE scales[kUnits], biases[kUnits];
#endif

  __device__ __forceinline__ CoefficientTiles(
      const __nv_bfloat16* coefficients, const Matrix& m, int stride, int entry, int column)
      : coefficients(coefficients), m(m), stride(stride), entry(entry), column(column) {}

  __device__ __forceinline__ void copy(uint32_t a, uint32_t b) {
    const int line = threadIdx.x >> 3, chunk = threadIdx.x & 7;
#pragma unroll
    for (int i = 0; i < kRows * 8 / kThreads; ++i)
      copy_async(chunk_address(a, line + kThreads / 8 * i, chunk),
                 coefficients + size_t(line + kThreads / 8 * i) * stride + copied + 8 * chunk, true);
#if !FLASH_BITS
#pragma unroll
    for (int i = 0; i < kDepth * kColumns / 8 / kThreads; ++i) {
      const int unit = threadIdx.x + kThreads * i, line = unit / (kColumns / 8), across = unit % (kColumns / 8);
      const int r = min(entry + copied + row_at(line), m.vocabulary - 1), c = min(column + 8 * across, m.columns - 8);
      copy_async(chunk_address(b + (across >> 3) * 8192, line, across & 7), m.weight + size_t(r) * m.columns + c, true);
    }
#endif
    copied += kDepth;
  }

#if FLASH_BITS
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int square = warp() + kThreads / 32 * i;  // 16 rows, 64 columns
      const int r = min(entry + fetched + row_at(16 * (square & 3) + (lane() & 15)), m.vocabulary - 1);
      const int c = min(column + 64 * (square >> 2) + 32 * (lane() >> 4), m.columns - 32);
      packed[i].fetch(reinterpret_cast<const uint4*>(m.weight) + size_t(r) * (m.columns * FLASH_BITS / 32 / 4) +
                      c * FLASH_BITS / 32 / 4);
      const int at = r * (m.columns / FLASH_GROUP) + c / FLASH_GROUP;
      scales[i] = m.scales[at], biases[i] = m.biases[at];
    }
    fetched += kDepth;
  }

  __device__ __forceinline__ void store(uint32_t b) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int square = warp() + kThreads / 32 * i;
      packed[i].store(b + (square >> 2) * 8192, 16 * (square & 3) + (lane() & 15), lane() >> 4, scales[i], biases[i]);
    }
  }
#endif
};

// `count` tiles of `per_tile` stages each; after a tile `finish(tile)` reads the accumulators.
template <class Tiles, class Finish>
__device__ __forceinline__ void multiply(
    Accumulator& d, Tiles& tiles, uint32_t shared, int count, int per_tile, Finish&& finish) {
  auto a = [&](int step) { return shared + unsigned(step) % kStages * kBytesA; };
  auto b = [&](int step) { return shared + kStages * kBytesA + unsigned(step) % kStages * kBytesB; };
  const int steps = count * per_tile;
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    if (s < steps) tiles.copy(a(s), b(s));
    asm volatile("cp.async.commit_group;\n" ::: "memory");
  }
#if FLASH_BITS
  tiles.fetch();
  tiles.store(b(0));
  if (steps > 1) tiles.fetch();
#endif
  int t = 0;
  for (int tile = 0; tile < count; ++tile) {
    for (int k = 0; k < per_tile; ++k, ++t) {
      asm volatile("cp.async.wait_group %0;\n" ::"n"(kAhead - 1) : "memory");
#if FLASH_WGMMA
      asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
      __syncthreads();
#if FLASH_WGMMA
      product<Tiles::transposed>(d, a(t), b(t), k > 0);
#if FLASH_BITS
      if (t + 1 < steps) tiles.store(b(t + 1));
      if (t + 2 < steps) tiles.fetch();
#endif
#endif
      if (t + kAhead < steps) tiles.copy(a(t + kAhead), b(t + kAhead));
      asm volatile("cp.async.commit_group;\n" ::: "memory");
#if !FLASH_WGMMA
      product<Tiles::transposed>(d, a(t), b(t), k > 0);
#if FLASH_BITS
      if (t + 1 < steps) tiles.store(b(t + 1));
      if (t + 2 < steps) tiles.fetch();
#endif
#endif
#if FLASH_WGMMA
      wait_product<1>(d);
#endif
    }
#if FLASH_WGMMA
    wait_product<0>(d);
#endif
    finish(tile);
  }
}

__device__ __forceinline__ uint32_t aligned_shared(const void* p) { return (shared_address(p) + 1023) & ~1023u; }

// Logits from raw products, in place.
__device__ __forceinline__ void logits_in_place(
    Accumulator& d, const float* bias, float scale, float softcap, int entry, int vocabulary) {
  const int first = entry + first_column() + 2 * (lane() & 3);
#if FLASH_SOFTCAP
  const float to_power = 2.0f * kLog2E / softcap;
#endif
#pragma unroll
  for (int j = 0; j < kJ; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#if FLASH_BIAS
      const float offset = bias[min(first + 8 * j + e, vocabulary - 1)];
#endif
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& z = d[i][j][2 * h + e];
#if FLASH_BIAS
          z += offset;
#endif
          z *= scale;
#if FLASH_SOFTCAP
          z = softcap * (1.0f - __fdividef(2.0f, 1.0f + power_of_two(z * to_power)));
#endif
        }
    }
  if (entry + kColumns > vocabulary) {  // entries past the end
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int i = 0; i < kI; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (first + 8 * j + e >= vocabulary) d[i][j][2 * h + e] = __int_as_float(0xff800000);
  }
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void wait_for(const int* counter, int count) {
  while (load_acquire(counter) < count) __nanosleep(64);
}

}  // namespace flash

// The kernel's signature is written by MLX; this is the way to bound its registers for a block of this size.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(FLASH_THREADS, 1)
"""

_FORWARD = r"""
using namespace flash;
extern __shared__ uint8_t storage[];
const int first_row = blockIdx.x * kRows, last_tile = (vocabulary + kColumns - 1) / kColumns;
const int begin = blockIdx.y * vocabulary_tiles_per_part, end = min(begin + vocabulary_tiles_per_part, last_tile);
const int per_tile = (columns + kDepth - 1) / kDepth;
const float scale = scaling[0], softcap = scaling[1];

Accumulator d;
float top[kI][2], sum[kI][2], picked[kI][2];
int wanted[kI][2];
#pragma unroll
for (int i = 0; i < kI; ++i)
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + row_of(i, h);
    top[i][h] = kLowest, sum[i][h] = 0.0f, picked[i][h] = 0.0f;
    wanted[i][h] = row < rows ? targets[row] : -1;
  }

LogitTiles tiles(hidden, Matrix{$MATRIX, vocabulary, columns}, rows, first_row, begin * kColumns);
multiply(d, tiles, aligned_shared(storage), end - begin, per_tile, [&](int tile) {
  const int entry = (begin + tile) * kColumns;
  logits_in_place(d, $BIAS, scale, softcap, entry, vocabulary);
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float best = top[i][h];
#pragma unroll
      for (int j = 0; j < kJ; ++j) best = fmaxf(best, fmaxf(d[i][j][2 * h], d[i][j][2 * h + 1]));
      const float shift = -best * kLog2E;
      float total[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) total[e] += power_of_two(fmaf(d[i][j][2 * h + e], kLog2E, shift));
      sum[i][h] = sum[i][h] * power_of_two((top[i][h] - best) * kLog2E) + (total[0] + total[1]);
      top[i][h] = best;
      const int at = wanted[i][h] - entry - first_column() - 2 * (lane() & 3);
      if (at >= 0 && at < 8 * kJ) {
#pragma unroll
        for (int j = 0; j < kJ; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) picked[i][h] = at == 8 * j + e ? d[i][j][2 * h + e] : picked[i][h];
      }
    }
});

const int part = blockIdx.y * kWarpsAcross + (FLASH_WGMMA ? 0 : warp() & 3);
#pragma unroll
for (int i = 0; i < kI; ++i)
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best = top[i][h], total = sum[i][h], target = picked[i][h];
    for (int other = 1; other < 4; other *= 2) {
      const float their_best = __shfl_xor_sync(0xffffffffu, best, other);
      const float their_total = __shfl_xor_sync(0xffffffffu, total, other);
      target += __shfl_xor_sync(0xffffffffu, target, other);
      const float both = fmaxf(best, their_best);
      total = total * power_of_two((best - both) * kLog2E) + their_total * power_of_two((their_best - both) * kLog2E);
      best = both;
    }
    const int row = first_row + row_of(i, h);
    if (row < rows && (lane() & 3) == 0) {
      const size_t at = size_t(part) * rows + row;
      part_peak[at] = best, part_total[at] = total, part_target[at] = target;
    }
  }
"""

# Work is drawn from a queue in an order in which everything an item waits for comes before it, so that the kernel ends
# with any number of blocks resident: coefficients of range s + 1, then products with range s, and so on.
_BACKWARD = r"""
using namespace flash;
extern __shared__ uint8_t storage[];
__shared__ int drawn;
const uint32_t shared = aligned_shared(storage);
const Matrix matrix{$MATRIX, vocabulary, columns};
const int vocabulary_tiles = (vocabulary + kColumns - 1) / kColumns, column_tiles = (columns + kColumns - 1) / kColumns;
const int per_tile = (columns + kDepth - 1) / kDepth;
const int items_per_row = (range_tiles + tiles_per_item - 1) / tiles_per_item;
const int first = virtual_tiles * items_per_row, second = virtual_tiles * column_tiles;
const int all = steps * (first + second), width = range_tiles * kColumns;
int* const queue = counters;
int* const ready = counters + 1;                       // [steps, virtual_tiles]: items of coefficients written
int* const used = ready + steps * virtual_tiles;       // [steps, virtual_tiles]: products done
const float scale = scaling[0], softcap = scaling[1], inverse_softcap = 1.0f / softcap;

Accumulator d;
while (true) {
  if (threadIdx.x == 0) drawn = atomicAdd(queue, 1);
  __syncthreads();
  int item = drawn;
  if (item >= all) break;

  bool coefficient = true;
  int step = 0;
  if (item >= first) {
    item -= first;
    step = item / (first + second) + 1;
    item %= first + second;
    coefficient = step < steps && item < first;
    if (!coefficient) {
      if (step < steps) item -= first;
      --step;
    }
  }
  const int tile_of_rows = item % virtual_tiles, inner = item / virtual_tiles;
  const int part = tile_of_rows / row_tiles, chunk = step / ranges, range = step % ranges;
  const int first_row = (chunk * row_tiles + tile_of_rows % row_tiles) * kRows;
  const int range_begin = part * vocabulary_tiles_per_part + range * range_tiles;
  const int range_end =
      min(min(range_begin + range_tiles, (part + 1) * vocabulary_tiles_per_part), vocabulary_tiles);
  __nv_bfloat16* const buffer =
      coefficients + (size_t(step % kInFlight) * virtual_tiles + tile_of_rows) * kRows * width;
  int* const done = (coefficient ? ready : used) + step * virtual_tiles + tile_of_rows;

  if (first_row < rows) {
    if (threadIdx.x == 0) {
      if (coefficient) {
        if (step >= kInFlight) wait_for(used + (step - kInFlight) * virtual_tiles + tile_of_rows, column_tiles);
      } else {
        wait_for(done - used + ready, items_per_row);
        if (step >= 1) wait_for(done - virtual_tiles, column_tiles);
      }
    }
    __syncthreads();
    if (coefficient) {
      const int begin = range_begin + inner * tiles_per_item, end = min(begin + tiles_per_item, range_end);
      if (begin < end) {
        LogitTiles tiles(hidden, matrix, rows, first_row, begin * kColumns);
        multiply(d, tiles, shared, end - begin, per_tile, [&](int tile) {
          const int entry = (begin + tile) * kColumns;
          logits_in_place(d, $BIAS, scale, softcap, entry, vocabulary);
#pragma unroll
          for (int i = 0; i < kI; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int local = row_of(i, h), row = first_row + local;
              const bool valid = row < rows;
              const float factor = valid ? cotangent[row] * scale : 0.0f;
              const float shift = valid ? -(peak[row] + log_sum[row]) * kLog2E : 0.0f;
              const int at = (valid ? targets[row] : -1) - entry - first_column() - 2 * (lane() & 3);
              uint4* const to = reinterpret_cast<uint4*>(
                  buffer + size_t(local) * width + (begin + tile - range_begin) * kColumns + first_column() +
                  8 * (lane() & 3));
              const auto probability = [&](float z) { return power_of_two(fmaf(z, kLog2E, shift)); };
              const auto slope = [&](float z) {
                const float ratio = fmaxf(z, -softcap) * inverse_softcap;
                return FLASH_SOFTCAP ? factor * (1.0f - ratio * ratio) : factor;
              };
#pragma unroll
              for (int g = 0; g < kJ / 4; ++g) {
                uint32_t packed[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                  const float low = d[i][4 * g + q][2 * h], high = d[i][4 * g + q][2 * h + 1];
                  packed[q] = pack(-slope(low) * probability(low), -slope(high) * probability(high));
                }
                to[4 * g] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
              }
              if (at >= 0 && at < 8 * kJ && (at & 7) < 2) {  // the target is one of this thread's columns
                float z = 0.0f;
#pragma unroll
                for (int j = 0; j < kJ; ++j)
#pragma unroll
                  for (int e = 0; e < 2; ++e) z = at == 8 * j + e ? d[i][j][2 * h + e] : z;
                reinterpret_cast<__nv_bfloat16*>(to + 4 * (at >> 5))[2 * ((at >> 3) & 3) + (at & 1)] =
                    __float2bfloat16(slope(z) * (1.0f - probability(z)));
              }
            }
        });
      }
    } else {
      // The partial sum of this tile, in the order in which threads hold it.
      float4* const kept = reinterpret_cast<float4*>(
          partial + (size_t(tile_of_rows) * column_tiles + inner) * kRows * kColumns) + threadIdx.x;
      const bool some = range_begin < range_end;
      if (some) {
        const int stages = (range_end - range_begin) * (kColumns / kDepth);
        CoefficientTiles tiles(buffer, matrix, width, range_begin * kColumns, inner * kColumns);
        multiply(d, tiles, shared, 1, stages, [](int) {});
      }
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int j = 0; j < kJ; ++j) {
          float4 v = range == 0 ? make_float4(0, 0, 0, 0) : __ldcg(kept + (i * kJ + j) * kThreads);
          if (some) v.x += d[i][j][0], v.y += d[i][j][1], v.z += d[i][j][2], v.w += d[i][j][3];
          if (range < ranges - 1) {
            __stcg(kept + (i * kJ + j) * kThreads, v);
          } else {
            const int column = inner * kColumns + first_column() + 8 * j + 2 * (lane() & 3);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int row = first_row + row_of(i, h);
              if (row < rows && column < columns) {
                const size_t at = (size_t(part) * rows + row) * columns + column;
                gradient[at] = Result(h ? v.z : v.x), gradient[at + 1] = Result(h ? v.w : v.y);
              }
            }
          }
        }
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(done, 1);
}
"""

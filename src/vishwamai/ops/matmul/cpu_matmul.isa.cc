// The matrix product in blocks (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
//
// B is packed once into panels; a task takes a block of C, packs its rows of A for one stretch of k after another, and
// adds up the block in memory that stays in the second cache level.  With few rows B is not worth a pass of its own: each
// task packs the stretch that it is about to use, and with very few (decoding) B is read as it lies.
#include "cpu_matmul.h"
#include "vishwamai/core/cpp/engine.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kPackedBytes = 64 << 20;  // packed B of several groups held at a time

// ---- the epilogue -----------------------------------------------------------------------------------------------
template <class T>
VISHWAMAI_INLINE V<T> sigmoid(V<T> x) {
  return T(1) / (T(1) + exp(-x));
}
template <class T>
VISHWAMAI_INLINE V<T> activate(Activation activation, V<T> x) {
  const V<T> zero = {};
  switch (activation) {
    case Activation::relu: return x > zero ? x : (x != x ? x : zero);
    case Activation::relu2: return x > zero ? x * x : (x != x ? x : zero);
    case Activation::silu: return x * sigmoid<T>(x);
    case Activation::gelu: return T(0.5) * x * (T(1) + erf<T>(x * T(0.70710678118654752440)));
    case Activation::gelu_tanh: return T(0.5) * x * (T(1) + tanh<T>(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
    case Activation::sigmoid: return sigmoid<T>(x);
    case Activation::tanh: return tanh<T>(x);
    default: return x;
  }
}

template <class R, class T>
void write_row(const MatmulArgs& a, const T* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  constexpr int W = lanes<T>;
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + group * a.bias_group + col : nullptr;
  const T* scale_b = a.scale_b ? static_cast<const T*>(a.scale_b) + group * a.scale_b_group + col * a.scale_b_col : nullptr;
  const T scale_a = a.scale_a ? static_cast<const T*>(a.scale_a)[group * a.scale_a_group + row * a.scale_a_row] : T(1);
  const int64_t first = (group * a.m + row) * a.n + col;
  R* out = static_cast<R*>(a.out) + first;
  R* preactivation = a.preactivation ? static_cast<R*>(a.preactivation) + first : nullptr;
  for (int64_t i = 0; i < n; i += W) {
    const int count = static_cast<int>(least<int64_t>(W, n - i));
    V<T> x = load(z + i);
    if (a.scale_a) x *= scale_a;
    if (scale_b) x *= a.scale_b_col ? load(scale_b + i, count) : splat(*scale_b);
    if (bias) x += load(bias + i, count);
    if (preactivation) store(preactivation + i, x, count);
    store(out + i, activate<T>(a.activation, x), count);
  }
}
void finish_row(const MatmulArgs& a, const double* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  write_row<double>(a, z, group, row, col, n);
}
void finish_row(const MatmulArgs& a, const float* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  if (a.result == Storage::bf16) write_row<bf16>(a, z, group, row, col, n);
  else write_row<float>(a, z, group, row, col, n);
}
// Sums of int8 products: as they are, or converted for a floating epilogue.
void finish_row(const MatmulArgs& a, const int32_t* z, int64_t group, int64_t row, int64_t col, int64_t n) {
  if (a.result == Storage::s32) {
    memcpy(static_cast<int32_t*>(a.out) + (group * a.m + row) * a.n + col, z, sizeof(int32_t) * static_cast<size_t>(n));
    return;
  }
  constexpr int kRun = 256;
  alignas(64) float x[kRun];
  for (int64_t i = 0; i < n; i += kRun) {
    const int64_t count = least<int64_t>(kRun, n - i);
    for (int64_t j = 0; j < count; j += lanes<float>) store(x + j, __builtin_convertvector(load(z + i + j), f32v));
    finish_row(a, x, group, row, col + i, count);
  }
}

// ---- blocks -----------------------------------------------------------------------------------------------------
template <class S, class E>
struct Matmul {
  using T = typename E::Acc;
  using Packed = typename E::Element;
  static constexpr int C = E::kCols;
  static constexpr bool kTiles = E::kStep >= 32;
  static constexpr int64_t kDepth = kTiles ? 16 * E::kStep : 256;  // k at a time: a panel of B fits the first cache level

  const MatmulArgs& g;
  int64_t rows, cols;  // of a task's block of C, multiples of 32 and C

  void choose_blocks(const Threads& threads) {
    rows = least<int64_t>(round_up<int64_t>(g.m, kPanelRows), 256);
    cols = least<int64_t>(round_up<int64_t>(g.n, C), 512);
    while (g.groups * ceil_div(g.m, rows) * ceil_div(g.n, cols) < 2 * threads.count && (rows > 64 || cols > 2 * C)) {
      if ((cols >= rows && cols > 2 * C) || rows <= 64) cols = round_up<int64_t>(cols / 2, C);
      else rows = round_up<int64_t>(rows / 2, kPanelRows);
    }
  }

  // Packs `panels` panels of B, from column `col` on, for k in [k0, k0 + depth); `out` is where the first one's row k0 goes.
  // Where rows of B are contiguous, few rows are taken at a time and all their columns, so that memory is read in runs.
  void pack_b(int64_t group, int64_t k0, int64_t depth, int64_t col, int64_t panels, Packed* out, int64_t panel_stride) const {
    const int64_t step = g.b_col == 1 ? round_up<int64_t>(32, E::kStep) : depth;
    const S* b = static_cast<const S*>(g.b) + group * g.b_group;
    for (int64_t k = 0; k < depth; k += step) {
      const int64_t kn = least(step, depth - k);
      for (int64_t j = 0; j < panels; ++j) {
        const int64_t first_col = col + j * C;
        E::pack_b(b + (k0 + k) * g.b_k + first_col * g.b_col, g.b_k, g.b_col, kn, round_up<int64_t>(kn, E::kStep),
                  static_cast<int>(least<int64_t>(C, g.n - first_col)), out + j * panel_stride + E::b_elements(k));
      }
    }
  }

  // The block of C at (row0, col0); `packed` is B's panels of this group, or null to pack them here.
  void block(int64_t group, int64_t row0, int64_t col0, const Packed* packed) const {
    const int64_t m = least(rows, g.m - row0), n = least(cols, g.n - col0), depth = least(kDepth, round_up<int64_t>(g.k, E::kStep));
    const int64_t a_panels = ceil_div<int64_t>(m, kPanelRows), b_panels = ceil_div<int64_t>(n, C);
    const int64_t padded_k = round_up<int64_t>(g.k, E::kStep), stride = b_panels * C + 16;
    const int64_t own_panels = packed ? 0 : b_panels;
    Scratch scratch(Scratch::size<Packed>(a_panels * E::a_elements(depth)) + Scratch::size<Packed>(own_panels * E::b_elements(depth)) +
                    Scratch::size<T>(a_panels * kPanelRows * stride));
    Packed* a = scratch.take<Packed>(a_panels * E::a_elements(depth));
    Packed* own = scratch.take<Packed>(own_panels * E::b_elements(depth));
    T* c = scratch.take<T>(a_panels * kPanelRows * stride);
    if (g.k == 0) memset(c, 0, sizeof(T) * static_cast<size_t>(a_panels * kPanelRows * stride));
    for (int64_t k0 = 0; k0 < g.k; k0 += kDepth) {
      const int64_t kn = least(kDepth, g.k - k0);
      for (int64_t i = 0; i < a_panels; ++i) {
        const int64_t row = row0 + i * kPanelRows;
        E::pack_a(static_cast<const S*>(g.a) + group * g.a_group + row * g.a_row + k0 * g.a_k, g.a_row, g.a_k,
                  static_cast<int>(least<int64_t>(kPanelRows, g.m - row)), kn, a + i * E::a_elements(depth));
      }
      if (own_panels) pack_b(group, k0, kn, col0, b_panels, own, E::b_elements(depth));
      for (int64_t j = 0; j < b_panels; ++j) {
        const Packed* b = packed ? packed + (col0 / C + j) * E::b_elements(padded_k) + E::b_elements(k0) : own + j * E::b_elements(depth);
        for (int64_t i = 0; i < a_panels; ++i) {
          E::product(a + i * E::a_elements(depth), E::a_stride(kn), b, kn, static_cast<int>(least<int64_t>(kPanelRows, m - i * kPanelRows)),
                     c + i * kPanelRows * stride + j * C, stride, k0 > 0);
        }
      }
    }
    for (int64_t r = 0; r < m; ++r) finish_row(g, c + r * stride, group, row0 + r, col0, n);
  }

  void run(const Threads& threads) {
    choose_blocks(threads);
    const int64_t row_blocks = ceil_div(g.m, rows), col_blocks = ceil_div(g.n, cols), blocks = row_blocks * col_blocks;
    const int64_t padded_k = round_up<int64_t>(g.k, E::kStep), panels = ceil_div<int64_t>(g.n, C);
    const int64_t b_groups = g.b_group == 0 ? 1 : g.groups;
    const bool shared = g.b_group == 0 && g.groups > 1;
    if (row_blocks == 1 && !shared) {
      parallel_for(threads, g.groups * blocks, [&](int64_t i) {
        typename E::Scope scope;
        (void)scope;
        block(i / blocks, 0, i % blocks * cols, nullptr);
      });
      return;
    }
    const int64_t elements = panels * E::b_elements(padded_k), bytes = elements * static_cast<int64_t>(sizeof(Packed));
    const int64_t wave = least(b_groups, greatest<int64_t>(1, kPackedBytes / greatest<int64_t>(1, bytes)));
    Scratch scratch(Scratch::size<Packed>(wave * elements));
    Packed* packed = scratch.take<Packed>(wave * elements);
    const int64_t stretches = ceil_div<int64_t>(greatest<int64_t>(1, g.k), kDepth);
    for (int64_t g0 = 0; g0 < b_groups; g0 += wave) {
      const int64_t count = least(wave, b_groups - g0);
      constexpr int64_t kRun = 16;  // panels that one task packs
      const int64_t runs = ceil_div(panels, kRun);
      parallel_for(threads, count * runs * stretches, [&](int64_t i) {
        const int64_t group = i / (runs * stretches), panel = i / stretches % runs * kRun, k0 = i % stretches * kDepth;
        pack_b(g0 + group, k0, least(kDepth, g.k - k0), panel * C, least(kRun, panels - panel),
               packed + group * elements + panel * E::b_elements(padded_k) + E::b_elements(k0), E::b_elements(padded_k));
      });
      const int64_t groups = shared ? g.groups : count;
      parallel_for(threads, groups * blocks, [&](int64_t i) {
        typename E::Scope scope;
        (void)scope;
        const int64_t group = i / blocks, j = i % blocks;
        block(g0 + group, j / col_blocks * rows, j % col_blocks * cols, packed + (shared ? 0 : group) * elements);
      });
    }
  }
};

// Up to kSkinnyRows rows of A times a B whose rows are contiguous: bound by reading B once, so it is used where it lies.
constexpr int64_t kSkinnyRows = 4;

template <class S, int kRows>
void skinny_columns(const MatmulArgs& g, int64_t group, int64_t col0, int64_t n) {
  using T = compute_t<S>;
  constexpr int W = lanes<T>, kUnroll = 8;
  const S* a = static_cast<const S*>(g.a) + group * g.a_group;
  const S* b = static_cast<const S*>(g.b) + group * g.b_group + col0;
  const int64_t stride = round_up<int64_t>(n, W);
  Scratch scratch(Scratch::size<T>(kRows * stride));
  T* c = scratch.take<T>(kRows * stride);
  memset(c, 0, sizeof(T) * static_cast<size_t>(kRows * stride));
  for (int64_t k = 0; k < g.k; k += kUnroll) {
    const int depth = static_cast<int>(least<int64_t>(kUnroll, g.k - k));
    T x[kRows][kUnroll] = {};
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < depth; ++i) x[r][i] = convert<T>(a[r * g.a_row + (k + i) * g.a_k]);
    const S* rows = b + k * g.b_k;
    for (int64_t j = 0; j < n; j += W) {
      const int count = static_cast<int>(least<int64_t>(W, n - j));
      V<T> sum[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = load(c + r * stride + j);
      if (depth == kUnroll && count == W) {
#pragma GCC unroll 8
        for (int i = 0; i < kUnroll; ++i) {
          const V<T> y = load(rows + i * g.b_k + j);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) sum[r] += y * x[r][i];
        }
      } else {
        for (int i = 0; i < depth; ++i) {
          const V<T> y = load(rows + i * g.b_k + j, count);
          for (int r = 0; r < kRows; ++r) sum[r] += y * x[r][i];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(c + r * stride + j, sum[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) finish_row(g, c + r * stride, group, r, col0, n);
}

template <class S>
void skinny(const MatmulArgs& g, const Threads& threads) {
  const int64_t wide = 4096 / static_cast<int64_t>(sizeof(S));  // a page of a row
  const int64_t cols = least(wide, greatest<int64_t>(64, round_up<int64_t>(ceil_div<int64_t>(g.n, 2 * threads.count), 64)));
  const int64_t blocks = ceil_div(g.n, cols);
  parallel_for(threads, g.groups * blocks, [&](int64_t i) {
    const int64_t group = i / blocks, col0 = i % blocks * cols, n = least(cols, g.n - col0);
    switch (g.m) {
      case 1: return skinny_columns<S, 1>(g, group, col0, n);
      case 2: return skinny_columns<S, 2>(g, group, col0, n);
      case 3: return skinny_columns<S, 3>(g, group, col0, n);
      default: return skinny_columns<S, 4>(g, group, col0, n);
    }
  });
}

#if defined(__AMX_BF16__)
// The largest magnitude of a matrix; NaN if it holds one.
float largest(const float* x, int64_t n, const Threads& threads) {
  constexpr int64_t kRun = 1 << 16, kMost = 256;
  const int64_t run = greatest<int64_t>(kRun, round_up<int64_t>(ceil_div(n, kMost), 64)), runs = ceil_div(n, run);
  float most[kMost];
  parallel_for(threads, runs, [&](int64_t t) {
    u32v top = {};
    for (int64_t i = t * run; i < least(n, (t + 1) * run); i += 16) {
      const u32v bits = bit_cast<u32v>(load(x + i, static_cast<int>(least<int64_t>(16, n - i)))) & 0x7fffffffu;
      top = bits > top ? bits : top;  // magnitudes are ordered like their bits, and a NaN is above them all
    }
    uint32_t highest = 0;
    for (int i = 0; i < 16; ++i) highest = greatest(highest, static_cast<uint32_t>(top[i]));
    most[t] = bit_cast<float>(highest);
  });
  uint32_t highest = 0;
  for (int64_t t = 0; t < runs; ++t) highest = greatest(highest, bit_cast<uint32_t>(most[t]));
  return bit_cast<float>(highest);
}

// Whether the split into bfloat16 parts keeps float32's accuracy: finite numbers whose products' small parts do not underflow.
bool splits_well(const MatmulArgs& g, const Threads& threads) {
  const float a = largest(static_cast<const float*>(g.a), (g.a_group ? g.groups : 1) * g.m * g.k, threads);
  const float b = largest(static_cast<const float*>(g.b), (g.b_group ? g.groups : 1) * g.n * g.k, threads);
  if (a == 0 || b == 0) return a == a && b == b && a < 1e38f && b < 1e38f;
  return a < 1e38f && b < 1e38f && a > 1e-27f && b > 1e-27f && static_cast<double>(a) * b > 1e-24;
}
#endif

template <class S, class E>
void run(const MatmulArgs& g, const Threads& threads) {
  Matmul<S, E>{g, 0, 0}.run(threads);
}

}  // namespace

void matmul(const MatmulArgs& g, const Threads& all) {
  Threads threads = all;
  if (g.groups * g.m * g.n * greatest<int64_t>(1, g.k) < 64 * 64 * 64) threads.count = 1;  // a hand-over costs more than the product
  const bool few_rows = g.m <= kSkinnyRows && g.b_col == 1 && g.k > 0;
  if (few_rows && g.storage == Storage::f32) return skinny<float>(g, threads);
  if (few_rows && g.storage == Storage::bf16) return skinny<bf16>(g, threads);
  if (g.storage == Storage::f64) return run<double, FmaEngine<double>>(g, threads);
#if defined(__AMX_BF16__)
  if (g.storage == Storage::s8) return run<int8_t, AmxInt8Engine>(g, threads);
  if (g.storage == Storage::bf16) return run<bf16, AmxEngine<1>>(g, threads);
  // With few rows the product is bound by reading B, and a look at B beforehand would double that.
  if (g.m > 16 && splits_well(g, threads)) {
    return g.parts == 2 ? run<float, AmxEngine<2>>(g, threads) : run<float, AmxEngine<3>>(g, threads);
  }
#else
  if (g.storage == Storage::s8) return run<int8_t, PairEngine>(g, threads);
  if (g.storage == Storage::bf16) return run<bf16, FmaEngine<float>>(g, threads);
#endif
  run<float, FmaEngine<float>>(g, threads);
}

}  // namespace vishwamai::VISHWAMAI_ISA

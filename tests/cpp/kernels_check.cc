// The kernels of the instruction set that isa.h picks, against plain loops in double, without Python or XLA: what
// `make arm64` runs under an emulator.
//
//   kernels_check                      all checks
//   kernels_check isa                  prints the set in use
//   kernels_check packed TYPE K N      prints a packed weight: numbers that `weight_number` gives
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "pool.h"
#include "vishwamai/core/cpp/adam.h"
#include "vishwamai/core/cpp/quantized.h"
#include "vishwamai/ops/activation/cpu_activation.h"
#include "vishwamai/ops/attention/cpu_attention.h"
#include "vishwamai/ops/delta/cpu_delta.h"
#include "vishwamai/ops/gated/cpu_gated.h"
#include "vishwamai/ops/loss/cpu_loss.h"
#include "vishwamai/ops/matmul/cpu_matmul.h"
#include "vishwamai/ops/moe/cpu_grouped.h"
#include "vishwamai/ops/norm/cpu_norm.h"
#include "vishwamai/ops/paged_attention/cpu_paged.h"
#include "vishwamai/ops/rope/cpu_rope.h"
#include "vishwamai/ops/softmax/cpu_softmax.h"
#include "vishwamai/ops/sparse/cpu_sparse.h"

using namespace vishwamai;

namespace {

// Call a function as the library's handlers do.
#define CALL_ROWS(function, ...) [&] { VISHWAMAI_DISPATCH_ROWS(function, __VA_ARGS__) }()
#define CALL(function, ...) [&] { VISHWAMAI_DISPATCH(function, __VA_ARGS__) }()
#define CALL_BYTES(function, ...) [&] { VISHWAMAI_DISPATCH_BYTES(function, __VA_ARGS__) }()

std::mt19937 random_bits(0);

using Values = std::vector<double>;
using Bytes = std::vector<char>;

Values normal(size_t n) {
  std::normal_distribution<double> draw;
  Values x(n);
  for (double& v : x) v = draw(random_bits);
  return x;
}

// `x` as the bytes of an array of that storage; `x` becomes what those bytes hold.
Bytes stored(Values& x, Storage storage) {
  const size_t size = storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2;
  Bytes bytes(x.size() * size);
  for (size_t i = 0; i < x.size(); ++i) {
    if (storage == Storage::f64) {
      std::memcpy(&bytes[i * 8], &x[i], 8);
      continue;
    }
    const float f = static_cast<float>(x[i]);
    uint32_t word;
    std::memcpy(&word, &f, 4);
    if (storage == Storage::bf16) {
      word = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000u;
      const uint16_t half = static_cast<uint16_t>(word >> 16);
      std::memcpy(&bytes[i * 2], &half, 2);
    } else {
      std::memcpy(&bytes[i * 4], &f, 4);
    }
    float back;
    std::memcpy(&back, &word, 4);
    x[i] = back;
  }
  return bytes;
}

double read(const Bytes& bytes, size_t i, Storage storage) {
  if (storage == Storage::f64) {
    double v;
    std::memcpy(&v, &bytes[i * 8], 8);
    return v;
  }
  uint32_t word = 0;
  if (storage == Storage::bf16) {
    uint16_t half;
    std::memcpy(&half, &bytes[i * 2], 2);
    word = static_cast<uint32_t>(half) << 16;
  } else {
    std::memcpy(&word, &bytes[i * 4], 4);
  }
  float v;
  std::memcpy(&v, &word, 4);
  return v;
}

void compare(const char* what, const Bytes& got, Storage storage, const Values& want, double tolerance) {
  double worst = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::fabs(read(got, i, storage) - want[i]);
    worst = error > worst || error != error ? error : worst;
    largest = std::fmax(largest, std::fabs(want[i]));
  }
  const bool good = worst <= tolerance * largest;
  std::printf("%-32s error %.2e of %.2e  %s\n", what, worst, largest, good ? "ok" : "WRONG");
  if (!good) std::exit(1);
}

struct Kind {
  const char* name;
  Storage storage;
  size_t size;
  double tolerance;
};
const Kind kKinds[] = {{"float32", Storage::f32, 4, 3e-6}, {"bfloat16", Storage::bf16, 2, 1e-2}, {"float64", Storage::f64, 8, 1e-13}};

// B as it lies, and packed where that is for its type.
void check_matmul(const Kind& kind, int64_t m, int64_t k, const Threads& threads) {
  const int64_t n = 53;
  Values a = normal(m * k), b = normal(k * n), want(m * n);
  Bytes a_bytes = stored(a, kind.storage), b_bytes = stored(b, kind.storage), out(m * n * kind.size);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
      want[i * n + j] = sum > 0 ? sum : 0;
    }
  MatmulArgs args{};
  args.storage = args.result = kind.storage;
  args.parts = 3;
  args.groups = 1, args.m = m, args.n = n, args.k = k;
  args.a = a_bytes.data(), args.b = b_bytes.data(), args.out = out.data();
  args.a_row = k, args.a_k = 1, args.b_k = n, args.b_col = 1;
  args.activation = Activation::relu;
  CALL_BYTES(matmul, args, threads);
  const std::string name = std::string("matmul ") + std::to_string(m) + " rows ";
  compare((name + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
  if (kind.storage == Storage::bf16) {
    // Sums are float32's before they are rounded; a row with an infinity does not touch its neighbours.
    Bytes sums(m * n * 4), bad(a_bytes);
    args.result = Storage::f32, args.out = sums.data();
    CALL_BYTES(matmul, args, threads);
    compare((name + "bfloat16 to float32").c_str(), sums, Storage::f32, want, 4e-6);
    const uint16_t infinity = 0x7f80;
    std::memcpy(&bad[(m / 2 * k + 3) * 2], &infinity, 2);
    args.a = bad.data();
    CALL_BYTES(matmul, args, threads);
    for (int64_t i = 0; i < m * n; ++i) {
      const double value = read(sums, i, Storage::f32);
      if (i / n == m / 2 ? value == want[i] && value != 0 : std::fabs(value - want[i]) > 1) std::printf("%srow %ld with an infinity  WRONG\n", name.c_str(), long(i / n)), std::exit(1);
    }
    args.a = a_bytes.data(), args.result = Storage::bf16;
  }
  const int64_t bytes = CALL_BYTES(matmul_packed_bytes, args);
  if (bytes < 0) return;
  Bytes panels(bytes), again(out.size());
  args.out = panels.data();
  CALL_BYTES(matmul_pack, args, threads);
  args.out = again.data(), args.b = nullptr, args.packed = panels.data();
  CALL_BYTES(matmul, args, threads);
  compare((name + kind.name + ", packed").c_str(), again, kind.storage, want, kind.tolerance);
}

// int8 is exact, as far from zero as it goes, whether or not k fills the instructions' steps.
void check_int8(int64_t m, int64_t n, int64_t k, const Threads& threads) {
  std::vector<int8_t> a(m * k), b(k * n);
  for (auto* x : {&a, &b})
    for (int8_t& v : *x) v = random_bits() % 3 ? static_cast<int8_t>(random_bits()) : int8_t{-128};
  std::vector<int32_t> out(m * n);
  MatmulArgs args{};
  args.storage = Storage::s8, args.result = Storage::s32;
  args.groups = 1, args.m = m, args.n = n, args.k = k;
  args.a = a.data(), args.b = b.data(), args.out = out.data();
  args.a_row = k, args.a_k = 1, args.b_k = n, args.b_col = 1;
  CALL_BYTES(matmul, args, threads);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      int32_t sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
      if (out[i * n + j] != sum) {
        std::printf("matmul int8 (%ld, %ld): %d, not %d  WRONG\n", long(i), long(j), out[i * n + j], sum);
        std::exit(1);
      }
    }
  std::printf("matmul int8 %ld x %ld x %ld  ok\n", long(m), long(n), long(k));
}

// Columns of B contiguous along k (a tied embedding), few rows of A.
void check_columns(const Kind& kind, int64_t m, const Threads& threads) {
  const int64_t n = 21, k = 139;
  Values a = normal(m * k), b = normal(n * k), want(m * n);
  Bytes a_bytes = stored(a, kind.storage), b_bytes = stored(b, kind.storage), out(m * n * kind.size);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l) want[i * n + j] += a[i * k + l] * b[j * k + l];
  MatmulArgs args{};
  args.storage = args.result = kind.storage;
  args.parts = 3;
  args.groups = 1, args.m = m, args.n = n, args.k = k;
  args.a = a_bytes.data(), args.b = b_bytes.data(), args.out = out.data();
  args.a_row = k, args.a_k = 1, args.b_k = 1, args.b_col = k;
  CALL_BYTES(matmul, args, threads);
  compare((std::string("matmul by columns ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
}

// The number that a code of a quantized weight stands for, before its scale.
double code_value(Packing packing, int code) {
  static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  switch (packing) {
    case Packing::int8: return code - 128;
    case Packing::int4: return code - 8;
    case Packing::mxfp4: return (code & 8 ? -1 : 1) * e2m1[code & 7];
    case Packing::uint4: return code;
    default: {
      const int exponent = code >> 3 & 15, digits = code & 7;
      return (code & 128 ? -1 : 1) * (exponent == 0 ? std::ldexp(digits, -9) : std::ldexp(8 + digits, exponent - 10));
    }
  }
}

// x are whole numbers whose largest in a block is 127, so that rounding them to int8 changes nothing.
void check_quantized(const Kind& kind, Packing packing, int64_t m, bool column_scales, bool exact, const Threads& threads) {
  const int64_t n = 37, k = packing == Packing::fp8 ? 96 : 70, block = packing == Packing::fp8 ? 32 : 24;
  QuantizedArgs g{};
  g.storage = kind.storage, g.result = Storage::f32, g.packing = packing, g.exact = exact || packing == Packing::fp8, g.column_scales = column_scales;
  g.m = m, g.n = n, g.k = k, g.block = block, g.groups = 1;
  Values x(m * k), want(m * n);
  for (size_t i = 0; i < x.size(); ++i) x[i] = i % k % block == 1 ? 127 : static_cast<int>(random_bits() % 255) - 127;
  std::vector<uint8_t> values(g.panels() * g.panel_bytes(), 0);
  std::vector<float> scales(g.panels() * g.panel_scales(), 0);
  const bool nibbles = g.bits() == 4;
  for (int64_t j = 0; j < g.panels() * kQuantizedColumns; ++j) {
    const int64_t panel = j / kQuantizedColumns, column = j % kQuantizedColumns;
    for (int64_t l = 0; l < g.padded_k(); ++l) {
      const bool inside = j < n && l < k;
      const int zero_code = packing == Packing::int8 ? 128 : packing == Packing::int4 ? 8 : 0;
      int code = inside ? static_cast<int>(random_bits() % (nibbles ? 16 : 256)) : zero_code;
      if (packing == Packing::fp8 && (code & 127) > 0x50) code &= 0x80 | 0x3f;  // no NaN, and no sums beyond float32's digits
      const int64_t scale_at = panel * g.panel_scales() + (column_scales ? 0 : l / block * kQuantizedColumns) + column;
      float scale = inside ? std::ldexp(1.0f, static_cast<int>((column + (column_scales ? 0 : l / block)) % 3)) : scales[scale_at];
      const double value = code_value(packing, code);
      double zero = 0;
      if (packing == Packing::uint4 && inside) {
        const uint32_t sixteenths = static_cast<uint32_t>(16 + 37 * (column + (column_scales ? 0 : l / block))) % 256;
        uint32_t word;
        std::memcpy(&word, &scale, 4);
        word |= sixteenths;
        std::memcpy(&scales[scale_at], &word, 4);
        zero = sixteenths / 16.0;
      } else {
        scales[scale_at] = scale;
      }
      uint8_t* const to = values.data() + panel * g.panel_bytes();
      if (packing == Packing::fp8) to[l * kQuantizedColumns + column] = static_cast<uint8_t>(code);
      else if (!nibbles) to[(l / 4 * kQuantizedColumns + column) * 4 + l % 4] = static_cast<uint8_t>(code);
      else to[(l / 8 * kQuantizedColumns + column) * 4 + l % 4] |= static_cast<uint8_t>(code << (l % 8 < 4 ? 0 : 4));
      for (int64_t i = 0; i < m && inside; ++i) want[i * n + j] += x[i * k + l] * (value - zero) * scale;
    }
  }
  Bytes xb = stored(x, kind.storage), out(m * n * 4);
  g.x = xb.data(), g.out = out.data();
  g.weight.values = values.data(), g.weight.scales = scales.data();
  CALL_BYTES(quantized_product, g, threads);
  static const char* const names[] = {"int8", "int4", "mxfp4", "fp8", "uint4"};
  const std::string name = std::string("quantized ") + names[static_cast<int>(packing)] + (column_scales ? " columns " : " ") + std::to_string(m) + (exact ? " exact " : " rows ");
  compare((name + kind.name).c_str(), out, Storage::f32, want, 2e-6);
}

// Groups of 30, 0 and 5 rows, two rows without a group; then the gradient of the matrices.
void check_grouped(const Kind& kind, const Threads& threads) {
  const int64_t m = 37, k = 41, n = 53, groups = 3;
  const int32_t sizes[groups] = {30, 0, 5};
  Values a = normal(m * k), b = normal(groups * k * n), c = normal(m * n), want(m * n), want_b(groups * k * n);
  Bytes a_bytes = stored(a, kind.storage), b_bytes = stored(b, kind.storage), c_bytes = stored(c, kind.storage);
  Bytes out(m * n * kind.size), out_b(groups * k * n * kind.size);
  for (int64_t g = 0, row = 0; g < groups; row += sizes[g++])
    for (int64_t i = row; i < row + sizes[g]; ++i)
      for (int64_t l = 0; l < k; ++l)
        for (int64_t j = 0; j < n; ++j) {
          want[i * n + j] += a[i * k + l] * b[(g * k + l) * n + j];
          want_b[(g * k + l) * n + j] += a[i * k + l] * c[i * n + j];
        }
  GroupedArgs args{};
  args.storage = args.result = kind.storage;
  args.batch = 1, args.groups = groups, args.m = m, args.k = k, args.n = n;
  args.lhs = a_bytes.data(), args.rhs = b_bytes.data(), args.sizes = sizes, args.out = out.data();
  CALL(grouped_rows, args, threads);
  compare((std::string("grouped ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
  args.rhs = c_bytes.data(), args.out = out_b.data();
  CALL(grouped_weights, args, threads);
  compare((std::string("grouped weights ") + kind.name).c_str(), out_b, kind.storage, want_b, kind.tolerance);
}

void check_norm(const Kind& kind, const Threads& threads) {
  const int64_t rows = 21, features = 131;
  Values x = normal(rows * features), want(rows * features);
  Bytes bytes = stored(x, kind.storage), y(x.size() * kind.size);
  for (int64_t i = 0; i < rows; ++i) {
    double mean = 0, square = 0;
    for (int64_t j = 0; j < features; ++j) mean += x[i * features + j] / features;
    for (int64_t j = 0; j < features; ++j) square += std::pow(x[i * features + j] - mean, 2) / features;
    for (int64_t j = 0; j < features; ++j) want[i * features + j] = (x[i * features + j] - mean) / std::sqrt(square + 1e-5);
  }
  NormForwardArgs args{};
  args.storage = kind.storage;
  args.layer = true;
  args.groups = 1, args.rows = rows, args.features = features;
  args.eps = 1e-5;
  args.x = bytes.data(), args.y = y.data();
  CALL_ROWS(norm_forward, args, threads);
  compare((std::string("layer norm ") + kind.name).c_str(), y, kind.storage, want, kind.tolerance);
}

// Causal, two query heads to a key head; a prefill and, with one query, the decoding kernel.
void check_attention(const Kind& kind, int64_t q_len, const Threads& threads) {
  const int64_t heads = 4, kv_heads = 2, kv_len = 75, dim = 40, offset = kv_len - q_len;
  Values q = normal(heads * q_len * dim), k = normal(kv_heads * kv_len * dim), v = normal(kv_heads * kv_len * dim);
  Bytes qb = stored(q, kind.storage), kb = stored(k, kind.storage), vb = stored(v, kind.storage);
  Values want(q.size()), lse_want(heads * q_len);
  const double scale = 1 / std::sqrt(double(dim));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < q_len; ++i) {
      const int64_t g = h / (heads / kv_heads), row = h * q_len + i;
      double sum = 0;
      for (int64_t j = 0; j <= i + offset; ++j) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += q[row * dim + d] * k[(g * kv_len + j) * dim + d];
        const double p = std::exp(scale * score);
        sum += p;
        for (int64_t d = 0; d < dim; ++d) want[row * dim + d] += p * v[(g * kv_len + j) * dim + d];
      }
      for (int64_t d = 0; d < dim; ++d) want[row * dim + d] /= sum;
      lse_want[row] = std::log(sum);
    }
  const Storage statistics = kind.storage == Storage::f64 ? Storage::f64 : Storage::f32;
  Bytes out(q.size() * kind.size), lse(lse_want.size() * (statistics == Storage::f64 ? 8 : 4));
  AttentionArgs args{};
  args.storage = kind.storage;
  args.parts = kind.storage == Storage::f32 ? 3 : 1;
  args.batch = 1, args.q_heads = heads, args.kv_heads = kv_heads, args.q_len = q_len, args.kv_len = kv_len;
  args.qk_dim = args.v_dim = dim;
  args.scale = scale;
  args.low = -(int64_t{1} << 40), args.high = offset;
  args.query = qb.data(), args.key = kb.data(), args.value = vb.data();
  args.keep_scale = 1;
  args.out = out.data(), args.logsumexp = lse.data();
  if (q_len == 1) CALL(attention_decode, args, threads);
  else CALL(attention_forward, args, threads);
  const std::string name = std::string(q_len == 1 ? "decode " : "attention ") + kind.name;
  compare(name.c_str(), out, kind.storage, want, kind.tolerance);
  compare((name + " lse").c_str(), lse, statistics, lse_want, kind.tolerance);
}

// Softmax forward, and the gradient of exact gelu (the function of most steps), over ragged rows.
void check_rows(const Kind& kind, const Threads& threads) {
  const int64_t rows = 7, features = 101;
  Values x = normal(rows * features), dy = normal(rows * features), want(x.size());
  Bytes xb = stored(x, kind.storage), dyb = stored(dy, kind.storage), out(xb.size());
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < features; ++i) sum += std::exp(x[r * features + i]);
    for (int64_t i = 0; i < features; ++i) want[r * features + i] = std::exp(x[r * features + i]) / sum;
  }
  SoftmaxArgs softmax{kind.storage, false, rows, features, xb.data(), nullptr, out.data()};
  CALL_ROWS(softmax_forward, softmax, threads);
  compare((std::string("softmax ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
  for (size_t i = 0; i < x.size(); ++i) {
    const double z = x[i];
    want[i] = dy[i] * (0.5 * (1 + std::erf(z * std::sqrt(0.5))) + z * std::exp(-0.5 * z * z) / std::sqrt(2 * std::acos(-1.0)));
  }
  ActivationArgs gelu{};
  gelu.storage = kind.storage, gelu.kind = ActivationKind::gelu;
  gelu.groups = 1, gelu.rows = rows, gelu.features = features;
  gelu.x = xb.data(), gelu.dy = dyb.data(), gelu.out = out.data();
  CALL_ROWS(activation_run, gelu, threads);
  compare((std::string("gelu gradient ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
}

// Three heads of five positions, the first 2 x 11 of 25 features turning.
void check_rope(const Kind& kind, bool interleaved, const Threads& threads) {
  const int64_t heads = 3, positions = 5, pairs = 11, dim = 25;
  const Storage wide = kind.storage == Storage::f64 ? Storage::f64 : Storage::f32;
  Values x = normal(heads * positions * dim), cos(positions * pairs), sin(cos.size());
  for (size_t i = 0; i < cos.size(); ++i) cos[i] = std::cos(0.3 * double(i)), sin[i] = std::sin(0.3 * double(i));
  Bytes xb = stored(x, kind.storage), cb = stored(cos, wide), sb = stored(sin, wide), out(xb.size());
  Values want = x;
  for (int64_t row = 0; row < heads * positions; ++row)
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t first = row * dim + (interleaved ? 2 * i : i), second = row * dim + (interleaved ? 2 * i + 1 : i + pairs);
      const double c = cos[row % positions * pairs + i], s = sin[row % positions * pairs + i];
      want[first] = x[first] * c - x[second] * s, want[second] = x[second] * c + x[first] * s;
    }
  RopeArgs args{};
  args.storage = kind.storage, args.interleaved = interleaved;
  args.batch = 1, args.positions = positions, args.pairs = pairs, args.dim = dim;
  args.cos = cb.data(), args.sin = sb.data();
  args.arrays[0].heads = heads, args.arrays[0].x = xb.data(), args.arrays[0].out = out.data();
  CALL_ROWS(rope_run, args, threads);
  compare((std::string("rope ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
}

// Two queries at the end of 70 tokens in pages of 8, four heads to two, keys and values in turn; the second query does
// not see the first one's key. With a distance and the logsumexp.
void check_paged(const Kind& kind, const Threads& threads) {
  const int64_t heads = 4, kv_heads = 2, dim = 21, page = 8, entries = 9, queries = 2, length = 70, row = 2 * kv_heads * dim;
  Values q = normal(queries * heads * dim), pool = normal(entries * page * row), want(q.size());
  Bytes qb = stored(q, kind.storage), pb = stored(pool, kind.storage), out(qb.size());
  const Kind& wide = kind.storage == Storage::f64 ? kind : kKinds[0];
  const uint8_t tree[] = {1, 0, 0, 1};
  Values slopes{0.5, 0.1, 0.02, 0}, want_lse(queries * heads);
  Bytes sb = stored(slopes, wide.storage), lse(sb.size() * queries);
  int32_t table[entries], lens[] = {int32_t(length)}, starts[] = {0, int32_t(queries)}, count[] = {1};
  for (int64_t i = 0; i < entries; ++i) table[i] = static_cast<int32_t>(i * 4 % entries);
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t h = 0; h < heads; ++h) {
      double sum = 0;
      double* to = &want[(i * heads + h) * dim];
      for (int64_t t = 0; t <= length - queries + i; ++t) {
        if (t >= length - queries && !tree[i * queries + t - (length - queries)]) continue;
        const double* key = &pool[(table[t / page] * page + t % page) * row + h / 2 * 2 * dim];
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += q[(i * heads + h) * dim + d] * key[d];
        const double p = std::exp(0.2 * score - slopes[h] * static_cast<double>(length - queries + i - t));
        sum += p;
        for (int64_t d = 0; d < dim; ++d) to[d] += p * key[dim + d];
      }
      for (int64_t d = 0; d < dim; ++d) to[d] /= sum;
      want_lse[i * heads + h] = std::log(sum);
    }
  PagedArgs args{};
  args.storage = kind.storage;
  args.page_type = kind.storage == Storage::f64 ? PageType::f64 : kind.storage == Storage::bf16 ? PageType::bf16 : PageType::f32;
  args.batch = 1, args.tokens = queries, args.heads = heads, args.dim = args.value_dim = dim, args.kv_heads = kv_heads;
  args.pages = entries, args.page_size = page, args.sequences = 1, args.entries = entries;
  args.scale = 0.2, args.window = -1;
  args.query = qb.data(), args.out = out.data();
  args.keys = {pb.data(), 0, row, 2 * dim};
  args.values = {pb.data() + dim * kind.size, 0, row, 2 * dim};
  args.kv_lens = lens, args.table = table, args.starts = starts, args.count = count;
  args.slopes = sb.data(), args.tree = tree, args.tree_columns = queries, args.lse = lse.data();
  CALL(paged_attention, args, threads);
  compare((std::string("paged attention ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
  compare((std::string("logsumexp of paged attention ") + kind.name).c_str(), lse, wide.storage, want_lse, kind.tolerance);
}

// A gated unit without an activation, and the gradient of x.
void check_gated(const Kind& kind, const Threads& threads) {
  const int64_t m = 37, n = 53, k = 70;
  Values x = normal(m * k), gate = normal(k * n), up = normal(k * n), dh = normal(m * n), want(m * n), dwant(m * k);
  Bytes xb = stored(x, kind.storage), gb = stored(gate, kind.storage), ub = stored(up, kind.storage), db = stored(dh, kind.storage);
  Bytes h(m * n * kind.size), z(h.size()), y(h.size()), dx(m * k * kind.size);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double g = 0, u = 0;
      for (int64_t l = 0; l < k; ++l) g += x[i * k + l] * gate[l * n + j], u += x[i * k + l] * up[l * n + j];
      want[i * n + j] = g * u;
      for (int64_t l = 0; l < k; ++l) dwant[i * k + l] += dh[i * n + j] * (u * gate[l * n + j] + g * up[l * n + j]);
    }
  GatedArgs args{};
  args.storage = args.result = kind.storage;
  args.parts = 3;
  args.groups = 1, args.m = m, args.n = n, args.k = k;
  args.x = xb.data(), args.gate = gb.data(), args.up = ub.data(), args.h = h.data();
  args.gate_sums = z.data(), args.up_sums = y.data();
  CALL(gated_forward, args, threads);
  compare((std::string("gated ") + kind.name).c_str(), h, kind.storage, want, kind.tolerance);
  args.dh = db.data(), args.dx = dx.data();
  CALL(gated_input_gradient, args, threads);
  compare((std::string("gated dx ") + kind.name).c_str(), dx, kind.storage, dwant, kind.tolerance);
}

void check_loss(const Kind& kind, const Threads& threads) {
  const int64_t tokens = 21, vocab = 300, features = 40;
  const Storage sums = kind.storage == Storage::f64 ? Storage::f64 : Storage::f32;
  const size_t size = sums == Storage::f64 ? 8 : 4;
  Values x = normal(tokens * features), weight = normal(vocab * features), lse(tokens), at_label(tokens), ones(tokens, 1), zeros(tokens, 0);
  Values dwant(x.size());
  Bytes xb = stored(x, kind.storage), wb = stored(weight, kind.storage), lse_got(tokens * size), label_got(tokens * size);
  Bytes ob = stored(ones, sums), zb = stored(zeros, sums), dx(xb.size()), dw(wb.size());
  std::vector<int32_t> labels(tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    labels[t] = static_cast<int32_t>(t * 17 % vocab);
    Values z(vocab);
    double sum = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      for (int64_t d = 0; d < features; ++d) z[v] += x[t * features + d] * weight[v * features + d];
      sum += std::exp(z[v]);
    }
    lse[t] = std::log(sum), at_label[t] = z[labels[t]];
    for (int64_t v = 0; v < vocab; ++v)
      for (int64_t d = 0; d < features; ++d) dwant[t * features + d] += std::exp(z[v]) / sum * weight[v * features + d];
  }
  LossArgs args{};
  args.storage = kind.storage;
  args.parts = 3;
  args.tokens = tokens, args.vocab = vocab, args.features = features;
  args.x = xb.data(), args.weight = wb.data(), args.labels = labels.data();
  args.logsumexp = lse_got.data(), args.label_logit = label_got.data();
  CALL(loss_forward, args, threads);
  compare((std::string("loss lse ") + kind.name).c_str(), lse_got, sums, lse, kind.tolerance);
  compare((std::string("loss label ") + kind.name).c_str(), label_got, sums, at_label, kind.tolerance);
  args.dlogsumexp = ob.data(), args.dlabel_logit = zb.data();
  args.dx = dx.data(), args.dweight = dw.data();
  CALL(loss_backward, args, threads);
  compare((std::string("loss dx ") + kind.name).c_str(), dx, kind.storage, dwant, kind.tolerance);

  Values shares(tokens), total(1), slopes(x.size()), bias(vocab, 0);  // every third token has no loss
  for (int64_t t = 0; t < tokens; ++t) {
    shares[t] = t % 3 == 2 ? 0 : 1;
    total[0] += shares[t] * (lse[t] - at_label[t]);
    for (int64_t d = 0; d < features; ++d) slopes[t * features + d] = shares[t] * (dwant[t * features + d] - weight[labels[t] * features + d]);
  }
  Bytes sb = stored(shares, sums), bb = stored(bias, sums), loss(size), dx_wide(x.size() * size), dw_wide(weight.size() * size), db(vocab * size);
  args.shares = sb.data(), args.bias = bb.data(), args.loss = loss.data();
  args.dx = dx_wide.data(), args.dweight = dw_wide.data(), args.dbias = db.data();
  CALL(loss_total, args, threads);
  compare((std::string("loss total ") + kind.name).c_str(), loss, sums, total, kind.tolerance);
  compare((std::string("loss total dx ") + kind.name).c_str(), dx_wide, sums, slopes, kind.tolerance);
}

// Two rows of three blocks, of which three are there, and one of those twice.
void check_sparse(const Kind& kind, const Threads& threads) {
  const int64_t m = 19, br = 20, bc = 35, blocks = 4;
  const int32_t indices[] = {1, 0, 0, 2, 1, 2, 0, 2};
  Values x = normal(m * 2 * br), values = normal(blocks * br * bc), dy = normal(m * 3 * bc), want(m * 3 * bc), dwant(values.size());
  Bytes xb = stored(x, kind.storage), vb = stored(values, kind.storage), yb = stored(dy, kind.storage);
  Bytes out(want.size() * kind.size), dvalues(vb.size());
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < br; ++i)
      for (int64_t j = 0; j < bc; ++j)
        for (int64_t r = 0; r < m; ++r) {
          const int64_t from = r * 2 * br + indices[2 * b] * br + i, to = r * 3 * bc + indices[2 * b + 1] * bc + j;
          want[to] += x[from] * values[(b * br + i) * bc + j];
          dwant[(b * br + i) * bc + j] += x[from] * dy[to];
        }
  SparseArgs args{};
  args.storage = args.result = kind.storage;
  args.parts = 3;
  args.groups = 1, args.m = m, args.rows = 2 * br, args.columns = 3 * bc, args.blocks = blocks, args.block_rows = br, args.block_columns = bc;
  args.dense = args.left = xb.data(), args.right = yb.data(), args.values = vb.data(), args.indices = indices;
  args.out = out.data(), args.dvalues = dvalues.data();
  CALL(sparse_product, args, threads);
  compare((std::string("sparse ") + kind.name).c_str(), out, kind.storage, want, kind.tolerance);
  CALL(sparse_values_gradient, args, threads);
  compare((std::string("sparse dvalues ") + kind.name).c_str(), dvalues, kind.storage, dwant, kind.tolerance);
}

// A sequence that begins and one that goes on in place, of more tokens than are widened at once, with columns that are
// no whole number of vectors; decays of heads or of channels.
void check_delta(const Kind& kind, bool channels, bool correction, const Threads& threads) {
  const Storage sums = kind.storage == Storage::f64 ? Storage::f64 : Storage::f32;
  const int64_t heads = 4, key_heads = 2, tokens = 40, dim = 21, width = 75, decays = channels ? dim : 1, split = 19;
  Values q = normal(key_heads * tokens * dim), k = normal(key_heads * tokens * dim), v = normal(heads * tokens * width);
  Values decay = normal(heads * tokens * decays), beta = normal(heads * tokens), skip = normal(heads), state = normal(heads * dim * width);
  for (double& x : k) x *= 0.2;
  for (double& x : decay) x = -std::fabs(x);
  for (double& x : beta) x = 1 / (1 + std::exp(-x));
  const Bytes qb = stored(q, kind.storage), kb = stored(k, kind.storage), vb = stored(v, kind.storage), db = stored(decay, sums);
  const Bytes bb = stored(beta, sums), sb = stored(skip, sums);
  Bytes states = stored(state, sums), out(v.size() * kind.size);
  Values want(v.size());
  for (int64_t h = 0; h < heads; ++h) {
    Values s(dim * width, 0);
    for (int64_t t = 0; t < tokens; ++t) {
      if (t == split) s = Values(state.begin() + h * dim * width, state.begin() + (h + 1) * dim * width);
      const double *qt = &q[(h / 2 * tokens + t) * dim], *kt = &k[(h / 2 * tokens + t) * dim], *vt = &v[(h * tokens + t) * width];
      for (int64_t i = 0; i < dim; ++i)
        for (int64_t j = 0; j < width; ++j) s[i * width + j] *= std::exp(decay[(h * tokens + t) * decays + (channels ? i : 0)]);
      for (int64_t j = 0; j < width; ++j) {
        double seen = 0, read = 0;
        for (int64_t i = 0; i < dim && correction; ++i) seen += kt[i] * s[i * width + j];
        for (int64_t i = 0; i < dim; ++i) {
          s[i * width + j] += kt[i] * beta[h * tokens + t] * (vt[j] - seen);
          read += qt[i] * s[i * width + j];
        }
        want[(h * tokens + t) * width + j] = 0.5 * read + skip[h] * vt[j];
      }
    }
    std::copy(s.begin(), s.end(), state.begin() + h * dim * width);
  }
  const DeltaSequence sequences[] = {{0, 0, split, nullptr, nullptr}, {0, split, tokens - split, states.data(), states.data()}};
  DeltaArgs args{};
  args.storage = kind.storage, args.correction = correction, args.scale = 0.5;
  args.heads = heads, args.key_heads = key_heads, args.tokens = tokens, args.key_dim = dim, args.value_dim = width, args.channels = decays;
  args.value = vb.data(), args.query = qb.data(), args.key = kb.data(), args.decay = db.data(), args.beta = bb.data(), args.skip = sb.data();
  args.sequences = sequences, args.count = 2, args.y = out.data();
  CALL_ROWS(delta_run, args, threads);
  compare((std::string("delta ") + kind.name).c_str(), out, kind.storage, want, 2 * kind.tolerance);
  compare((std::string("delta states ") + kind.name).c_str(), states, sums, state, sums == Storage::f64 ? 1e-13 : 1e-5);
}

// A first moment of any type next to the others in float, in more than one task and no whole number of vectors.
void check_adam(const Kind& kind, const Threads& threads) {
  if (kind.storage != Storage::f32 && kind.storage != Storage::bf16) return;
  const size_t n = 20011;
  Values g = normal(n), p = normal(n), mu = normal(n), nu = normal(n);
  for (double& v : nu) v *= v;
  const Bytes gb = stored(g, Storage::f32);
  Bytes pb = stored(p, Storage::f32), mb = stored(mu, kind.storage), nb = stored(nu, Storage::f32);
  AdamArgs a{};
  a.storage = kind.storage, a.n = static_cast<int64_t>(n), a.gradient = reinterpret_cast<const float*>(gb.data());
  a.param = reinterpret_cast<float*>(pb.data()), a.first = mb.data(), a.second = reinterpret_cast<float*>(nb.data());
  a.clip = 0.5f, a.first_scale = 2.0f, a.second_scale = 4.0f, a.rate = -0.125f, a.eps = 0.0625f, a.decay = 0.25f;
  a.keep_first = 0.75f, a.add_first = 0.25f, a.keep_second = 0.875f, a.add_second = 0.125f;
  for (size_t i = 0; i < n; ++i) {
    g[i] *= 0.5;
    mu[i] = 0.25 * g[i] + 0.75 * mu[i];
    nu[i] = 0.125 * g[i] * g[i] + 0.875 * nu[i];
    p[i] -= 0.125 * (2 * mu[i] / (std::sqrt(4 * nu[i]) + 0.0625) + 0.25 * p[i]);
  }
  CALL_ROWS(adam_run, a, threads);
  compare("adam parameters", pb, Storage::f32, p, 1e-6);
  compare((std::string("adam first moment ") + kind.name).c_str(), mb, kind.storage, mu, kind.tolerance);
  compare("adam second moment", nb, Storage::f32, nu, 1e-6);
}

// Prints the panels of a weight [k, n], number after number, as whole numbers.
double weight_number(int64_t i) { return static_cast<double>(i * 7 % 251 - 125); }
void print_packed(const std::string& type, int64_t k, int64_t n, const Threads& threads) {
  MatmulArgs args{};
  args.storage = args.result = type == "int8" ? Storage::s8 : type == "bfloat16" ? Storage::bf16 : Storage::f32;
  if (type == "int8") args.result = Storage::s32;
  Values b(k * n);
  for (size_t i = 0; i < b.size(); ++i) b[i] = weight_number(static_cast<int64_t>(i));
  Bytes bytes(b.size());
  if (type == "int8") for (size_t i = 0; i < b.size(); ++i) bytes[i] = static_cast<char>(static_cast<int8_t>(b[i]));  // char is unsigned on Arm
  else bytes = stored(b, args.storage);
  args.groups = 1, args.m = 1, args.n = n, args.k = k, args.b = bytes.data(), args.b_k = n, args.b_col = 1;
  Bytes panels(CALL_BYTES(matmul_packed_bytes, args));
  args.out = panels.data();
  CALL_BYTES(matmul_pack, args, threads);
  // int8 is stored widened to int16 where the set has no products of bytes.
  const bool wide = type == "int8" && static_cast<int64_t>(panels.size()) >= 2 * k * n;
  const size_t size = type == "float32" ? 4 : type == "bfloat16" || wide ? 2 : 1;
  for (size_t i = 0; i < panels.size() / size; ++i) {
    int16_t pair = 0;
    if (wide) std::memcpy(&pair, &panels[2 * i], 2);
    const double number = type != "int8" ? read(panels, i, args.storage) : wide ? pair : static_cast<int8_t>(panels[i]);
    std::printf("%d\n", static_cast<int>(number));
  }
}

void check_all(const Threads& threads) {
  check_int8(37, 53, 129, threads);
  check_int8(1, 5, 3, threads);
  check_int8(100, 40, 2100, threads);  // longer than a stretch of k
  for (const Packing packing : {Packing::int8, Packing::int4, Packing::mxfp4, Packing::fp8, Packing::uint4})
    for (const int64_t m : {1, 2, 3, 5, 20})
      for (const bool columns : {false, true})
        for (int i = 0; i < 2; ++i) {
          check_quantized(kKinds[i], packing, m, columns, false, threads);
          if (m == 3 || m == 20) check_quantized(kKinds[i], packing, m, columns, true, threads);
        }
  for (const Kind& kind : kKinds) {
    for (const int64_t m : {1, 6}) check_columns(kind, m, threads);
    for (const int64_t m : {1, 3, 8, 37, 70}) check_matmul(kind, m, 129, threads);
    check_matmul(kind, 13, 1100, threads);  // more than a stretch of k
    check_grouped(kind, threads);
    check_norm(kind, threads);
    check_gated(kind, threads);
    check_loss(kind, threads);
    check_sparse(kind, threads);
    check_adam(kind, threads);
    for (const bool channels : {false, true})
      for (const bool correction : {false, true}) check_delta(kind, channels, correction, threads);
    check_rows(kind, threads);
    check_rope(kind, false, threads);
    check_rope(kind, true, threads);
    check_paged(kind, threads);
    check_attention(kind, 63, threads);
    check_attention(kind, 1, threads);
  }
}

}  // namespace

int main(int count, char** words) {
  if (isa_complaint() != nullptr) std::fprintf(stderr, "%s\n", isa_complaint());
  Pool pool(2);
  const Threads threads = pool.threads(3);
  const std::string task = count > 1 ? words[1] : "";
  if (task == "isa") {
    std::puts(isa_name(isa()));
  } else if (task == "packed" && count == 5) {
    print_packed(words[2], std::atoll(words[3]), std::atoll(words[4]), threads);
  } else {
    check_all(threads);
    std::printf("kernels_check: ok (%s)\n", isa_name(isa()));
  }
  return 0;
}

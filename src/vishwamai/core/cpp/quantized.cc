// FFI handlers of products with a quantized weight (quantized.h), and of bringing one into its panels.
#include "quantized.h"

#include "ffi.h"
#include "registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;

void run_product(const QuantizedArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_BYTES(quantized_product, args, threads) }

bool packing_of(int64_t number, Packing* packing) {
  *packing = static_cast<Packing>(number);
  return number >= 0 && number <= static_cast<int64_t>(Packing::uint4);
}

// Values are [groups, panels, bytes of a panel].
bool weight_of(const Buffer& values, const Buffer& scales, const QuantizedArgs& g, QuantizedWeight* weight) {
  const auto dims = values.dimensions();
  const ffi::DataType scale = g.packing == Packing::uint4 ? ffi::U32 : ffi::F32;
  if (dims.size() != 3 || dims[0] != g.groups || dims[1] != g.panels() || dims[2] != g.panel_bytes() || scales.element_type() != scale ||
      static_cast<int64_t>(scales.element_count()) != g.groups * g.panels() * g.panel_scales()) {
    return false;
  }
  *weight = {optional<uint8_t>(values), optional<float>(scales), g.panels() * g.panel_bytes(), g.panels() * g.panel_scales()};
  return true;
}

ffi::Error product(ffi::ThreadPool pool, Buffer x, Buffer values, Buffer scales, Buffer up_values, Buffer up_scales, Buffer bias, Buffer sizes,
                   ffi::Result<Buffer> out, int64_t packing, int64_t block, bool column_scales, bool exact, int64_t activation) {
  QuantizedArgs g{};
  const auto dx = x.dimensions(), dc = out->dimensions();
  if (dx.size() != 2 || dc.size() != 2 || !storage_of(x, &g.storage) || !storage_of(*out, &g.result) || !packing_of(packing, &g.packing) || block <= 0 || block % 8) {
    return invalid("quantized product: x and the result must be [rows, columns] of float32 or bfloat16, blocks a multiple of 8");
  }
  g.block = block, g.column_scales = column_scales, g.exact = exact;
  g.m = dx[0], g.k = dx[1], g.n = dc[1];
  g.sizes = optional<int32_t>(sizes), g.groups = g.sizes ? static_cast<int64_t>(sizes.element_count()) : 1;
  g.x = x.untyped_data(), g.out = out->untyped_data();
  g.bias = optional<float>(bias), g.activation = static_cast<Activation>(activation);
  if (g.packing == Packing::fp8 && !exact) return invalid("quantized product: rows are not rounded where the weight is of 8-bit floats");
  if (out->element_count() == 0) return ffi::Error::Success();
  if (!weight_of(values, scales, g, &g.weight) || (up_values.element_count() && !weight_of(up_values, up_scales, g, &g.up))) {
    return invalid("quantized product: the panels do not have the size that x, the result and the options give");
  }
  run_product(g, threads_of(pool));
  return ffi::Error::Success();
}

// [groups, k, n] int8, or [groups, n, k], to [groups, panels, bytes]. Numbers are the values, of mxfp4 their bits - 8,
// of uint4 the values - 8, and of fp8 their bits.
ffi::Error pack(ffi::ThreadPool pool, Buffer values, ffi::Result<Buffer> out, int64_t packing, bool transposed) {
  const auto dims = values.dimensions();
  QuantizedArgs g{};
  if (dims.size() != 3 || values.element_type() != ffi::S8 || !packing_of(packing, &g.packing)) return invalid("quantized pack: values must be [groups, k, n] int8");
  g.k = dims[transposed ? 2 : 1], g.n = dims[transposed ? 1 : 2];
  const int64_t k_stride = transposed ? 1 : g.n, n_stride = transposed ? g.k : 1, panels = g.panels(), bytes = g.panel_bytes();
  if (static_cast<int64_t>(out->element_count()) != dims[0] * panels * bytes) return invalid("quantized pack: the result has another size");
  const auto* const from = optional<int8_t>(values);
  auto* const to = static_cast<uint8_t*>(out->untyped_data());
  const int bits = g.bits(), offset = g.packing == Packing::fp8 ? 0 : bits == 8 ? 128 : 8;
  parallel_for(threads_of(pool), dims[0] * panels, [&](int64_t i) {
    const int64_t first = i % panels * kQuantizedColumns, columns = g.n - first < kQuantizedColumns ? g.n - first : kQuantizedColumns;
    const int8_t* const in = from + i / panels * g.k * g.n + first * n_stride;
    const auto value = [&](int64_t k, int64_t c) { return k < g.k && c < columns ? in[k * k_stride + c * n_stride] + offset : offset; };
    uint8_t* byte = to + i * bytes;
    if (g.packing == Packing::fp8) {
      for (int64_t k = 0; k < g.padded_k(); ++k)
        for (int64_t c = 0; c < kQuantizedColumns; ++c, ++byte) *byte = static_cast<uint8_t>(value(k, c));
      return;
    }
    const int64_t step = bits == 8 ? 4 : 8;
    for (int64_t k = 0; k < g.padded_k(); k += step)
      for (int64_t c = 0; c < kQuantizedColumns; ++c)
        for (int64_t j = 0; j < 4; ++j, ++byte) *byte = static_cast<uint8_t>(bits == 8 ? value(k + j, c) : (value(k + j, c) & 15) | (value(k + j + 4, c) & 15) << 4);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_quantized_multiply, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // x
                                  .Arg<Buffer>()  // values
                                  .Arg<Buffer>()  // scales
                                  .Arg<Buffer>()  // up values
                                  .Arg<Buffer>()  // up scales
                                  .Arg<Buffer>()  // bias
                                  .Arg<Buffer>()  // group sizes
                                  .Ret<Buffer>()  // out
                                  .Attr<int64_t>("packing")
                                  .Attr<int64_t>("block")
                                  .Attr<bool>("column_scales")
                                  .Attr<bool>("exact")
                                  .Attr<int64_t>("activation"));
VISHWAMAI_REGISTER(vishwamai_quantized_multiply)

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_quantized_panels, pack,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Buffer>().Ret<Buffer>().Attr<int64_t>("packing").Attr<bool>("transposed"));
VISHWAMAI_REGISTER(vishwamai_quantized_panels)

}  // namespace vishwamai

// FFI handler of the matrix product.
#include "cpu_matmul.h"

#include <string>
#include <string_view>

#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

void run_matmul(const MatmulArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_BYTES(matmul, args, threads) }
void run_pack(const MatmulArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_BYTES(matmul_pack, args, threads) }
int64_t packed_bytes(const MatmulArgs& args) { VISHWAMAI_DISPATCH_BYTES(matmul_packed_bytes, args) }

// Stride over the groups of a buffer [groups or 1, ...]; 0 where they share it.
int64_t group_stride(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return dims[0] == 1 || dims[0] == 0 ? 0 : static_cast<int64_t>(buffer.element_count()) / dims[0];
}

ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer bias, ffi::AnyBuffer scale_a,
                   ffi::AnyBuffer scale_b, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> preactivation,
                   bool transpose_a, bool transpose_b, int64_t activation, int64_t parts) {
  MatmulArgs g{};
  const auto da = a.dimensions(), db = b.dimensions(), dc = out->dimensions();
  if (da.size() != 3 || db.size() != 3 || dc.size() != 3 || !storage_of(a, &g.storage) || !storage_of(*out, &g.result)) {
    return invalid("matmul: a, b and the result must be [groups, rows, columns] of a type that the kernel has");
  }
  g.groups = dc[0], g.m = dc[1], g.n = dc[2], g.k = da[transpose_a ? 1 : 2];
  g.a = a.untyped_data(), g.b = b.untyped_data();
  g.a_group = group_stride(a), g.b_group = group_stride(b);
  g.a_row = transpose_a ? 1 : g.k, g.a_k = transpose_a ? g.m : 1;
  g.b_k = transpose_b ? 1 : g.n, g.b_col = transpose_b ? g.k : 1;
  if ((g.bias = optional(bias)) != nullptr) g.bias_group = group_stride(bias);
  if ((g.scale_a = optional(scale_a)) != nullptr) {
    g.scale_a_group = group_stride(scale_a), g.scale_a_row = scale_a.dimensions()[1] == 1 ? 0 : 1;
  }
  if ((g.scale_b = optional(scale_b)) != nullptr) {
    g.scale_b_group = group_stride(scale_b), g.scale_b_col = scale_b.dimensions()[1] == 1 ? 0 : 1;
  }
  g.activation = static_cast<Activation>(activation), g.parts = static_cast<int>(parts);
  g.out = out->untyped_data();
  g.preactivation = preactivation->element_count() ? preactivation->untyped_data() : nullptr;
  if (out->element_count() != 0) run_matmul(g, threads_of(pool));
  return ffi::Error::Success();
}

// a [m, k] times a weight that was packed for the instruction set of that name.
ffi::Error packed_product(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer packed, ffi::AnyBuffer bias, ffi::AnyBuffer scale_a, ffi::AnyBuffer scale_b,
                          ffi::Result<ffi::AnyBuffer> out, int64_t activation, std::string_view packed_for) {
  MatmulArgs g{};
  const auto da = a.dimensions(), dc = out->dimensions();
  if (da.size() != 2 || dc.size() != 2 || !storage_of(a, &g.storage) || !storage_of(*out, &g.result)) {
    return invalid("matmul: a and the result must be [rows, columns] of a type that the kernel has");
  }
  if (packed_for != isa_name(isa())) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "gemm: the PackedWeight is in the order of VISHWAMAI_CPU_ISA=" + std::string(packed_for) + ", but this process uses " +
                                                            isa_name(isa()) + "; trace the program again here (the weight is then unpacked), or pack the weight again");
  }
  g.groups = 1, g.m = dc[0], g.n = dc[1], g.k = da[1], g.parts = 3;
  if (packed_bytes(g) != static_cast<int64_t>(packed.size_bytes())) return invalid("matmul: the packed weight has another size on this instruction set");
  g.a = a.untyped_data(), g.packed = packed.untyped_data();
  g.a_row = g.k, g.a_k = 1;
  g.bias = optional(bias);
  if ((g.scale_a = optional(scale_a)) != nullptr) g.scale_a_row = scale_a.element_count() == 1 ? 0 : 1;
  if ((g.scale_b = optional(scale_b)) != nullptr) g.scale_b_col = scale_b.element_count() == 1 ? 0 : 1;
  g.activation = static_cast<Activation>(activation);
  g.out = out->untyped_data();
  if (out->element_count() != 0) run_matmul(g, threads_of(pool));
  return ffi::Error::Success();
}

// b [k, n], or [n, k], into the panels of this process's instruction set.
ffi::Error pack(ffi::ThreadPool pool, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> out, bool transposed) {
  MatmulArgs g{};
  const auto dims = b.dimensions();
  if (dims.size() != 2 || !storage_of(b, &g.storage)) return invalid("matmul: a weight to be packed must be a matrix of a type that the kernel has");
  g.k = dims[transposed ? 1 : 0], g.n = dims[transposed ? 0 : 1];
  g.b = b.untyped_data(), g.b_k = transposed ? 1 : g.n, g.b_col = transposed ? g.k : 1;
  g.out = out->untyped_data();
  if (packed_bytes(g) != static_cast<int64_t>(out->size_bytes())) return invalid("matmul: the packed weight has another size on this instruction set");
  if (out->element_count() != 0) run_pack(g, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_matmul_pack, pack, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<bool>("transposed"));
VISHWAMAI_REGISTER(vishwamai_matmul_pack)

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_matmul_packed, packed_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // a
                                  .Arg<ffi::AnyBuffer>()  // packed b
                                  .Arg<ffi::AnyBuffer>()  // bias
                                  .Arg<ffi::AnyBuffer>()  // scale_a
                                  .Arg<ffi::AnyBuffer>()  // scale_b
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attr<int64_t>("activation")
                                  .Attr<std::string_view>("packed_for"));
VISHWAMAI_REGISTER(vishwamai_matmul_packed)

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_matmul, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // a
                                  .Arg<ffi::AnyBuffer>()  // b
                                  .Arg<ffi::AnyBuffer>()  // bias
                                  .Arg<ffi::AnyBuffer>()  // scale_a
                                  .Arg<ffi::AnyBuffer>()  // scale_b
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // preactivation
                                  .Attr<bool>("transpose_a")
                                  .Attr<bool>("transpose_b")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("parts"));
VISHWAMAI_REGISTER(vishwamai_matmul)

}  // namespace vishwamai

// FFI handlers of the grouped matrix product.
#include "cpu_grouped.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

void run_rows(const GroupedArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH(grouped_rows, args, threads) }
void run_weights(const GroupedArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH(grouped_weights, args, threads) }

ffi::Error arguments(const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs, const ffi::AnyBuffer& sizes, const ffi::AnyBuffer& out, size_t rhs_rank, GroupedArgs* g) {
  const auto dl = lhs.dimensions(), dr = rhs.dimensions(), ds = sizes.dimensions();
  if (dl.size() != 3 || dr.size() != rhs_rank || ds.size() != 2 || sizes.element_type() != ffi::S32 || !storage_of(lhs, &g->storage) || !storage_of(out, &g->result)) {
    return invalid("grouped_gemm: lhs [batch, m, k], rhs and int32 sizes [batch, groups] must be of types that the kernel has");
  }
  g->batch = dl[0], g->m = dl[1], g->k = dl[2], g->groups = ds[1];
  g->lhs = lhs.untyped_data(), g->rhs = rhs.untyped_data();
  g->rhs_batch = dr[0] == 1 ? 0 : static_cast<int64_t>(rhs.element_count()) / dr[0];
  g->sizes = static_cast<const int32_t*>(sizes.untyped_data()), g->sizes_batch = ds[0] == 1 ? 0 : ds[1];
  g->out = out.untyped_data();
  return ffi::Error::Success();
}

ffi::Error rows(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer sizes, ffi::Result<ffi::AnyBuffer> out, bool transposed) {
  GroupedArgs g{};
  if (ffi::Error error = arguments(lhs, rhs, sizes, *out, 4, &g); error.failure()) return error;
  g.n = rhs.dimensions()[transposed ? 2 : 3], g.transposed = transposed;
  if (out->element_count() != 0) run_rows(g, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error weights(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer sizes, ffi::Result<ffi::AnyBuffer> out) {
  GroupedArgs g{};
  if (ffi::Error error = arguments(lhs, rhs, sizes, *out, 3, &g); error.failure()) return error;
  g.n = rhs.dimensions()[2], g.rhs_batch = g.m * g.n;
  if (out->element_count() != 0) run_weights(g, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_grouped_rows, rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<ffi::AnyBuffer>()  // group_sizes
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attr<bool>("transposed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_grouped_weights, weights,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()   // lhs
                                  .Arg<ffi::AnyBuffer>()   // the cotangent of out
                                  .Arg<ffi::AnyBuffer>()   // group_sizes
                                  .Ret<ffi::AnyBuffer>());  // the gradient of rhs
VISHWAMAI_REGISTER(vishwamai_grouped_rows)
VISHWAMAI_REGISTER(vishwamai_grouped_weights)

}  // namespace vishwamai

// FFI handlers of the normalizations.
#include "cpu_norm.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

void run_forward(const NormForwardArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(norm_forward, args, threads) }
void run_backward(const NormBackwardArgs& args, const Threads& threads) {
  VISHWAMAI_DISPATCH_ROWS(norm_backward, args, threads)
}

// How a parameter of rows in `rows` is stored; false where the kernel does not take it so.
bool parameter_storage(const ffi::AnyBuffer& parameter, Storage rows, Storage* storage) {
  *storage = rows == Storage::f64 ? Storage::f64 : Storage::f32;
  if (parameter.element_count() == 0) return true;
  if (!row_storage_of(parameter, storage)) return false;
  return (*storage == Storage::f64) == (rows == Storage::f64);
}

int64_t group_stride(const ffi::AnyBuffer& parameter, int64_t features) {
  return parameter.element_count() > static_cast<size_t>(features) ? features : 0;
}

ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer residual, ffi::AnyBuffer scale,
                   ffi::AnyBuffer offset, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> total, double eps,
                   bool layer) {
  const auto dims = x.dimensions();
  NormForwardArgs a{};
  if (dims.size() != 3 || !storage_of(x, &a.storage)) return invalid("norm_forward: x must be [groups, rows, features]");
  if (!parameter_storage(scale, a.storage, &a.scale_storage) || !parameter_storage(offset, a.storage, &a.offset_storage)) {
    return invalid("norm_forward: scale and offset must be in 16 bits or in the type of the statistics");
  }
  a.layer = layer;
  a.groups = dims[0], a.rows = dims[1], a.features = dims[2];
  a.eps = eps;
  a.x = x.untyped_data();
  a.residual = optional(residual), a.scale = optional(scale), a.offset = optional(offset);
  a.scale_stride = group_stride(scale, a.features), a.offset_stride = group_stride(offset, a.features);
  a.y = y->untyped_data(), a.total = total->untyped_data();
  if (x.element_count() != 0) run_forward(a, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, ffi::AnyBuffer s, ffi::AnyBuffer dy, ffi::AnyBuffer dtotal,
                    ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dscale,
                    ffi::Result<ffi::AnyBuffer> doffset, double eps, bool layer) {
  const auto dims = s.dimensions();
  NormBackwardArgs a{};
  if (dims.size() != 3 || !storage_of(s, &a.storage)) return invalid("norm_backward: s must be [groups, rows, features]");
  if (!parameter_storage(*dscale, a.storage, &a.scale_storage) || !parameter_storage(*doffset, a.storage, &a.offset_storage)) {
    return invalid("norm_backward: scale and offset must be in 16 bits or in the type of the statistics");
  }
  a.layer = layer;
  a.groups = dims[0], a.rows = dims[1], a.features = dims[2];
  a.eps = eps;
  a.s = s.untyped_data(), a.dy = dy.untyped_data(), a.dtotal = optional(dtotal), a.scale = optional(scale);
  a.scale_stride = group_stride(scale, a.features);
  a.dx = dx->untyped_data();
  const size_t features = static_cast<size_t>(a.features);
  a.dscale = dscale->element_count() ? dscale->untyped_data() : nullptr;
  a.doffset = doffset->element_count() ? doffset->untyped_data() : nullptr;
  a.dscale_shared = dscale->element_count() == features, a.doffset_shared = doffset->element_count() == features;
  run_backward(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_norm_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<double>("eps")
                                  .Attr<bool>("layer"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_norm_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<double>("eps")
                                  .Attr<bool>("layer"));
VISHWAMAI_REGISTER(vishwamai_norm_forward)
VISHWAMAI_REGISTER(vishwamai_norm_backward)

}  // namespace vishwamai

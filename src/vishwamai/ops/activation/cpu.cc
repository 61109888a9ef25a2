// FFI handler of the activations, forward (no dy) and backward.
#include "cpu_activation.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

void run(const ActivationArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(activation_run, args, threads) }

// Elements from one group to the next of a [groups or 1, ...] buffer.
int64_t group_stride(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return dims.size() == 2 && dims[0] > 1 ? dims[1] : 0;
}

ffi::Error activation(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::AnyBuffer rows, ffi::AnyBuffer columns,
                      ffi::AnyBuffer seed, ffi::Result<ffi::AnyBuffer> out, int64_t kind, int64_t threshold,
                      double keep_scale) {
  const auto dims = x.dimensions();
  ActivationArgs a{};
  if (dims.size() != 3 || !row_storage_of(x, &a.storage) || kind < 0 || kind > static_cast<int64_t>(ActivationKind::relu2)) {
    return invalid("activation: x must be floating, [groups, rows, features]");
  }
  a.kind = static_cast<ActivationKind>(kind);
  a.groups = dims[0], a.rows = dims[1], a.features = dims[2];
  a.x = x.untyped_data(), a.dy = optional(dy), a.out = out->untyped_data();
  a.seed = optional<uint32_t>(seed), a.row_numbers = optional<uint32_t>(rows), a.column_numbers = optional<uint32_t>(columns);
  a.seed_stride = group_stride(seed), a.row_stride = group_stride(rows), a.column_stride = group_stride(columns);
  a.threshold = static_cast<uint32_t>(threshold), a.keep_scale = keep_scale;
  if (x.element_count() != 0) run(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_activation, activation,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // dy
                                  .Arg<ffi::AnyBuffer>()  // rows
                                  .Arg<ffi::AnyBuffer>()  // columns
                                  .Arg<ffi::AnyBuffer>()  // seed
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("threshold")
                                  .Attr<double>("keep_scale"));
VISHWAMAI_REGISTER(vishwamai_activation)

}  // namespace vishwamai

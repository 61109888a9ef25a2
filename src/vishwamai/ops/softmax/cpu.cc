// FFI handlers of the softmaxes.
#include "cpu_softmax.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

void run_forward(const SoftmaxArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(softmax_forward, args, threads) }
void run_backward(const SoftmaxArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(softmax_backward, args, threads) }

bool read(const ffi::AnyBuffer& x, bool log, SoftmaxArgs* a) {
  const auto dims = x.dimensions();
  *a = SoftmaxArgs{};
  if (dims.size() != 3 || !row_storage_of(x, &a->storage)) return false;
  a->log = log;
  a->rows = dims[0] * dims[1], a->features = dims[2];
  a->x = x.untyped_data();
  return true;
}

ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, bool log) {
  SoftmaxArgs a;
  if (!read(x, log, &a)) return invalid("softmax_forward: x must be floating, [groups, rows, features]");
  a.out = y->untyped_data();
  if (x.element_count() != 0) run_forward(a, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, ffi::AnyBuffer source, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx, bool log) {
  SoftmaxArgs a;
  if (!read(source, log, &a)) return invalid("softmax_backward: x must be floating, [groups, rows, features]");
  a.dy = dy.untyped_data(), a.out = dx->untyped_data();
  if (source.element_count() != 0) run_backward(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    vishwamai_softmax_forward, forward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<bool>("log"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_softmax_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("log"));
VISHWAMAI_REGISTER(vishwamai_softmax_forward)
VISHWAMAI_REGISTER(vishwamai_softmax_backward)

}  // namespace vishwamai

// FFI handlers of the cross entropy of a linear layer.
#include "cpu_loss.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

void run_forward(const LossArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(loss_forward, a, t) }
void run_backward(const LossArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(loss_backward, a, t) }
void run_total(const LossArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(loss_total, a, t) }

const char kShapes[] = "loss: x must be [tokens, features], weight [vocab, features] and labels [tokens]";

bool read(const Buffer& x, const Buffer& weight, const Buffer& bias, const Buffer& labels, double softcap, int64_t parts, LossArgs* a) {
  *a = LossArgs{};
  const auto dx = x.dimensions(), dw = weight.dimensions();
  if (dx.size() != 2 || dw.size() != 2 || dx[1] != dw[1] || !storage_of(x, &a->storage)) return false;
  if (a->storage == Storage::s8 || a->storage == Storage::s32) return false;
  a->tokens = dx[0], a->features = dx[1], a->vocab = dw[0];
  a->softcap = softcap, a->parts = static_cast<int>(parts);
  a->x = x.untyped_data(), a->weight = weight.untyped_data(), a->bias = optional(bias);
  a->labels = static_cast<const int32_t*>(labels.untyped_data());
  return true;
}

ffi::Error forward(ffi::ThreadPool pool, Buffer x, Buffer weight, Buffer bias, Buffer labels, Result logsumexp, Result label_logit, Result logit_sum,
                   double softcap, int64_t parts) {
  LossArgs a;
  if (!read(x, weight, bias, labels, softcap, parts, &a)) return invalid(kShapes);
  a.logsumexp = logsumexp->untyped_data(), a.label_logit = label_logit->untyped_data();
  a.logit_sum = logit_sum->element_count() ? logit_sum->untyped_data() : nullptr;
  if (a.tokens != 0) run_forward(a, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, Buffer x, Buffer weight, Buffer bias, Buffer labels, Buffer logsumexp, Buffer dlogsumexp,
                    Buffer dlabel_logit, Buffer dlogit_sum, Result dx, Result dweight, Result dbias, double softcap, int64_t parts) {
  LossArgs a;
  if (!read(x, weight, bias, labels, softcap, parts, &a)) return invalid(kShapes);
  a.logsumexp = logsumexp.untyped_data();  // read only
  a.dlogsumexp = dlogsumexp.untyped_data(), a.dlabel_logit = dlabel_logit.untyped_data(), a.dlogit_sum = optional(dlogit_sum);
  a.dx = dx->untyped_data(), a.dweight = dweight->untyped_data();
  a.dbias = a.bias ? dbias->untyped_data() : nullptr;
  if (a.tokens == 0) {
    __builtin_memset(a.dweight, 0, dweight->size_bytes());
    if (a.dbias) __builtin_memset(a.dbias, 0, dbias->size_bytes());
    return ffi::Error::Success();
  }
  run_backward(a, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error total(ffi::ThreadPool pool, Buffer x, Buffer weight, Buffer bias, Buffer labels, Buffer shares, Result loss, Result dx, Result dweight,
                 Result dbias, double softcap, int64_t parts, double smoothing, double z_loss) {
  LossArgs a;
  if (!read(x, weight, bias, labels, softcap, parts, &a)) return invalid(kShapes);
  a.shares = shares.untyped_data(), a.smoothing = smoothing, a.z_loss = z_loss;
  a.logit_sum = smoothing != 0 ? loss->untyped_data() : nullptr;  // only whether it is wanted is read
  a.loss = loss->untyped_data(), a.dx = dx->untyped_data(), a.dweight = dweight->element_count() ? dweight->untyped_data() : nullptr;
  a.dbias = a.bias ? dbias->untyped_data() : nullptr;
  run_total(a, threads_of(pool));
  return ffi::Error::Success();
}

auto operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Buffer>()   // x
      .Arg<Buffer>()   // weight
      .Arg<Buffer>()   // bias
      .Arg<Buffer>();  // labels
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_loss_forward, forward,
                              operands()
                                  .Ret<Buffer>()  // logsumexp
                                  .Ret<Buffer>()  // label's logit
                                  .Ret<Buffer>()  // sum of the logits
                                  .Attr<double>("softcap")
                                  .Attr<int64_t>("parts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_loss_backward, backward,
                              operands()
                                  .Arg<Buffer>()  // logsumexp
                                  .Arg<Buffer>()  // its cotangent, and those of
                                  .Arg<Buffer>()  // the label's logit
                                  .Arg<Buffer>()  // and of the sum of the logits
                                  .Ret<Buffer>()  // dx
                                  .Ret<Buffer>()  // dweight
                                  .Ret<Buffer>()  // dbias
                                  .Attr<double>("softcap")
                                  .Attr<int64_t>("parts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_loss_total, total,
                              operands()
                                  .Arg<Buffer>()  // shares
                                  .Ret<Buffer>()  // sum of the losses
                                  .Ret<Buffer>()  // dx
                                  .Ret<Buffer>()  // dweight
                                  .Ret<Buffer>()  // dbias
                                  .Attr<double>("softcap")
                                  .Attr<int64_t>("parts")
                                  .Attr<double>("smoothing")
                                  .Attr<double>("z_loss"));
VISHWAMAI_REGISTER(vishwamai_loss_forward)
VISHWAMAI_REGISTER(vishwamai_loss_backward)
VISHWAMAI_REGISTER(vishwamai_loss_total)

}  // namespace vishwamai

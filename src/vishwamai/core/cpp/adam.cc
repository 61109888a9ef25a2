// FFI handler of a step of AdamW (adam.h).
#include "adam.h"

#include "ffi.h"
#include "registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;

void run(const AdamArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(adam_run, args, threads) }

// numbers: clip, first_scale, second_scale, rate. Where not good, everything stays, bit for bit.
ffi::Error adam(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gradient, ffi::Buffer<ffi::F32> param, Buffer first,
                ffi::Buffer<ffi::F32> second, ffi::Buffer<ffi::F32> numbers, ffi::Buffer<ffi::PRED> good,
                ffi::Result<ffi::Buffer<ffi::F32>> new_param, ffi::Result<Buffer> new_first,
                ffi::Result<ffi::Buffer<ffi::F32>> new_second, double b1, double b2, double eps, double decay, double factor) {
  AdamArgs a{};
  const size_t n = gradient.element_count();
  if (param.element_count() != n || first.element_count() != n || second.element_count() != n || numbers.element_count() != 4 ||
      good.element_count() != 1 || !storage_of(first, &a.storage) || (a.storage != Storage::f32 && a.storage != Storage::bf16)) {
    return invalid("adam: gradient, parameter and moments must have one size, and the first moment be float32 or bfloat16");
  }
  if (param.untyped_data() != new_param->untyped_data() || first.untyped_data() != new_first->untyped_data() ||
      second.untyped_data() != new_second->untyped_data()) {
    return invalid("adam: the results must be the memory of the parameter and the moments");
  }
  if (n == 0 || !good.typed_data()[0]) return ffi::Error::Success();
  const float* of_step = numbers.typed_data();
  a.n = static_cast<int64_t>(n), a.gradient = gradient.typed_data();
  a.param = new_param->typed_data(), a.first = new_first->untyped_data(), a.second = new_second->typed_data();
  a.clip = of_step[0], a.first_scale = of_step[1], a.second_scale = of_step[2];
  a.rate = of_step[3] * static_cast<float>(factor);
  a.keep_first = static_cast<float>(b1), a.add_first = static_cast<float>(1 - b1);
  a.keep_second = static_cast<float>(b2), a.add_second = static_cast<float>(1 - b2);
  a.eps = static_cast<float>(eps), a.decay = static_cast<float>(decay);
  run(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_adam, adam,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // gradient
                                  .Arg<ffi::Buffer<ffi::F32>>()   // parameter
                                  .Arg<Buffer>()                  // first moment
                                  .Arg<ffi::Buffer<ffi::F32>>()   // second moment
                                  .Arg<ffi::Buffer<ffi::F32>>()   // numbers
                                  .Arg<ffi::Buffer<ffi::PRED>>()  // good
                                  .Ret<ffi::Buffer<ffi::F32>>()   // parameter
                                  .Ret<Buffer>()                  // first moment
                                  .Ret<ffi::Buffer<ffi::F32>>()   // second moment
                                  .Attr<double>("b1")
                                  .Attr<double>("b2")
                                  .Attr<double>("eps")
                                  .Attr<double>("decay")
                                  .Attr<double>("factor"));  // of the rate, for this parameter
VISHWAMAI_REGISTER(vishwamai_adam)

}  // namespace vishwamai

// FFI handlers of the gated linear unit.
#include "cpu_gated.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

void run_forward(const GatedArgs& g, const Threads& t) { VISHWAMAI_DISPATCH(gated_forward, g, t) }
void run_input_gradient(const GatedArgs& g, const Threads& t) { VISHWAMAI_DISPATCH(gated_input_gradient, g, t) }
void run_weight_gradient(const GatedArgs& g, const Threads& t) { VISHWAMAI_DISPATCH(gated_weight_gradient, g, t) }

size_t element_size(Storage storage) { return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2; }

// x [groups or 1, m, k]; gate and up [groups or 1, k, n] each, or both [groups or 1, 2, k, n]; `like_h` has h's shape.
bool read(const Buffer& x, const Buffer& gate, const Buffer& up, const Buffer& both, const Buffer& like_h, int64_t activation, int64_t parts,
          GatedArgs* g) {
  *g = GatedArgs{};
  const auto dx = x.dimensions(), dh = like_h.dimensions();
  if (dx.size() != 3 || dh.size() != 3 || !storage_of(x, &g->storage) || g->storage == Storage::s8 || g->storage == Storage::s32) return false;
  g->result = g->storage;
  g->parts = static_cast<int>(parts), g->activation = static_cast<Activation>(activation);
  g->groups = dh[0], g->m = dh[1], g->n = dh[2], g->k = dx[2];
  const int64_t matrix = g->k * g->n;
  const bool joint = both.dimensions().size() == 4;
  if ((joint ? both : gate).dimensions().size() != (joint ? 4u : 3u) || (!joint && up.dimensions().size() != 3)) return false;
  const int64_t weight_groups = (joint ? both : gate).dimensions()[0];
  if (joint) {
    g->gate = both.untyped_data();
    g->up = static_cast<const char*>(both.untyped_data()) + static_cast<size_t>(matrix) * element_size(g->storage);
  } else {
    g->gate = gate.untyped_data(), g->up = up.untyped_data();
  }
  g->x = x.untyped_data();
  g->x_group = dx[0] == 1 ? 0 : g->m * g->k;
  g->gate_group = g->up_group = weight_groups == 1 ? 0 : (joint ? 2 : 1) * matrix;
  if (weight_groups == 1 && dx[0] == g->groups) {  // one problem of more rows
    g->m *= g->groups, g->groups = 1;
    g->x_group = 0;
  }
  return true;
}

const char kShapes[] = "gated: x must be [groups, rows, features], the weights [groups, features, hidden] or [groups, 2, features, hidden]";

ffi::Error forward(ffi::ThreadPool pool, Buffer x, Buffer gate, Buffer up, Buffer both, Result h, Result gate_sums, Result up_sums, int64_t activation,
                   int64_t parts) {
  GatedArgs g;
  if (!read(x, gate, up, both, *h, activation, parts, &g)) return invalid(kShapes);
  g.h = h->untyped_data();
  if (gate_sums->element_count() != 0) g.gate_sums = gate_sums->untyped_data(), g.up_sums = up_sums->untyped_data();
  if (h->element_count() != 0) run_forward(g, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error input_gradient(ffi::ThreadPool pool, Buffer x, Buffer gate, Buffer up, Buffer both, Buffer gate_sums, Buffer up_sums, Buffer dh, Result dx,
                          int64_t activation, int64_t parts) {
  GatedArgs g;
  if (!read(x, gate, up, both, dh, activation, parts, &g) || !storage_of(*dx, &g.result)) return invalid(kShapes);
  g.gate_sums = gate_sums.untyped_data(), g.up_sums = up_sums.untyped_data(), g.dh = dh.untyped_data();
  g.dx = dx->untyped_data();
  if (dx->element_count() != 0) run_input_gradient(g, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error weight_gradient(ffi::ThreadPool pool, Buffer x, Buffer gate, Buffer up, Buffer both, Buffer gate_sums, Buffer up_sums, Buffer dh,
                           Result dgate, Result dup, Result dboth, int64_t activation, int64_t parts) {
  GatedArgs g;
  if (!read(x, gate, up, both, dh, activation, parts, &g)) return invalid(kShapes);
  const bool joint = both.dimensions().size() == 4;
  if (!storage_of(joint ? *dboth : *dgate, &g.result)) return invalid(kShapes);
  g.gate_sums = gate_sums.untyped_data(), g.up_sums = up_sums.untyped_data(), g.dh = dh.untyped_data();
  const int64_t matrix = g.k * g.n;
  g.dweight_group = (joint ? 2 : 1) * matrix;
  if (joint) {
    g.dgate = dboth->untyped_data();
    g.dup = static_cast<char*>(dboth->untyped_data()) + static_cast<size_t>(matrix) * element_size(g.result);
  } else {
    g.dgate = dgate->untyped_data(), g.dup = dup->untyped_data();
  }
  if (g.groups * matrix != 0) run_weight_gradient(g, threads_of(pool));
  return ffi::Error::Success();
}

auto operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Buffer>()   // x
      .Arg<Buffer>()   // gate
      .Arg<Buffer>()   // up
      .Arg<Buffer>();  // both
}
auto backward_operands() {
  return operands()
      .Arg<Buffer>()   // x @ gate
      .Arg<Buffer>()   // x @ up
      .Arg<Buffer>();  // dh
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_gated_forward, forward,
                              operands()
                                  .Ret<Buffer>()  // h
                                  .Ret<Buffer>()  // x @ gate
                                  .Ret<Buffer>()  // x @ up
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("parts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_gated_input_gradient, input_gradient,
                              backward_operands()
                                  .Ret<Buffer>()  // dx
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("parts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_gated_weight_gradient, weight_gradient,
                              backward_operands()
                                  .Ret<Buffer>()  // dgate
                                  .Ret<Buffer>()  // dup
                                  .Ret<Buffer>()  // dboth
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("parts"));
VISHWAMAI_REGISTER(vishwamai_gated_forward)
VISHWAMAI_REGISTER(vishwamai_gated_input_gradient)
VISHWAMAI_REGISTER(vishwamai_gated_weight_gradient)

}  // namespace vishwamai

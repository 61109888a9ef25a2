// FFI handler of the rotary embedding.
#include "cpu_rope.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

void run(const RopeArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(rope_run, args, threads) }

ffi::Error rope(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                ffi::Result<ffi::AnyBuffer> query_out, ffi::Result<ffi::AnyBuffer> key_out, bool interleaved,
                bool heads_inside, bool back) {
  const auto q = query.dimensions(), table = cos.dimensions();
  RopeArgs a{};
  if (q.size() != 4 || table.size() != 3 || !row_storage_of(query, &a.storage)) {
    return invalid("rope: query must be floating of four axes, cos and sin [batch or 1, positions, pairs]");
  }
  const int heads = heads_inside ? 2 : 1;
  a.interleaved = interleaved, a.heads_inside = heads_inside, a.back = back;
  a.batch = q[0], a.positions = q[3 - heads], a.dim = q[3], a.pairs = table[2];
  if (table[1] != a.positions || 2 * a.pairs > a.dim) return invalid("rope: the tables do not fit the query");
  a.cos = cos.untyped_data(), a.sin = sin.untyped_data();
  a.table_stride = table[0] > 1 ? a.positions * a.pairs : 0;
  a.arrays[0] = {q[heads], query.untyped_data(), query_out->untyped_data()};
  if (optional(key) != nullptr) a.arrays[1] = {key.dimensions()[heads], key.untyped_data(), key_out->untyped_data()};
  if (query.element_count() != 0 || a.arrays[1].x != nullptr) run(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_rope, rope,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // query
                                  .Arg<ffi::AnyBuffer>()  // key
                                  .Arg<ffi::AnyBuffer>()  // cos
                                  .Arg<ffi::AnyBuffer>()  // sin
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("interleaved")
                                  .Attr<bool>("heads_inside")
                                  .Attr<bool>("back"));
VISHWAMAI_REGISTER(vishwamai_rope)

}  // namespace vishwamai

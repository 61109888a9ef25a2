// FFI handlers of the block-sparse product and of the gradient of its values.
#include "cpu_sparse.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

void run_product(const SparseArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(sparse_product, a, t) }
void run_values_gradient(const SparseArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(sparse_values_gradient, a, t) }

bool floating(const Buffer& buffer, Storage* storage) {
  return storage_of(buffer, storage) && *storage != Storage::s8 && *storage != Storage::s32;
}

const char kShapes[] =
    "sparse: dense must be [groups, m, features], values [groups or 1, blocks, rows, columns] and indices [groups or 1, blocks, 2]";

ffi::Error product(ffi::ThreadPool pool, Buffer dense, Buffer values, Buffer indices, Result out, bool transpose, int64_t parts) {
  SparseArgs a{};
  const auto d = dense.dimensions(), v = values.dimensions(), i = indices.dimensions(), o = out->dimensions();
  if (d.size() != 3 || v.size() != 4 || i.size() != 3 || o.size() != 3 || !floating(dense, &a.storage) || !floating(*out, &a.result)) {
    return invalid(kShapes);
  }
  a.parts = static_cast<int>(parts), a.transpose = transpose;
  a.groups = d[0], a.m = d[1], a.rows = transpose ? o[2] : d[2], a.columns = transpose ? d[2] : o[2];
  a.blocks = v[1], a.block_rows = v[2], a.block_columns = v[3];
  a.values_group = v[0] == 1 ? 0 : a.blocks * a.block_rows * a.block_columns, a.indices_group = i[0] == 1 ? 0 : 2 * a.blocks;
  a.dense = dense.untyped_data(), a.values = values.untyped_data(), a.indices = static_cast<const int32_t*>(indices.untyped_data());
  a.out = out->untyped_data();
  if (a.values_group == 0 && a.indices_group == 0) a.m *= a.groups, a.groups = 1;  // one problem of more rows
  if (out->element_count() == 0) return ffi::Error::Success();
  if (a.rows == 0 || a.columns == 0 || a.blocks == 0) {
    __builtin_memset(a.out, 0, out->size_bytes());
    return ffi::Error::Success();
  }
  run_product(a, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error values_gradient(ffi::ThreadPool pool, Buffer left, Buffer right, Buffer indices, Result dvalues, int64_t parts) {
  SparseArgs a{};
  const auto l = left.dimensions(), r = right.dimensions(), i = indices.dimensions(), v = dvalues->dimensions();
  if (l.size() != 3 || r.size() != 3 || i.size() != 3 || v.size() != 4 || !floating(left, &a.storage) || !floating(*dvalues, &a.result)) {
    return invalid(kShapes);
  }
  a.parts = static_cast<int>(parts);
  a.groups = l[0], a.m = l[1], a.rows = l[2], a.columns = r[2];
  a.blocks = v[1], a.block_rows = v[2], a.block_columns = v[3];
  a.indices_group = i[0] == 1 ? 0 : 2 * a.blocks;
  a.left = left.untyped_data(), a.right = right.untyped_data(), a.indices = static_cast<const int32_t*>(indices.untyped_data());
  a.dvalues = dvalues->untyped_data();
  if (v[0] == 1 && a.indices_group == 0) a.m *= a.groups, a.groups = 1;  // the groups are summed over
  if (v[0] != a.groups) return invalid(kShapes);
  if (dvalues->element_count() != 0) run_values_gradient(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_sparse_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // dense
                                  .Arg<Buffer>()  // values
                                  .Arg<Buffer>()  // indices
                                  .Ret<Buffer>()  // out
                                  .Attr<bool>("transpose")
                                  .Attr<int64_t>("parts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_sparse_values_gradient, values_gradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // left
                                  .Arg<Buffer>()  // right
                                  .Arg<Buffer>()  // indices
                                  .Ret<Buffer>()  // dvalues
                                  .Attr<int64_t>("parts"));
VISHWAMAI_REGISTER(vishwamai_sparse_product)
VISHWAMAI_REGISTER(vishwamai_sparse_values_gradient)

}  // namespace vishwamai

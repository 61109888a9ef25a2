// FFI handler of paged attention: operands in the order of spec.py's Operands, options as attributes.
#include <algorithm>
#include <cstring>

#include "cpu_paged.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;

void run(const PagedArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH(paged_attention, args, threads) }

bool page_type_of(const Buffer& buffer, PageType* type) {
  switch (buffer.element_type()) {
    case ffi::F32: *type = PageType::f32; return true;
    case ffi::BF16: *type = PageType::bf16; return true;
    case ffi::F16: *type = PageType::f16; return true;
    case ffi::F64: *type = PageType::f64; return true;
    case ffi::S8: *type = PageType::s8; return true;
    case ffi::S4: *type = PageType::s4; return true;
    case ffi::F8E4M3FN: *type = PageType::f8e4m3; return true;
    case ffi::F8E5M2: *type = PageType::f8e5m2; return true;
    default: return false;
  }
}

// Elements from one batch entry to the next of a [batch or 1, ...] buffer.
int64_t batch_stride(const Buffer& buffer) {
  const auto dims = buffer.dimensions();
  return dims.size() == 0 || dims[0] <= 1 ? 0 : static_cast<int64_t>(buffer.element_count()) / dims[0];
}

// `value_dim` tells the form of the pages apart: latent ones are [batch, pages, page, dim], the others have an axis of
// rows.
ffi::Error paged(ffi::ThreadPool pool, Buffer query, Buffer k_pages, Buffer v_pages, Buffer kv_lens, Buffer page_indices,
                 Buffer cu_q_lens, Buffer num_seqs, Buffer sinks, Buffer k_scale, Buffer v_scale, Buffer slopes, Buffer tree,
                 ffi::Result<Buffer> out, ffi::Result<Buffer> lse, double scale, double softcap, int64_t window, int64_t value_dim) {
  const auto q = query.dimensions(), k = k_pages.dimensions(), table = page_indices.dimensions();
  PagedArgs a{};
  const bool latent = k.size() == 4, separate = optional(v_pages) != nullptr;
  if (q.size() != 4 || (!latent && k.size() != 5) || table.size() != 3 || !row_storage_of(query, &a.storage) ||
      !page_type_of(k_pages, &a.page_type) || (a.storage == Storage::f64) != (a.page_type == PageType::f64)) {
    return invalid("paged_attention: query must be [batch, tokens, heads, dim], page_indices [batch, sequences, entries]");
  }
  a.batch = q[0], a.tokens = q[1], a.heads = q[2], a.dim = q[3], a.value_dim = value_dim;
  a.pages = k[1], a.page_size = k[2], a.sequences = table[1], a.entries = table[2];
  const int64_t rows = latent ? 1 : k[3];
  a.kv_heads = latent || separate ? rows : rows / 2;
  a.scale = scale, a.softcap = softcap, a.window = window;
  a.query = query.untyped_data();
  const int64_t own = latent || separate ? a.dim : 2 * a.dim;
  const int64_t unit = a.page_type == PageType::s4 ? 2 : 1;  // numbers
  if (a.dim % unit != 0 || (separate && value_dim % unit != 0)) return invalid("paged_attention: int4 rows must be whole bytes");
  a.keys = {k_pages.untyped_data(), batch_stride(k_pages) / unit, rows * a.dim / unit, own / unit};
  if (separate) {
    a.values = {v_pages.untyped_data(), batch_stride(v_pages) / unit, rows * value_dim / unit, value_dim / unit};
  } else {
    a.values = a.keys;
    const int64_t bytes = a.page_type == PageType::f64 ? 8 : a.page_type == PageType::f32 ? 4 : a.page_type <= PageType::f16 ? 2 : 1;
    if (!latent) a.values.data = static_cast<const char*>(a.keys.data) + a.dim * bytes / unit;
  }
  a.kv_lens = optional<int32_t>(kv_lens), a.table = optional<int32_t>(page_indices);
  a.starts = optional<int32_t>(cu_q_lens), a.count = optional<int32_t>(num_seqs);
  a.kv_lens_stride = batch_stride(kv_lens), a.table_stride = batch_stride(page_indices);
  a.starts_stride = batch_stride(cu_q_lens), a.count_stride = batch_stride(num_seqs);
  a.sinks = optional(sinks), a.sinks_stride = batch_stride(sinks);
  a.key_scale = optional<float>(k_scale), a.key_scale_stride = batch_stride(k_scale);
  a.value_scale = optional<float>(v_scale), a.value_scale_stride = batch_stride(v_scale);
  a.token_scales = k_scale.dimensions().size() > 2 || v_scale.dimensions().size() > 2;
  a.slopes = optional(slopes), a.slopes_stride = batch_stride(slopes);
  a.tree = optional<uint8_t>(tree), a.tree_stride = batch_stride(tree);
  if (a.tree != nullptr) a.tree_columns = tree.dimensions()[2];
  // Tokens that belong to no sequence.
  a.out = out->untyped_data();
  std::memset(a.out, 0, out->size_bytes());
  if (lse->element_count() > 0) {
    a.lse = lse->untyped_data();
    constexpr float none = -__builtin_inff();
    if (a.storage == Storage::f64) std::fill_n(static_cast<double*>(a.lse), lse->element_count(), none);
    else std::fill_n(static_cast<float*>(a.lse), lse->element_count(), none);
  }
  if (out->element_count() == 0 || a.pages * a.page_size * a.sequences * a.entries == 0) return ffi::Error::Success();
  run(a, threads_of(pool));
  return ffi::Error::Success();
}

// rows[i] becomes pool[page[i], slot[i]], in place: the result is the pool's own memory. A place outside of the pool is
// not written. What costs time is the rows, whatever the pool's size and type.
ffi::Error update(ffi::ThreadPool pool, Buffer pages, Buffer rows, Buffer page, Buffer slot, ffi::Result<Buffer> out) {
  const auto p = pages.dimensions(), r = rows.dimensions();
  if (p.size() < 2 || r.size() + 1 != p.size() || page.element_count() != slot.element_count() || page.element_type() != ffi::S32 ||
      slot.element_type() != ffi::S32 || pages.element_type() != rows.element_type()) {
    return invalid("update_pages: the pool must be [pages, slots, ...], rows [tokens, ...] of its type, page and slot [tokens] int32");
  }
  if (pages.untyped_data() != out->untyped_data()) return invalid("update_pages: the result must be the pool's memory");
  const int64_t count = p[0], slots = p[1], tokens = r[0];
  if (rows.element_count() == 0 || pages.element_count() == 0) return ffi::Error::Success();
  const size_t row = rows.element_count() / static_cast<size_t>(tokens);
  if (rows.element_type() == ffi::S4 && row % 2 != 0) return invalid("update_pages: int4 rows must be whole bytes");
  const int64_t bytes = static_cast<int64_t>(bytes_of(rows.element_type(), row));
  const char* const from = static_cast<const char*>(rows.untyped_data());
  char* const to = static_cast<char*>(out->untyped_data());
  const auto *pages_of = optional<int32_t>(page), *slots_of = optional<int32_t>(slot);
  constexpr int64_t kTask = 256 << 10;  // bytes that are worth a hand-over
  const int64_t each = kTask / bytes + 1;
  parallel_for(threads_of(pool), (tokens + each - 1) / each, [&](int64_t task) {
    for (int64_t i = task * each; i < tokens && i < (task + 1) * each; ++i) {
      if (pages_of[i] < 0 || pages_of[i] >= count || slots_of[i] < 0 || slots_of[i] >= slots) continue;
      std::memcpy(to + (pages_of[i] * slots + slots_of[i]) * bytes, from + i * bytes, static_cast<size_t>(bytes));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_update_pages, update,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // pool
                                  .Arg<Buffer>()  // rows
                                  .Arg<Buffer>()  // page
                                  .Arg<Buffer>()  // slot
                                  .Ret<Buffer>());  // the pool
VISHWAMAI_REGISTER(vishwamai_update_pages)

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_paged_attention, paged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // query
                                  .Arg<Buffer>()  // k_pages
                                  .Arg<Buffer>()  // v_pages
                                  .Arg<Buffer>()  // kv_lens
                                  .Arg<Buffer>()  // page_indices
                                  .Arg<Buffer>()  // cu_q_lens
                                  .Arg<Buffer>()  // num_seqs
                                  .Arg<Buffer>()  // sinks
                                  .Arg<Buffer>()  // k_scale
                                  .Arg<Buffer>()  // v_scale
                                  .Arg<Buffer>()  // slopes
                                  .Arg<Buffer>()  // tree_mask
                                  .Ret<Buffer>()  // out
                                  .Ret<Buffer>()  // logsumexp
                                  .Attr<double>("scale")
                                  .Attr<double>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("value_dim"));
VISHWAMAI_REGISTER(vishwamai_paged_attention)

}  // namespace vishwamai

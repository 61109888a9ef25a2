// FFI handlers of attention: operands in the order of spec.py's Operands, options as attributes.
#include "cpu_attention.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

void run_forward(const AttentionArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(attention_forward, a, t) }
void run_decode(const AttentionArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(attention_decode, a, t) }
void run_backward(const AttentionArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(attention_backward, a, t) }
void run_bias_gradient(const AttentionArgs& a, const Threads& t) { VISHWAMAI_DISPATCH(attention_bias_gradient, a, t) }

// Element strides of a [B|1, H|1, Q|1, K|1] buffer, 0 along axes of length 1.
void broadcast_strides(const Buffer& buffer, int64_t strides[4]) {
  const auto dims = buffer.dimensions();
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    strides[axis] = dims[axis] == 1 ? 0 : stride;
    stride *= dims[axis];
  }
}

int64_t batch_stride(const Buffer& buffer) {
  const auto dims = buffer.dimensions();
  return dims[0] == 1 ? 0 : static_cast<int64_t>(buffer.element_count()) / dims[0];
}

using Numbers = ffi::Span<const int64_t>;
using Codes = ffi::Span<const int32_t>;
using Patterns = ffi::Span<const int8_t>;

struct Options {
  double scale, softcap, keep_scale;
  int64_t low, high, origin, dropout_threshold, parts;
  bool bias_last;
  Numbers blocks;  // of the block mask: heads, q_blocks, kv_blocks, block_q, block_kv; empty without one
  Codes codes;
  Patterns patterns;
};

bool read(const Buffer& query, const Buffer& key, const Buffer& value, const Buffer& bias, const Buffer& mask,
          const Buffer& q_segments, const Buffer& kv_segments, const Buffer& sinks, const Buffer& seed,
          const Buffer& positions, const Buffer& slopes, const Options& o, AttentionArgs* a) {
  *a = AttentionArgs{};
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || !storage_of(query, &a->storage)) return false;
  a->parts = static_cast<int>(o.parts);
  a->batch = q[0], a->q_heads = q[1], a->q_len = q[2], a->qk_dim = q[3];
  a->kv_heads = k[1], a->kv_len = k[2], a->v_dim = v[3];
  a->scale = o.scale, a->softcap = o.softcap, a->low = o.low, a->high = o.high;
  a->query = query.untyped_data(), a->key = key.untyped_data(), a->value = value.untyped_data();
  if ((a->bias = optional(bias)) != nullptr) broadcast_strides(bias, a->bias_strides);
  if ((a->mask = optional<uint8_t>(mask)) != nullptr) broadcast_strides(mask, a->mask_strides);
  if ((a->q_segments = optional<int32_t>(q_segments)) != nullptr) a->q_segments_stride = batch_stride(q_segments);
  if ((a->kv_segments = optional<int32_t>(kv_segments)) != nullptr) a->kv_segments_stride = batch_stride(kv_segments);
  if ((a->sinks = optional(sinks)) != nullptr) a->sinks_stride = batch_stride(sinks);
  if ((a->positions = optional<int32_t>(positions)) != nullptr) a->positions_stride = batch_stride(positions);
  if ((a->slopes = optional(slopes)) != nullptr) a->slopes_stride = batch_stride(slopes);
  a->origin = o.origin, a->bias_last = o.bias_last;
  a->dropout_seed = optional<uint32_t>(seed);
  a->dropout_threshold = static_cast<uint32_t>(o.dropout_threshold), a->keep_scale = o.keep_scale;
  if (o.codes.size() != 0) {
    if (o.blocks.size() != 5) return false;
    a->blocks = {o.codes.begin(), o.patterns.begin(), o.blocks[0], o.blocks[1], o.blocks[2], o.blocks[3], o.blocks[4]};
    if (a->blocks.heads != 1 && a->blocks.heads != a->q_heads) return false;
  }
  return true;
}

ffi::Error forward(ffi::ThreadPool pool, Buffer query, Buffer key, Buffer value, Buffer bias, Buffer mask,
                   Buffer q_segments, Buffer kv_segments, Buffer sinks, Buffer seed, Buffer positions,
                   Buffer slopes, Result out, Result logsumexp, double scale, double softcap, int64_t low, int64_t high,
                   int64_t origin, int64_t dropout_threshold, double keep_scale, int64_t parts, bool bias_last,
                   Numbers blocks, Codes codes, Patterns patterns, bool decode) {
  AttentionArgs a;
  const Options options{scale, softcap, keep_scale, low, high, origin, dropout_threshold, parts, bias_last, blocks, codes, patterns};
  if (!read(query, key, value, bias, mask, q_segments, kv_segments, sinks, seed, positions, slopes, options, &a)) {
    return invalid("attention_forward: query, key and value must be [batch, heads, length, dim], a block mask [heads or 1, blocks, blocks]");
  }
  a.out = out->untyped_data();
  a.logsumexp = logsumexp->element_count() ? logsumexp->untyped_data() : nullptr;
  const Threads threads = threads_of(pool);
  if (a.batch * a.q_heads * a.q_len == 0) return ffi::Error::Success();
  if (decode) run_decode(a, threads);
  else run_forward(a, threads);
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, Buffer query, Buffer key, Buffer value, Buffer bias, Buffer mask,
                    Buffer q_segments, Buffer kv_segments, Buffer sinks, Buffer seed, Buffer positions,
                    Buffer slopes, Buffer out, Buffer logsumexp, Buffer dout, Buffer dlogsumexp, Result dquery,
                    Result dkey, Result dvalue, double scale, double softcap, int64_t low, int64_t high, int64_t origin,
                    int64_t dropout_threshold, double keep_scale, int64_t parts, bool bias_last, Numbers blocks,
                    Codes codes, Patterns patterns) {
  AttentionArgs a;
  const Options options{scale, softcap, keep_scale, low, high, origin, dropout_threshold, parts, bias_last, blocks, codes, patterns};
  if (!read(query, key, value, bias, mask, q_segments, kv_segments, sinks, seed, positions, slopes, options, &a)) {
    return invalid("attention_backward: query, key and value must be [batch, heads, length, dim], a block mask [heads or 1, blocks, blocks]");
  }
  a.out = out.untyped_data(), a.logsumexp = logsumexp.untyped_data(), a.dout = dout.untyped_data();
  a.dlogsumexp = optional(dlogsumexp);
  a.dquery = dquery->untyped_data(), a.dkey = dkey->untyped_data(), a.dvalue = dvalue->untyped_data();
  run_backward(a, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error bias_gradient(ffi::ThreadPool pool, Buffer query, Buffer key, Buffer value, Buffer bias, Buffer mask,
                         Buffer q_segments, Buffer kv_segments, Buffer sinks, Buffer seed, Buffer positions,
                         Buffer slopes, Buffer out, Buffer logsumexp, Buffer dout, Buffer dlogsumexp, Result dbias,
                         double scale, double softcap, int64_t low, int64_t high, int64_t origin,
                         int64_t dropout_threshold, double keep_scale, int64_t parts, bool bias_last, Numbers blocks,
                         Codes codes, Patterns patterns) {
  AttentionArgs a;
  const Options options{scale, softcap, keep_scale, low, high, origin, dropout_threshold, parts, bias_last, blocks, codes, patterns};
  if (!read(query, key, value, bias, mask, q_segments, kv_segments, sinks, seed, positions, slopes, options, &a)) {
    return invalid("attention_bias_gradient: query, key and value must be [batch, heads, length, dim], a block mask [heads or 1, blocks, blocks]");
  }
  a.out = out.untyped_data(), a.logsumexp = logsumexp.untyped_data(), a.dout = dout.untyped_data();
  a.dlogsumexp = optional(dlogsumexp);
  a.dbias = dbias->untyped_data();
  const auto shape = dbias->dimensions();
  for (int axis = 0; axis < 4; ++axis) a.dbias_shape[axis] = shape[axis];
  if (dbias->element_count() != 0) run_bias_gradient(a, threads_of(pool));
  return ffi::Error::Success();
}

// The eleven operands that all handlers begin with, and the options that they end with.
auto operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Buffer>()   // query
      .Arg<Buffer>()   // key
      .Arg<Buffer>()   // value
      .Arg<Buffer>()   // bias
      .Arg<Buffer>()   // mask
      .Arg<Buffer>()   // q_segment_ids
      .Arg<Buffer>()   // kv_segment_ids
      .Arg<Buffer>()   // sinks
      .Arg<Buffer>()   // dropout_seed
      .Arg<Buffer>()   // q_positions
      .Arg<Buffer>();  // slopes
}
template <class Binding>
auto options(Binding&& binding) {
  return std::move(binding)
      .template Attr<double>("scale")
      .template Attr<double>("softcap")
      .template Attr<int64_t>("low")
      .template Attr<int64_t>("high")
      .template Attr<int64_t>("origin")
      .template Attr<int64_t>("dropout_threshold")
      .template Attr<double>("keep_scale")
      .template Attr<int64_t>("parts")
      .template Attr<bool>("bias_last")
      .template Attr<Numbers>("blocks")
      .template Attr<Codes>("codes")
      .template Attr<Patterns>("patterns");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_attention_forward, forward,
                              options(operands().Ret<Buffer>().Ret<Buffer>()).Attr<bool>("decode"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_attention_backward, backward,
                              options(operands()
                                          .Arg<Buffer>()  // out
                                          .Arg<Buffer>()  // logsumexp
                                          .Arg<Buffer>()  // dout
                                          .Arg<Buffer>()  // dlogsumexp
                                          .Ret<Buffer>()
                                          .Ret<Buffer>()
                                          .Ret<Buffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_attention_bias_gradient, bias_gradient,
                              options(operands()
                                          .Arg<Buffer>()  // out
                                          .Arg<Buffer>()  // logsumexp
                                          .Arg<Buffer>()  // dout
                                          .Arg<Buffer>()  // dlogsumexp
                                          .Ret<Buffer>()));
VISHWAMAI_REGISTER(vishwamai_attention_forward)
VISHWAMAI_REGISTER(vishwamai_attention_backward)
VISHWAMAI_REGISTER(vishwamai_attention_bias_gradient)

}  // namespace vishwamai

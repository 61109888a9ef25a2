// FFI handlers of the recurrences: operands in the order of spec.py's Operands, options as attributes.
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_delta.h"
#include "vishwamai/core/cpp/ffi.h"
#include "vishwamai/core/cpp/registry.h"

namespace vishwamai {
namespace {

using Buffer = ffi::AnyBuffer;

void run(const DeltaArgs& args, const Threads& threads) { VISHWAMAI_DISPATCH_ROWS(delta_run, args, threads) }

// Elements from one row to the next of a [rows or 1, ...] buffer.
int64_t row_stride(const Buffer& buffer) {
  const auto dims = buffer.dimensions();
  return dims.size() == 0 || dims[0] <= 1 ? 0 : static_cast<int64_t>(buffer.element_count()) / dims[0];
}

// The operands that both handlers have; false where they are not what they must be.
bool read(const Buffer& value, const Buffer& query, const Buffer& key, const Buffer& decay, const Buffer& beta, const Buffer& skip,
          DeltaArgs* a) {
  const auto v = value.dimensions(), k = key.dimensions();
  if (v.size() != 4 || k.size() != 4 || k[1] == 0 || v[1] % k[1] != 0 || !row_storage_of(value, &a->storage)) return false;
  if (query.element_type() != value.element_type() || key.element_type() != value.element_type()) return false;
  const auto sums = a->storage == Storage::f64 ? ffi::F64 : ffi::F32;
  for (const Buffer* x : {&decay, &beta, &skip})
    if (x->element_count() > 0 && x->element_type() != sums) return false;
  a->heads = v[1], a->tokens = v[2], a->value_dim = v[3], a->key_heads = k[1], a->key_dim = k[3];
  a->channels = decay.element_count() > 0 ? decay.dimensions()[3] : 1;
  a->value = value.untyped_data(), a->query = query.untyped_data(), a->key = key.untyped_data();
  a->decay = optional(decay), a->beta = optional(beta), a->skip = optional(skip), a->skip_stride = row_stride(skip);
  return true;
}

int64_t state_bytes(const DeltaArgs& a) { return a.heads * a.key_dim * a.value_dim * (a.storage == Storage::f64 ? 8 : 4); }

ffi::Error forward(ffi::ThreadPool pool, Buffer value, Buffer query, Buffer key, Buffer decay, Buffer beta, Buffer skip,
                   Buffer initial_state, Buffer segments, ffi::Result<Buffer> y, ffi::Result<Buffer> state, double scale,
                   bool correction) {
  DeltaArgs a{};
  if (!read(value, query, key, decay, beta, skip, &a)) return invalid("delta: value must be [rows, heads, tokens, dim]");
  a.scale = scale, a.correction = correction;
  a.segments = optional<int32_t>(segments), a.segments_stride = row_stride(segments);
  a.y = y->untyped_data();
  const int64_t bytes = state_bytes(a);
  std::vector<DeltaSequence> sequences;
  for (int64_t i = 0; i < value.dimensions()[0]; ++i) {
    const auto* before = static_cast<const char*>(optional(initial_state));
    auto* after = state->element_count() > 0 ? static_cast<char*>(state->untyped_data()) : nullptr;
    sequences.push_back({i, 0, a.tokens, before ? before + i * bytes : nullptr, after ? after + i * bytes : nullptr});
  }
  a.sequences = sequences.data(), a.count = static_cast<int64_t>(sequences.size());
  if (y->element_count() > 0) run(a, threads_of(pool));
  return ffi::Error::Success();
}

// Sequences of one row, each with its states in a pool of slots, which is changed in place. As if all states were read
// before the first is written: one that another sequence writes is copied. Of sequences that write one slot, the last
// does.
ffi::Error step(ffi::ThreadPool pool, Buffer value, Buffer query, Buffer key, Buffer decay, Buffer beta, Buffer skip,
                Buffer states, Buffer slots, Buffer cu_q_lens, ffi::Result<Buffer> y, ffi::Result<Buffer> out, double scale,
                bool correction) {
  DeltaArgs a{};
  if (!read(value, query, key, decay, beta, skip, &a) || value.dimensions()[0] != 1) {
    return invalid("delta_step: value must be [1, heads, tokens, dim]");
  }
  if (slots.dimensions().size() != 2 || slots.dimensions()[0] != 2 || slots.element_type() != ffi::S32 || cu_q_lens.element_type() != ffi::S32 ||
      cu_q_lens.element_count() != slots.element_count() / 2 + 1) {
    return invalid("delta_step: slots must be [2, sequences] and cu_q_lens [sequences + 1], of int32");
  }
  if (states.untyped_data() != out->untyped_data()) return invalid("delta_step: the result must be the pool's memory");
  if (states.element_type() != (a.storage == Storage::f64 ? ffi::F64 : ffi::F32)) {
    return invalid("delta_step: the pool must be in the type of sums");
  }
  a.scale = scale, a.correction = correction;
  a.y = y->untyped_data();
  const int64_t bytes = state_bytes(a), count = slots.dimensions()[1], places = states.dimensions()[0];
  const auto *from = optional<int32_t>(slots), *to = from + count, *starts = optional<int32_t>(cu_q_lens);
  const auto inside = [&](int32_t slot) { return slot >= 0 && slot < places; };
  std::vector<int64_t> writer(static_cast<size_t>(places), -1);
  int64_t covered = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (starts[i] < 0 || starts[i + 1] > a.tokens) return invalid("delta_step: cu_q_lens must be within the tokens");
    if (starts[i + 1] > starts[i]) covered += starts[i + 1] - starts[i];
    if (starts[i + 1] > starts[i] && inside(to[i])) writer[static_cast<size_t>(to[i])] = i;
  }
  char* const memory = static_cast<char*>(out->untyped_data());
  std::vector<DeltaSequence> sequences;
  std::vector<std::unique_ptr<char[]>> copies;
  for (int64_t i = 0; i < count; ++i) {
    if (starts[i + 1] <= starts[i]) continue;
    DeltaSequence sequence{0, starts[i], starts[i + 1] - starts[i], nullptr, nullptr};
    if (inside(from[i])) {
      sequence.before = memory + from[i] * bytes;
      const int64_t other = writer[static_cast<size_t>(from[i])];
      if (other >= 0 && other != i) {
        copies.emplace_back(new char[static_cast<size_t>(bytes)]);
        std::memcpy(copies.back().get(), sequence.before, static_cast<size_t>(bytes));
        sequence.before = copies.back().get();
      }
    }
    if (inside(to[i]) && writer[static_cast<size_t>(to[i])] == i) sequence.after = memory + to[i] * bytes;
    sequences.push_back(sequence);
  }
  if (covered < a.tokens) std::memset(a.y, 0, y->size_bytes());  // tokens that belong to no sequence
  a.sequences = sequences.data(), a.count = static_cast<int64_t>(sequences.size());
  if (!sequences.empty() && y->element_count() > 0) run(a, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_delta, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // value
                                  .Arg<Buffer>()  // query
                                  .Arg<Buffer>()  // key
                                  .Arg<Buffer>()  // decay
                                  .Arg<Buffer>()  // beta
                                  .Arg<Buffer>()  // skip
                                  .Arg<Buffer>()  // initial_state
                                  .Arg<Buffer>()  // numbers of segments
                                  .Ret<Buffer>()  // y
                                  .Ret<Buffer>()  // state
                                  .Attr<double>("scale")
                                  .Attr<bool>("correction"));
VISHWAMAI_REGISTER(vishwamai_delta)

XLA_FFI_DEFINE_HANDLER_SYMBOL(vishwamai_delta_step, step,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Buffer>()  // value
                                  .Arg<Buffer>()  // query
                                  .Arg<Buffer>()  // key
                                  .Arg<Buffer>()  // decay
                                  .Arg<Buffer>()  // beta
                                  .Arg<Buffer>()  // skip
                                  .Arg<Buffer>()  // pool of states
                                  .Arg<Buffer>()  // slots
                                  .Arg<Buffer>()  // cu_q_lens
                                  .Ret<Buffer>()  // y
                                  .Ret<Buffer>()  // the pool
                                  .Attr<double>("scale")
                                  .Attr<bool>("correction"));
VISHWAMAI_REGISTER(vishwamai_delta_step)

}  // namespace vishwamai

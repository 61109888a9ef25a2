// Reading the operands of an XLA FFI call.  An operand or result that is absent is a buffer with no elements.
#pragma once

#include <cstring>

#include "parallel.h"
#include "placement.h"
#include "storage.h"
#include "xla/ffi/api/ffi.h"

namespace vishwamai {

namespace ffi = xla::ffi;

// XLA's intra-op pool as our Threads; `pool` must outlive it (it is an argument of the handler).
inline Threads threads_of(ffi::ThreadPool& pool) {
  Threads threads;
  threads.pool = &pool;
  threads.schedule = [](void* p, void (*run)(void*), void* task) {
    static_cast<ffi::ThreadPool*>(p)->Schedule([run, task] { run(task); });
  };
  const int available = static_cast<int>(pool.num_threads());
  const int limit = thread_limit();
  threads.count = available < 1 ? 1 : available < limit ? available : limit;
  return threads;
}

template <class T>
inline const T* optional(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}
inline const void* optional(const ffi::AnyBuffer& buffer) { return optional<void>(buffer); }

// Bytes of so many elements; XLA keeps two of 4 bits in one.
inline size_t bytes_of(ffi::DataType dtype, size_t count) {
  const bool halves = dtype == ffi::S4 || dtype == ffi::U4;
  return halves ? (count + 1) / 2 : count * ffi::ByteWidth(dtype);
}

// What the program says of a call's threads: the attributes "vishwamai_threads" and "vishwamai_node", which no handler
// declares. They are read and left out of `frame`, whose lists of attributes become `types`, `names` and `values`.
struct CallAttributes {
  static constexpr int64_t kMost = 32;
  XLA_FFI_AttrType types[kMost];
  XLA_FFI_ByteSpan* names[kMost];
  void* values[kMost];

  Placement take(XLA_FFI_CallFrame* frame) {
    Placement where;
    XLA_FFI_Attrs& attrs = frame->attrs;
    int64_t count = 0;
    for (int64_t i = 0; i < attrs.size && attrs.size <= kMost; ++i) {
      const XLA_FFI_ByteSpan& name = *attrs.names[i];
      int* target = is(name, "vishwamai_threads") ? &where.threads : is(name, "vishwamai_node") ? &where.node : nullptr;
      if (target && attrs.types[i] == XLA_FFI_AttrType_SCALAR) {
        *target = static_cast<int>(*static_cast<const int64_t*>(static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i])->value));
        continue;
      }
      types[count] = attrs.types[i], names[count] = attrs.names[i], values[count++] = attrs.attrs[i];
    }
    if (attrs.size <= kMost && count < attrs.size) {
      attrs.size = count, attrs.types = types, attrs.names = names, attrs.attrs = values;
    }
    return where;
  }
  static bool is(const XLA_FFI_ByteSpan& name, const char* text) {
    return name.len == std::strlen(text) && std::memcmp(name.ptr, text, name.len) == 0;
  }
};

// Handler `call`, whose results are announced first: what VISHWAMAI_REGISTER registers, so every large result of every
// operation.
template <XLA_FFI_Handler* call>
XLA_FFI_Error* announcing_results(XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (frame->rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const XLA_FFI_Buffer& result = *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
    size_t count = 1;
    for (int64_t axis = 0; axis < result.rank; ++axis) count *= static_cast<size_t>(result.dims[axis]);
    expect_written(result.data, bytes_of(static_cast<ffi::DataType>(result.dtype), count));
  }
  CallAttributes attributes;
  XLA_FFI_CallFrame rest = *frame;
  const Placed in_force(attributes.take(&rest));
  XLA_FFI_Error* error = call(&rest);
  frame->future = rest.future;
  return error;
}

inline bool storage_of(const ffi::AnyBuffer& buffer, Storage* storage) {
  switch (buffer.element_type()) {
    case ffi::F32: *storage = Storage::f32; return true;
    case ffi::BF16: *storage = Storage::bf16; return true;
    case ffi::F64: *storage = Storage::f64; return true;
    case ffi::S8: *storage = Storage::s8; return true;
    case ffi::S32: *storage = Storage::s32; return true;
    default: return false;
  }
}

// The same for kernels that take every floating type of 16 bits or more, float16 too.
inline bool row_storage_of(const ffi::AnyBuffer& buffer, Storage* storage) {
  if (buffer.element_type() == ffi::F16) {
    *storage = Storage::f16;
    return true;
  }
  return storage_of(buffer, storage) && *storage != Storage::s8 && *storage != Storage::s32;
}

inline ffi::Error invalid(const char* message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, message); }

}  // namespace vishwamai

// The functions that follow a product: one enumeration for the arguments, and their vector forms for kernel sources.
#pragma once

namespace vishwamai {

enum class Activation : int { none, relu, relu2, silu, gelu, gelu_tanh, sigmoid, tanh };

}  // namespace vishwamai

#ifdef VISHWAMAI_ISA
#include "simd.h"

namespace vishwamai::VISHWAMAI_ISA {

template <class T>
VISHWAMAI_INLINE V<T> sigmoid(V<T> x) {
  return T(1) / (T(1) + exp(-x));
}
template <class T>
VISHWAMAI_INLINE V<T> activate(Activation activation, V<T> x) {
  const V<T> zero = {};
  switch (activation) {
    case Activation::relu: return x > zero ? x : (x != x ? x : zero);
    case Activation::relu2: return x > zero ? x * x : (x != x ? x : zero);
    case Activation::silu: return x * sigmoid<T>(x);
    case Activation::gelu: return T(0.5) * x * (T(1) + erf<T>(x * T(0.70710678118654752440)));
    case Activation::gelu_tanh: return T(0.5) * x * (T(1) + tanh<T>(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
    case Activation::sigmoid: return sigmoid<T>(x);
    case Activation::tanh: return tanh<T>(x);
    default: return x;
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
#endif

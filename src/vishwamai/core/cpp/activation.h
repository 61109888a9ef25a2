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

// d activation(x) / dx, as in core/activations.py; relu's and relu2's is 0 at 0.
template <class T>
VISHWAMAI_INLINE V<T> derivative(Activation activation, V<T> x) {
  const V<T> zero = {};
  const V<T> one = splat(T(1));
  switch (activation) {
    case Activation::relu: return x > zero ? one : zero;
    case Activation::relu2: return x > zero ? x + x : (x != x ? x : zero);
    case Activation::silu: {
      const V<T> s = sigmoid<T>(x);
      return s * (T(1) + x * (T(1) - s));
    }
    case Activation::gelu:
      return T(0.5) * (T(1) + erf<T>(x * T(0.70710678118654752440))) + x * T(0.39894228040143267794) * exp(x * x * T(-0.5));
    case Activation::gelu_tanh: {
      const V<T> t = tanh<T>(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x));
      return T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * T(0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
    }
    case Activation::sigmoid: {
      const V<T> s = sigmoid<T>(x);
      return s * (T(1) - s);
    }
    case Activation::tanh: {
      const V<T> t = tanh<T>(x);
      return T(1) - t * t;
    }
    default: return one;
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
#endif

// Activations and probabilities in float32: plain loops that the compiler turns into vectors.
#pragma once
#include "net.h"

namespace {

using namespace gigamlp;

// exp by a power of two and a polynomial (degree 6, relative error 2e-7 with its roundings); saturates, never NaN
FI float exponential(float x) {
  x = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2**23: adding it rounds to a whole number
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  memcpy(&bits, &p, 4);
  bits += (int32_t)n * (1 << 23);
  memcpy(&p, &bits, 4);
  return p;
}

FI float magnitude(float x) { return x < 0 ? -x : x; }

FI float logistic(float x) {
  const float e = exponential(-magnitude(x));
  return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

FI float hyperbolic_tangent(float x) {
  const float a = magnitude(x), e = exponential(-2.0f * a);
  const float far = (1.0f - e) / (1.0f + e);
  const float s = a * a;  // near 0 the difference 1 - e has lost its digits
  const float near = a * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
  const float y = a < 0.25f ? near : far;
  return x < 0 ? -y : y;
}

// Abramowitz and Stegun 7.1.26, as in activations.py
FI float error_function(float x) {
  const float a = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * a);
  const float poly =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float y = 1.0f - poly * exponential(-a * a);
  return x < 0 ? -y : y;
}

__attribute__((noinline)) void activate(int64_t which, float* z, int64_t n) {
  switch (which) {
    case kRelu:
      for (int64_t i = 0; i < n; i++) z[i] = z[i] > 0 ? z[i] : 0;
      break;
    case kTanh:
      for (int64_t i = 0; i < n; i++) z[i] = hyperbolic_tangent(z[i]);
      break;
    case kLogistic:
      for (int64_t i = 0; i < n; i++) z[i] = logistic(z[i]);
      break;
    case kGelu:
      for (int64_t i = 0; i < n; i++) z[i] = 0.5f * z[i] * (1.0f + error_function(z[i] * 0.707106781f));
      break;
    case kGeluTanh:
      for (int64_t i = 0; i < n; i++) {
        const float x = z[i];
        z[i] = 0.5f * x * (1.0f + hyperbolic_tangent(0.797884561f * (x + 0.044715f * x * x * x)));
      }
      break;
    case kSilu:
      for (int64_t i = 0; i < n; i++) z[i] = z[i] * logistic(z[i]);
      break;
    default:
      break;
  }
}

__attribute__((noinline)) void softmax(const float* z, float top, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = exponential(z[i] - top);
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += out[i];
  const float share = 1.0f / sum;
  for (int64_t i = 0; i < n; i++) out[i] *= share;
}

}  // namespace

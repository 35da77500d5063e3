// Several elements at once, of any dtype that the loops take, as vectors of the processor.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {


#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int HALF = LANES / 2;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * HALF)));

constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Float32 { typedef float Type; static float value(float x) { return x; } };
struct BFloat16 {
  typedef uint16_t Type;
  static float value(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
  }
};
struct Float16 {
  typedef uint16_t Type;
  static float value(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
    uint32_t bits = rest << 13;
    float found;
    if (rest >= 0x7c00) {
      bits = 0x7f800000 | bits;
    } else {
      bits += 112u << 23;
      if (rest < 0x0400) {  // no leading 1
        bits += 1u << 23;
        std::memcpy(&found, &bits, 4);
        found -= 6.103515625e-05f;
        std::memcpy(&bits, &found, 4);
      }
    }
    bits |= sign;
    std::memcpy(&found, &bits, 4);
    return found;
  }
};

static Floats all_floats(float value) { return Floats{} + value; }
static Doubles all_doubles(double value) { return Doubles{} + value; }

template <class T> static inline Floats load(const typename T::Type* x) {
  Floats found;
  if (sizeof(*x) == sizeof(float)) {
    std::memcpy(&found, x, sizeof(found));
    return found;
  }
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  if (std::is_same<T, Float16>::value) return Floats(_mm512_cvtph_ps(bits));
  return Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  if (std::is_same<T, Float16>::value) return Floats(_mm256_cvtph_ps(bits));
  return Floats(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
#else
  float lanes[LANES];
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = T::value(x[lane]);
  std::memcpy(&found, lanes, sizeof(found));
  return found;
#endif
}

static inline void halves(const Floats& x, Doubles* wide) {
#if defined(__AVX512F__)
  const __m512d bits = _mm512_castps_pd(__m512(x));
  wide[0] = Doubles(_mm512_cvtps_pd(_mm512_castps512_ps256(__m512(x))));
  wide[1] = Doubles(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1))));
#elif defined(__AVX__)
  wide[0] = Doubles(_mm256_cvtps_pd(_mm256_castps256_ps128(__m256(x))));
  wide[1] = Doubles(_mm256_cvtps_pd(_mm256_extractf128_ps(__m256(x), 1)));
#else
  typedef float Narrow __attribute__((vector_size(4 * HALF)));
  Narrow narrow[2];
  std::memcpy(narrow, &x, sizeof(x));
  wide[0] = __builtin_convertvector(narrow[0], Doubles);
  wide[1] = __builtin_convertvector(narrow[1], Doubles);
#endif
}

// Returns all bits of the lanes that a mask selects.
static inline Ints selected(const uint8_t* mask) {
#if defined(__AVX512F__)
  return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(mask)))) != 0;
#elif defined(__AVX2__)
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask)))) != 0;
#else
  int32_t lanes[LANES];
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = mask[lane] ? -1 : 0;
  Ints found;
  std::memcpy(&found, lanes, sizeof(found));
  return found;
#endif
}

// Returns the numbers at these places of a table.
static inline Floats at_places(const float* table, const Ints& places) {
#if defined(__AVX512F__)
  return Floats(_mm512_i32gather_ps(__m512i(places), table, 4));
#elif defined(__AVX2__)
  return Floats(_mm256_i32gather_ps(table, __m256i(places), 4));
#else
  Floats found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = table[places[lane]];
  return found;
#endif
}

// Returns numbers without what follows the point.
static inline Ints truncated(const Floats& x) {
#if defined(__AVX512F__)
  return Ints(_mm512_cvttps_epi32(__m512(x)));
#elif defined(__AVX__)
  return Ints(_mm256_cvttps_epi32(__m256(x)));
#else
  return __builtin_convertvector(x, Ints);
#endif
}

}  // namespace

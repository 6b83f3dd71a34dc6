// Element types as raw bits, and their conversions: arithmetic without a branch, the same for one value and for a
// vector of them, so that every instruction set rounds alike.
//
// A file that does arithmetic is compiled once per instruction set, which SPMD_ISA names. Every function lives in the
// namespace of that name and uses builtins in place of the standard library's inline functions: a linker keeps one copy
// of those, and it may be one for the wrong machine. Without SPMD_ISA a header of this folder holds plain data only.
#pragma once

#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef SPMD_DEVICE
#define SPMD_DEVICE  // what a CUDA compiler wants in front of a function
#endif

namespace spmd {

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct BFloat16 {
    std::uint16_t bits;
};

struct Float16 {
    std::uint16_t bits;
};

#ifdef SPMD_ISA
namespace SPMD_ISA {

#if defined(__AVX512BW__)
constexpr int kWidth = 16;  // floats of a vector register
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef std::uint8_t Bytes __attribute__((vector_size(kWidth)));

SPMD_DEVICE inline std::uint32_t bits_of(float v) { return __builtin_bit_cast(std::uint32_t, v); }
SPMD_DEVICE inline float from_bits(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
SPMD_DEVICE inline std::uint32_t words_of(std::uint16_t v) { return v; }
SPMD_DEVICE inline std::uint16_t halves_of(std::uint32_t v) { return static_cast<std::uint16_t>(v); }
SPMD_DEVICE inline std::uint8_t bytes_of(std::uint32_t v) { return static_cast<std::uint8_t>(v); }
inline Words bits_of(Floats v) { return __builtin_bit_cast(Words, v); }
inline Floats from_bits(Words bits) { return __builtin_bit_cast(Floats, bits); }
#if defined(__AVX512BW__)  // the generic forms of these two take five instructions
inline Words words_of(Halves v) {
    return __builtin_bit_cast(Words, _mm512_maskz_cvtepu16_epi32(0xffff, __builtin_bit_cast(__m256i, v)));
}
#elif defined(__AVX2__)
inline Words words_of(Halves v) {
    return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, v)));
}
#else
inline Words words_of(Halves v) { return __builtin_convertvector(v, Words); }
#endif
inline Halves halves_of(Words v) { return __builtin_convertvector(v, Halves); }
inline Bytes bytes_of(Words v) { return __builtin_convertvector(halves_of(v), Bytes); }

// In the templates F is float or Floats and U the words of F.

template <class F>
SPMD_DEVICE inline F magnitude_of(F v) { return from_bits(bits_of(v) & 0x7fffffffu); }

// A format with fewer bits than fp32, its numbers without sign, infinity and NaN.
template <int kMantissa, int kBias>
struct Small {
    static constexpr int kShift = 23 - kMantissa;
    static constexpr std::uint32_t kRebias = (127u - kBias) << 23;
    static constexpr float kNormal = __builtin_bit_cast(float, (128u - kBias) << 23);             // the smallest one
    static constexpr float kUnit = __builtin_bit_cast(float, (151u - kBias - kMantissa) << 23);  // ulp: a subnormal's

    // A number to the word of its code, to nearest, ties to even.
    template <class F>
    SPMD_DEVICE static inline auto narrow(F v) {
        const auto bits = bits_of(v);
        const auto normal = (bits - kRebias + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1u)) >> kShift;
        return v < kNormal ? bits_of(v + kUnit) - bits_of(kUnit) : normal;
    }

    // The word of a code to its number.
    template <class U>
    SPMD_DEVICE static inline auto widen(U code) {
        const U shifted = code << kShift;
        const auto normal = from_bits(shifted + kRebias);
        return normal < kNormal ? from_bits(shifted + bits_of(kNormal)) - kNormal : normal;
    }
};

// How T lies in memory (Raw: a vector of it) and in fp32. rounded: to nearest, ties to even, still in fp32; exact: to
// memory, of a value that is rounded; narrow: both; widen: from memory. NaN stays NaN, its payload may change.
template <class T>
struct Format;

template <>
struct Format<float> {
    using Raw = Floats;
    template <class F>
    SPMD_DEVICE static inline F rounded(F v) { return v; }
    template <class F>
    SPMD_DEVICE static inline F exact(F v) { return v; }
    template <class F>
    SPMD_DEVICE static inline F narrow(F v) { return v; }
    template <class F>
    SPMD_DEVICE static inline F widen(F v) { return v; }
};

template <>
struct Format<BFloat16> {
    using Raw = Halves;
    template <class H>
    SPMD_DEVICE static inline auto widen(H v) { return from_bits(words_of(v) << 16); }
    template <class F>
    SPMD_DEVICE static inline F by_bits(F v) {
        const auto bits = bits_of(v), number = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
        return from_bits(v == v ? number : 0x7fc00000u);
    }
    template <class F>
    SPMD_DEVICE static inline F rounded(F v) { return by_bits(v); }
    template <class F>
    SPMD_DEVICE static inline auto exact(F v) { return halves_of(bits_of(v) >> 16); }
    template <class F>
    SPMD_DEVICE static inline auto narrow(F v) { return exact(rounded(v)); }
#if defined(__AVX512BF16__)  // an instruction that rounds the same, except that it takes subnormals for zeros
    static inline Halves narrow(Floats v) {
        if (__builtin_expect(_mm512_fpclass_ps_mask(v, 0x20), 0)) return exact(by_bits(v));
        return __builtin_bit_cast(Halves, _mm512_cvtneps_pbh(v));
    }
    static inline Floats rounded(Floats v) { return widen(narrow(v)); }
#endif
};

template <>
struct Format<Float16> {
    using Raw = Halves;
#if defined(__F16C__)
    static inline std::uint16_t narrow(float v) {
        return __builtin_bit_cast(std::uint16_t, static_cast<_Float16>(v));
    }
    static inline float widen(std::uint16_t v) { return static_cast<float>(__builtin_bit_cast(_Float16, v)); }
#if defined(__AVX512BW__)
    static inline Halves narrow(Floats v) { return __builtin_bit_cast(Halves, _mm512_maskz_cvtps_ph(0xffff, v, 0)); }
    static inline Floats widen(Halves v) { return _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, v)); }
#else
    static inline Halves narrow(Floats v) { return __builtin_bit_cast(Halves, _mm256_cvtps_ph(v, 0)); }
    static inline Floats widen(Halves v) { return _mm256_cvtph_ps(__builtin_bit_cast(__m128i, v)); }
#endif
#else
    template <class F>
    SPMD_DEVICE static inline auto narrow(F v) {
        const auto sign = (bits_of(v) >> 16) & 0x8000u;
        const auto size = magnitude_of(v);
        const auto code = Small<10, 15>::narrow(size < 0x1p16f ? size : 0x1p16f);  // 2^16 has infinity's code
        return halves_of(sign | (v == v ? code : 0x7e00u));
    }
    template <class H>
    SPMD_DEVICE static inline auto widen(H v) {
        const auto sign = (words_of(v) & 0x8000u) << 16;
        const auto size = Small<10, 15>::widen(words_of(v) & 0x7fffu);
        return from_bits(sign | (bits_of(size) + (size < 0x1p16f ? 0u : 0x38000000u)));  // infinity and NaN
    }
#endif
    template <class F>
    SPMD_DEVICE static inline F rounded(F v) { return widen(narrow(v)); }
    template <class F>
    SPMD_DEVICE static inline auto exact(F v) { return narrow(v); }
};

// One value.
SPMD_DEVICE inline float load(float v) { return v; }
template <class T>
SPMD_DEVICE inline float load(T v) { return Format<T>::widen(v.bits); }
template <class T>
SPMD_DEVICE inline T store(float v) { return {Format<T>::narrow(v)}; }
template <class T, class F>
SPMD_DEVICE inline F rounded(F v) { return Format<T>::rounded(v); }

// The first `count` values of a vector; zeros stand for the others.
template <class T>
inline Floats load(const T* from, int count) {
    typename Format<T>::Raw raw = {};
    __builtin_memcpy(&raw, from, sizeof(T) * count);
    return Format<T>::widen(raw);
}
template <class T>
inline void store_exact(T* to, Floats v, int count) {
    const auto raw = Format<T>::exact(v);
    __builtin_memcpy(to, &raw, sizeof(T) * count);
}

// f(i, k, count) for the vectors of a row: element i is the first of `count`, in vector k of its chunk of 32. count is
// a constant in whole chunks.
constexpr int kChunk = 32;
template <class F>
inline void each_vector(std::int64_t n, F f) {
    struct Whole {
        constexpr operator int() const { return kWidth; }
    };
    constexpr int kVectors = kChunk / kWidth;
    std::int64_t i = 0;
    for (; i + kChunk <= n; i += kChunk)
#pragma GCC unroll 8
        for (int k = 0; k < kVectors; ++k) f(i + k * kWidth, k, Whole{});
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k, i += kWidth)
        if (i < n) f(i, k, static_cast<int>(n - i < kWidth ? n - i : kWidth));
}

// Calls f with a null pointer of the element type that `dtype` names.
template <class F>
void with_type(int dtype, F f) {
    if (dtype == kFloat32) f(static_cast<float*>(nullptr));
    if (dtype == kBFloat16) f(static_cast<BFloat16*>(nullptr));
    if (dtype == kFloat16) f(static_cast<Float16*>(nullptr));
}

}  // namespace SPMD_ISA
#endif

}  // namespace spmd

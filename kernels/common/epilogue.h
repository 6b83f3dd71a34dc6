// Purpose: what follows an all-reduce, on a row of its sum while that is in cache: bias, residual, norm, quantisation.
// Method:  two passes over vectors of a row; squares go to 32 accumulators, element i to number i % 32, so that every
//          instruction set and the torch reference add in the same order.
// Requirement: contiguous rows; every step is rounded to T once, the norm is computed in fp32 from rounded values.
//          residual may be residual_out; out may be where the sum was read from.
// Use:     epilogue_row, by every all-reduce kernel and, alone, by cpu/rows.cpp.
#pragma once

#include "common/types.h"

namespace spmd {

enum Fusion : int {  // AllReduceFusionOp of collectives/fusion.py
    kNone = 0,
    kResidualRmsNorm = 1,
    kLastProcessForUb = 2,
    kResidualRmsPrepostNorm = 3,
    kResidualRmsNormQuantFp8 = 4,
    kResidualRmsNormQuantNvfp4 = 5,
    kResidualRmsNormOutQuantFp8 = 6,
    kResidualRmsNormOutQuantNvfp4 = 7,
    kMoeFinalizeResidualRmsNorm = 8,
    kRmsNorm = 9,
};

// What is done to every row of a finished sum. A null pointer: that input is not there, that output is not wanted.
struct Epilogue {
    int op;          // Fusion
    int dtype;       // T of all tensors below that are void
    std::int64_t n;  // elements of a row; a multiple of 16 for NVFP4
    const void *bias, *residual, *weight, *pre_weight;  // [n], [rows, n], [n], [n]
    const float* scale;                                 // [1], of the quantisation
    float eps, weight_offset;                           // 1 where the norm multiplies by 1 + weight, as Gemma's does
    void *out, *residual_out;                           // [rows, n]
    std::uint8_t* quant_out;                            // [rows, n] e4m3 or [rows, n / 2] e2m1 pairs
    std::uint8_t* scale_out;                            // swizzled; the padding is not written
};

}  // namespace spmd

#ifdef SPMD_ISA
#include <math.h>

#include "common/quantise.h"

namespace spmd {
namespace SPMD_ISA {

template <class T>
inline T* at(T* row, std::int64_t i) {
    return row ? row + i : nullptr;
}

// T(v), then T(v + bias), then T(v + residual), whichever are there, of elements [i, i + count). v: fp32, or T already.
template <class T, class V>
inline Floats added(const V* v, const T* bias, const T* residual, std::int64_t i, int count) {
    Floats x = load(v + i, count);
    if constexpr (sizeof(V) > sizeof(T)) x = rounded<T>(x);
    if (bias) x = rounded<T>(x + load(bias + i, count));
    if (residual) x = rounded<T>(x + load(residual + i, count));
    return x;
}

// Stores what `added` makes of v to `sum` and `kept`, where they are wanted; returns 1 / sqrt(mean of squares + eps).
template <class T, class V>
inline float add_and_measure(const V* v, const T* bias, const T* residual, T* sum, float* kept, std::int64_t n,
                             float eps) {
    Floats squares[kChunk / kWidth] = {};  // an accumulator for every place in a chunk
    each_vector(n, [&](std::int64_t i, int k, auto count) {
        const Floats x = added(v, bias, residual, i, count);
        if (sum) store_exact(sum + i, x, count);
        if (kept) store_exact(kept + i, x, count);
        squares[k] += x * x;
    });
    float lanes[kChunk];
    __builtin_memcpy(lanes, squares, sizeof lanes);
    for (int width = kChunk / 2; width; width /= 2)
        for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
    return 1.0f / sqrtf(lanes[0] / static_cast<float>(n) + eps);
}

// T(v * scale * (offset + weight)) of elements [i, i + count), without the last factor if there is no weight.
template <class T, class V>
inline Floats normalised(const V* v, float scale, float offset, const T* weight, std::int64_t i, int count) {
    Floats x = load(v + i, count) * scale;
    if (weight) x *= offset + load(weight + i, count);
    return rounded<T>(x);
}

// v[0 ... e.n): the sum in fp32, not yet rounded; overwritten.
template <class T>
inline void epilogue_row(const Epilogue& e, std::int64_t row, float* v) {
    const std::int64_t n = e.n, first = row * n;
    const T *bias = static_cast<const T*>(e.bias), *weight = static_cast<const T*>(e.weight);
    const float offset = e.weight_offset;
    T* out = at(static_cast<T*>(e.out), first);
    if (e.op == kNone) {
        each_vector(n, [&](std::int64_t i, int, auto count) {
            store_exact(out + i, added<T>(v, bias, nullptr, i, count), count);
        });
        return;
    }
    if (e.op == kResidualRmsPrepostNorm) {
        const T* pre_weight = static_cast<const T*>(e.pre_weight);
        const float scale = add_and_measure<T>(v, bias, nullptr, nullptr, v, n, e.eps);
        each_vector(n, [&](std::int64_t i, int, auto count) {
            store_exact(v + i, normalised(v, scale, offset, pre_weight, i, count), count);
        });
        bias = nullptr;
    }
    const T* residual = e.op == kRmsNorm ? nullptr : at(static_cast<const T*>(e.residual), first);
    T* sum = at(static_cast<T*>(e.residual_out), first);
    const float scale = add_and_measure(v, bias, residual, sum, v, n, e.eps);
    const bool fp8 = e.op == kResidualRmsNormQuantFp8 || e.op == kResidualRmsNormOutQuantFp8;
    const bool nvfp4 = e.op == kResidualRmsNormQuantNvfp4 || e.op == kResidualRmsNormOutQuantNvfp4;
    const float quant_scale = fp8 || nvfp4 ? *e.scale : 1.0f;
    each_vector(n, [&](std::int64_t i, int, auto count) {
        const Floats x = normalised(v, scale, offset, weight, i, count);
        if (out) store_exact(out + i, x, count);
        if (fp8) {
            const Bytes codes = bytes_of(to_e4m3(x / quant_scale));
            __builtin_memcpy(e.quant_out + first + i, &codes, count);
        }
        if (nvfp4) store_exact(v + i, x, count);
    });
    if (nvfp4) quantise_nvfp4(v, n, row, quant_scale, e.quant_out + first / 2, e.scale_out);
}

}  // namespace SPMD_ISA
}  // namespace spmd
#endif

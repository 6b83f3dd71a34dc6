// Purpose: residual + RMSNorm, SwiGLU, rotary embedding with the KV cache write, attention of one token, and what
//          follows an all-reduce.
// Method:  plain loops over fp32 with a fixed number of accumulators, so that every instruction set adds in the same
//          order and the compiler can vectorise without reordering. Compiled once per instruction set: common/types.h.
// Requirement: contiguous rows; T is fp32, bf16 or fp16; every result is rounded to T once.
// Use:     nn/rows.py, through the table in rows.h.

#include "cpu/rows.h"

#include <cmath>
#include <cstring>

namespace spmd {
namespace SPMD_ISA {
namespace {

template <class T>
void rms_norm_rows(const T* x, const T* residual, const T* weight, T* y, T* sum, std::int64_t rows, std::int64_t n,
                   float eps) {
    if (!residual) sum = nullptr;
    for (std::int64_t first = 0; first < rows * n; first += n) {
        const T* row = at(sum ? sum : x, first);
        const T* added = at(residual, first);
        const float scale = add_and_measure<T>(x + first, nullptr, added, at(sum, first), nullptr, n, eps);
        each_vector(n, [&](std::int64_t i, int, auto count) {
            store_exact(y + first + i, normalised(row, scale, 0.0f, weight, i, count), count);
        });
    }
}

// e^x for x in fp32, relative error below 2e-7: 2^k * p(f), Cody-Waite reduction, Taylor to the sixth power
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;  // written so that NaN goes through
    x = x < -87.0f ? -87.0f : x;
    const float k = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const float f = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    const float p = 1.0f + f * (1.0f + f * (0.5f + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f / 720)))));
    const auto power = static_cast<std::int32_t>(k == k ? k : 0.0f);
    return p * from_bits(static_cast<std::uint32_t>(power + 127) << 23);
}

template <class T>
void swiglu_rows(const T* gate, T* __restrict y, std::int64_t rows, std::int64_t n) {
    for (std::int64_t r = 0; r < rows; ++r, gate += 2 * n, y += n) {
        const T* up = gate + n;
        for (std::int64_t i = 0; i < n; ++i) {
            const float g = load(gate[i]);
            const T silu = store<T>(g / (1.0f + exponential(-g)));
            y[i] = store<T>(load(silu) * load(up[i]));
        }
    }
}

template <class T>
void rotate(const T* head, T* out, const float* rotation, std::int64_t d) {
    for (std::int64_t i = 0; i < d; i += 2) {
        const float re = load(head[i]), im = load(head[i + 1]), cos = rotation[i], sin = rotation[i + 1];
        out[i] = store<T>(re * cos - im * sin);
        out[i + 1] = store<T>(re * sin + im * cos);
    }
}

template <class T>
void rotate_store_rows(T* qkv, const float* rotation, T* cache, std::int64_t rows, std::int64_t heads,
                       std::int64_t kv_heads, std::int64_t d) {
    for (std::int64_t r = 0; r < rows; ++r, rotation += d) {
        for (std::int64_t h = 0; h < heads; ++h, qkv += d) rotate(qkv, qkv, rotation, d);
        for (std::int64_t h = 0; h < kv_heads; ++h, qkv += d, cache += d) rotate(qkv, cache, rotation, d);
        std::memcpy(cache, qkv, sizeof(T) * kv_heads * d);
        qkv += kv_heads * d, cache += kv_heads * d;
    }
}

// Dot product with kSum accumulators, folded pairwise.
template <class T>
float dot(const float* a, const T* b, std::int64_t d) {
    constexpr int kSum = 16;
    float lanes[kSum] = {};
    std::int64_t i = 0;
    for (; i + kSum <= d; i += kSum)
        for (int k = 0; k < kSum; ++k) lanes[k] += a[i + k] * load(b[i + k]);
    for (; i < d; ++i) lanes[i % kSum] += a[i] * load(b[i]);
    for (int width = kSum / 2; width; width /= 2)
        for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
    return lanes[0];
}

// scores[0 ... n) become exp(score - max); returns their sum and, in top, the max.
float exponentials(float* __restrict scores, std::int64_t n, float& top) {
    top = scores[0];
    for (std::int64_t i = 1; i < n; ++i) top = scores[i] > top ? scores[i] : top;
    for (std::int64_t i = 0; i < n; ++i) scores[i] = exponential(scores[i] - top);
    float sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += scores[i];
    return sum;
}

template <class T>
void attend_token(const T* queries, const T* cache, T* out, std::int64_t heads, std::int64_t kv_heads, std::int64_t d,
                  std::int64_t count, std::int64_t lead, std::int64_t share, float* scratch, float* stats) {
    float *scores = scratch, *query = scores + count, *sum = query + d;
    const std::int64_t step = 2 * kv_heads * d;  // from one position of the cache to the next
    for (std::int64_t h = 0; h < heads; ++h) {
        const T* keys = cache + (lead + h) / share * d;
        const T* values = keys + kv_heads * d;
        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        for (std::int64_t i = 0; i < d; ++i) query[i] = load(queries[h * d + i]) * scale, sum[i] = 0;
        for (std::int64_t p = 0; p < count; ++p) scores[p] = dot(query, keys + p * step, d);
        float top;
        const float total = exponentials(scores, count, top);
        if (stats) *stats++ = top, *stats++ = total;
        for (std::int64_t p = 0; p < count; ++p)
            for (std::int64_t i = 0; i < d; ++i) sum[i] += scores[p] * load(values[p * step + i]);
        for (std::int64_t i = 0; i < d; ++i) out[h * d + i] = store<T>(sum[i] / total);
    }
}

void rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum, std::int64_t rows,
              std::int64_t n, float eps, int dtype) {
    with_type(dtype, [&]<class T>(T*) {
        rms_norm_rows(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
                      static_cast<T*>(y), static_cast<T*>(sum), rows, n, eps);
    });
}

void swiglu(const void* gate_up, void* y, std::int64_t rows, std::int64_t n, int dtype) {
    with_type(dtype, [&]<class T>(T*) { swiglu_rows(static_cast<const T*>(gate_up), static_cast<T*>(y), rows, n); });
}

void rotate_store(void* qkv, const float* rotation, void* cache, std::int64_t rows, std::int64_t heads,
                  std::int64_t kv_heads, std::int64_t d, int dtype) {
    with_type(dtype, [&]<class T>(T*) {
        rotate_store_rows(static_cast<T*>(qkv), rotation, static_cast<T*>(cache), rows, heads, kv_heads, d);
    });
}

void attend(const void* queries, const void* cache, void* out, std::int64_t heads, std::int64_t kv_heads,
            std::int64_t d, std::int64_t count, std::int64_t lead, std::int64_t share, float* scratch, float* stats,
            int dtype) {
    with_type(dtype, [&]<class T>(T*) {
        attend_token(static_cast<const T*>(queries), static_cast<const T*>(cache), static_cast<T*>(out), heads,
                     kv_heads, d, count, lead, share, scratch, stats);
    });
}

void epilogue(float* sum, std::int64_t rows, const Epilogue& e) {
    with_type(e.dtype, [&]<class T>(T*) {
        for (std::int64_t row = 0; row < rows; ++row) epilogue_row<T>(e, row, sum + row * e.n);
    });
}

}  // namespace

extern const RowKernels kernels;
const RowKernels kernels = {&rms_norm, &swiglu, &rotate_store, &attend, &epilogue};

}  // namespace SPMD_ISA
}  // namespace spmd

// What is done to a row of activations while it is in cache. One table of functions per instruction set; `row_kernels()`
// picks the best one this machine has.
#pragma once

#include "common/epilogue.h"

namespace spmd {

struct RowKernels {
    // sum = T(x + residual) (residual may be null: sum = x and is not written); y = T(sum * rsqrt(mean(sum^2) + eps) * weight);
    // y may be x, and sum may be residual
    void (*rms_norm)(const void* x, const void* residual, const void* weight, void* y, void* sum, std::int64_t rows,
                     std::int64_t n, float eps, int dtype);
    // gate_up [rows, 2n] -> y [rows, n] = T(T(silu(gate)) * up)
    void (*swiglu)(const void* gate_up, void* y, std::int64_t rows, std::int64_t n, int dtype);
    // qkv [rows, heads + 2 * kv_heads, d]: query heads are rotated in place, rotated keys and the values go to
    // cache [rows, 2, kv_heads, d]; rotation [rows, d / 2] complex, as (cos, sin) pairs
    void (*rotate_store)(void* qkv, const float* rotation, void* cache, std::int64_t rows, std::int64_t heads,
                         std::int64_t kv_heads, std::int64_t d, int dtype);
    // One token's queries [heads, d] over cache [count, 2, kv_heads, d] -> out [heads, d], softmax(q k / sqrt(d)) v in
    // fp32. Query head h reads key/value head (lead + h) / share. scratch: count + 2 * d floats. stats (or null):
    // [heads, 2], the largest score and the sum of exp(score - largest)
    void (*attend)(const void* queries, const void* cache, void* out, std::int64_t heads, std::int64_t kv_heads,
                   std::int64_t d, std::int64_t count, std::int64_t lead, std::int64_t share, float* scratch,
                   float* stats, int dtype);
    // sum [rows, e.n]: finished sums, not yet rounded, overwritten
    void (*epilogue)(float* sum, std::int64_t rows, const Epilogue& e);
};

const RowKernels& row_kernels();

}  // namespace spmd

// The loops of a collective over a rank's own and its peers' memory: copy, sum in rank order, sum and finish rows, and
// the Lamport pair. One table per instruction set; `data_kernels()` gives the one in use. Who may touch which memory when
// is not decided here but in plane.cpp.
#pragma once

#include <cstdint>

#include "common/epilogue.h"

namespace spmd {

constexpr std::int64_t kLine = 64;            // bytes of a cache line
constexpr std::uint32_t kSentinel = 1u << 31;  // a Lamport word that nobody has written yet: -0.0
constexpr int kMaxRanks = 256;                // of a group on one host
constexpr int kBytes = 3;                     // a DType of its own: rows that are moved and never summed
constexpr std::int64_t kScaled = 128;          // elements that share a scale on the low-precision wire

// Called while a peer's Lamport word is not there; false: give up. turn counts the polls so far.
using Late = bool (*)(void* context, int peer, std::int64_t turn);

// Peers' Lamport buffers, `size` of them; buffers[rank] is what this rank has posted, as it was handed in.
struct Mailboxes {
    const void* const* buffers;
    int size, rank;
    Late late;
    void* context;
};

constexpr std::int64_t scaled_bytes(std::int64_t n) { return (n + kScaled - 1) / kScaled * (kScaled + 4); }

struct DataKernels {
    // stream: non-temporal stores, for what does not stay in cache
    void (*copy)(void* out, const void* in, std::int64_t bytes, bool stream);
    // out = T(a + b)
    void (*add)(void* out, const void* a, const void* b, std::int64_t n, int dtype);
    // out = T(0 + in[0] + in[1] ...) in fp32; out may be one of the inputs
    void (*sum)(void* out, const void* const* in, int count, std::int64_t n, int dtype, bool stream);
    // everywhere[k] = T(0 + everywhere[0] + everywhere[1] ...), for all k
    void (*sum_everywhere)(void* const* everywhere, int count, std::int64_t n, int dtype);
    // rows [row, row + rows) of an epilogue's outputs from the fp32 sums of in[0], in[1], ...; scratch: e.n floats
    void (*finish)(const Epilogue& e, std::int64_t row, const void* const* in, int count, std::int64_t rows,
                   float* scratch);
    // `bytes` to a mailbox, padded to whole lines with zeros; a word that looks like the sentinel becomes +0
    void (*post)(void* mailbox, const void* in, std::int64_t bytes);
    // out = T(sum) of n elements, or with e the epilogue of its rows (scratch: n floats); false: gave up waiting
    bool (*collect)(const Mailboxes& from, void* out, std::int64_t n, int dtype, const Epilogue* e, float* scratch);
    void (*clear)(void* mailbox, std::int64_t bytes);  // whole lines back to the sentinel
    // FP8 blocks: kScaled codes and their fp32 scale; out takes scaled_bytes(n)
    void (*pack)(void* out, const void* in, std::int64_t n, int dtype);
    // fp32 sums of n elements of packed inputs
    void (*sum_packed)(float* out, const void* const* in, int count, std::int64_t n);
    // out = T(sums) of n elements, or with e the epilogue of the rows from `row` on; sums are overwritten
    void (*round)(void* out, float* sums, std::int64_t n, int dtype, const Epilogue* e, std::int64_t row);
    // out = T(weights[0] * in[0] + weights[1] * in[1] ...) in fp32
    void (*blend)(void* out, const void* const* in, const float* weights, int count, std::int64_t n, int dtype);
};

const DataKernels& data_kernels();

}  // namespace spmd

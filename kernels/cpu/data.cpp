// Purpose: the memory-bound loops of the collectives.
// Method:  vectors of common/types.h; sums start from +0 and add in the order of `in`, so all strategies and instruction
//          sets give the same bits. Compiled once per instruction set (SPMD_ISA names it); nothing of the standard
//          library that translation units share may be instantiated here.
// Requirement: any alignment, any count; mailboxes are aligned to lines.
// Use:     plane.cpp, through the table in data.h.

#include "cpu/data.h"

#include <cmath>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/epilogue.h"
#include "common/quantise.h"
#include "common/types.h"

namespace spmd {
namespace SPMD_ISA {
namespace {

typedef std::uint32_t Line __attribute__((vector_size(kLine)));

template <class V>
inline V read(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
inline Floats load_vector(const T* p) { return load(p, kWidth); }
template <class T>
inline void store_vector(T* p, Floats v) {
    const auto raw = Format<T>::narrow(v);
    std::memcpy(p, &raw, sizeof raw);
}

// A non-temporal store of one vector to memory that is aligned to its size.
template <class V>
inline void stream_out(void* p, const V& v) {
#if defined(__AVX512F__)
    if constexpr (sizeof v == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), read<__m512i>(&v));
#endif
#if defined(__x86_64__)
    if constexpr (sizeof v == 8) return _mm_stream_si64(static_cast<long long*>(p), read<long long>(&v));
    for (std::size_t k = 0; k < sizeof v / 16; ++k)
        _mm_stream_si128(static_cast<__m128i*>(p) + k, read<__m128i>(reinterpret_cast<const __m128i*>(&v) + k));
#else
    std::memcpy(p, &v, sizeof v);
#endif
}

// Non-temporal stores become visible in no order: before the next flag, all of them.
inline void stream_end() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

void copy(void* out, const void* in, std::int64_t bytes, bool stream) {
    auto* to = static_cast<char*>(out);
    auto* from = static_cast<const char*>(in);
    if (stream && bytes >= 2 * kLine) {
        const std::int64_t head = -reinterpret_cast<std::intptr_t>(to) & (kLine - 1);
        std::memcpy(to, from, head);
        std::int64_t i = head;
        for (; i + kLine <= bytes; i += kLine) stream_out(to + i, read<Line>(from + i));
        stream_end();
        to += i, from += i, bytes -= i;
    }
    std::memcpy(to, from, bytes);
}

// Sum of N inputs (N 0: of `count`).
template <int N, class T>
inline Floats sum_vector(const T* const* in, int count, std::int64_t i) {
    Floats acc = {};
    for (int s = 0; s < (N ? N : count); ++s) acc += load_vector(in[s] + i);
    return acc;
}

template <class T>
inline float sum_one(const T* const* in, int count, std::int64_t i) {
    float acc = 0;
    for (int s = 0; s < count; ++s) acc += load(in[s][i]);
    return acc;
}

template <int N, class Out, class T>
void sum_n(Out* out, const T* const* in, int count, std::int64_t n, bool stream) {
    constexpr std::int64_t kBytes = kWidth * sizeof(Out);
    std::int64_t i = 0;
    if (stream) {
        for (; i < n && reinterpret_cast<std::uintptr_t>(out + i) % kBytes; ++i)
            out[i] = store<Out>(sum_one(in, count, i));
        for (; i + kWidth <= n; i += kWidth) stream_out(out + i, Format<Out>::narrow(sum_vector<N>(in, count, i)));
        stream_end();
    }
    for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
        Floats sums[4];
        for (int k = 0; k < 4; ++k) sums[k] = sum_vector<N>(in, count, i + k * kWidth);
        for (int k = 0; k < 4; ++k) store_vector(out + i + k * kWidth, sums[k]);
    }
    for (; i + kWidth <= n; i += kWidth) store_vector(out + i, sum_vector<N>(in, count, i));
    for (; i < n; ++i) out[i] = store<Out>(sum_one(in, count, i));
}

template <class Out, class T>
void sum_all(Out* out, const void* const* in, int count, std::int64_t n, bool stream) {
    auto* from = reinterpret_cast<const T* const*>(in);
    switch (count) {
        case 1: return sum_n<1>(out, from, count, n, stream);
        case 2: return sum_n<2>(out, from, count, n, stream);
        case 4: return sum_n<4>(out, from, count, n, stream);
        default: return sum_n<0>(out, from, count, n, stream);
    }
}

void add_two(void* out, const void* a, const void* b, std::int64_t n, int dtype) {
    const void* in[2] = {a, b};
    with_type(dtype, [&]<class T>(T*) { sum_all<T, T>(static_cast<T*>(out), in, 2, n, false); });
}

void sum(void* out, const void* const* in, int count, std::int64_t n, int dtype, bool stream) {
    with_type(dtype, [&]<class T>(T*) { sum_all<T, T>(static_cast<T*>(out), in, count, n, stream); });
}

template <class T>
void blend_all(T* out, const T* const* in, const float* weights, int count, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        Floats acc = {};
        for (int s = 0; s < count; ++s) acc += load_vector(in[s] + i) * weights[s];
        store_vector(out + i, acc);
    }
    for (; i < n; ++i) {
        float acc = 0;
        for (int s = 0; s < count; ++s) acc += load(in[s][i]) * weights[s];
        out[i] = store<T>(acc);
    }
}

void blend(void* out, const void* const* in, const float* weights, int count, std::int64_t n, int dtype) {
    with_type(dtype, [&]<class T>(T*) {
        blend_all<T>(static_cast<T*>(out), reinterpret_cast<const T* const*>(in), weights, count, n);
    });
}

template <int N, class T>
void sum_everywhere_n(T* const* everywhere, int count, std::int64_t n) {
    constexpr int kStep = 2;
    std::int64_t i = 0;
    for (; i + kStep * kWidth <= n; i += kStep * kWidth) {
        const auto a = Format<T>::narrow(sum_vector<N>(everywhere, count, i)),
                   b = Format<T>::narrow(sum_vector<N>(everywhere, count, i + kWidth));
        for (int k = 0; k < (N ? N : count); ++k) {
            std::memcpy(everywhere[k] + i, &a, sizeof a);
            std::memcpy(everywhere[k] + i + kWidth, &b, sizeof b);
        }
    }
    for (; i < n; ++i) {
        const T sum = store<T>(sum_one(everywhere, count, i));
        for (int k = 0; k < count; ++k) everywhere[k][i] = sum;
    }
}

void sum_everywhere(void* const* everywhere, int count, std::int64_t n, int dtype) {
    with_type(dtype, [&]<class T>(T*) {
        auto* memory = reinterpret_cast<T* const*>(everywhere);
        count == 2 ? sum_everywhere_n<2>(memory, count, n) : sum_everywhere_n<0>(memory, count, n);
    });
}

void finish(const Epilogue& e, std::int64_t row, const void* const* in, int count, std::int64_t rows, float* scratch) {
    with_type(e.dtype, [&]<class T>(T*) {
        const T* from[kMaxRanks];
        for (int s = 0; s < count; ++s) from[s] = static_cast<const T*>(in[s]);
        for (std::int64_t r = 0; r < rows; ++r) {
            sum_all<float, T>(scratch, reinterpret_cast<const void* const*>(from), count, e.n, false);
            epilogue_row<T>(e, row + r, scratch);
            for (int s = 0; s < count; ++s) from[s] += e.n;
        }
    });
}

// sums [n] to T in out, or to the outputs of e from its row `row` on.
template <class T>
void round_all(void* out, float* sums, std::int64_t n, const Epilogue* e, std::int64_t row) {
    if (e)
        for (std::int64_t at = 0; at < n; at += e->n, ++row) epilogue_row<T>(*e, row, sums + at);
    else
        sum_n<1>(static_cast<T*>(out), &sums, 1, n, false);
}

void round(void* out, float* sums, std::int64_t n, int dtype, const Epilogue* e, std::int64_t row) {
    with_type(dtype, [&]<class T>(T*) { round_all<T>(out, sums, n, e, row); });
}

// ---------------------------------------------------------------------------------------------------- Lamport mailboxes
// Data and flag are the same word. x86 keeps the stores of a core in order, and its loads; elsewhere, and where a checker
// watches, every word is an atomic of its own.

#if defined(__x86_64__) && !defined(SPMD_ATOMIC_WORDS)
inline Line take(const void* p) { return *static_cast<const volatile Line*>(p); }
inline void put(void* p, Line w) { *static_cast<volatile Line*>(p) = w; }
#else
inline Line take(const void* p) {
    Line w;
    for (int k = 0; k < 16; ++k) w[k] = __atomic_load_n(static_cast<const std::uint32_t*>(p) + k, __ATOMIC_ACQUIRE);
    return w;
}
inline void put(void* p, Line w) {
    for (int k = 0; k < 16; ++k) __atomic_store_n(static_cast<std::uint32_t*>(p) + k, w[k], __ATOMIC_RELEASE);
}
#endif

inline bool missing(Line w) {  // whether some word is not written yet
#if defined(__AVX512F__)
    return _mm512_cmpeq_epi32_mask((__m512i)w, _mm512_set1_epi32(static_cast<int>(kSentinel)));
#else
    const Line same = (Line)(w == kSentinel);
    std::uint32_t any = 0;
    for (int k = 0; k < 16; ++k) any |= same[k];
    return any;
#endif
}

// The values of a line, added to its sums.
template <class T>
constexpr int kVectors = kLine / sizeof(T) / kWidth;
template <class T>
inline void add_line(Floats* acc, Line line) {
    for (int k = 0; k < kVectors<T>; ++k) {
        typename Format<T>::Raw raw;
        std::memcpy(&raw, reinterpret_cast<const char*>(&line) + k * sizeof raw, sizeof raw);
        acc[k] += Format<T>::widen(raw);
    }
}

void post(void* mailbox, const void* in, std::int64_t bytes) {
    auto* to = static_cast<char*>(mailbox);
    auto* from = static_cast<const char*>(in);
    std::int64_t i = 0;
    for (; i + kLine <= bytes; i += kLine) {
        const Line w = read<Line>(from + i);
        put(to + i, w & (Line)(w != kSentinel));
    }
    if (i < bytes) {
        Line w = {};
        std::memcpy(&w, from + i, bytes - i);
        put(to + i, w & (Line)(w != kSentinel));
    }
}

void clear(void* mailbox, std::int64_t bytes) {
    const Line empty = Line{} + kSentinel;
    for (std::int64_t i = 0; i < bytes; i += kLine) put(static_cast<char*>(mailbox) + i, empty);
}

constexpr std::int64_t kPolls = 64;  // at once one after the other: the line is usually on its way

// A peer's line at `at`, once all its words are there.
inline bool take_line(const Mailboxes& from, int peer, std::int64_t at, Line& w) {
    const char* p = static_cast<const char*>(from.buffers[peer]) + at;
    w = take(p);
    for (std::int64_t turn = 0; __builtin_expect(missing(w), 0); w = take(p), ++turn)
        if (turn > kPolls && !from.late(from.context, peer, turn - kPolls)) return false;
    return true;
}

// One line of every rank, summed in rank order: kLine / sizeof(T) lanes in fp32. mine: this rank's.
template <class T, bool kTwo>
inline bool collect_line(const Mailboxes& from, Line mine, std::int64_t at, Floats* acc) {
    for (int k = 0; k < kVectors<T>; ++k) acc[k] = Floats{};
    Line w;
    if constexpr (kTwo) {  // two summands have no order
        if (!take_line(from, 1 - from.rank, at, w)) return false;
        add_line<T>(acc, mine);
        add_line<T>(acc, w);
        return true;
    }
    for (int peer = 0; peer < from.size; ++peer) {
        w = mine;
        if (peer != from.rank && !take_line(from, peer, at, w)) return false;
        add_line<T>(acc, w);
    }
    return true;
}

template <class T, bool kTwo, class Out>
bool collect_all(const Mailboxes& from, Out* out, std::int64_t n) {
    constexpr int kElements = kLine / sizeof(T);
    const Mailboxes here = from;  // what the loop needs of it stays in registers
    auto* own = static_cast<const T*>(here.buffers[here.rank]);
    Floats acc[kVectors<T>];
    std::int64_t i = 0;
    for (; i + kElements <= n; i += kElements) {
        if (!collect_line<T, kTwo>(here, read<Line>(own + i), i * sizeof(T), acc)) return false;
        for (int k = 0; k < kVectors<T>; ++k) store_vector(out + i + k * kWidth, acc[k]);
    }
    if (i < n) {
        Line last_own = {};
        std::memcpy(&last_own, own + i, (n - i) * sizeof(T));
        if (!collect_line<T, kTwo>(here, last_own, i * sizeof(T), acc)) return false;
        Out last[kElements];
        for (int k = 0; k < kVectors<T>; ++k) store_vector(last + k * kWidth, acc[k]);
        std::memcpy(out + i, last, (n - i) * sizeof(Out));
    }
    return true;
}

bool collect(const Mailboxes& from, void* out, std::int64_t n, int dtype, const Epilogue* e, float* scratch) {
    bool done = false;
    with_type(dtype, [&]<class T>(T*) {
        auto sum_to = [&](auto* to) {
            return from.size == 2 ? collect_all<T, true>(from, to, n) : collect_all<T, false>(from, to, n);
        };
        if (e) {
            if ((done = sum_to(scratch))) round_all<T>(out, scratch, n, e, 0);
        } else {
            done = sum_to(static_cast<T*>(out));
        }
    });
    return done;
}

// ------------------------------------------------------------------------------------------------------- low precision
// The scale is the power of two that brings the largest element to (224, 448]: a code's relative precision does not depend
// on it, and products with it are exact. A block with an infinity or a NaN becomes NaN.

inline float scale_for(float top) {
    const std::uint32_t bits = bits_of(top), exponent = bits >> 23, above = (bits & 0x7fffff) > 0x600000;  // 1.75
    if (exponent == 255) return from_bits(0x7fc00000);
    return from_bits((exponent > 8 ? exponent - 8 + above : 1u) << 23);
}

void pack(void* out, const void* in, std::int64_t n, int dtype) {
    auto* to = static_cast<std::uint8_t*>(out);
    with_type(dtype, [&]<class T>(T*) {
        auto* from = static_cast<const T*>(in);
        for (std::int64_t at = 0; at < n; at += kScaled, to += kScaled + 4) {
            const std::int64_t count = n - at < kScaled ? n - at : kScaled;
            float v[kScaled] = {}, top = 0;
            for (std::int64_t i = 0; i < count; ++i) v[i] = load(from[at + i]);
            for (std::int64_t i = 0; i < kScaled; ++i) {
                const float size = std::fabs(v[i]);
                top = size > top || size != size ? size : top;
            }
            const float scale = scale_for(top), inverse = 1.0f / scale;
            for (std::int64_t i = 0; i < kScaled; ++i)
                to[i] = static_cast<std::uint8_t>(to_e4m3(v[i] * inverse));
            std::memcpy(to + kScaled, &scale, sizeof scale);
        }
    });
}

void sum_packed(float* out, const void* const* in, int count, std::int64_t n) {
    for (std::int64_t at = 0, block = 0; at < n; at += kScaled, ++block) {
        float acc[kScaled] = {};
        for (int s = 0; s < count; ++s) {
            auto* from = static_cast<const std::uint8_t*>(in[s]) + block * (kScaled + 4);
            float scale;
            std::memcpy(&scale, from + kScaled, sizeof scale);
            for (std::int64_t i = 0; i < kScaled; ++i) acc[i] += from_e4m3(std::uint32_t{from[i]}) * scale;
        }
        std::memcpy(out + at, acc, sizeof(float) * (n - at < kScaled ? n - at : kScaled));
    }
}

}  // namespace

extern const DataKernels data_table;
const DataKernels data_table = {&copy, &add_two, &sum, &sum_everywhere, &finish, &post, &collect, &clear, &pack, &sum_packed, &round, &blend};

}  // namespace SPMD_ISA
}  // namespace spmd

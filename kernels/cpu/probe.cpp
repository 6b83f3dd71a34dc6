// Purpose: how fast can two processes add their vectors on this machine? The limit that bench/allreduce.py measures the
//          package against, and what the bench needs around a measurement: inputs, a barrier that spins, checks.
// Method:  each all-reduce is a bare loop over 64-byte lines with no arguments to check and no Python above it. `run`
//          rewrites the input before each iteration, aligns the ranks, times the call alone and counts wrong elements.
// Requirement: two ranks, each on a core of its own; shared memory of shared_bytes(n); n a multiple of 64 bytes; fp32
//          or bf16 without NaN. On x86 built for AVX-512: part of the bench, not of the package.
// Use:     bench/allreduce.py; vectors and shared memory arrive as addresses.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <sched.h>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace {

using Address = std::uintptr_t;
using Count = std::int64_t;

// ---- one line of 64 bytes: 16 fp32 or 32 bf16, handled as 32-bit words ----

using Words = std::uint32_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));
constexpr Count kLine = sizeof(Words);
constexpr std::uint32_t kEmpty = 0x80000000;  // Lamport: -0.0, or the bf16 pair (+0, -0), is a word not yet written

enum DType : int { kFloat32 = 0, kBFloat16 = 1 };  // the numbers of rows.h

template <DType dtype>
inline Words add(Words a, Words b) {
    if constexpr (dtype == kFloat32) return std::bit_cast<Words>(std::bit_cast<Floats>(a) + std::bit_cast<Floats>(b));
    const auto sum = [](Words p, Words q) {  // in fp32, rounded to nearest even; the bf16 is the upper half
        const Words bits = std::bit_cast<Words>(std::bit_cast<Floats>(p) + std::bit_cast<Floats>(q));
        return bits + 0x7fff + ((bits >> 16) & 1);
    };
    return (sum(a & 0xffff0000, b & 0xffff0000) & 0xffff0000) | (sum(a << 16, b << 16) >> 16);
}

inline bool has_empty(Words v) {
#if defined(__AVX512F__)
    return _mm512_cmpeq_epi32_mask(std::bit_cast<__m512i>(v), _mm512_set1_epi32(static_cast<int>(kEmpty)));
#else
    bool found = false;
    for (int i = 0; i < 16; ++i) found |= v[i] == kEmpty;
    return found;
#endif
}

inline Words without_empty(Words v) { return v & ~std::bit_cast<Words>(v == kEmpty); }

inline void store_past_cache(Words* to, Words v) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), std::bit_cast<__m512i>(v));
#elif defined(__x86_64__)
    __m128i part[4];
    std::memcpy(part, &v, sizeof v);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part[i]);
#else
    *to = v;
#endif
}

inline void fence_past_cache() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// ---- waiting ----

template <class Ready>
inline void spin(Ready ready) {  // no pause instruction: 0.08 us of a Lamport call of 1 KB
    for (int turn = 0; !ready(); ++turn)
        if (turn >= 2000) sched_yield(), turn = 1000;  // more ranks than cores: the one waited for may need this core
}

constexpr int kMaxRanks = 64;

struct alignas(128) Flag {  // a line, and the one the prefetcher takes along
    std::atomic<std::uint64_t> value;
    void await(std::uint64_t at_least) const {
        spin([&] { return value.load(std::memory_order_acquire) >= at_least; });
    }
    void set(std::uint64_t v) { value.store(v, std::memory_order_release); }
};

struct Shared {  // followed by the slots
    Flag arrived[kMaxRanks], flags[2];
};

void barrier(Address shared, int rank, int ranks) {
    Flag* arrived = reinterpret_cast<Shared*>(shared)->arrived;
    const std::uint64_t turn = arrived[rank].value.load(std::memory_order_relaxed) + 1;
    arrived[rank].set(turn);
    for (int r = 0; r < ranks; ++r) arrived[r].await(turn);
}

Count shared_bytes(Count n) { return static_cast<Count>(sizeof(Shared)) + 6 * n; }

// ---- values: integers -16 ... 15, by element, rank and iteration; sums of 16 ranks are exact in bf16 ----

constexpr int kValues = 32;

inline std::uint32_t kind(Count i) { return static_cast<std::uint32_t>(i) * 2654435761u >> 27; }  // a hash, < kValues

// The fp32 bits of what these ranks' inputs add up to, by the kind of an element; `zero` stands for 0.
struct Sums {
    std::uint32_t bits[kValues];
    Sums(int first, int ranks, int iteration, std::uint32_t zero) {
        for (int k = 0; k < kValues; ++k) {
            int sum = 0;
            for (int r = first; r < first + ranks; ++r) sum += (k + r * 5 + iteration * 7) % kValues - kValues / 2;
            bits[k] = sum ? std::bit_cast<std::uint32_t>(static_cast<float>(sum)) : zero;
        }
    }
};

void fill(Address x, Count n, int dtype, int first, int ranks, int iteration) {
    const Sums sums(first, ranks, iteration, kEmpty);  // what a Lamport kernel must not take for an empty word
    auto* words = reinterpret_cast<std::uint32_t*>(x);
    auto* halves = reinterpret_cast<std::uint16_t*>(x);
    if (dtype == kFloat32)
        for (Count i = 0; i < n / 4; ++i) words[i] = sums.bits[kind(i)];
    else
        for (Count i = 0; i < n / 2; ++i) halves[i] = static_cast<std::uint16_t>(sums.bits[kind(i)] >> 16);
}

Count wrong(Address y, Count n, int dtype, int ranks, int iteration) {
    const Sums sums(0, ranks, iteration, 0);
    const auto differs = [&](std::uint32_t bits, Count i) { return (bits == kEmpty ? 0 : bits) != sums.bits[kind(i)]; };
    const auto* words = reinterpret_cast<const std::uint32_t*>(y);
    const auto* halves = reinterpret_cast<const std::uint16_t*>(y);
    std::int32_t count = 0;
    if (dtype == kFloat32)
        for (Count i = 0; i < n / 4; ++i) count += differs(words[i], i);
    else
        for (Count i = 0; i < n / 2; ++i) count += differs(std::uint32_t{halves[i]} << 16, i);
    return count;
}

// ---- the all-reduces ----

struct Problem {
    Shared* shared;
    int rank;
    Words *x, *y;
    Count lines, chunk;  // of the vector, of a chunk
    Words* slots(int of) const { return reinterpret_cast<Words*>(shared + 1) + of * 3 * lines; }
    Words* mine() const { return slots(rank); }
    Words* theirs() const { return slots(1 - rank); }
    Flag& my_flag() const { return shared->flags[rank]; }
    const Flag& their_flag() const { return shared->flags[1 - rank]; }
};

// Data words are their own flags. Three buffers in turn; the one before is emptied once the peer's words of this
// call have come, since the peer has then left it, and is filled again two calls later.
template <DType dtype>
void lamport(const Problem& p, Count call) {
    Words* out = p.mine() + call % 3 * p.lines;
    const Words* in = p.theirs() + call % 3 * p.lines;
    Words* before = p.mine() + (call + 2) % 3 * p.lines;
    for (Count i = 0; i < p.lines; ++i) out[i] = without_empty(p.x[i]);
    for (Count i = 0; i < p.lines; ++i) {
        Words line = in[i];
        if (has_empty(line)) [[unlikely]]
            spin([&] {
                asm volatile("" ::: "memory");
                line = in[i];
                return !has_empty(line);
            });
        p.y[i] = add<dtype>(p.x[i], line);
    }
    for (Count i = 0; i < p.lines; ++i) before[i] = Words{} + kEmpty;
}

// Copy in chunk after chunk, each with a flag, and add the peer's chunk of the step before, whose lines have had time
// to come. Four slots need no flag for "read": before chunk c, I waited for the peer's chunk c - 2, which it wrote
// after it had read my chunk c - 4. One chunk, added in the same step, is the one-shot with a flag: two slots.
template <DType dtype, bool past_cache>
void chunked(const Problem& p, Count call) {
    const Count chunks = (p.lines + p.chunk - 1) / p.chunk, lag = chunks > 1, slots = lag ? 4 : 2;
    for (Count c = 0; c < chunks + lag; ++c) {
        if (c < chunks) {
            const Count begin = c * p.chunk, count = std::min(p.chunk, p.lines - begin), number = call * chunks + c;
            Words* out = p.mine() + number % slots * p.chunk;
            for (Count i = 0; i < count; ++i) out[i] = p.x[begin + i];
            p.my_flag().set(number + 1);
        }
        if (c >= lag) {
            const Count begin = (c - lag) * p.chunk, count = std::min(p.chunk, p.lines - begin);
            const Count number = call * chunks + c - lag;
            const Words* in = p.theirs() + number % slots * p.chunk;
            p.their_flag().await(number + 1);
            for (Count i = 0; i < count; ++i) {
                const Words sum = add<dtype>(p.x[begin + i], in[i]);
                if constexpr (past_cache)
                    store_past_cache(&p.y[begin + i], sum);
                else
                    p.y[begin + i] = sum;
            }
        }
    }
    if constexpr (past_cache) fence_past_cache();
}

// Both vectors lie in shared memory: each rank adds one half and stores the sum into both.
template <DType dtype>
void symmetric(const Problem& p, Count call) {
    const Count half = p.lines / 2, begin = p.rank ? half : 0, end = p.rank ? p.lines : half;
    Words *mine = p.mine(), *theirs = p.theirs();
    p.my_flag().set(2 * call + 1);
    p.their_flag().await(2 * call + 1);
    for (Count i = begin; i < end; ++i) mine[i] = theirs[i] = add<dtype>(mine[i], theirs[i]);
    p.my_flag().set(2 * call + 2);
    p.their_flag().await(2 * call + 2);
}

// ---- a measurement ----

std::int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

template <DType dtype>
auto choose(const std::string& variant) -> void (*)(const Problem&, Count) {
    if (variant == "lamport") return lamport<dtype>;
    if (variant == "chunked") return chunked<dtype, false>;
    if (variant == "chunked-nt") return chunked<dtype, true>;
    if (variant == "symmetric") return symmetric<dtype>;
    throw std::invalid_argument("no such variant: " + variant);
}

// Times `iterations` calls into `times` [iterations] (ns of this rank) and returns the wrong elements of all of them.
// stores: until every store of the call is done, which a caller that goes on to store something has to wait for.
Count run(const std::string& variant, bool stores, Address shared, int rank, Address x, Address y, Count n, int dtype, Count chunk,
          int iterations, Address times) {
    const auto all_reduce = dtype == kFloat32 ? choose<kFloat32>(variant) : choose<kBFloat16>(variant);
    Problem p{reinterpret_cast<Shared*>(shared), rank, reinterpret_cast<Words*>(x), reinterpret_cast<Words*>(y),
              n / kLine, (chunk ? chunk : n) / kLine};
    if (variant == "symmetric") x = y = reinterpret_cast<Address>(p.mine());
    barrier(shared, rank, 2);  // nobody is in the run before
    p.my_flag().set(0);
    if (variant == "lamport") std::fill_n(p.mine(), 3 * p.lines, Words{} + kEmpty);
    Count bad = 0;
    for (int i = 0, warmup = 3 + iterations / 10; i < warmup + iterations; ++i) {
        fill(x, n, dtype, rank, 1, i);
        barrier(shared, rank, 2);
        const std::int64_t begin = now();
        all_reduce(p, i);
        if (stores) std::atomic_thread_fence(std::memory_order_seq_cst);
        const std::int64_t end = now();
        if (i >= warmup) reinterpret_cast<std::int64_t*>(times)[i - warmup] = end - begin;
        bad += wrong(y, n, dtype, 2, i);
    }
    return bad;
}

inline float fp32(std::uint16_t bf16) { return std::bit_cast<float>(std::uint32_t{bf16} << 16); }

// MPI_User_function: bf16 has no MPI type and travels as uint16.
void mpi_bf16_sum(void* in, void* inout, int* count, void*) {
    const auto* __restrict a = static_cast<const std::uint16_t*>(in);
    auto* __restrict b = static_cast<std::uint16_t*>(inout);
    for (int i = 0, n = *count; i < n; ++i) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(fp32(a[i]) + fp32(b[i]));
        b[i] = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

}  // namespace

NB_MODULE(_probe, m) {
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("x86-64-v4")) throw nb::import_error("spmd._probe was built for AVX-512");
#endif
    m.doc() = "The limit of a two-rank all-reduce on this machine, and what its measurement needs.";
    m.attr("mpi_bf16_sum") = reinterpret_cast<Address>(&mpi_bf16_sum);
    m.def("shared_bytes", &shared_bytes, "Shared memory, zeroed, that n bytes need; 0: the barrier alone.");
    m.def("barrier", &barrier, "Spin until all ranks have come.");
    m.def("fill", &fill, "Write the sum of the inputs of ranks first ... first + ranks of an iteration, n bytes.");
    m.def("wrong", &wrong, "The elements that are not the sum over all ranks.");
    m.def("run", &run, nb::call_guard<nb::gil_scoped_release>(), "See probe.cpp.");
}

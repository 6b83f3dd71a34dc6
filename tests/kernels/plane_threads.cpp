// Ranks as threads of one process: every algorithm of the plane, mixed at random, results checked. Built with
// -fsanitize=thread it shows data races, which processes would hide; test_threads.py builds and runs it.
// Arguments: ranks, calls, seed.

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cpu/plane.h"

namespace spmd {
namespace SPMD_ISA {
extern const DataKernels data_table;
}
const DataKernels& data_kernels() { return SPMD_ISA::data_table; }
}  // namespace spmd

using namespace spmd;

namespace {

constexpr std::int64_t kMailbox = 2048, kSlot = 4096, kShared = 1 << 16;

// Integers that differ by rank, place and call: sums are exact.
float value(int rank, std::int64_t i, int call) { return static_cast<float>((i * 7 + call * 3) % 31 + rank * 5 - 11); }

struct Run {
    int ranks, calls;
    unsigned seed;
    std::vector<std::vector<char>> regions, shared, lent;
    int wrong = 0;

    std::vector<std::uintptr_t> at(std::vector<std::vector<char>>& memory) {
        std::vector<std::uintptr_t> addresses;
        for (auto& bytes : memory)
            addresses.push_back((reinterpret_cast<std::uintptr_t>(bytes.data()) + 127) / 128 * 128);
        return addresses;
    }
};

void rank_main(Run& run, int rank, std::barrier<>& start) {
    Plane plane(rank, run.at(run.regions), std::vector<int>(run.ranks, -1), kMailbox, kSlot, true);
    plane.timeout_s = 60;
    plane.chunk_bytes = 1024;
    plane.stream_bytes = 1 << 14;
    plane.add_region(0, run.at(run.shared), kShared, false);
    plane.add_region(1, run.at(run.lent), kShared, true);
    const auto shared = run.at(run.shared)[rank], lent = run.at(run.lent)[rank];
    std::mt19937 same(run.seed), own(run.seed * 977 + rank);  // what all do, and how long each dawdles
    std::vector<float> in, out;
    start.arrive_and_wait();
    int wrong = 0;
    for (int call = 0; call < run.calls; ++call) {
        const int kind = same() % 8;
        const std::int64_t n = kind == 0 ? 1 + same() % (kMailbox / 4) : same() % 2 ? same() % 64 : same() % (kShared / 4);
        const std::int64_t part = n / run.ranks;
        in.assign(n, 0), out.assign(n + 1, -1);
        for (std::int64_t i = 0; i < n; ++i) in[i] = value(rank, i, call);
        for (unsigned turn = own() % 3 ? 0 : own() % 2000; turn; --turn) cpu_pause();
        auto total = [&](std::int64_t i) {
            float sum = 0;
            for (int r = 0; r < run.ranks; ++r) sum += value(r, i, call);
            return sum;
        };
        float* result = out.data();
        std::int64_t count = n, first = 0;
        int status = kDone;
        if (kind <= 2) {
            const Rows rows{in.data(), out.data(), 1, kFloat32, nullptr, nullptr};
            status = plane.all_reduce(static_cast<Algorithm>(kind), kCopied, rows, n);
        } else if (kind <= 4) {  // in symmetric memory, in place and not
            auto* x = reinterpret_cast<float*>(shared);
            std::memcpy(x, in.data(), n * sizeof(float));
            if (kind == 3) result = x;
            const Rows rows{x, result, 1, kFloat32, nullptr, nullptr};
            status = plane.all_reduce(kOneShot, same() % 2 ? kOneShot : kTwoShot, rows, n);
            if (kind == 4) std::memset(x, 255, n * sizeof(float));  // the input is mine again
        } else if (kind == 7) {  // rows that are summed while the next ones are made
            auto* x = reinterpret_cast<float*>(lent);
            const std::int64_t rows_of = 16, all = n / rows_of, some = all / 4 + 1;
            count = all * rows_of;
            const Rows rows{x, out.data(), rows_of, kFloat32, nullptr, nullptr};
            status = plane.ready(1);  // nobody reads the last call's rows any more
            if (!status) status = plane.start(count * 4, kFloat32, reinterpret_cast<std::uintptr_t>(x));
            for (std::int64_t at = 0, k = 0; at < all + some && !status; at += some, ++k) {
                const std::int64_t end = std::min(at + some, all);
                for (std::int64_t i = at * rows_of; i < end * rows_of; ++i) x[i] = in[i];
                if (at < all) plane.publish();
                if (k) status = plane.complete(k - 1, rows, at - some, std::min(some, all - (at - some)));
            }
        } else {  // reduce-scatter, all-gather
            RowMap map{{}, n, n};
            if (kind == 5) {
                map.pieces.push_back({0, part * rank, part, {}});
                for (int r = 0; r < run.ranks; ++r) map.pieces[0].sources.push_back(r);
                first = part * rank, count = part;
            } else {
                map.rows = map.max_rows = part;
                for (int r = 0; r < run.ranks; ++r) map.pieces.push_back({part * r, 0, part, {r}});
                count = part * run.ranks;
            }
            const Rows rows{in.data(), out.data(), 1, kFloat32, nullptr, nullptr};
            status = plane.exchange(kind == 5 ? kReduceScatter : kAllGather, map, rows, kind);
        }
        std::memset(in.data(), 255, n * sizeof(float));  // and this one
        if (status) {
            std::printf("rank %d call %d kind %d status %d about %d\n", rank, call, kind, status, plane.odd);
            std::exit(3);
        }
        for (std::int64_t i = 0; i < count; ++i)
            wrong += result[i] != (kind == 6 ? value(static_cast<int>(i / part), i % part, call) : total(first + i));
    }
    start.arrive_and_wait();
    __atomic_fetch_add(&run.wrong, wrong, __ATOMIC_RELAXED);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    Run run{std::atoi(argv[1]), std::atoi(argv[2]), static_cast<unsigned>(std::atoi(argv[3])), {}, {}, {}};
    run.regions.assign(run.ranks, std::vector<char>(Plane::region_bytes(kMailbox, kSlot) + 128));
    run.shared.assign(run.ranks, std::vector<char>(kShared + 128));
    run.lent = run.shared;
    std::barrier<> start(run.ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < run.ranks; ++rank) threads.emplace_back([&, rank] { rank_main(run, rank, start); });
    for (auto& thread : threads) thread.join();
    std::printf("%d ranks, %d calls, wrong %d\n", run.ranks, run.calls, run.wrong);
    return run.wrong != 0;
}

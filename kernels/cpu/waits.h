// A clock that all processes of a host share, and how to wait for one of them.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace spmd {

inline std::int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One turn of a wait. The first turns keep the core (the answer is usually a cache line away), the next ones give it
// up to whoever can run, later ones sleep: with more ranks than cores a spinning rank delays the one it waits for.
inline void relax(std::int64_t turn) {
    constexpr std::int64_t kPauseTurns = 32, kYieldTurns = 4096;
    constexpr long kSleepNs = 50'000;
    if (turn < kPauseTurns) {
        for (int i = 0; i < 16; ++i) cpu_pause();
    } else if (turn < kYieldTurns) {
        sched_yield();
    } else {
        timespec nap{0, kSleepNs};
        nanosleep(&nap, nullptr);
    }
}

}  // namespace spmd

// spmd._cpu: what a waiting rank needs from the machine. Pure host code, no Python objects inside a wait.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <ctime>
#include <sched.h>

namespace nb = nanobind;

namespace {

std::int64_t monotonic_ns() {
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
void relax(std::int64_t turn) {
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

}  // namespace

NB_MODULE(_cpu, m) {
    m.doc() = "Host primitives of the data plane: clock and waits.";
    m.def("monotonic_ns", &monotonic_ns, "Nanoseconds of CLOCK_MONOTONIC: comparable between the processes of a host.");
    m.def("relax", &relax, nb::arg("turn"), nb::call_guard<nb::gil_scoped_release>(),
          "Wait a little: turn counts the polls so far; pause first, then yield the core, then sleep 50 us.");
}

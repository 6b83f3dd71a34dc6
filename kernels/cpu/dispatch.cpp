// Which of the compiled instruction sets this machine has.

#include "rows.h"

namespace spmd {

namespace baseline {
extern const RowKernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const RowKernels kernels;
}
namespace avx512 {
extern const RowKernels kernels;
}
#endif

namespace {

struct Choice {
    const RowKernels* kernels;
    const char* isa;
};

Choice choose() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("x86-64-v4")) return {&avx512::kernels, "avx512"};
    if (__builtin_cpu_supports("x86-64-v3")) return {&avx2::kernels, "avx2"};
#endif
    return {&baseline::kernels, "baseline"};
}

const Choice choice = choose();

}  // namespace

const RowKernels& row_kernels() { return *choice.kernels; }
const char* row_kernels_isa() { return choice.isa; }

}  // namespace spmd

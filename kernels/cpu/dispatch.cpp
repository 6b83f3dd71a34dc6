// Which of the compiled instruction sets this process uses.

#include <cstdlib>
#include <cstring>

#include "cpu/data.h"
#include "cpu/isa.h"
#include "cpu/rows.h"

namespace spmd {

namespace baseline {
extern const RowKernels kernels;
extern const DataKernels data_table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const RowKernels kernels;
extern const DataKernels data_table;
}
namespace avx512 {
extern const RowKernels kernels;
extern const DataKernels data_table;
}
namespace avx512bf16 {
extern const RowKernels kernels;
extern const DataKernels data_table;
}
#endif

namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512bf16"};
#if defined(__x86_64__)
constexpr const RowKernels* kRowKernels[] = {&baseline::kernels, &avx2::kernels, &avx512::kernels,
                                             &avx512bf16::kernels};
constexpr const DataKernels* kDataKernels[] = {&baseline::data_table, &avx2::data_table, &avx512::data_table,
                                               &avx512bf16::data_table};
#else
constexpr const RowKernels* kRowKernels[] = {&baseline::kernels};
constexpr const DataKernels* kDataKernels[] = {&baseline::data_table};
#endif

Isa best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("x86-64-v4")) return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512;
    if (__builtin_cpu_supports("x86-64-v3")) return kAvx2;
#endif
    return kBaseline;
}

Isa choose() {
    const char* wanted = std::getenv("SPMD_ISA");
    for (int isa = best(); wanted && isa >= 0; --isa)
        if (!std::strcmp(wanted, kNames[isa])) return static_cast<Isa>(isa);
    return best();
}

const Isa chosen = choose();

}  // namespace

Isa isa() { return chosen; }
const char* isa_name() { return kNames[chosen]; }
const RowKernels& row_kernels() { return *kRowKernels[chosen]; }
const DataKernels& data_kernels() { return *kDataKernels[chosen]; }

}  // namespace spmd

// Which of the instruction sets that the kernels are compiled for this process uses: the best one this machine has, or
// what SPMD_ISA=baseline|avx2|avx512|avx512bf16 asks for, where the machine has that. Chosen once, when the extension is loaded.
#pragma once

namespace spmd {

enum Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

Isa isa();
const char* isa_name();

}  // namespace spmd

// Purpose: fp32 to 8 bits (e4m3) and to 4 bits (e2m1) with a scale for every 16 elements (NVFP4), and back.
// Method:  to nearest, ties to even, saturating; arithmetic without a branch, as in types.h.
// Source:  OCP OFP8 (e4m3: 448 is the largest, no infinity) and OCP Microscaling Formats (e2m1: 0 0.5 1 1.5 2 3 4 6).
#pragma once

#include "common/types.h"

#ifdef SPMD_ISA
namespace spmd {
namespace SPMD_ISA {

constexpr int kNvfp4Block = 16;  // elements that share a scale

// float or Floats to one code in each word.
template <class F>
SPMD_DEVICE inline auto to_e4m3(F v) {
    const F size = magnitude_of(v);
    const auto code = Small<3, 7>::narrow(size < 448.0f ? size : 448.0f) | ((bits_of(v) >> 24) & 0x80u);
    return v == v ? code : 0x7fu;
}

template <class U>
SPMD_DEVICE inline auto from_e4m3(U code) {
    const U size = code & 0x7fu, bits = bits_of(Small<3, 7>::widen(size));
    return from_bits((size == 0x7fu ? 0x7fc00000u : bits) | (code & 0x80u) << 24);
}

// The same in four bits. NaN becomes 6, as on CUDA.
template <class F>
SPMD_DEVICE inline auto to_e2m1(F v) {
    const F size = magnitude_of(v);
    const auto code = Small<1, 1>::narrow(size < 6.0f ? size : 6.0f) | ((bits_of(v) >> 28) & 8u);
    return v == v ? code : 7u;
}

// Where the scale of (row, block) lies: tiles of 128 rows x 4 blocks, 32 x 4 x 4 of (row % 32, row / 32, block) in one.
SPMD_DEVICE inline std::int64_t swizzled_offset(std::int64_t row, std::int64_t block, std::int64_t blocks) {
    const std::int64_t tile = row / 128 * ((blocks + 3) / 4) + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

// A row v[0 ... n), n a multiple of 16, to codes[0 ... n / 2), the first of two in the low nibble, and to the scales of
// its blocks, e4m3(scale * max|v| / 6). NaN in a block makes its scale NaN.
inline void quantise_nvfp4(const float* v, std::int64_t n, std::int64_t row, float scale, std::uint8_t* codes,
                           std::uint8_t* scales) {
    typedef std::uint16_t Pairs __attribute__((vector_size(kWidth)));
    typedef std::uint8_t Packed __attribute__((vector_size(kWidth / 2)));
    const std::int64_t blocks = n / kNvfp4Block;
    for (std::int64_t first = 0; first < blocks; first += kWidth) {  // the scales of some blocks are one vector
        const int count = static_cast<int>(blocks - first < kWidth ? blocks - first : kWidth);
        std::uint32_t tops[kWidth] = {};  // magnitudes compare as integers, NaN above all others
        for (int b = 0; b < count; ++b)
            for (int k = 0; k < kNvfp4Block; ++k) {
                const std::uint32_t magnitude = bits_of(v[(first + b) * kNvfp4Block + k]) & 0x7fffffff;
                tops[b] = magnitude > tops[b] ? magnitude : tops[b];
            }
        const Words code = to_e4m3(scale * from_bits(__builtin_bit_cast(Words, tops)) / 6.0f);
        const Floats block_scale = from_e4m3(code), multiplier = block_scale == 0.0f ? 0.0f : scale / block_scale;
        for (int b = 0; b < count; ++b) {
            scales[swizzled_offset(row, first + b, blocks)] = static_cast<std::uint8_t>(code[b]);
            for (int k = 0; k < kNvfp4Block; k += kWidth) {
                const std::int64_t i = (first + b) * kNvfp4Block + k;
                const Bytes nibbles = bytes_of(to_e2m1(load(v + i, kWidth) * multiplier[b]));
                const Pairs pairs = __builtin_bit_cast(Pairs, nibbles);  // little endian: the first is the low byte
                const Packed packed = __builtin_convertvector(pairs | pairs >> 4, Packed);
                __builtin_memcpy(codes + i / 2, &packed, sizeof packed);
            }
        }
    }
}

}  // namespace SPMD_ISA
}  // namespace spmd
#endif

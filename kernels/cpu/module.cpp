// spmd._cpu: what a rank needs from the machine it runs on: a clock, a wait, and the row kernels. Tensors arrive as
// addresses, the cheapest argument from Python; nn/rows.py is the only caller and checks them first.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "cpu/isa.h"
#include "cpu/rows.h"
#include "cpu/waits.h"

namespace nb = nanobind;

namespace {

using Address = std::uintptr_t;

void rms_norm(Address x, Address residual, Address weight, Address y, Address sum, std::int64_t rows, std::int64_t n,
              float eps, int dtype) {
    auto at = [](Address a) { return reinterpret_cast<void*>(a); };
    spmd::row_kernels().rms_norm(at(x), at(residual), at(weight), at(y), at(sum), rows, n, eps, dtype);
}

void swiglu(Address gate_up, Address y, std::int64_t rows, std::int64_t n, int dtype) {
    spmd::row_kernels().swiglu(reinterpret_cast<const void*>(gate_up), reinterpret_cast<void*>(y), rows, n, dtype);
}

void rotate_store(Address qkv, Address rotation, Address cache, std::int64_t rows, std::int64_t heads,
                  std::int64_t kv_heads, std::int64_t d, int dtype) {
    spmd::row_kernels().rotate_store(reinterpret_cast<void*>(qkv), reinterpret_cast<const float*>(rotation),
                                     reinterpret_cast<void*>(cache), rows, heads, kv_heads, d, dtype);
}

void attend(Address queries, Address cache, Address out, std::int64_t heads, std::int64_t kv_heads, std::int64_t d,
            std::int64_t count, std::int64_t lead, std::int64_t share, Address stats, int dtype) {
    thread_local std::vector<float> scratch;
    if (scratch.size() < static_cast<std::size_t>(count + 2 * d)) scratch.resize(2 * (count + 2 * d));
    spmd::row_kernels().attend(reinterpret_cast<const void*>(queries), reinterpret_cast<const void*>(cache),
                               reinterpret_cast<void*>(out), heads, kv_heads, d, count, lead, share, scratch.data(),
                               reinterpret_cast<float*>(stats), dtype);
}

void epilogue(Address sum, std::int64_t rows, std::int64_t n, int op, int dtype, Address bias, Address residual,
              Address weight, Address pre_weight, Address scale, float eps, float weight_offset, Address out,
              Address residual_out, Address quant_out, Address scale_out) {
    auto at = [](Address a) { return reinterpret_cast<void*>(a); };
    auto bytes = [](Address a) { return reinterpret_cast<std::uint8_t*>(a); };
    const spmd::Epilogue e{op, dtype, n, at(bias), at(residual), at(weight), at(pre_weight),
                           reinterpret_cast<const float*>(scale), eps, weight_offset, at(out), at(residual_out),
                           bytes(quant_out), bytes(scale_out)};
    spmd::row_kernels().epilogue(reinterpret_cast<float*>(sum), rows, e);
}

}  // namespace

namespace spmd {
void bind_plane(nb::module_& m);
}

NB_MODULE(_cpu, m) {
    m.doc() = "Host primitives: clock, waits, row kernels.";
    nb::set_leak_warnings(false);  // groups live until the interpreter ends
    spmd::bind_plane(m);
    m.attr("isa") = spmd::isa_name();
    m.def("rms_norm", &rms_norm, "See rows.h; residual 0: none.");
    m.def("swiglu", &swiglu, "See rows.h.");
    m.def("rotate_store", &rotate_store, "See rows.h.");
    m.def("attend", &attend, "See rows.h.");
    m.def("epilogue", &epilogue, "See rows.h and common/epilogue.h; address 0: none.");
    m.def("monotonic_ns", &spmd::monotonic_ns, "Nanoseconds of CLOCK_MONOTONIC: comparable between the processes of a host.");
    m.def("relax", &spmd::relax, nb::arg("turn"), nb::call_guard<nb::gil_scoped_release>(),
          "Wait a little: turn counts the polls so far; pause first, then yield the core, then sleep 50 us.");
}

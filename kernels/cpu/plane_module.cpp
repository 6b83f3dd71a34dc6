// spmd._cpu.Plane for Python. Tensors arrive as addresses; spmd/collectives/cpu.py checks them first.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sched.h>

#include "cpu/plane.h"
#include "cpu/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace spmd {

namespace {

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// A long wait lets other Python threads run and signal handlers raise.
bool idle() {
    {
        nb::gil_scoped_release released;
        sched_yield();
    }
    return PyErr_CheckSignals() == 0;
}

int checked(int status) {
    if (status == kInterrupted && PyErr_Occurred()) throw nb::python_error();
    return status;
}

// In one number, an argument less for the shortest calls: the algorithm for ordinary memory, the one for symmetric
// memory, and the dtype.
int run(Plane& plane, int how, const Rows& rows, std::int64_t count) {
    return checked(plane.all_reduce(static_cast<Algorithm>(how & 15), static_cast<Algorithm>(how >> 4 & 15), rows, count));
}

int all_reduce(Plane& plane, Address in, Address out, std::int64_t count, int how) {
    return run(plane, how, Rows{at(in), at(out), 1, how >> 8, nullptr, nullptr}, count);
}

// An epilogue's fixed part with the tensors of one call.
Epilogue placed(const Epilogue& fixed, Address residual, Address out, Address residual_out, Address quant_out,
                Address scale_out) {
    Epilogue e = fixed;
    e.residual = at(residual), e.out = at(out), e.residual_out = at(residual_out);
    e.quant_out = at<std::uint8_t>(quant_out), e.scale_out = at<std::uint8_t>(scale_out);
    return e;
}

// The epilogue alone, of values of its own type, which stay as they are.
void finish(Address values, std::int64_t rows, const Epilogue& fixed, Address residual, Address out,
                  Address residual_out, Address quant_out, Address scale_out) {
    thread_local std::vector<float> scratch;
    const Epilogue e = placed(fixed, residual, out, residual_out, quant_out, scale_out);
    if (static_cast<std::int64_t>(scratch.size()) < e.n) scratch.resize(e.n);
    const void* in = at(values);
    data_kernels().finish(e, 0, &in, 1, rows, scratch.data());
}

int all_reduce_rows(Plane& plane, Address in, std::int64_t count, int how, const Epilogue& fixed, Address residual,
                    Address out, Address residual_out, Address quant_out, Address scale_out) {
    const Epilogue e = placed(fixed, residual, out, residual_out, quant_out, scale_out);
    return run(plane, how, Rows{at(in), at(out), e.n, e.dtype, nullptr, &e}, count);
}

int complete(Plane& plane, std::uint32_t part, Address in, Address out, std::int64_t n, int dtype, std::int64_t first,
             std::int64_t count) {
    return checked(plane.complete(part, Rows{at(in), at(out), n, dtype, nullptr, nullptr}, first, count));
}

int complete_rows(Plane& plane, std::uint32_t part, Address in, std::int64_t first, std::int64_t count,
                  const Epilogue& fixed, Address residual, Address out, Address residual_out, Address quant_out,
                  Address scale_out) {
    const Epilogue e = placed(fixed, residual, out, residual_out, quant_out, scale_out);
    return checked(plane.complete(part, Rows{at(in), at(out), e.n, e.dtype, nullptr, &e}, first, count));
}

int exchange(Plane& plane, int op, const RowMap& map, Address in, Address out, std::int64_t n, int dtype, Address fold,
             std::uint64_t signature) {
    const Rows rows{at(in), at(out), n, dtype, at(fold), nullptr};
    return checked(plane.exchange(static_cast<Op>(op), map, rows, signature));
}

int exchange_rows(Plane& plane, int op, const RowMap& map, Address in, Address fold, std::uint64_t signature,
                  const Epilogue& fixed, Address residual, Address out, Address residual_out, Address quant_out,
                  Address scale_out) {
    const Epilogue e = placed(fixed, residual, out, residual_out, quant_out, scale_out);
    const Rows rows{at(in), at(out), e.n, e.dtype, at(fold), &e};
    return checked(plane.exchange(static_cast<Op>(op), map, rows, signature));
}

Tokens tokens(std::int64_t count, int k, std::int64_t row_bytes, Address rows, Address ids, Address weights) {
    return {count, k, row_bytes, at(rows), at<const std::int32_t>(ids), at<const float>(weights)};
}

int dispatch(Plane& plane, Address in, std::int64_t count, int k, std::int64_t row_bytes, Address rows, Address ids,
             Address weights, Address bounds, std::int64_t room, std::int64_t signature) {
    const Tokens mine = tokens(count, k, row_bytes, rows, ids, weights);
    return checked(plane.dispatch(in, mine, at<const std::int32_t>(bounds), room, signature));
}

int combine(Plane& plane, Address in, std::int64_t count, int k, Address ids, Address bounds, std::int64_t room,
            std::int64_t n, int dtype, Address out) {
    const Tokens mine = tokens(count, k, n * (dtype == kFloat32 ? 4 : 2), 0, ids, 0);
    return checked(plane.combine(in, mine, at<const std::int32_t>(bounds), room, n, dtype, at(out)));
}

Epilogue epilogue(int op, int dtype, std::int64_t n, Address bias, Address weight, Address pre_weight, Address scale,
                  float eps, float weight_offset) {
    Epilogue e{};
    e.op = op, e.dtype = dtype, e.n = n;
    e.bias = at(bias), e.weight = at(weight), e.pre_weight = at(pre_weight), e.scale = at<const float>(scale);
    e.eps = eps, e.weight_offset = weight_offset;
    return e;
}

// An object that is called with a tensor and an output, and sums one into the other without asking Python anything, once
// it remembers how such a call is made: it is known by the size and type of its tensors. All other calls, and those that
// fail, go to the methods `_call` and `_fail` of the Python class made of it.
class CallCache {
public:
    explicit CallCache(nb::type_object tensor) : tensor_(tensor) {}

    void remember(Plane& plane, int dtype, std::int64_t elements, int how) {
        plane_ = &plane;
        ways_.push_back({dtype, elements, how});
    }
    void forget() { ways_.clear(), plane_ = nullptr; }

    // -1: not known.
    int sum(nb::handle x, nb::handle out) {
        DLTensor in, to;
        int dtype, out_dtype;
        std::int64_t n, out_n;
        if (ways_.empty() || !tensor_.read(x, in, dtype, n)) return -1;
        if (out.ptr() == x.ptr())
            to = in;
        else if (!tensor_.read(out, to, out_dtype, out_n) || out_dtype != dtype || !TensorType::same_shape(in, to))
            return -1;
        for (const Way& way : ways_)
            if (way.elements == n && way.dtype == dtype)
                return all_reduce(*plane_, TensorType::address(in), TensorType::address(to), n, way.how);
        return -1;
    }

    // As all_reduce_rows, or without a plane as `finish`, where `weight` is still what `fixed` says.
    int rows(Plane* plane, const Epilogue& fixed, int how, std::int64_t elements, nb::handle x, nb::handle weight,
             nb::handle residual, nb::handle out, nb::handle residual_out) {
        DLTensor t[5];
        const nb::handle tensors[] = {x, residual, out, residual_out, weight};
        for (int k = 0; k < 5; ++k) {
            int dtype;
            std::int64_t n;
            if (!tensor_.read(tensors[k], t[k], dtype, n) || dtype != fixed.dtype) return -1;
            if (k < 4 ? n != elements || !TensorType::same_shape(t[0], t[k]) : n != fixed.n) return -1;
        }
        if (t[0].ndim == 0 || t[0].shape[t[0].ndim - 1] != fixed.n || t[4].ndim != 1) return -1;
        if (at(TensorType::address(t[4])) != fixed.weight) return -1;
        auto address = [&](int k) { return TensorType::address(t[k]); };
        const std::int64_t count = elements / fixed.n;
        if (plane) return all_reduce_rows(*plane, address(0), count, how, fixed, address(1), address(2), address(3), 0, 0);
        finish(address(0), count, fixed, address(1), address(2), address(3), 0, 0);
        return kDone;
    }

    // self(x, out=...), or whatever else
    static PyObject* called(PyObject* self, PyObject* args, PyObject* keywords) {
        static PyObject* const name_of_out = PyUnicode_InternFromString("out");
        static PyObject* const name_of_call = PyUnicode_InternFromString("_call");
        if (keywords && PyTuple_GET_SIZE(args) == 1 && PyDict_GET_SIZE(keywords) == 1) {
            PyObject* out = PyDict_GetItem(keywords, name_of_out);
            const int status = out ? instance(self)->sum(PyTuple_GET_ITEM(args, 0), out) : -1;
            if (status == 0) return Py_NewRef(out);
            if (status > 0) return PyObject_CallMethod(self, "_fail", "i", status);
        }
        nb::object call = nb::steal(PyObject_GetAttr(self, name_of_call));
        return call.is_valid() ? PyObject_Call(call.ptr(), args, keywords) : nullptr;
    }

private:
    struct Way {
        int dtype;
        std::int64_t elements;
        int how;
    };
    static CallCache* instance(PyObject* self) { return nb::inst_ptr<CallCache>(self); }

    Plane* plane_ = nullptr;
    TensorType tensor_;
    std::vector<Way> ways_;
};

PyObject* call_cached(PyObject* self, PyObject* args, PyObject* keywords) {
    try {
        return CallCache::called(self, args, keywords);
    } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
    }
}
PyType_Slot call_slots[] = {{Py_tp_call, reinterpret_cast<void*>(call_cached)}, {0, nullptr}};

}  // namespace

void bind_plane(nb::module_& m) {
    nb::class_<Epilogue>(m, "Epilogue", "What is done to the rows of a sum: see common/epilogue.h.")
        .def("__init__", [](Epilogue* self, int op, int dtype, std::int64_t n, Address bias, Address weight,
                            Address pre_weight, Address scale, float eps, float weight_offset) {
            new (self) Epilogue(epilogue(op, dtype, n, bias, weight, pre_weight, scale, eps, weight_offset));
        });
    m.def("finish", &finish, "An epilogue without communication: see data.h's finish.");
    using Tuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::vector<int>>;
    nb::class_<RowMap>(m, "RowMap", "Pieces (first row out, first row of the sources, rows, sources): see plane.h.")
        .def("__init__", [](RowMap* self, const std::vector<Tuple>& pieces, std::int64_t rows, std::int64_t max_rows) {
            new (self) RowMap{{}, rows, max_rows};
            for (const auto& [out, first, count, sources] : pieces) self->pieces.push_back({out, first, count, sources});
        });
    nb::class_<Plane>(m, "Plane", "The shared-memory collectives of one group: see plane.h.")
        .def("__init__",
             [](Plane* self, int rank, const std::vector<Address>& regions, const std::vector<int>& processes,
                std::int64_t mailbox_bytes, std::int64_t slot_bytes, bool crowded) {
                 new (self) Plane(rank, regions, processes, mailbox_bytes, slot_bytes, crowded);
                 self->idle = idle;
             })
        .def_static("region_bytes", &Plane::region_bytes)
        .def("barrier", [](Plane& plane) { return checked(plane.barrier()); })
        .def("all_reduce", &all_reduce)
        .def("all_reduce_rows", &all_reduce_rows)
        .def("exchange", &exchange)
        .def("exchange_rows", &exchange_rows)
        .def("start", [](Plane& plane, std::int64_t bytes, int dtype, Address in) { return plane.start(bytes, dtype, in); })
        .def("publish", &Plane::publish)
        .def("complete", &complete)
        .def("complete_rows", &complete_rows)
        .def("dispatch", &dispatch)
        .def("combine", &combine)
        .def("arrivals", &Plane::arrivals)
        .def("combine_parts", [](Plane& plane, Address in, std::int64_t rows, std::int64_t heads, std::int64_t first,
                                 std::int64_t last, std::int64_t width, int dtype, Address out) {
            return checked(plane.combine_parts(in, {rows, heads, first, last, width}, dtype, at(out)));
        })
        .def("add_region", &Plane::add_region)
        .def("remove_region", &Plane::remove_region)
        .def("symmetric", &Plane::symmetric)
        .def("close", &Plane::close)
        .def("ready", [](Plane& plane, int id) { return checked(plane.ready(id)); })
        .def("what",
             [](const Plane& plane, int rank, std::uint32_t number) {
                 const Words& words = plane.words(rank);
                 const std::uint64_t call = __atomic_load_n(&words.call[number & 1], __ATOMIC_ACQUIRE);
                 const std::uint64_t what = __atomic_load_n(&words.what[number & 1], __ATOMIC_RELAXED);
                 const int op = call >> 32 == number ? static_cast<int>(what >> 56) : -1;
                 return std::tuple(op, what >> 48 & 255, what & ((1ull << 48) - 1), call & ~0u);
             }, "rank"_a, "number"_a, "(op, dtype, bytes, hash) of a rank's call; op -1: it has not made it")
        .def("gave_up",
             [](const Plane& plane, int rank) {
                 const std::uint64_t word = __atomic_load_n(&plane.words(rank).gave_up, __ATOMIC_ACQUIRE);
                 return std::tuple(word >> 32, static_cast<int>(word & 255) - 1, static_cast<int>(word >> 8 & 0xffffff));
             }, "rank"_a, "(call, status, rank it is about) of a rank that gave up; status -1: it has not")
        .def_prop_ro("totals",
                     [](const Plane& plane) {
                         std::vector<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>> rows;
                         for (int op = 0; op < kOps; ++op)
                             if (const Total& t = plane.totals[op]; t.calls)
                                 rows.emplace_back(op, t.calls, t.bytes, t.ns);
                         return rows;
                     }, "(op, calls, bytes, ns)")
        .def_prop_ro("events",
                     [](const Plane& plane) {
                         std::vector<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>> rows;
                         for (const Event& e : plane.events) rows.emplace_back(e.op, e.bytes, e.start_ns, e.end_ns);
                         return rows;
                     }, "(op, bytes, start ns, end ns)")
        .def("reset", [](Plane& plane) { plane.totals.assign(kOps, {}), plane.events.clear(); })
        .def_ro("odd", &Plane::odd)
        .def_prop_ro("call", &Plane::call)
        .def_rw("timeout_s", &Plane::timeout_s)
        .def_rw("chunk_bytes", &Plane::chunk_bytes)
        .def_rw("stream_chunk_bytes", &Plane::stream_chunk_bytes)
        .def_rw("stream_bytes", &Plane::stream_bytes)
        .def_rw("timeline", &Plane::timeline)
        .def_prop_ro("mailbox_bytes", &Plane::mailbox_bytes)
        .def_prop_ro("slot_bytes", &Plane::slot_bytes);
    nb::class_<CallCache>(m, "CallCache", "Calls like one that was made before, with tensors as they are.",
                          nb::type_slots(call_slots))
        .def(nb::init<nb::type_object>())
        .def("remember", &CallCache::remember, "The plane must live until `forget`.")
        .def("forget", &CallCache::forget)
        .def("sum", &CallCache::sum)
        .def("rows", &CallCache::rows, "plane"_a.none(), "fixed"_a, "how"_a, "elements"_a, "x"_a, "weight"_a, "residual"_a,
             "out"_a, "residual_out"_a);
}

}  // namespace spmd

// What a Python tensor is, asked for without a Python call: through the DLPack exchange interface (1.3) of its type.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "cpu/data.h"

namespace spmd {

// As the DLPack specification lays them out.
struct DLTensor {
    void* data;
    std::int32_t device_type, device_id;  // 1: CPU
    std::int32_t ndim;
    std::uint8_t code, bits;  // code 2: float, 4: bfloat16
    std::uint16_t lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};
struct DLPackExchange {
    std::uint32_t major, minor;
    void* older;
    void* functions_not_used_here[3];
    int (*tensor_of)(void* object, DLTensor* tensor);
    void* current_stream;
};

class TensorType {
public:
    // type: a tensor class; without the interface nothing is ever recognised
    explicit TensorType(nanobind::type_object type) : type_(type.ptr()) {
        nanobind::object capsule = nanobind::getattr(type, "__dlpack_c_exchange_api__", nanobind::none());
        if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
        auto* exchange = static_cast<DLPackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        if (exchange->major == 1 && exchange->minor >= 2) exchange_ = exchange;
    }

    // A contiguous CPU tensor of a type that is summed: what it is, its dtype and elements. false: it is something else.
    bool read(nanobind::handle object, DLTensor& t, int& dtype, std::int64_t& elements) const {
        if (!exchange_ || Py_TYPE(object.ptr()) != reinterpret_cast<PyTypeObject*>(type_)) return false;
        if (exchange_->tensor_of(object.ptr(), &t) != 0) {
            PyErr_Clear();
            return false;
        }
        if (t.device_type != 1 || t.lanes != 1) return false;
        if (t.code == 2 && t.bits == 32) dtype = kFloat32;
        else if (t.code == 2 && t.bits == 16) dtype = kFloat16;
        else if (t.code == 4 && t.bits == 16) dtype = kBFloat16;
        else return false;
        elements = 1;
        for (int d = t.ndim; d-- > 0; elements *= t.shape[d])
            if (t.strides && t.shape[d] != 1 && t.strides[d] != elements) return false;
        return true;
    }

    static std::uintptr_t address(const DLTensor& t) { return reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset; }
    static bool same_shape(const DLTensor& a, const DLTensor& b) {
        bool same = a.ndim == b.ndim;
        for (int d = 0; same && d < a.ndim; ++d) same = a.shape[d] == b.shape[d];
        return same;
    }

private:
    PyObject* type_;
    const DLPackExchange* exchange_ = nullptr;
};

}  // namespace spmd

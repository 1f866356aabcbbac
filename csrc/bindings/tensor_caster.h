// Converts a torch.Tensor to a TensorView without linking torch. It asks the Python object for its memory, through DLPack's
// exchange protocol or, if this torch lacks that, through the tensor's methods.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <utility>

#include "dlpack_exchange.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce::python {

namespace py = pybind11;

// Holds objects of torch, which are compared by identity, and interned attribute names. Never destroyed, because the
// interpreter may be gone by then.
class Torch {
 public:
  // Called once, while the module is imported.
  static void load() { instance() = new Torch; }
  static const Torch& get() { return *instance(); }

  // The view of a tensor; None gives an absent one. A view keeps nothing alive: the caller holds its arguments. in_memory:
  // false if the tensor may be on any device, without memory; the view then has no pointer to data.
  TensorView view(const char* argument, py::handle object, bool in_memory = true) const {
    if (object.is_none()) return {};
    if (!PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(tensor_.ptr()))) {
      reject(argument, "a torch.Tensor", py::repr(py::type::handle_of(object)));
    }
    TensorView view;
    if (exchanged(object, view)) return view;
    if (!get(object, layout_).is(strided_))
      reject(argument, "a dense (strided) tensor", get(object, layout_));
    if (call(object, is_neg_).ptr() == Py_True)
      reject(argument, "memory as it is", "a lazy negation: resolve_neg() it");
    view.dtype = dtype(argument, object);
    view.cuda_device = cuda_device(argument, object, in_memory);
    const py::object sizes = get(object, shape_);
    const py::object strides = call(object, stride_);
    const auto rank = PyTuple_GET_SIZE(sizes.ptr());
    if (rank > TensorView::kMaxRank) {
      reject(argument, "at most " + std::to_string(TensorView::kMaxRank) + " dimensions", py::int_(rank));
    }
    view.rank = 1, view.size[0] = 1, view.stride[0] = 1;  // a scalar is a vector of one element
    if (rank > 0) view.rank = static_cast<int>(rank);
    for (int d = 0; d < rank; ++d) {
      view.size[d] = integer(PyTuple_GET_ITEM(sizes.ptr(), d));
      view.stride[d] = integer(PyTuple_GET_ITEM(strides.ptr(), d));
    }
    if (!in_memory) return view;
    view.data = PyLong_AsVoidPtr(call(object, data_ptr_).ptr());
    if (view.data == nullptr) {
      if (PyErr_Occurred()) throw py::error_already_set();
      if (view.numel() > 0)
        reject(argument, "a tensor with memory of its own", py::repr(py::type::handle_of(object)));
    }
    return view;
  }

 private:
  Torch() {
    const auto torch = py::module_::import("torch");
    tensor_ = torch.attr("Tensor");
    parameter_ = torch.attr("nn").attr("Parameter");
    const py::object capsule = py::getattr(tensor_, dlpack::Exchange::kAttribute, py::none());
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::Exchange::kCapsule)) {
      const auto* const exchange = static_cast<const dlpack::Exchange*>(
          PyCapsule_GetPointer(capsule.ptr(), dlpack::Exchange::kCapsule));
      if (exchange->major == dlpack::Exchange::kMajor) exchange_ = exchange->view;
    }
    strided_ = torch.attr("strided");
    for (int i = 0; i < kDTypes; ++i) dtypes_[i] = torch.attr(name(static_cast<DType>(i)));
  }

  // Views an ordinary tensor through the exchange protocol, in 0.1 us; the tensor's methods take 0.7. Returns false if there is
  // no protocol, or if something is unusual about the tensor: the code that calls its methods then reports what.
  bool exchanged(py::handle object, TensorView& view) const {
    const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    if (exchange_ == nullptr || (type != tensor_.ptr() && type != parameter_.ptr())) return false;
    if (call(object, is_neg_).ptr() == Py_True) return false;
    dlpack::View t{};
    if (exchange_(object.ptr(), &t) != 0) {
      PyErr_Clear();
      return false;
    }
    if (!exchanged_dtype(t, view.dtype) || t.rank > TensorView::kMaxRank) return false;
    if (t.device != dlpack::kCpu && t.device != dlpack::kCuda) return false;
    view.cuda_device = t.device == dlpack::kCuda ? t.device_index : -1;
    view.rank = 1, view.size[0] = 1, view.stride[0] = 1;  // a scalar is a vector of one element
    if (t.rank > 0) view.rank = t.rank;
    std::copy_n(t.size, t.rank, view.size);
    std::copy_n(t.stride, t.rank, view.stride);
    view.data = t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset;
    return view.data != nullptr || view.numel() == 0;
  }

  static bool exchanged_dtype(const dlpack::View& t, DType& dtype) {
    using enum dlpack::ElementKind;
    if (t.lanes != 1) return false;
    if (t.kind == kBFloat && t.bits == 16) return dtype = DType::kBFloat16, true;
    if (t.kind == kFloat && t.bits == 16) return dtype = DType::kFloat16, true;
    if (t.kind == kFloat && t.bits == 32) return dtype = DType::kFloat32, true;
    if (t.kind == kFloat && t.bits == 64) return dtype = DType::kFloat64, true;
    if (t.kind == kInt && t.bits == 64) return dtype = DType::kInt64, true;
    if (t.kind == kBool && t.bits == 8) return dtype = DType::kBool, true;
    return false;
  }

  static Torch*& instance() {
    static Torch* torch = nullptr;
    return torch;
  }

  static py::object interned(const char* text) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text));
  }

  static py::object checked(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }
  static py::object get(py::handle object, const py::object& attribute) {
    return checked(PyObject_GetAttr(object.ptr(), attribute.ptr()));
  }
  static py::object call(py::handle object, const py::object& method) {
    return checked(PyObject_CallMethodNoArgs(object.ptr(), method.ptr()));
  }
  static std::int64_t integer(PyObject* number) {
    const long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  DType dtype(const char* argument, py::handle object) const {
    const py::object found = get(object, dtype_);
    const auto at =
        std::find_if(dtypes_, dtypes_ + kDTypes, [&](const py::object& t) { return t.is(found); });
    if (at == dtypes_ + kDTypes) reject(argument, "a real floating, int64 or bool tensor", found);
    return static_cast<DType>(at - dtypes_);
  }

  int cuda_device(const char* argument, py::handle object, bool in_memory) const {
    if (get(object, is_cuda_).ptr() == Py_True)
      return static_cast<int>(integer(call(object, get_device_).ptr()));
    if (in_memory && get(object, is_cpu_).ptr() != Py_True)
      reject(argument, "a tensor on the CPU or a CUDA device", get(object, device_));
    return -1;
  }

  [[noreturn]] static void reject(const char* argument, const std::string& expected, const py::object& got) {
    throw py::type_error(std::string(argument) + ": expected " + expected + ", got " +
                         std::string(py::str(got)));
  }
  [[noreturn]] static void reject(const char* argument, const std::string& expected, const char* got) {
    reject(argument, expected, py::str(got));
  }

  static constexpr int kDTypes = static_cast<int>(DType::kBool) + 1;

  py::object tensor_, parameter_, strided_, dtypes_[kDTypes];
  decltype(dlpack::Exchange::view) exchange_ = nullptr;
  const py::object layout_ = interned("layout"), is_neg_ = interned("is_neg"), dtype_ = interned("dtype"),
                   is_cpu_ = interned("is_cpu"), is_cuda_ = interned("is_cuda"),
                   get_device_ = interned("get_device"), device_ = interned("device"),
                   shape_ = interned("shape"), stride_ = interned("stride"), data_ptr_ = interned("data_ptr");
};

// A torch.Tensor or None, as Python passed it.
struct TensorArgument {
  py::handle object;
};

}  // namespace monoidreduce::python

namespace pybind11::detail {

template <>
struct type_caster<monoidreduce::python::TensorArgument> {
  PYBIND11_TYPE_CASTER(monoidreduce::python::TensorArgument, const_name("torch.Tensor | None"));
  bool load(handle source, bool) {
    value.object = source;
    return true;
  }
};

}  // namespace pybind11::detail

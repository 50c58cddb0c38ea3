// How `Ranges` observes a model: forward hooks on its modules, as C functions, and hooks on the nodes of its graph.
//
// The hooks see modules' inputs and outputs, and notify `Ranges`. Must not change a gradient, or touch a Python object
// in a backward pass.

#pragma once

#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "ranges.hpp"

namespace aorta {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

// A pre-hook of a graph node that tells `Ranges` of a gradient, excluded from what compiled autograd compiles: it only
// observes.
template <class Tell>
class Looks final : public FunctionPreHook {
 public:
  Looks(std::shared_ptr<Ranges> ranges, Tell tell) : ranges_(std::move(ranges)), tell_(std::move(tell)) {}
  variable_list operator()(const variable_list& gradients) override {
    const Own own(ranges_->step());
    tell_(*ranges_);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  const std::shared_ptr<Ranges> ranges_;
  const Tell tell_;
};

// Tensors in nested containers that a backward pass will reach.
inline void add_needing_gradient(PyObject* value, std::vector<at::Tensor>& found) {
  if (THPVariable_Check(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (tensor.requires_grad()) {
      found.push_back(tensor);
    }
  } else if (PyTuple_Check(value)) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); ++at) {
      add_needing_gradient(PyTuple_GET_ITEM(value, at), found);
    }
  } else if (PyList_Check(value)) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(value); ++at) {
      add_needing_gradient(PyList_GET_ITEM(value, at), found);
    }
  } else if (PyDict_Check(value)) {
    PyObject *key = nullptr, *item = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);) {
      add_needing_gradient(item, found);
    }
  }
}

// Observes a gradient when it is ready: a hook of the tensor, after its existing ones, or before them if `first`.
template <class Tell>
void at_gradient(const at::Tensor& tensor, bool first, const std::shared_ptr<Ranges>& ranges, const Tell& tell) {
  auto hook = std::make_unique<Looks<Tell>>(ranges, tell);
  if (const auto node = tensor.grad_fn()) {
    auto& hooks = node->tensor_pre_hooks();
    hooks.insert(first ? hooks.begin() : hooks.end(), std::move(hook));
  } else {
    tensor.register_hook([looks = std::shared_ptr<FunctionPreHook>(std::move(hook))](const at::TensorBase&) { (*looks)({}); });
  }
}

// State of a module's forward hook: a C function whose self is one of these. `module` is alive for as long as the hook
// observes. A copy of the module shares the hook, which does nothing there; pickled, it becomes a function of the
// standard library that does nothing, so that a watched model can be saved, and loaded without AORTA.
struct Hook {
  std::shared_ptr<Ranges> ranges;
  const PyObject* module;
  size_t block;

  bool observes(const PyObject* called) const { return called == module && ranges->looks(); }
};

// `contextlib.nullcontext().__exit__` takes any arguments and returns None; a C function is pickled as an attribute of
// its self, by its name.
constexpr const char* NAME_OF_HOOKS = "__exit__";
inline py::tuple pickled(const Hook& /*hook*/) {
  return py::make_tuple(py::module_::import("contextlib").attr("nullcontext"), py::tuple());
}

// (module, args, kwargs) -> None. The block's backward pass ends with the last gradient of its inputs.
inline void before_forward(const Hook& hook, PyObject* const* arguments, Py_ssize_t count) {
  std::vector<at::Tensor> inputs;
  for (Py_ssize_t at = 1; at < count; ++at) {
    add_needing_gradient(arguments[at], inputs);
  }
  if (!inputs.empty()) {
    const auto left = std::make_shared<std::atomic<size_t>>(inputs.size());
    for (const at::Tensor& input : inputs) {
      at_gradient(input, false, hook.ranges, [left, block = hook.block](Ranges& ranges) {
        if (--*left == 0) {
          ranges.end_backward(block);
        }
      });
    }
  }
  hook.ranges->begin_forward(hook.block);
}

// (module, args, output) -> None. The block's backward pass begins with the first gradient of its outputs, in a
// pre-hook of its node and so after all hooks of the tensor, whenever they were registered: FSDP waits for the block's
// parameters in one of them (R5).
inline void after_forward(const Hook& hook, PyObject* const* arguments, Py_ssize_t count) {
  hook.ranges->end_forward(hook.block);
  const auto begins = [block = hook.block](Ranges& ranges) { ranges.begin_backward(block); };
  std::vector<at::Tensor> outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor& output : outputs) {
    if (const auto node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<Looks<std::decay_t<decltype(begins)>>>(hook.ranges, begins));
    } else {
      at_gradient(output, false, hook.ranges, begins);
    }
  }
}

// (module, args, output) -> None. Before the tensor's other hooks: FSDP also queues its end-of-backward callback with
// the first gradient.
inline void after_watched_forward(const Hook& hook, PyObject* const* arguments, Py_ssize_t count) {
  std::vector<at::Tensor> outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor& output : outputs) {
    at_gradient(output, true, hook.ranges, [](Ranges& ranges) { ranges.gradient_came(); });
  }
}

using Observe = void (*)(const Hook&, PyObject* const*, Py_ssize_t);

template <Observe observe>
PyObject* call_hook(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Hook& hook = *py::cast<const Hook*>(py::handle(self));
  if (hook.observes(arguments[0])) {
    const Own own(hook.ranges->step());
    observe(hook, arguments, count);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <Observe observe>
py::object hook(std::shared_ptr<Ranges> ranges, py::handle module, size_t block) {
  static PyMethodDef method{NAME_OF_HOOKS, reinterpret_cast<PyCFunction>(call_hook<observe>), METH_FASTCALL, nullptr};
  const py::object self = py::cast(std::make_unique<Hook>(Hook{std::move(ranges), module.ptr(), block}));
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&method, self.ptr(), py::str("aorta.instrument.native.native_interceptor").ptr()));
}

}  // namespace aorta

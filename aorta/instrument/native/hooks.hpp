// How `Ranges` observes a model: forward hooks on its modules, as C functions, and hooks on the nodes of its graph.
//
// The hooks see modules' inputs and outputs, and notify `Ranges`. Must not change a gradient, or touch a Python object
// in a backward pass.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
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

// A pre-hook of a graph node, excluded from what compiled autograd compiles: it only observes.
class Looks : public FunctionPreHook {
 public:
  explicit Looks(std::shared_ptr<Ranges> ranges) : ranges_(std::move(ranges)) {}
  variable_list operator()(const variable_list& gradients) final {
    const Own own(ranges_->step());
    look();
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const final {}
  virtual void look() = 0;

 protected:
  const std::shared_ptr<Ranges> ranges_;
};

class OpensBackward final : public Looks {
 public:
  OpensBackward(std::shared_ptr<Ranges> ranges, size_t block) : Looks(std::move(ranges)), block_(block) {}
  void look() override { ranges_->begin_backward(block_); }

 private:
  const size_t block_;
};

// Fires with the last of `left` gradients.
class ClosesBackward final : public Looks {
 public:
  ClosesBackward(std::shared_ptr<Ranges> ranges, size_t block, std::shared_ptr<std::atomic<int64_t>> left)
      : Looks(std::move(ranges)), block_(block), left_(std::move(left)) {}
  void look() override {
    if (--*left_ == 0) {
      ranges_->end_backward(block_);
    }
  }

 private:
  const size_t block_;
  const std::shared_ptr<std::atomic<int64_t>> left_;
};

class NoticesBackward final : public Looks {
 public:
  using Looks::Looks;
  void look() override { ranges_->gradient_came(); }
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
template <typename Hook, typename... Arguments>
void at_gradient(const at::Tensor& tensor, bool first, Arguments... arguments) {
  auto hook = std::make_unique<Hook>(std::move(arguments)...);
  if (const auto node = tensor.grad_fn()) {
    auto& hooks = node->tensor_pre_hooks();
    hooks.insert(first ? hooks.begin() : hooks.end(), std::move(hook));
  } else {
    tensor.register_hook([hook = std::shared_ptr<Hook>(std::move(hook))](const at::TensorBase&) { (*hook)({}); });
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

inline const Hook& hook_of(PyObject* self) { return *py::cast<const Hook*>(py::handle(self)); }

// (module, args, kwargs) -> None. The block's backward pass ends with the last gradient of its inputs.
inline PyObject* before_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Hook& hook = hook_of(self);
  if (!hook.observes(arguments[0])) {
    Py_RETURN_NONE;
  }
  const Own own(hook.ranges->step());
  std::vector<at::Tensor> inputs;
  for (Py_ssize_t at = 1; at < count; ++at) {
    add_needing_gradient(arguments[at], inputs);
  }
  if (!inputs.empty()) {
    const auto left = std::make_shared<std::atomic<int64_t>>(inputs.size());
    for (const at::Tensor& input : inputs) {
      at_gradient<ClosesBackward>(input, false, hook.ranges, hook.block, left);
    }
  }
  hook.ranges->begin_forward(hook.block);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (module, args, output) -> None. The block's backward pass begins with the first gradient of its outputs, in a
// pre-hook of its node and so after all hooks of the tensor, whenever they were registered: FSDP waits for the block's
// parameters in one of them (R5).
inline PyObject* after_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Hook& hook = hook_of(self);
  if (!hook.observes(arguments[0])) {
    Py_RETURN_NONE;
  }
  const Own own(hook.ranges->step());
  hook.ranges->end_forward(hook.block);
  std::vector<at::Tensor> outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor& output : outputs) {
    if (const auto node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<OpensBackward>(hook.ranges, hook.block));
    } else {
      at_gradient<OpensBackward>(output, false, hook.ranges, hook.block);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (module, args, output) -> None. Before the tensor's other hooks: FSDP also queues its end-of-backward callback with
// the first gradient.
inline PyObject* after_watched_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Hook& hook = hook_of(self);
  if (!hook.observes(arguments[0])) {
    Py_RETURN_NONE;
  }
  const Own own(hook.ranges->step());
  std::vector<at::Tensor> outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor& output : outputs) {
    at_gradient<NoticesBackward>(output, true, hook.ranges);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline py::object as_hook(PyMethodDef& method, std::shared_ptr<Ranges> ranges, py::handle module, size_t block) {
  const py::object self = py::cast(std::make_unique<Hook>(Hook{std::move(ranges), module.ptr(), block}));
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&method, self.ptr(), py::str("aorta.instrument.native.native_interceptor").ptr()));
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
py::object hook(std::shared_ptr<Ranges> ranges, py::handle module, size_t block = 0) {
  static PyMethodDef method{NAME_OF_HOOKS, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr};
  return as_hook(method, std::move(ranges), module, block);
}

}  // namespace aorta

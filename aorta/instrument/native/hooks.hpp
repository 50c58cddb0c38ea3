// How `Ranges` observes a model: forward hooks on its modules, as C functions, and hooks on the nodes of its graph.
//
// The hooks see modules' inputs and outputs, and notify `Ranges`. Must not change a gradient, or touch a Python object
// in a backward pass.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "loop.hpp"

namespace aorta {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

// A pre-hook of a graph node that tells `Ranges` of a gradient, excluded from what compiled autograd compiles: it only
// observes. There is one kind of it, as each call finds the caches empty.
class Looks final : public FunctionPreHook {
 public:
  enum What : uint8_t { BEGINS, ENDS, CAME };
  // `left`: of how many gradients this is one, where the last one counts; none: of one.
  Looks(std::shared_ptr<Ranges> ranges, What what, size_t block, std::shared_ptr<std::atomic<size_t>> left = nullptr)
      : ranges_(std::move(ranges)), left_(std::move(left)), block_(block), what_(what) {}
  variable_list operator()(const variable_list& gradients) override {
    const Own own(ranges_->step());
    if (what_ == BEGINS) {
      ranges_->begin_backward(block_);
    } else if (what_ == CAME) {
      ranges_->gradient_came();
    } else if (!left_ || --*left_ == 0) {
      ranges_->end_backward(block_, own.since_ns());
    }
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  const std::shared_ptr<Ranges> ranges_;
  const std::shared_ptr<std::atomic<size_t>> left_;
  const size_t block_;
  const What what_;
};

using Tensors = c10::SmallVector<const at::Tensor*, 8>;

// Tensors in nested containers that a backward pass will reach; they live as long as the containers.
inline void add_needing_gradient(PyObject* value, Tensors& found) {
  if (THPVariable_Check(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (tensor.requires_grad()) {
      found.push_back(&tensor);
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
inline void at_gradient(const at::Tensor& tensor, bool first, std::unique_ptr<FunctionPreHook> hook) {
  if (const auto& node = tensor.grad_fn()) {
    auto& hooks = node->tensor_pre_hooks();
    hooks.insert(first ? hooks.begin() : hooks.end(), std::move(hook));
  } else {
    tensor.register_hook([looks = std::shared_ptr<FunctionPreHook>(std::move(hook))](const at::TensorBase&) { (*looks)({}); });
  }
}

// The self of a module's forward hooks, which are C functions.
struct Hook {
  std::shared_ptr<Ranges> ranges;
  size_t block;

  std::unique_ptr<Looks> looks(Looks::What what, std::shared_ptr<std::atomic<size_t>> left = nullptr) const {
    return std::make_unique<Looks>(ranges, what, block, std::move(left));
  }
};

// (module, args, kwargs) -> None. The block's backward pass ends with the last gradient of its inputs.
inline void before_forward(const Hook& hook, const Own& /*own*/, PyObject* const* arguments, Py_ssize_t count) {
  Tensors inputs;
  for (Py_ssize_t at = 1; at < count; ++at) {
    add_needing_gradient(arguments[at], inputs);
  }
  const auto left = inputs.size() < 2 ? nullptr : std::make_shared<std::atomic<size_t>>(inputs.size());
  for (const at::Tensor* input : inputs) {
    at_gradient(*input, false, hook.looks(Looks::ENDS, left));
  }
  hook.ranges->begin_forward(hook.block);
}

// (module, args, output) -> None. The block's backward pass begins with the first gradient of its outputs, in a
// pre-hook of its node and so after all hooks of the tensor, whenever they were registered: FSDP waits for the block's
// parameters in one of them (R5).
inline void after_forward(const Hook& hook, const Own& own, PyObject* const* arguments, Py_ssize_t count) {
  hook.ranges->end_forward(hook.block, own.since_ns());
  Tensors outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor* output : outputs) {
    if (const auto& node = output->grad_fn()) {
      node->add_pre_hook(hook.looks(Looks::BEGINS));
    } else {
      at_gradient(*output, false, hook.looks(Looks::BEGINS));
    }
  }
}

// (module, args, output) -> None. Before the tensor's other hooks: FSDP also queues its end-of-backward callback with
// the first gradient.
inline void after_watched_forward(const Hook& hook, const Own& /*own*/, PyObject* const* arguments, Py_ssize_t count) {
  Tensors outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor* output : outputs) {
    at_gradient(*output, true, hook.looks(Looks::CAME));
  }
}

template <auto observe>
PyObject* call_hook(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return returned_by([&] {
    const Hook& hook = object_of<Hook>(self);
    if (hook.ranges->looks()) {
      const Own own(hook.ranges->step());
      observe(hook, own, arguments, count);
    }
    return py::none().release().ptr();
  });
}

// `before_forward`, `after_forward` and `after_watched_forward` of a block.
inline py::tuple hooks_of(std::shared_ptr<Ranges> ranges, size_t block) {
  static std::array<PyMethodDef, 3> methods{
      {{"before_forward", fast(call_hook<before_forward>), METH_FASTCALL, nullptr},
       {"after_forward", fast(call_hook<after_forward>), METH_FASTCALL, nullptr},
       {"after_watched_forward", fast(call_hook<after_watched_forward>), METH_FASTCALL, nullptr}}};
  return functions_of(std::make_unique<Hook>(Hook{std::move(ranges), block}), methods);
}

}  // namespace aorta

// When blocks computed and a backward pass ended, marked without Python, on the host's clock or a device's.
//
// The same as `aorta/instrument/compute.py` and `backward.py` do (docs/measuring.md, R5). Enters: forward hooks of modules, as C functions, and gradients on their way through the graph. Leaves: the
// passes of blocks and the endings of backward passes, for Python to take once a step. Must not: change a gradient, or
// touch a Python object in a backward pass.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "device_clock.hpp"
#include "step.hpp"

namespace aorta {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

// One pass of one block, in nanoseconds or, on a device, as marks; the end is 0 while it is open.
struct Pass {
  size_t block;
  bool backward;
  int64_t start_ns;
  int64_t end_ns;
};

// Of one step, in the order in which they began; `tails` are the endings of backward passes.
struct Passes {
  std::vector<Pass> all;
  Stalls tails;
};

class Ranges : public std::enable_shared_from_this<Ranges> {
 public:
  // `clock`: the device's; none on a CPU.
  Ranges(std::shared_ptr<Step> step, std::shared_ptr<DeviceClock> clock)
      : step_(std::move(step)), clock_(std::move(clock)) {}

  void begin() {
    const std::lock_guard<std::mutex> held(mutex_);
    forget();
    open_ = true;
  }

  // What happened since `begin`; nothing more is noted down.
  std::unique_ptr<Passes> end() {
    const std::lock_guard<std::mutex> held(mutex_);
    open_ = false;
    auto taken = std::make_unique<Passes>(Passes{std::exchange(passes_, {}), std::exchange(tails_, {})});
    forget();
    return taken;
  }

  // From here on, until `ignore`: what was put into a graph before is looked at too.
  void look() { looking_.store(true, std::memory_order_release); }
  void ignore() { looking_.store(false, std::memory_order_release); }

  size_t add_block() {
    const std::lock_guard<std::mutex> held(mutex_);
    forward_.emplace_back();
    backward_.emplace_back();
    return forward_.size() - 1;
  }

  void begin_forward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded()) {
      forward_[block].push_back(opened(block, false));
    }
  }

  void end_forward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (!forward_[block].empty()) {
      passes_[forward_[block].back()].end_ns = moment();
      forward_[block].pop_back();
    }
  }

  void begin_backward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded() && !backward_[block]) {
      backward_[block] = opened(block, true);
    }
  }

  void end_backward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    close(backward_[block]);
  }

  // A gradient reached a module whose backward passes are watched: the engine is asked for a word behind the last node,
  // once a pass. Told apart by identity: a pass that failed never ends, and must not hide the next one.
  void gradient_came() {
    const int pass = torch::autograd::get_current_graph_task_id();
    if (looking_.load(std::memory_order_acquire) && asked_in_.exchange(pass) != pass) {
      when_backward_ends([self = shared_from_this()] { self->nodes_ran(); });
    }
  }

 private:
  static void when_backward_ends(std::function<void()> callback) {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  }

  // Before the strategy's own ending, which was asked for later; a second word comes behind that.
  void nodes_ran() {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      for (auto& pass : backward_) {
        close(pass);
      }
    }
    when_backward_ends([self = shared_from_this(), begin = moment()] {
      const int64_t end = self->moment();
      {
        const std::lock_guard<std::mutex> held(self->mutex_);
        if (self->open_) {
          self->tails_.emplace_back(begin, end);
        } else {
          self->release(begin);
          self->release(end);
        }
      }
      self->step_->settle();
    });
  }

  bool recorded() const { return open_ && looking_.load(std::memory_order_acquire); }

  size_t opened(size_t block, bool backward) {
    passes_.push_back({block, backward, moment(), 0});
    return passes_.size() - 1;
  }

  void close(std::optional<size_t>& pass) {
    if (pass) {
      passes_[*pass].end_ns = moment();
      pass.reset();
    }
  }

  int64_t moment() const { return clock_ ? clock_->mark() : now_ns(); }
  void release(int64_t mark) const {
    if (clock_) {
      clock_->release(mark);
    }
  }

  void forget() {
    for (const Pass& pass : passes_) {
      release(pass.start_ns);
      release(pass.end_ns);
    }
    for (const auto& [begin, end] : tails_) {
      release(begin);
      release(end);
    }
    passes_.clear();
    tails_.clear();
    for (auto& passes : forward_) {
      passes.clear();
    }
    for (auto& pass : backward_) {
      pass.reset();
    }
  }

  const std::shared_ptr<Step> step_;
  const std::shared_ptr<DeviceClock> clock_;
  std::atomic<bool> looking_{false};
  std::atomic<int> asked_in_{-1};
  std::mutex mutex_;
  bool open_ = false;
  std::vector<Pass> passes_;
  Stalls tails_;
  std::vector<std::vector<size_t>> forward_;      // by block: those that are open, in `passes_`
  std::vector<std::optional<size_t>> backward_;
};

// In front of a node of the graph, and left out of what compiled autograd compiles: it only looks.
class Looks : public FunctionPreHook {
 public:
  explicit Looks(std::shared_ptr<Ranges> ranges) : ranges_(std::move(ranges)) {}
  variable_list operator()(const variable_list& gradients) final {
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

// With the last of `left` gradients.
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

// Looks at a gradient when it is there: a hook of the tensor, behind those it has, or `first`.
template <typename Hook, typename... Arguments>
void at_gradient(const at::Tensor& tensor, bool first, Arguments... arguments) {
  auto hook = std::make_unique<Hook>(std::move(arguments)...);
  if (const auto node = tensor.grad_fn()) {
    auto& hooks = node->tensor_pre_hooks();
    hooks.insert(first ? hooks.begin() : hooks.end(), std::move(hook));
  } else {
    tensor.register_hook([hook = std::shared_ptr<Hook>(std::move(hook))](const at::TensorBase&) { hook->look(); });
  }
}

// A module's forward hook: a C function, whose self is one of these in a capsule.
struct Hook {
  std::shared_ptr<Ranges> ranges;
  size_t block;
};

inline const Hook& hook_of(PyObject* capsule) {
  return *static_cast<const Hook*>(PyCapsule_GetPointer(capsule, nullptr));
}

// (module, args, kwargs) -> None. The block's backward pass ends with the last gradient of its inputs.
inline PyObject* before_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Hook& hook = hook_of(self);
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

// (module, args, output) -> None. The block's backward pass begins with the first gradient of its outputs, before that
// one's node and so behind all hooks of the tensor, whenever they were put on: FSDP waits for the block's parameters in
// one of them (R5).
inline PyObject* after_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Hook& hook = hook_of(self);
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

// (module, args, output) -> None. In front of the tensor's other hooks: FSDP asks for its ending with the first gradient
// too.
inline PyObject* after_watched_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::vector<at::Tensor> outputs;
  add_needing_gradient(arguments[count - 1], outputs);
  for (const at::Tensor& output : outputs) {
    at_gradient<NoticesBackward>(output, true, hook_of(self).ranges);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline py::object as_hook(PyMethodDef& method, std::shared_ptr<Ranges> ranges, size_t block) {
  const py::capsule self(new Hook{std::move(ranges), block}, [](void* hook) { delete static_cast<Hook*>(hook); });
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&method, self.ptr(), py::str("aorta.instrument.native.ranges").ptr()));
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
py::object hook(const char* name, std::shared_ptr<Ranges> ranges, size_t block = 0) {
  static PyMethodDef method{name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr};
  return as_hook(method, std::move(ranges), block);
}

}  // namespace aorta

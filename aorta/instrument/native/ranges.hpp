// When blocks computed and a backward pass ended, marked without Python, on the host's clock or a device's: forward hooks on
// modules, as C functions, and hooks on the nodes of their graph; and what C functions of Python share.
//
// The same as `aorta/instrument/row_ranges.py` does (docs/dev/measuring.md, R5): hooks notify `Ranges`, and block passes and
// ends of backward passes become rows. Must not change a gradient, or touch a Python object in a backward pass.

#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "step.hpp"

namespace aorta {

using torch::autograd::Engine;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

class Ranges : public std::enable_shared_from_this<Ranges> {
 public:
  explicit Ranges(std::shared_ptr<Step> step) : step_(std::move(step)) {}

  // Begin a step, or record nothing until the next one begins; what is open has no end.
  void record(bool open) {
    const std::lock_guard<std::mutex> held(mutex_);
    open_ = open;
    for (auto& block : blocks_) {
      block.forward.clear();
      block.backward.reset();
    }
  }

  // Observe from here on, in steps that are observed, or nothing more; hooks already in a graph count too.
  void look(bool on) { looking_.store(on, std::memory_order_release); }

  Step& step() const { return *step_; }

  bool looks() const { return looking_.load(std::memory_order_acquire) && step_->observes(); }

  // `name`: its number in the ring.
  size_t add_block(uint16_t name) {
    const std::lock_guard<std::mutex> held(mutex_);
    blocks_.push_back({name});
    return blocks_.size() - 1;
  }

  void begin_forward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded()) {
      blocks_[block].forward.push_back(opened(blocks_[block], false));
    }
  }

  void end_forward(size_t block, int64_t at_ns) {
    const std::lock_guard<std::mutex> held(mutex_);
    auto& passes = blocks_[block].forward;
    if (!passes.empty()) {
      step_->end_span(passes.back(), at_ns);
      passes.pop_back();
    }
  }

  void begin_backward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded() && !blocks_[block].backward) {
      blocks_[block].backward = opened(blocks_[block], true);
    }
  }

  void end_backward(size_t block, int64_t at_ns) {
    const std::lock_guard<std::mutex> held(mutex_);
    close_backward(blocks_[block], at_ns);
  }

  // A gradient reached a module whose backward passes are watched: queue a callback of the engine after the last node,
  // once per pass. Passes are compared by id: one that failed never ends, and must not hide the next one.
  void gradient_came() {
    const int pass = torch::autograd::get_current_graph_task_id();
    if (looks() && asked_in_.exchange(pass) != pass) {
      step_->add_watched(1);
      Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->nodes_ran(); });
    }
  }

 private:
  // Runs before the strategy's own callback, which was queued later; queues a second one that runs after it.
  void nodes_ran() {
    const Own own(*step_);
    int64_t begin = 0;
    {
      const std::lock_guard<std::mutex> held(mutex_);
      for (auto& block : blocks_) {
        close_backward(block, own.since_ns());
      }
      begin = moment();
    }
    Engine::get_default_engine().queue_callback([self = shared_from_this(), begin] {
      const Own own(*self->step_);
      int64_t end = 0;
      {
        const std::lock_guard<std::mutex> held(self->mutex_);
        end = self->moment();
        if (self->open_) {
          self->step_->append({Kind::TAIL}, begin, end);
        } else {
          self->step_->drop(begin, end);
        }
      }
      self->step_->settle(self->step_->marks() ? now_ns() : end);
      self->step_->add_watched(-1);
    });
  }

  bool recorded() const { return open_ && looks(); }

  // Rows of its passes that are open.
  struct Block {
    uint16_t name;
    std::optional<int64_t> backward;
    std::vector<int64_t> forward;
  };

  int64_t opened(const Block& block, bool backward) {
    return step_->begin_span({Kind::PASS, backward ? flag::BACKWARD : uint8_t{0}, 0, 0, 0, block.name}, now_ns());
  }

  void close_backward(Block& block, int64_t at_ns) {
    if (block.backward) {
      step_->end_span(*block.backward, at_ns);
      block.backward.reset();
    }
  }

  // None of the device outside of steps.
  int64_t moment() const { return step_->marks() && !open_ ? NO_MARK : step_->moment(); }

  const std::shared_ptr<Step> step_;
  std::atomic<bool> looking_{false};
  std::atomic<int> asked_in_{-1};
  std::mutex mutex_;
  bool open_ = false;
  std::vector<Block> blocks_;
};

template <typename Object>
Object& object_of(PyObject* capsule) {
  return *static_cast<Object*>(PyCapsule_GetPointer(capsule, nullptr));
}

// C functions of one object, which ends with the last of them.
template <typename Object, size_t count>
py::tuple functions_of(std::unique_ptr<Object> object, std::array<PyMethodDef, count>& methods) {
  const py::capsule self(object.release(), [](void* held) { delete static_cast<Object*>(held); });
  py::tuple functions(count);
  for (size_t at = 0; at < count; ++at) {
    functions[at] = py::reinterpret_steal<py::object>(PyCFunction_New(&methods[at], self.ptr()));
  }
  return functions;
}

// Numbers among the arguments of a function; where one is none, an error is set.
template <size_t count>
std::array<int64_t, count> words_of(PyObject* const* arguments) {
  std::array<int64_t, count> words{};
  std::transform(arguments, arguments + count, words.begin(), PyLong_AsLongLong);
  return words;
}

inline PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(function);
}

// What a function of Python returns; an exception is its error. Without torch's buffer for warnings, which takes longer
// than what these functions do.
template <typename Call>
PyObject* returned_by(const Call& call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

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

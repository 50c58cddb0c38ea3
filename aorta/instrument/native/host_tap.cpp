// Collectives of CPU tensors, seen at the dispatcher and timed without Python: no interpreter lock, and no interpreter.
//
// The same as `aorta/instrument/seam.py` and `collectives.py` do (docs/measuring.md, R1 and R6), for the case that is
// nothing but host time. Enters: calls of `c10d::*` operators. Leaves: what each was, when it was issued, when it ended
// and when its caller stood waiting, for Python to take once a step. Must not: touch a Python object on a backend's
// thread; wait for a backend's work more than once, or without being asked.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "hooks.hpp"
#include "intervals.hpp"
#include "ranges.hpp"
#include "step.hpp"
#include "told.hpp"

namespace {

using aorta::Collective;
using aorta::End;
using aorta::Future;
using aorta::Noted;
using aorta::now_ns;
using aorta::Step;
using aorta::TimedWork;
using c10::IValue;
using c10d::ProcessGroup;
using c10d::Work;

// What an operator's schema and `operators.py` say about it.
struct Operator {
  std::string kind;
  int64_t group_at;
  std::optional<int64_t> argument;  // holds the full array; none for operators that move none
  bool one_part;                    // only the root is given the full array
  bool coalesced;                   // several tensors share one work handle
  bool point_to_point;
};

int64_t bytes_in(const IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().numel() * value.toTensor().element_size();
  }
  int64_t sum = 0;
  for (const IValue& item : value.toListRef()) {
    sum += bytes_in(item);
  }
  return sum;
}

const at::Tensor* first_tensor(c10::ArrayRef<IValue> values) {
  for (const IValue& value : values) {
    const at::Tensor* found = nullptr;
    if (value.isTensor()) {
      found = value.toTensor().defined() ? &value.toTensor() : nullptr;
    } else if (value.isList()) {
      found = first_tensor(value.toListRef());
    }
    if (found != nullptr) {
      return found;
    }
  }
  return nullptr;
}

// The name of a collective in torch.profiler's trace (`labels.py`), while a profiler is on.
class Label {
 public:
  Label(const Operator& op, const Collective& collective) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      text_ = "comm:" + op.kind + "#" + std::to_string(collective.seq) + " group=" + collective.group;
      scope_.emplace(std::move(*callbacks));
      scope_->before(std::string_view(text_));
    }
  }

 private:
  std::string text_;  // outlives the scope, which looks at it
  std::optional<at::RecordFunction> scope_;
};

class Tap;

// Between the dispatcher's BackendSelect key and the backend, for one operator.
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(std::shared_ptr<Tap> tap, size_t index) : tap_(std::move(tap)), index_(index) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);

 private:
  const std::shared_ptr<Tap> tap_;
  const size_t index_;
};

// Counts collectives for as long as it lives; looks at them while it is open.
class Tap : public std::enable_shared_from_this<Tap> {
 public:
  Tap(const std::vector<std::pair<std::string, Operator>>& operators, int64_t enqueue_ns, py::function on_group)
      : operators_(operators), enqueue_ns_(enqueue_ns), on_group_(std::move(on_group)) {}

  // The last to hold it may be a thread without the interpreter lock.
  ~Tap() {
    if (!Py_IsInitialized()) {
      on_group_.release();
      return;
    }
    const py::gil_scoped_acquire interpreter;
    on_group_ = py::function();
  }

  void open() {
    library_.emplace(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    try {
      for (size_t index = 0; index < operators_.size(); ++index) {
        library_->impl(
            operators_[index].first.c_str(),
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(shared_from_this(), index)));
      }
    } catch (...) {
      library_.reset();
      throw;
    }
  }

  void close() { library_.reset(); }

  const std::shared_ptr<Step>& step() const { return step_; }

  void begin() { step_->begin(); }

  // What happened since `begin`; nothing more is noted down. Python is told of it when there is time (`rows_of`).
  std::unique_ptr<Noted> end() {
    auto [collectives, stalls] = step_->end();
    return std::make_unique<Noted>(Noted{std::move(collectives), std::move(stalls)});
  }

  void collective(size_t index, const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    const Operator& op = operators_[index].second;
    const auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
    Group& group = group_of(arguments[op.group_at].toCustomClass<ProcessGroup>());
    const Collective row = issued(index, group, arguments);
    {
      const Label label(op, row);
      handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    if (const int64_t returned_ns = now_ns(); returned_ns - row.issue_ns > enqueue_ns_) {
      step_->stall(row.issue_ns, returned_ns);
    }
    IValue& result = stack->back();
    auto work = result.isNone() ? c10::intrusive_ptr<Work>() : result.toCustomClass<Work>();
    if (!work) {  // it is over, and there is nothing to wait for
      row.end->stamp(End::WAIT);
      return;
    }
    notice_end(index, group, row, *work);
    result = IValue(c10::intrusive_ptr<Work>(c10::make_intrusive<TimedWork>(std::move(work), row.end, step_)));
  }

 private:
  using Counts = std::unordered_map<std::string, int64_t>;  // by kind for sends and receives, else under ""

  struct Group {
    c10::weak_intrusive_ptr<ProcessGroup> pinned;  // weak: it may go, but its address is not given to another
    std::string name;
    int64_t size;
    std::shared_ptr<Counts> counts;  // of its name, as ranks match them, whichever group bears it
    std::vector<bool> futureless;    // by operator
  };

  Collective issued(size_t index, Group& group, c10::ArrayRef<IValue> arguments) {
    const Operator& op = operators_[index].second;
    const at::Tensor* tensor = first_tensor(arguments);
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor == nullptr || tensor->is_cpu(), "a collective of device tensors in a run on the CPU");
    Collective row{index, group.name, 0, 0, std::nullopt, 0, 1, std::make_shared<End>()};
    if (op.argument) {
      row.bytes = bytes_in(arguments[*op.argument]) * (op.one_part ? group.size : 1);
      if (tensor != nullptr) {
        row.dtype = tensor->scalar_type();
      }
    }
    if (op.coalesced) {
      row.waiters = static_cast<int64_t>(arguments[0].toListRef().size());
    }
    const std::lock_guard<std::mutex> held(counts_mutex_);
    step_->issue(row, (*group.counts)[op.point_to_point ? op.kind : ""]);
    return row;
  }

  Group& group_of(const c10::intrusive_ptr<ProcessGroup>& group) {
    {
      const std::lock_guard<std::mutex> held(groups_mutex_);
      const auto found = groups_.find(group.get());
      if (found != groups_.end()) {
        return found->second;  // stays where it is, whatever is put in beside it
      }
    }
    // Asked for without the lock: a group implemented in Python takes the interpreter's.
    const std::string name = group->getGroupName();
    const int64_t size = group->getSize();
    {
      const py::gil_scoped_acquire interpreter;
      on_group_(group);
    }
    const std::lock_guard<std::mutex> held(groups_mutex_);
    auto& counts = counts_.try_emplace(name, std::make_shared<Counts>()).first->second;
    Group fresh{
        c10::weak_intrusive_ptr<ProcessGroup>(group), name, size, counts, std::vector<bool>(operators_.size())};
    return groups_.try_emplace(group.get(), std::move(fresh)).first->second;
  }

  // By the backend's future. Where it has none the caller's wait is all there is; asked for in vain once for each
  // operator of a group, since the answer is an exception.
  void notice_end(size_t index, Group& group, const Collective& row, Work& work) {
    {
      const std::lock_guard<std::mutex> held(groups_mutex_);
      if (group.futureless[index]) {
        return;
      }
    }
    try {
      const auto future = work.getFuture();
      row.end->watch(future);
      // uses_future=false: it is not looked at, so no stream is switched for the callback.
      future->addCallback([end = row.end](Future&) { end->called_back(); }, /*uses_future=*/false);
    } catch (const std::exception&) {
      const std::lock_guard<std::mutex> held(groups_mutex_);
      group.futureless[index] = true;
    }
  }

  const std::vector<std::pair<std::string, Operator>> operators_;
  const int64_t enqueue_ns_;
  py::function on_group_;
  const std::shared_ptr<Step> step_ = std::make_shared<Step>();
  std::mutex groups_mutex_;
  std::unordered_map<const ProcessGroup*, Group> groups_;
  std::unordered_map<std::string, std::shared_ptr<Counts>> counts_;
  std::mutex counts_mutex_;
  std::optional<torch::Library> library_;
};

void Kernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // The tap may be closed, and this kernel with it, before the backend has answered.
  const auto tap = tap_;
  tap->collective(index_, op, stack);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::class_<End, std::shared_ptr<End>>(module, "End")
      .def("ended", [](const End& end) -> std::optional<std::pair<int64_t, const char*>> {
        const int64_t both = end.both();
        if (both == 0) {
          return std::nullopt;
        }
        return std::make_pair(End::moment_ns(both), End::source(both) == End::WAIT ? "wait" : "future");
      });
  pybind11::class_<Operator>(module, "Operator")
      .def(
          pybind11::init<std::string, int64_t, std::optional<int64_t>, bool, bool, bool>(),
          pybind11::arg("kind"),
          pybind11::arg("group_at"),
          pybind11::arg("argument"),
          pybind11::arg("one_part"),
          pybind11::arg("coalesced"),
          pybind11::arg("point_to_point"));
  pybind11::class_<Tap, std::shared_ptr<Tap>>(module, "Tap")
      .def(pybind11::init<const std::vector<std::pair<std::string, Operator>>&, int64_t, py::function>())
      .def("open", &Tap::open)
      .def("close", &Tap::close)
      .def("begin", &Tap::begin)
      .def("end", &Tap::end);
  pybind11::class_<Noted>(module, "Noted").def("rows", &aorta::rows_of);
  module.def("issued_by", &aorta::issued_by);

  using aorta::Ranges;
  pybind11::class_<aorta::Passes>(module, "Passes").def("rows", &aorta::passes_of);
  pybind11::class_<Ranges, std::shared_ptr<Ranges>>(module, "Ranges")
      .def(pybind11::init([](const Tap& tap) { return std::make_shared<Ranges>(tap.step()); }))
      .def("begin", &Ranges::begin)
      .def("end", &Ranges::end)
      .def("look", &Ranges::look)
      .def("ignore", &Ranges::ignore)
      .def("add_block", &Ranges::add_block)
      .def("before_forward", [](std::shared_ptr<Ranges> ranges, size_t block) {
        return aorta::hook<aorta::before_forward>("before_forward", std::move(ranges), block);
      })
      .def("after_forward", [](std::shared_ptr<Ranges> ranges, size_t block) {
        return aorta::hook<aorta::after_forward>("after_forward", std::move(ranges), block);
      })
      .def("after_watched_forward", [](std::shared_ptr<Ranges> ranges) {
        return aorta::hook<aorta::after_watched_forward>("after_watched_forward", std::move(ranges));
      });

  aorta::define_algebra(module);
}

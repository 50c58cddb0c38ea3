// Intercepts collectives at the dispatcher and times them without Python: no interpreter lock, and no interpreter.
//
// On a CPU the same as `aorta/instrument/dispatcher.py` and `python_interceptor.py` do, without an emulated fabric, and all there is
// on a device (docs/dev/measuring.md, R1 to R3 and R6). Of each call of a `c10d::*` operator rows say what it was, when
// it was issued, when it ended and when its caller was blocked. Must not touch a Python
// object on a backend's thread; wait for a backend's work more than once, or unless the caller does.

#include <type_traits>
#include <unordered_map>

#include <ATen/record_function.h>
#include <c10/util/FunctionRef.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "copies.hpp"
#include "loop.hpp"

namespace aorta {
namespace {

using c10::IValue;
using c10d::ProcessGroup;

// Of an argument, if an operator has it.
using Position = std::optional<int64_t>;

// An operator as its schema and `operators.py` describe it.
struct Operator {
  std::string name;
  std::string kind;
  int64_t group_at;
  Position argument;  // the full array; none for operators that move none
  bool one_part;      // only the root is given the full array
  bool point_to_point;
  bool stacks;        // the backend may stack a list of tensors in one of its own
  Position async_at;  // the flag for asynchronous calls; none: always asynchronous
  Position peer_at;   // the other rank of a send or a receive
};

// A function of Python whose last reference may be dropped by a thread without the interpreter lock, or outlive the
// interpreter, and is never freed then.
std::shared_ptr<py::function> kept(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            if (Py_IsInitialized() != 0) {
              const py::gil_scoped_acquire interpreter;
              delete held;
            }
          }};
}

// Calls `visit` with each tensor of an argument, also in nested lists.
template <class Visit>
void visit_tensors(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) {
      visit_tensors(item, visit);
    }
  }
}

// Make the current stream wait for a work's future; false where that orders nothing, or a wait would block the host.
bool wait_for_future(Work& work) {
  c10::intrusive_ptr<Future> future;
  try {
    future = work.getFuture();
  } catch (const std::exception&) {  // this backend has none
    return false;
  }
  if (!future || !future->completed() || future->storages().empty()) {
    return false;
  }
  future->wait();
  return true;
}

// The name of a collective in torch.profiler's trace (`backend_calls.labelled`), while a profiler is on.
class Label {
 public:
  Label(const Operator& op, int64_t seq, const std::string& group) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      text_ = "comm:" + op.kind + "#" + std::to_string(seq) + " group=" + group;
      scope_.emplace(std::move(*callbacks));
      scope_->before(std::string_view(text_));
    }
  }

 private:
  std::string text_;  // outlives the scope, which references it
  std::optional<at::RecordFunction> scope_;
};

// Counts collectives for as long as it lives; intercepts them while it is open.
class Tap : public std::enable_shared_from_this<Tap> {
 public:
  // `on_group` is called with each new group, and returns its `on_device`, `early`, `shared` and its number in `ring`.
  Tap(std::vector<Operator> operators,
      int64_t enqueue_ns,
      py::function on_group,
      std::shared_ptr<Device> device,
      const std::shared_ptr<Ring>& ring)
      : operators_(std::move(operators)),
        enqueue_ns_(enqueue_ns),
        on_group_(kept(std::move(on_group))),
        device_(std::move(device)),
        device_key_(
            device_ ? c10::computeDispatchKey(std::nullopt, std::nullopt, device_->clock()->device())
                    : c10::DispatchKey::CPU),
        step_(std::make_shared<Step>(
            ring, device_ ? std::make_shared<Marks>(device_->clock(), ring) : nullptr)) {}

  void open() {
    library_.emplace(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    try {
      for (size_t index = 0; index < operators_.size(); ++index) {
        if (!open_typed(index)) {
          library_->impl(
              operators_[index].name.c_str(),
              torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(shared_from_this(), index)));
        }
      }
      if (device_) {
        copies_ = watch_copies(device_, step_);
        lookout_.emplace(step_->marks());
      }
    } catch (...) {
      close();
      throw;
    }
  }

  void close() {
    lookout_.reset();
    copies_.reset();
    library_.reset();
  }

  const std::shared_ptr<Step>& step() const { return step_; }

  // How many collectives were captured into a graph since the last call.
  int64_t take_captured() { return captured_.exchange(0); }

  void collective(size_t index, const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    const Operator& op = operators_[index];
    const size_t count = handle.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    Call call{index, arguments[op.group_at].toCustomClass<ProcessGroup>()};
    for (int64_t at = 0; at < static_cast<int64_t>(count); ++at) {
      if (at == op.argument || call.tensor == nullptr) {
        visit_tensors(arguments[at], [&](const at::Tensor& tensor) { call.add(tensor, at == op.argument); });
      }
    }
    call.asynchronous = !op.async_at || arguments[*op.async_at].toBool();
    call.peer = op.peer_at ? arguments[*op.peer_at].toInt() : Ring::NO_PEER;
    const c10::DispatchKeySet key = key_of(call);
    const auto backend = [&](bool synchronously) {
      if (synchronously) {
        torch::jit::peek(*stack, *op.async_at, count) = IValue(false);
      }
      handle.redispatchBoxed(key, stack);
      const IValue& result = stack->back();
      return result.isNone() ? c10::intrusive_ptr<Work>() : result.toCustomClass<Work>();
    };
    const auto boxed = [&] { return std::vector<IValue>(arguments.begin(), arguments.end()); };
    if (auto work = intercepted(call, boxed, backend)) {
      stack->back() = IValue(std::move(work));
    }
  }

  // The same where the compiler knows the operator's signature, so that nothing is boxed for a collective on the host.
  template <class Result, class... Arguments>
  Result typed_collective(
      size_t index, const c10::TypedOperatorHandle<Result(Arguments...)>& handle, Arguments... arguments) {
    const Operator& op = operators_[index];
    Call call{index};
    int64_t at = 0;
    const auto look = [&](const auto& argument) {
      using Given = std::decay_t<decltype(argument)>;
      if constexpr (std::is_same_v<Given, c10::intrusive_ptr<ProcessGroup>>) {
        call.group = argument;
      } else if constexpr (std::is_same_v<Given, at::Tensor> || std::is_same_v<Given, at::TensorList>) {
        const at::TensorList tensors(argument);
        for (const at::Tensor& tensor : tensors) {
          call.add(tensor, at == op.argument);
        }
      } else if constexpr (std::is_same_v<Given, bool>) {
        call.asynchronous = at == op.async_at ? argument : call.asynchronous;
      }
      ++at;
    };
    (look(arguments), ...);
    std::optional<Result> result;
    const auto backend = [&](bool /*synchronously*/) {
      result.emplace(handle.redispatch(key_of(call), arguments...));
      return std::get<1>(*result);
    };
    const auto boxed = [&] { return c10::impl::boxArgs<Arguments...>(arguments...); };
    if (auto work = intercepted(call, boxed, backend)) {
      std::get<1>(*result) = std::move(work);
    }
    return std::move(*result);
  }

  // The backend starts to coalesce operations into one launch.
  void batch_begins(const c10::intrusive_ptr<ProcessGroup>& process_group) {
    Group& group = group_of(process_group);
    if (group.on_device) {
      group.batch = std::make_shared<Batch>(step_);
    }
  }

  // `launch` is the backend's; returns its work, or the handle that wraps it.
  c10::intrusive_ptr<Work> batch_ends(
      const c10::intrusive_ptr<ProcessGroup>& process_group,
      const std::function<c10::intrusive_ptr<Work>()>& launch) {
    Group& group = group_of(process_group);
    const auto batch = std::exchange(group.batch, nullptr);
    if (!batch || batch->spans.empty()) {
      return launch();
    }
    Own own(*step_);
    const int64_t number = launches_++;
    c10::intrusive_ptr<Work> work;
    device_->stalling(*step_, batch->last, [&] {
      for (const auto& span : batch->spans) {
        span->is_part_of(number);
        span->begins(marked());
      }
      work = own.without(launch);
      if (!work) {  // synchronous: on the caller's stream
        ended(batch->spans);
      }
      return !work;
    });
    if (!work) {
      return work;
    }
    const auto side = device_->side("beside " + group.name);
    if (!side || batch->stacks) {
      for (const auto& span : batch->spans) {
        span->has_no_end(side ? Untimed::STACKED_IN_A_BATCH : Untimed::NO_STREAM);
      }
      return work;
    }
    auto held = waited_beside(*side, *work, batch->spans, std::move(batch->tensors));
    return c10::make_intrusive<DeviceWork>(std::move(work), step_, batch->last, device_, nullptr, std::move(held));
  }

 private:
  // The kernel of one operator, between the dispatcher's BackendSelect key and the backend.
  struct Kernel final : c10::OperatorKernel {
    Kernel(std::shared_ptr<Tap> tap, size_t index) : tap(std::move(tap)), index(index) {}
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
      const auto kept = tap;  // the interceptor may be closed, and this kernel with it, before the backend returns
      kept->collective(index, op, stack);
    }
    const std::shared_ptr<Tap> tap;
    const size_t index;
  };

  // Runs the backend's own operator, synchronously if asked to. What follows is compiled once, and not for each operator: it
  // is then more often in the processor's caches.
  using Backend = c10::function_ref<c10::intrusive_ptr<Work>(bool)>;

  // What the arguments of one call say. `tensor`: the first one, if there is any; `bytes`: of what the operator moves.
  struct Call {
    size_t index;
    c10::intrusive_ptr<ProcessGroup> group;
    const at::Tensor* tensor = nullptr;
    int64_t bytes = 0;
    bool asynchronous = true;
    int64_t peer = Ring::NO_PEER;

    void add(const at::Tensor& given, bool is_moved) {
      tensor = tensor == nullptr && given.defined() ? &given : tensor;
      bytes += is_moved ? given.numel() * static_cast<int64_t>(given.element_size()) : 0;
    }
    bool on_host() const { return tensor != nullptr && tensor->is_cpu(); }
  };

  c10::DispatchKeySet key_of(const Call& call) const {
    return c10::DispatchKeySet(call.on_host() ? c10::DispatchKey::CPU : device_key_);
  }

  // Kernels without boxes for the collectives of DDP and FSDP, where this torch has the signatures of 2.11 to 2.13; the
  // dispatcher refuses others. False: the boxed kernel is to be used.
  bool open_typed(size_t index) {
    using Group_ = const c10::intrusive_ptr<ProcessGroup>&;
    using Reduce = const c10::intrusive_ptr<c10d::ReduceOp>&;
    using OfList = std::tuple<std::vector<at::Tensor>, c10::intrusive_ptr<Work>>;
    using OfOne = std::tuple<at::Tensor, c10::intrusive_ptr<Work>>;
    using Sparse = const std::optional<at::Tensor>&;
    if (device_ && device_->dedicated_async) {  // its argument is changed where it is boxed
      return false;
    }
    return open_as<OfList, at::TensorList, Group_, Reduce, Sparse, bool, int64_t>(index, "allreduce_") ||
           open_as<OfOne, at::Tensor&, at::Tensor&, Group_, bool, int64_t>(index, "_allgather_base_") ||
           open_as<OfOne, at::Tensor&, at::Tensor&, Group_, Reduce, bool, int64_t>(index, "_reduce_scatter_base_");
  }

  template <class Result, class... Arguments>
  bool open_as(size_t index, const std::string& name) {
    if (operators_[index].name != name) {
      return false;
    }
    try {
      const auto handle = c10::Dispatcher::singleton()
                              .findSchemaOrThrow(("c10d::" + name).c_str(), "")
                              .template typed<Result(Arguments...)>();
      library_->impl(
          name.c_str(),
          torch::CppFunction(
              [tap = shared_from_this(), index, handle](c10::DispatchKeySet, Arguments... arguments) -> Result {
                // The interceptor may be closed, and this kernel with it, before the backend returns.
                const auto kept = tap;
                const auto original = handle;
                return kept->template typed_collective<Result, Arguments...>(index, original, arguments...);
              }));
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  // Returns the handle to give to the caller; none: what the backend gave. `boxed`: returns the arguments.
  c10::intrusive_ptr<Work> intercepted(
      const Call& call, c10::function_ref<std::vector<IValue>()> boxed, Backend backend) {
    if (owner_ != process) {  // its locks may have been held by a thread that the child does not have
      backend(false);
      return nullptr;
    }
    Own own(*step_);
    const Operator& op = operators_[call.index];
    const bool on_host = call.on_host();
    Group& group = group_of(call.group);
    if (device_ && is_capturing(device_->current())) {
      ++captured_;
      own.without([&] { return backend(false); });
      return nullptr;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        device_ || call.tensor == nullptr || on_host, "a collective of device tensors in a run on the CPU");
    // The host waits for a barrier, whatever its backend.
    const bool on_device = call.tensor != nullptr && !on_host && op.argument &&
        (group.on_device || (group.early && !call.asynchronous));
    const Underway underway(step_);
    Collective row = issued(group, call, on_device);
    // In a step that is passed over nobody is told when it has ended. What is moved in the others is moved there too, as they
    // stand for it.
    const bool moves = device_ && device_->dedicated && !op.point_to_point && !group.batch;
    if (on_device && !step_->observes() && !moves) {
      own.without([&] { return backend(false); });
      return nullptr;
    }
    const auto original = [&](bool synchronously) {
      const Label label(op, row.name.seq, group.name);
      return own.without([&] { return backend(synchronously); });
    };
    if (on_device) {
      return on_device_stream(op, group, row, call, boxed(), own, original);
    }
    auto work = original(false);
    if (!device_ && own.since_ns() - row.issue_ns > enqueue_ns_ && step_->holds_up()) {
      step_->ring().sent(row.name.row, false, own.since_ns());
    }
    if (!work) {  // already complete: there is nothing to wait for
      row.end->stamp(End::WAIT);
      if (!device_ && step_->holds_up()) {
        step_->wait(row.name, flag::OVER, row.issue_ns, row.end->both() >> 1);
      }
      return nullptr;
    }
    // The backend's future marks the end, or, without one, only the caller's wait. A missing future is probed once per
    // operator and group, since the answer is an exception.
    if ((on_host || !group.early) && !group.futureless[call.index]) {
      try {
        const auto future = work->getFuture();
        row.end->watch(future);
        // uses_future=false: the callback does not read it, so no stream is switched for it.
        future->addCallback([end = row.end](Future&) { end->called_back(); }, /*uses_future=*/false);
      } catch (const std::exception&) {
        group.futureless[call.index] = true;
      }
    }
    return c10::make_intrusive<TimedWork>(std::move(work), step_, row.name, row.end);
  }

  // The operations that a backend has coalesced so far.
  struct Batch {
    explicit Batch(std::shared_ptr<Step> step) : underway(std::move(step)) {}
    Underway underway;
    std::vector<std::shared_ptr<Span>> spans;
    std::vector<IValue> tensors;
    bool stacks = false;
    Name last;  // stands for all of them: who waits for one waits for the launch
  };

  // How many of a group were issued: collectives, counted under the step's lock, and sends and receives, under their own,
  // by kind, and by kind and peer.
  struct Counts {
    int64_t collectives = 0;
    std::unordered_map<std::string, int64_t> of_pairs;
    std::mutex mutex;
  };

  struct Group {
    c10::weak_intrusive_ptr<ProcessGroup> pinned;  // weak: it may be destroyed, but its address is not reused
    std::string name;
    int64_t size;
    Counts* counts;  // by group name, as ranks match them, whichever object has that name
    std::vector<std::atomic<bool>> futureless;  // by operator
    bool on_device;                  // waiting for its collectives of device tensors blocks the device
    bool early;                      // they complete after their futures do (`dispatcher.ends_on_streams`)
    std::optional<bool> shared;      // `dispatcher.shares_communicator`
    uint16_t number;                 // in the ring
    std::shared_ptr<Batch> batch;    // what is being coalesced, if anything
  };

  Collective issued(Group& group, const Call& call, bool on_device) {
    const Operator& op = operators_[call.index];
    Row row{Kind::COLLECTIVE, 0, static_cast<uint8_t>(call.index), Ring::NO_DTYPE, group.number};
    if (op.argument) {
      row.x = call.bytes * (op.one_part ? group.size : 1);
      if (call.tensor != nullptr) {
        row.dtype = step_->ring().number_of(call.tensor->scalar_type());
      }
    }
    row.b2 = call.peer & Ring::NO_PEER;
    Counts& counts = *group.counts;
    if (!op.point_to_point) {
      return step_->issue(row, counts.collectives, on_device);
    }
    // Also by peer: the two ranks of a pair agree on that alone.
    const std::lock_guard<std::mutex> held(counts.mutex);
    row.b2 |= counts.of_pairs[op.kind + " " + std::to_string(call.peer)]++ << 32;
    return step_->issue(row, counts.of_pairs[op.kind], on_device);
  }

  void ended(const std::vector<std::shared_ptr<Span>>& spans) {
    for (const auto& span : spans) {
      span->ends(marked());
    }
  }

  Mark marked() { return step_->is_open() ? device_->clock()->mark() : NO_MARK; }

  // Let `side` wait for the backend's kernel, and mark the end there. Returns the arguments where the backend has
  // released them. `stacks`: it may be using tensors of its own, which `work.wait()` would release under its kernel.
  std::shared_ptr<Held> waited_beside(
      const c10::Stream& side,
      Work& work,
      const std::vector<std::shared_ptr<Span>>& spans,
      std::vector<IValue> tensors,
      bool stacks = false) {
    const c10::StreamGuard on(side);
    const bool kept = stacks && wait_for_future(work);
    if (!kept) {
      work.wait();  // blocks `side`, not the host; without it the mark would be at the end of the launch (W1)
    }
    ended(spans);
    return kept ? nullptr : device_->hold(std::move(tensors), device_->done(side));
  }

  // A collective of device tensors; returns the handle that wraps the backend's work, if there is one.
  c10::intrusive_ptr<Work> on_device_stream(
      const Operator& op,
      Group& group,
      const Collective& row,
      const Call& call,
      std::vector<IValue> tensors,
      Own& own,
      Backend original) {
    if (group.batch) {  // launched when the batch ends
      group.batch->spans.push_back(row.span);
      group.batch->last = row.name;
      group.batch->stacks = group.batch->stacks || op.stacks;
      group.batch->tensors.insert(group.batch->tensors.end(), tensors.begin(), tensors.end());
      original(false);
      return nullptr;
    }
    const c10::Stream caller = device_->current();
    if (op.point_to_point) {
      std::string key = group.name;
      if (!group.shared.value_or(false)) {
        const int64_t peer = op.peer_at ? call.peer : UNKNOWN;
        row.span->is_run_by(group.shared ? peer : UNKNOWN);
        key += (group.shared ? " " : " " + op.kind + " ") + std::to_string(peer);
      }
      return watched("beside " + key, caller, row, std::move(tensors), /*stacks=*/false, original);
    }
    if (device_->dedicated) {
      if (const auto side = device_->side(group.name)) {
        const bool synchronously = call.asynchronous && device_->dedicated_async && op.async_at;
        return moved(*side, caller, row, std::move(tensors), call.asynchronous, synchronously, original);
      }
    }
    if (call.asynchronous) {
      return watched("beside " + group.name, caller, row, std::move(tensors), op.stacks, original);
    }
    // The backend runs it on the caller's own stream, where two marks bracket it.
    device_->stalling(*step_, row.name, [&] {
      row.span->begins(marked());
      if (const auto work = original(false)) {
        own.without([&] { work->wait(); });
      }
      row.span->ends(marked());
      return true;
    });
    return nullptr;
  }

  // On AORTA's stream (R2), whichever the backend would have used.
  c10::intrusive_ptr<Work> moved(
      const c10::Stream& side,
      const c10::Stream& caller,
      const Collective& row,
      std::vector<IValue> tensors,
      bool asynchronous,
      bool synchronously,
      Backend original) {
    device_->done(caller)->block(side);  // the inputs must be ready (W2)
    c10::intrusive_ptr<Work> work;
    OrderEvents::Lent done;
    {
      const c10::StreamGuard on(side);
      row.span->begins(marked());
      work = original(synchronously);
      if (work) {
        work->wait();
      }
      row.span->ends(marked());
      done = device_->done(side);
      if (!work && asynchronous) {  // as `dedicated_async` asks
        std::vector<at::Tensor> outputs;
        visit_tensors(tensors.front(), [&](const at::Tensor& output) { outputs.push_back(output); });
        work = c10::make_intrusive<IssuedWork>(done, std::move(outputs), device_->clock()->device());
      }
    }
    std::shared_ptr<Held> held;
    if (asynchronous) {
      held = device_->hold(std::move(tensors), done);
    } else {
      // After this wait the caller's stream is in the state it would be in had the backend used it.
      device_->stalling(*step_, row.name, [&] {
        done->block(caller);
        return true;
      });
    }
    if (!work) {
      return work;
    }
    return c10::make_intrusive<DeviceWork>(
        std::move(work), step_, row.name, device_, std::move(done), std::move(held));
  }

  // Left on the backend's stream; AORTA's stream waits for it and records the marks (R3).
  c10::intrusive_ptr<Work> watched(
      const std::string& key,
      const c10::Stream& caller,
      const Collective& row,
      std::vector<IValue> tensors,
      bool stacks,
      Backend original) {
    const auto side = device_->side(key);
    if (!side) {
      row.span->has_no_end(Untimed::NO_STREAM);
      original(false);
      return nullptr;
    }
    device_->done(caller)->block(*side);
    {
      const c10::StreamGuard on(*side);
      row.span->begins(marked());
    }
    auto work = original(false);
    if (!work) {  // the backend used the caller's stream after all
      row.span->ends(marked());
      return work;
    }
    auto held = waited_beside(*side, *work, {row.span}, std::move(tensors), stacks);
    return c10::make_intrusive<DeviceWork>(std::move(work), step_, row.name, device_, nullptr, std::move(held));
  }

  Group& group_of(const c10::intrusive_ptr<ProcessGroup>& group) {
    Group* const latest = latest_.load(std::memory_order_acquire);
    if (latest != nullptr && latest->pinned._unsafe_get_target() == group.get()) {
      return *latest;
    }
    {
      const std::lock_guard<std::mutex> held(groups_mutex_);
      const auto found = groups_.find(group.get());
      if (found != groups_.end()) {
        latest_.store(&found->second, std::memory_order_release);
        return found->second;  // its address is stable under insertion
      }
    }
    // Called without the lock held: a group implemented in Python takes the interpreter lock.
    const std::string name = group->getGroupName();
    const int64_t size = group->getSize();
    const auto [on_device, early, shared, number] = [&] {
      const py::gil_scoped_acquire interpreter;
      return (*on_group_)(group).cast<std::tuple<bool, bool, std::optional<bool>, uint16_t>>();
    }();
    const std::lock_guard<std::mutex> held(groups_mutex_);
    Group fresh{
        c10::weak_intrusive_ptr<ProcessGroup>(group),
        name,
        size,
        &counts_[name],
        std::vector<std::atomic<bool>>(operators_.size()),
        on_device,
        early,
        shared,
        number,
        nullptr};
    return groups_.try_emplace(group.get(), std::move(fresh)).first->second;
  }

  const std::vector<Operator> operators_;
  const int64_t enqueue_ns_;
  const std::shared_ptr<py::function> on_group_;
  const std::shared_ptr<Device> device_;
  const c10::DispatchKey device_key_;
  const pid_t owner_ = process;
  std::atomic<int64_t> captured_{0};
  std::atomic<int64_t> launches_{0};
  const std::shared_ptr<Step> step_;
  std::mutex groups_mutex_;
  std::unordered_map<const ProcessGroup*, Group> groups_;
  std::atomic<Group*> latest_{nullptr};  // most callers ask for the same one again
  std::unordered_map<std::string, Counts> counts_;  // addresses of its values are stable
  std::optional<torch::Library> library_;
  std::shared_ptr<Copies> copies_;
  std::optional<Lookout> lookout_;
};

// How many collectives the backends of each process group have counted, by its identity: `dispatcher.counts_of_groups`.
// Which devices they serve is asked once: that takes longer than their counts. No backend is referenced, not even weakly: its
// destructor, which ends its threads, runs behind its last weak reference.
struct BackendCounts {
  struct Group {
    py::weakref of;
    py::int_ identity;
    ProcessGroup* group;  // alive while `of` is
    std::vector<c10::DeviceType> devices;
  };
  py::module_ c10d;  // `distributed_c10d`
  std::vector<Group> groups{};
  py::str world{"_world"}, map{"pg_map"}, own_map{"_pg_map"};
  PyTypeObject* own_world = of_own_map();

  // The class whose map is the module's own, which is read without a call of Python; none in a torch that has no such map.
  PyTypeObject* of_own_map() const {
    const py::object now = c10d.attr(world);
    const bool is_own = py::hasattr(c10d, own_map) && now.attr(map).is(c10d.attr(own_map));
    return is_own ? Py_TYPE(now.ptr()) : nullptr;
  }

  py::dict groups_now() const {
    const py::object now = c10d.attr(world);
    return Py_TYPE(now.ptr()) == own_world ? c10d.attr(own_map) : now.attr(map);
  }

  void learn(const py::dict& now) {
    groups.clear();
    for (const auto& [object, _] : now) {
      auto& known = groups.emplace_back(Group{py::weakref(object), reinterpret_cast<uintptr_t>(object.ptr()), nullptr, {}});
      try {
        known.group = object.cast<c10::intrusive_ptr<ProcessGroup>>().get();
        for (const c10::Device& device : known.group->getDeviceTypes()) {
          known.devices.push_back(device.type());
        }
      } catch (const std::exception&) {
        known.devices.clear();
      }
    }
  }

  // None where a backend keeps no count.
  static std::optional<uint64_t> sum(const Group& known) {
    uint64_t sum = 0;
    std::vector<const c10d::Backend*> counted;  // one may serve several devices
    try {
      for (const c10::DeviceType device : known.devices) {
        const auto backend = known.group->getBackend(device);
        if (std::find(counted.begin(), counted.end(), backend.get()) == counted.end()) {
          counted.push_back(backend.get());
          sum += backend->getSequenceNumberForGroup();
        }
      }
    } catch (const std::exception&) {
      return std::nullopt;
    }
    return counted.empty() ? std::nullopt : std::optional(sum);
  }

  static PyObject* now(PyObject* self, PyObject* /*none*/) {
    return returned_by([self] {
      BackendCounts& seen = object_of<BackendCounts>(self);
      const py::dict now = seen.groups_now();
      const auto is_known = [](const Group& group, const auto& item) {
        return py::reinterpret_steal<py::object>(PyObject_CallNoArgs(group.of.ptr())).is(item.first);
      };
      if (seen.groups.size() != now.size() || !std::equal(seen.groups.begin(), seen.groups.end(), now.begin(), is_known)) {
        seen.learn(now);
      }
      py::dict counts;
      for (const Group& group : seen.groups) {
        counts[group.identity] = sum(group);
      }
      return counts.release().ptr();
    });
  }
};

py::object counts_function(py::module_ c10d) {
  static std::array<PyMethodDef, 1> methods{{{"counts_of_groups", BackendCounts::now, METH_NOARGS, nullptr}}};
  return functions_of(std::make_unique<BackendCounts>(BackendCounts{std::move(c10d)}), methods)[0];
}

}  // namespace
}  // namespace aorta

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace aorta;
  ::pthread_atfork(nullptr, nullptr, [] { process = ::getpid(); });
  module.def("why_not_served", &why_not_served);
  module.def("use_clock", [](uintptr_t address) { other_clock = reinterpret_cast<int64_t (*)()>(address); });
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  pybind11::class_<DeviceClock, std::shared_ptr<DeviceClock>>(module, "DeviceClock")
      .def(pybind11::init<c10::Device>(), Unlocked())
      .def("mark", &DeviceClock::mark)
      .def("new_epoch", &DeviceClock::new_epoch)
      .def("read_ns", &DeviceClock::read_ns)
      .def("sent_ns", &DeviceClock::sent_ns)
      .def("bound_ns", &DeviceClock::bound_ns)
      .def("release", &DeviceClock::release)
      .def("facts", &DeviceClock::facts, Unlocked())
      .def("events", &DeviceClock::events);
  pybind11::class_<Device, std::shared_ptr<Device>>(module, "Device")
      .def(pybind11::init([](std::shared_ptr<DeviceClock> clock, bool dedicated, bool all, py::function priority) {
        return std::make_shared<Device>(std::move(clock), dedicated, all, [held = kept(std::move(priority))] {
          const py::gil_scoped_acquire interpreter;
          return (*held)().cast<int>();
        });
      }))
      .def("begin", &Device::begin)
      .def("take_joined", &Device::take_joined);
  pybind11::class_<Operator>(module, "Operator")
      .def(pybind11::init<std::string, std::string, int64_t, Position, bool, bool, bool, Position, Position>());
  pybind11::class_<Tap, std::shared_ptr<Tap>>(module, "Tap")
      .def(pybind11::init<std::vector<Operator>, int64_t, py::function, std::shared_ptr<Device>, std::shared_ptr<Ring>>())
      .def("open", &Tap::open)
      .def("close", &Tap::close)
      .def("take_captured", &Tap::take_captured)
      .def("batch_begins", &Tap::batch_begins, Unlocked())
      .def("batch_ends", &Tap::batch_ends, Unlocked())
      .def("step", &Tap::step);
  pybind11::class_<Step, std::shared_ptr<Step>>(module, "Step")
      .def("abandon", [](Step& step) { return step.end(/*abandoned=*/true).count; })
      .def("wait_for_stream", &Step::wait_for_stream)
      .def("marks", &Step::marks);
  pybind11::class_<Name>(module, "Name");
  pybind11::class_<Marks, std::shared_ptr<Marks>>(module, "Marks")
      .def("settle", &Marks::settle)
      .def("append", [](Marks& marks, int64_t kind, Mark begin, Mark end) {
        return marks.append({static_cast<Kind>(kind)}, begin, end);
      });
  pybind11::class_<Ring, std::shared_ptr<Ring>>(module, "Ring")
      .def(pybind11::init<int, uintptr_t, size_t, size_t, size_t, const Ring::Types&, const Ring::Layout&>())
      .def("enter_function", &enter_function)
      .def("time_step", &Ring::time_step);
  module.def("counts_function", &counts_function);

  pybind11::class_<Ranges, std::shared_ptr<Ranges>>(module, "Ranges")
      .def(pybind11::init<std::shared_ptr<Step>>())
      .def("record", &Ranges::record)
      .def("loop", &loop_functions)
      .def("look", &Ranges::look)
      .def("add_block", &Ranges::add_block)
      .def("hooks_of", &hooks_of);
}

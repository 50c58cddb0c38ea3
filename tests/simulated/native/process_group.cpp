// ProcessGroupNCCL's contract on the simulated device. See process_group.hpp.
#include "process_group.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "contention.hpp"
#include "operators.hpp"

namespace sim {
namespace {

constexpr auto COLLECTIVES = "collectives";
constexpr int COLLECTIVE_LANE = 0;
constexpr auto BUSY_WAIT = std::chrono::milliseconds(1);

class SimulatedWork final : public c10d::Work {
 public:
  SimulatedWork(int rank, c10d::OpType type) : Work(rank, type) {}
  Stream* stream = nullptr;
  SharedMoment done;  // none while its kernel waits for the end of coalescing: it then orders nothing, as with NCCL
  std::shared_ptr<Shelf> shelf = std::make_shared<Shelf>();
  std::shared_ptr<Failure> failure, group_failure;
  std::shared_ptr<Link> link;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  Tensors outputs;
  uint64_t sequence = 0;
  bool is_barrier = false, blocking = false;

  bool isCompleted() override { return poll(done); }
  bool isSuccess() const override { return failure == nullptr || failure->get().empty(); }
  std::exception_ptr exception() const override {
    const auto said = failure == nullptr ? std::string() : failure->get();
    if (said.empty()) return nullptr;
    return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, said));
  }
  void synchronize() override {
    current_stream(stream->device).wait(done);
    shelf->unstash();  // behind the wait, so that the allocator may hand the bytes out again
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (blocking || timeout != kNoTimeout) {
      wait_on_the_host(timeout);
    } else if (is_barrier) {
      synchronize_stream(current_stream(stream->device), "barrier", /*by_operator=*/true);
    }
    if (auto error = exception()) {
      // As NCCL does, so that nothing waits for the others any more.
      group_failure->set(failure->get());
      link->abort();
      std::rethrow_exception(error);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  std::vector<at::Tensor> result() override { return outputs; }
  uint64_t getSequencenumber() const override { return sequence; }

 private:
  void wait_on_the_host(std::chrono::milliseconds timeout) {
    if (done == nullptr) return;
    const HostWait waits([&] { return done->query(); });
    const auto limit = std::chrono::steady_clock::now() + timeout;
    while (!done->query()) {
      if (timeout != kNoTimeout && std::chrono::steady_clock::now() > limit) {
        failure->set("the work timed out in a blocking wait");
        return;
      }
      std::this_thread::sleep_for(BUSY_WAIT);
    }
    synchronize_moment(done, "work", /*by_operator=*/false);
  }
};

bool environment_says(const char* name) {
  const char* said = std::getenv(name);
  return said != nullptr && (std::strcmp(said, "1") == 0 || std::strcmp(said, "true") == 0);
}

int64_t bytes_of_all(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& one : tensors) bytes += bytes_of(one);
  return bytes;
}

bool of_one_size(const Tensors& list) {
  return std::all_of(list.begin(), list.end(), [&](const at::Tensor& one) { return one.sizes() == list[0].sizes(); });
}

at::Tensor stack_of(const Tensors& list) {
  auto sizes = list.at(0).sizes().vec();
  sizes.insert(sizes.begin(), static_cast<int64_t>(list.size()));
  return at::empty(sizes, list[0].options());
}

Tensors flattened(const std::vector<Tensors>& lists) {
  Tensors made;
  for (const auto& list : lists) made.insert(made.end(), list.begin(), list.end());
  return made;
}

}  // namespace

// ---- small parts ----------------------------------------------------------------------------------------------------
void Shelf::stash(const Tensors& more) {
  std::lock_guard<std::mutex> held(mutex);
  tensors.insert(tensors.end(), more.begin(), more.end());
}
void Shelf::unstash() {
  Tensors gone;
  std::lock_guard<std::mutex> held(mutex);
  gone.swap(tensors);
}
void Failure::set(const std::string& what) {
  std::lock_guard<std::mutex> held(mutex);
  if (said.empty()) said = what;
}
std::string Failure::get() {
  std::lock_guard<std::mutex> held(mutex);
  return said;
}

SimulatedNccl::SimulatedNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                             c10::intrusive_ptr<Options> options, MakeInner make_inner)
    : Backend(rank, size), options_(std::move(options)), store_(std::move(store)), make_inner_(std::move(make_inner)) {
  auto inner = size == 1 ? nullptr
                         : make_inner_(c10::make_intrusive<c10d::PrefixStore>("simulated", store_), rank, size,
                                       options_->timeout);
  link_ = std::make_shared<Link>(std::move(inner), rank, size);
  blocking_wait_ = environment_says("TORCH_NCCL_BLOCKING_WAIT");
  setGroupUid(options_->group_name);
}

c10::intrusive_ptr<c10d::Backend> SimulatedNccl::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::vector<int>& ranks,
                                                       const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  ++splits_;
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  auto given = c10::dynamic_intrusive_pointer_cast<Options>(options);
  TORCH_CHECK(given != nullptr, "a group is split with ProcessGroupNCCL.Options");
  given->global_ranks_in_group.clear();
  const auto& global = options_->global_ranks_in_group;
  for (const int rank : ranks) {
    given->global_ranks_in_group.push_back(global.empty() ? static_cast<uint64_t>(rank) : global.at(rank));
  }
  auto made = c10::make_intrusive<SimulatedNccl>(store->clone(), static_cast<int>(own - ranks.begin()),
                                                 static_cast<int>(ranks.size()), given, make_inner_);
  made->eager_ = true;
  return made;
}

void SimulatedNccl::check(const Tensors& tensors) const {
  TORCH_CHECK(!tensors.empty(), "Tensor list must be nonempty");
  for (const auto& one : tensors) {
    TORCH_CHECK(one.is_cuda() && !one.is_sparse(), "Tensors must be CUDA and dense");
    TORCH_CHECK(one.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    TORCH_CHECK(one.device() == tensors[0].device(), "Expecting one tensor only but got multiple (of several devices)");
  }
}

void SimulatedNccl::refuse_if_failed() {
  const auto said = aborted_ ? std::string("the communicator was aborted") : failure_->get();
  if (!said.empty()) throw C10_BUILD_ERROR(DistBackendError, said);
}

// NCCL's watchdog has seen these end; their tensors go at the next call of the group.
void SimulatedNccl::let_go() {
  if (capturing() != nullptr) return;  // which forbids to ask for an event; NCCL's watchdog looks later as well
  auto ended = [](const Pending& one) {
    if (!poll(one.done)) return false;
    one.shelf->unstash();
    return true;
  };
  pending_.erase(std::remove_if(pending_.begin(), pending_.end(), ended), pending_.end());
}

SimulatedNccl::Communicator& SimulatedNccl::communicator(const std::string& key, int device) {
  auto& found = communicators_[{key, device}];
  if (found.own == nullptr) {
    found.own = &new_stream(device, options_->is_high_priority_stream ? -1 : 0);
    found.lane = static_cast<int>(key != COLLECTIVES);
  }
  return found;
}

void SimulatedNccl::refuse_a_shared_device(int device) {
  if (std::exchange(places_known_, true) || getSize() == 1) return;
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  const char* named = std::getenv("NCCL_HOSTID");
  const auto mine = std::string(named == nullptr ? host : named) + "/" + std::to_string(device);
  const auto key = [](int rank) { return "place/" + std::to_string(rank); };
  store_->set(key(getRank()), std::vector<uint8_t>(mine.begin(), mine.end()));
  const auto until = std::chrono::steady_clock::now() + store_->getTimeout();
  for (int rank = 0; rank < getSize(); ++rank) {
    // A `get` that waits would keep the connection, which all groups of this process share, from their other threads.
    while (!store_->check({key(rank)}) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto said = store_->get(key(rank));
    if (rank == getRank() || std::string(said.begin(), said.end()) != mine) continue;
    throw C10_BUILD_ERROR(DistBackendError, "ncclInvalidUsage: Duplicate GPU detected : rank " +
                                                std::to_string(getRank()) + " and rank " + std::to_string(rank) +
                                                " both on CUDA device " + std::to_string(device));
  }
}

void SimulatedNccl::fault_next(Fault fault, const std::string& message) {
  fault_ = fault;
  fault_message_ = message;
}

c10d::ErrorType SimulatedNccl::getError() {
  return failure_->get().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void SimulatedNccl::abort() {
  aborted_ = true;
  link_->abort();
}

void SimulatedNccl::shutdown() {
  for (auto& [_, one] : communicators_) {
    if (one.last == nullptr) continue;
    count("host_synchronisation:shutdown");
    {
      const HostWait waits([&] { return one.last->query(); });
      one.last->wait();
    }
    advance_host_to_ns(one.last->at_ns());
  }
}

// ---- launching ------------------------------------------------------------------------------------------------------
SharedMoment SimulatedNccl::launch(Communicator& by, Stream& on, std::vector<Call> calls, const std::string& name,
                                   uint64_t sequence, const std::shared_ptr<Failure>& failure) {
  let_go();
  const auto fault = std::exchange(fault_, Fault::None);
  std::vector<Touched> touched;
  int64_t bytes = 0;
  std::string kinds;
  for (const auto& call : calls) {
    for (const auto& one : call.inputs) touch(touched, one, false);
    for (const auto& one : call.outputs) touch(touched, one, true);
    bytes += std::max(bytes_of_all(call.inputs), bytes_of_all(call.outputs));
    if (call.transfer) kinds += call.kind + " ";
  }
  const auto length = collective_length(calls.front().kind);
  const auto in_time = [](const CollectiveLength& of, int64_t bytes) {
    return of.fixed_ns + static_cast<int64_t>(of.ns_per_byte * static_cast<double>(bytes));
  };
  const auto length_ns = in_time(length, bytes);
  std::vector<Transfer> transfers;
  std::vector<Link::Message> messages;
  for (auto& call : calls) {
    if (call.transfer) {
      transfers.push_back(std::move(call.transfer));
    } else {
      messages.push_back(*call.message);
      messages.back().mine = {call.kind, 0, in_time(collective_length(call.kind), messages.back().bytes.numel())};
    }
  }
  if (&on == by.own) count("backend_stream:" + std::to_string(on.device) + ":" + std::to_string(on.id));
  on.wait(by.last, "communicator", /*orders=*/false);
  const auto lane = by.lane;
  const auto delay_ns = settings()->real_collective_ns;
  on.launch({"collective", name, length_ns, bytes, getGroupUid(), static_cast<int64_t>(sequence)}, touched,
            [=, link = link_, group_failure = failure_, said = fault_message_](int64_t start_ns) mutable {
              try {
                if (fault == Fault::PeerIsDead) link->wait_for_abort();
                TORCH_CHECK(fault != Fault::Fails, said);
                auto end_ns = start_ns;
                if (!transfers.empty()) {
                  const auto agreed = link->agree({kinds, start_ns, length_ns});
                  end_ns = agreed.ready_ns + agreed.length_ns;
                }
                for (auto& one : messages) one.mine.ready_ns = start_ns;
                link->say(messages, lane);
                for (const auto& one : messages) {
                  end_ns = std::max(end_ns, std::max(start_ns, one.theirs.ready_ns) +
                                                std::max(one.mine.length_ns, one.theirs.length_ns));
                }
                if (delay_ns > 0) sleep_until_real_ns(real_now_ns() + delay_ns);
                for (const auto& transfer : transfers) transfer(*link);
                link->move(messages, lane);
                return end_ns;
              } catch (const Aborted&) {
                return start_ns;  // the kernel was taken off the device
              } catch (const std::exception& error) {
                // Who holds a Work is told there; a synchronous caller at the host's next synchronisation.
                if (failure != nullptr) {
                  failure->set(error.what());
                } else {
                  asynchronous_error(name + ": " + error.what());
                }
                group_failure->set(error.what());
                return start_ns;
              }
            });
  by.last = on.record();
  return by.last;
}

WorkPointer SimulatedNccl::finished_work(c10d::OpType type, Stream& on, SharedMoment done, uint64_t sequence,
                                         const Tensors& outputs, const Tensors& stashed,
                                         const std::shared_ptr<Failure>& failure, bool with_future) {
  auto work = c10::make_intrusive<SimulatedWork>(getRank(), type);
  work->stream = &on;
  work->done = std::move(done);
  work->failure = failure;
  work->group_failure = failure_;
  work->link = link_;
  work->outputs = outputs;
  work->sequence = sequence;
  work->blocking = blocking_wait_;
  work->shelf->stash(stashed);
  if (with_future) {
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(on.device));
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{device});
    const c10::StreamGuard behind(as_c10(on));  // the future records its event here
    work->future->markCompleted(c10::IValue(outputs));
  }
  if (work->done != nullptr) {
    pending_.push_back({work->shelf, work->done});
  }
  return work;
}

WorkPointer SimulatedNccl::collective(c10d::OpType type, bool asynchronous, Call call, const Stacked& stacked) {
  Tensors tensors = call.inputs;
  tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
  check(tensors);
  refuse_if_failed();
  const int device = tensors[0].device().index();
  const c10::DeviceGuard guard(tensors[0].device());
  refuse_a_shared_device(device);
  auto& by = communicator(COLLECTIVES, device);
  auto& current = current_stream(device);
  auto& on = asynchronous ? *by.own : current;
  if (asynchronous) on.wait(current.record());
  const auto copied = [&on](const std::function<void()>& copies) {
    const c10::StreamGuard behind(as_c10(on));
    if (copies) copies();
  };
  copied(stacked.before);
  tensors.insert(tensors.end(), stacked.list.begin(), stacked.list.end());
  const auto outputs = call.outputs;
  auto failure = asynchronous ? std::make_shared<Failure>() : nullptr;
  if (group_.active) {
    if (!std::exchange(group_.collective, true)) ++collectives_;
    group_.asynchronous = asynchronous;
    group_.device = device;
    group_.calls.push_back(std::move(call));
    copied(stacked.after);  // before the kernel, which is launched at the end: torch does that too
    if (!asynchronous) return nullptr;
    group_.stashed.insert(group_.stashed.end(), tensors.begin(), tensors.end());
    return finished_work(type, on, nullptr, collectives_, outputs, {}, failure, true);
  }
  const auto sequence = ++collectives_;
  const auto name = call.kind;
  std::vector<Call> calls;
  calls.push_back(std::move(call));
  auto done = launch(by, on, std::move(calls), name, sequence, failure);
  if (stacked.after) {
    copied(stacked.after);
    done = on.record();
  }
  if (!asynchronous) return nullptr;
  return finished_work(type, on, std::move(done), sequence, outputs, tensors, failure, true);
}

WorkPointer SimulatedNccl::fused(c10d::OpType type, bool asynchronous, std::vector<Call> calls) {
  Tensors tensors, outputs;
  for (const auto& call : calls) {
    tensors.insert(tensors.end(), call.inputs.begin(), call.inputs.end());
    tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
    outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
  }
  check(tensors);
  refuse_if_failed();
  const int device = tensors[0].device().index();
  const c10::DeviceGuard guard(tensors[0].device());
  auto& by = communicator(COLLECTIVES, device);
  auto& current = current_stream(device);
  auto& on = asynchronous ? *by.own : current;
  if (asynchronous) on.wait(current.record());
  const auto sequence = ++collectives_;
  auto failure = asynchronous ? std::make_shared<Failure>() : nullptr;
  const auto name = calls.front().kind + "_coalesced";
  if (group_.active) {
    // NCCL launches at the end of the outermost group, yet the end of this Work is recorded now: before the kernel.
    group_.collective = true;
    group_.asynchronous = asynchronous;
    group_.device = device;
    for (auto& call : calls) group_.calls.push_back(std::move(call));
    auto too_early = on.record();
    if (!asynchronous) return nullptr;
    return finished_work(type, on, std::move(too_early), sequence, outputs, tensors, failure, true);
  }
  auto done = launch(by, on, std::move(calls), name, sequence, failure);
  if (!asynchronous) return nullptr;
  return finished_work(type, on, std::move(done), sequence, outputs, tensors, failure, true);
}

WorkPointer SimulatedNccl::message(c10d::OpType type, const at::Tensor& tensor, int peer, bool sends) {
  check({tensor});
  refuse_if_failed();
  TORCH_CHECK(peer >= 0 && peer < getSize() && peer != getRank(), "Invalid peer ", peer);
  const int device = tensor.device().index();
  const c10::DeviceGuard guard(tensor.device());
  Call call{sends ? "send" : "recv", {}, {}, nullptr, Link::Message{peer, sends, raw(tensor), {}, {}}};
  (sends ? call.inputs : call.outputs).push_back(tensor);
  // NCCL in eager mode, and everything batched, goes through the group's own communicator. Otherwise each pair has one.
  const bool shared = group_.active || eager_;
  auto& by = communicator(shared ? COLLECTIVES : "with " + std::to_string(peer), device);
  auto& on = *by.own;
  on.wait(current_stream(device).record());
  record_stream(tensor.storage().data_ptr(), on);
  if (group_.active) {
    if (!group_.point_to_point) ++messages_;
    group_.point_to_point = true;
    group_.asynchronous = true;
    group_.device = device;
    group_.calls.push_back(std::move(call));
    return nullptr;
  }
  const auto sequence = ++messages_;
  auto failure = std::make_shared<Failure>();
  std::vector<Call> calls;
  const auto name = call.kind;
  calls.push_back(std::move(call));
  auto done = launch(by, on, std::move(calls), name, sequence, failure);
  return finished_work(type, on, std::move(done), sequence, {tensor}, {}, failure, true);
}

void SimulatedNccl::startCoalescing() {
  group_ = Group{};
  group_.active = true;
}

WorkPointer SimulatedNccl::endCoalescing() {
  auto group = std::exchange(group_, Group{});
  if (group.calls.empty()) return nullptr;
  const c10::DeviceGuard guard(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(group.device)));
  auto& by = communicator(COLLECTIVES, group.device);
  auto& on = group.asynchronous ? *by.own : current_stream(group.device);
  const auto sequence = group.point_to_point ? messages_ : collectives_;
  auto failure = group.asynchronous ? std::make_shared<Failure>() : nullptr;
  auto done = launch(by, on, std::move(group.calls), "coalesced", sequence, failure);
  if (!group.asynchronous) return nullptr;
  return finished_work(c10d::OpType::COALESCED, on, std::move(done), sequence, {}, group.stashed, failure, false);
}

// ---- the collectives ------------------------------------------------------------------------------------------------
WorkPointer SimulatedNccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return collective(c10d::OpType::ALLREDUCE, options.asyncOp,
                    {"allreduce", tensors, tensors, allreduce_transfer(tensors.at(0), options.reduceOp), {}});
}

WorkPointer SimulatedNccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Call> calls;
  for (auto& one : tensors) calls.push_back({"allreduce", {one}, {one}, allreduce_transfer(one, options.reduceOp), {}});
  return fused(c10d::OpType::COALESCED, options.asyncOp, std::move(calls));
}

WorkPointer SimulatedNccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  const bool sends = root == getRank();
  return collective(c10d::OpType::BROADCAST, options.asyncOp,
                    {"broadcast", sends ? tensors : Tensors{}, sends ? Tensors{} : tensors,
                     broadcast_transfer(tensors.at(0), root), {}});
}

WorkPointer SimulatedNccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  return collective(c10d::OpType::REDUCE, options.asyncOp,
                    {"reduce", tensors, root == getRank() ? tensors : Tensors{},
                     reduce_transfer(tensors.at(0), tensors.at(0), options.reduceOp, root), {}});
}

WorkPointer SimulatedNccl::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  const auto& list = outputs.at(0);
  if (!of_one_size(list)) {  // broadcasts between the caller's own tensors
    return collective(c10d::OpType::ALLGATHER, options.asyncOp,
                      {"allgather", inputs, list, allgather_transfer(list, inputs.at(0)), {}});
  }
  const auto stack = stack_of(list);
  const auto copies = [&] {
    for (size_t i = 0; i < list.size(); ++i) at::Tensor(list[i]).copy_(stack[static_cast<int64_t>(i)], true);
  };
  return collective(c10d::OpType::ALLGATHER, options.asyncOp,
                    {"allgather", inputs, {stack}, allgather_transfer({stack}, inputs.at(0)), {}},
                    {nullptr, copies, list});
}

WorkPointer SimulatedNccl::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) {
  TORCH_CHECK(input.numel() * getSize() == output.numel(),
              "output tensor size must be equal to world_size times input tensor size");
  return collective(c10d::OpType::_ALLGATHER_BASE, options.asyncOp,
                    {"allgather", {input}, {output}, allgather_transfer({output}, input), {}});
}

WorkPointer SimulatedNccl::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) {
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back({"allgather", {inputs[i]}, {outputs.at(i)}, allgather_transfer({outputs.at(i)}, inputs[i]), {}});
  }
  return fused(c10d::OpType::COALESCED, options.asyncOp, std::move(calls));
}

WorkPointer SimulatedNccl::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) {
  const auto& list = inputs.at(0);
  if (!of_one_size(list)) {  // reductions between the caller's own tensors
    return collective(c10d::OpType::REDUCE_SCATTER, options.asyncOp,
                      {"reducescatter", list, outputs,
                       reduce_scatter_transfer(outputs.at(0), list, options.reduceOp), {}});
  }
  const auto stack = stack_of(list);
  const auto copies = [&] {
    for (size_t i = 0; i < list.size(); ++i) stack[static_cast<int64_t>(i)].copy_(list[i], true);
  };
  return collective(c10d::OpType::REDUCE_SCATTER, options.asyncOp,
                    {"reducescatter",
                     {stack},
                     outputs,
                     reduce_scatter_transfer(outputs.at(0), {stack}, options.reduceOp),
                     {}},
                    {copies, nullptr, list});
}

WorkPointer SimulatedNccl::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(input.numel() == output.numel() * getSize(),
              "input tensor must be the same size as output size times world size");
  return collective(c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp,
                    {"reducescatter",
                     {input},
                     {output},
                     reduce_scatter_transfer(output, {input}, options.reduceOp),
                     {}});
}

WorkPointer SimulatedNccl::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) {
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back({"reducescatter",
                     {inputs[i]},
                     {outputs.at(i)},
                     reduce_scatter_transfer(outputs.at(i), {inputs[i]}, options.reduceOp),
                     {}});
  }
  return fused(c10d::OpType::COALESCED, options.asyncOp, std::move(calls));
}

WorkPointer SimulatedNccl::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return collective(c10d::OpType::ALLTOALL, options.asyncOp,
                    {"alltoall", inputs, outputs, alltoall_transfer(outputs, inputs), {}});
}

WorkPointer SimulatedNccl::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                                         std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options) {
  return collective(c10d::OpType::ALLTOALL_BASE, options.asyncOp,
                    {"alltoall",
                     {input},
                     {output},
                     alltoall_split_transfer(output, input, output_rows, input_rows, getSize()),
                     {}});
}

WorkPointer SimulatedNccl::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto into = flattened(outputs);
  return collective(c10d::OpType::GATHER, options.asyncOp,
                    {"gather",
                     inputs,
                     into,
                     gather_transfer(into, inputs.at(0), static_cast<int>(options.rootRank)),
                     {}});
}

WorkPointer SimulatedNccl::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) {
  const auto from = flattened(inputs);
  return collective(
      c10d::OpType::SCATTER, options.asyncOp,
      {"scatter", from, outputs, scatter_transfer(outputs.at(0), from, static_cast<int>(options.rootRank)), {}});
}

WorkPointer SimulatedNccl::barrier(const c10d::BarrierOptions& options) {
  auto device = current_device();
  if (options.device) {
    device = options.device->index();
  } else if (!options.device_ids.empty()) {
    device = static_cast<int>(options.device_ids[0]);
  } else if (getBoundDeviceId()) {
    device = getBoundDeviceId()->index();
  }
  const c10::DeviceGuard guard(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
  auto tensor = at::zeros({1}, at::TensorOptions().device(c10::DeviceType::CUDA, device).dtype(at::kFloat));
  Tensors tensors{tensor};
  auto work = collective(c10d::OpType::BARRIER, options.asyncOp,
                         {"barrier", tensors, tensors, allreduce_transfer(tensor, c10d::ReduceOp::SUM), {}});
  if (options.asyncOp) {
    static_cast<SimulatedWork*>(work.get())->is_barrier = true;
    return work;
  }
  synchronize_stream(current_stream(device), "barrier", /*by_operator=*/true);
  return nullptr;
}

WorkPointer SimulatedNccl::send(Tensors& tensors, int peer, int) {
  return message(c10d::OpType::SEND, tensors.at(0), peer, true);
}

WorkPointer SimulatedNccl::recv(Tensors& tensors, int peer, int) {
  return message(c10d::OpType::RECV, tensors.at(0), peer, false);
}

}  // namespace sim

namespace c10d {
namespace {

// The logger of DistributedDataParallel wants a timer for the type of its device, and gets the host's.
struct SimulatedTimer final : Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer);

}  // namespace
}  // namespace c10d

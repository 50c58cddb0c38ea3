// A process group called "nccl" that keeps the contract of torch's ProcessGroupNCCL towards streams.
//
// - asyncOp=false: the kernel runs on the caller's current stream, and there is no Work. asyncOp=true and
//   point-to-point: on the group's own stream, which waits for the caller's; `wait()` makes the current stream wait,
//   never the host (unless it is given a timeout, or belongs to a barrier); tensors are stashed until then.
// - A Work's future completes at once and carries the end of the kernel as an event.
// - A list of tensors of one size is one stacked tensor to NCCL, allocated on the caller's stream and copied on the
//   kernel's. Nobody but the Work holds that tensor.
// - One communicator runs its kernels one after another, on whatever streams they are. Unbatched sends and receives
//   use the group's own where it was connected eagerly (it is bound to a device, or was split from one that is);
//   otherwise each pair of ranks has one.
// - What is issued between startCoalescing and endCoalescing is launched at the end, as one.
//
// In time a kernel starts when its own rank is ready (NCCL's spins until its peers are) and ends on all ranks at once.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "guard.hpp"
#include "link.hpp"
#include "memory.hpp"
#include "transfers.hpp"

namespace sim {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;
// Makes the inner group: torch ships no headers of gloo's, so Python does it.
using MakeInner = std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>&, int rank,
                                                                  int size, std::chrono::milliseconds timeout)>;

// Tensors that have to live until somebody is ordered behind the kernel.
struct Shelf {
  std::mutex mutex;
  Tensors tensors;
  void stash(const Tensors& more);
  void unstash();
};

// What has gone wrong on one rank of a group.
struct Failure {
  std::mutex mutex;
  std::string said;
  void set(const std::string& what);
  std::string get();
};

class SimulatedNccl final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl", std::chrono::minutes(10)) {}
    bool is_high_priority_stream = false;
    c10::intrusive_ptr<c10d::Backend> split_from;
    int64_t split_color = -1;
  };

  SimulatedNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options,
                MakeInner make_inner);

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void eagerConnectSingleDevice(at::Device device) override {
    refuse_a_shared_device(device.index());
    eager_ = true;
  }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  bool connected() const { return eager_; }
  int64_t splits() const { return splits_; }

  WorkPointer allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPointer allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPointer broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPointer reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPointer allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPointer _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPointer reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPointer _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPointer alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPointer alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                            const c10d::AllToAllOptions&) override;
  WorkPointer gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPointer scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPointer barrier(const c10d::BarrierOptions&) override;
  WorkPointer send(Tensors&, int peer, int tag) override;
  WorkPointer recv(Tensors&, int peer, int tag) override;
  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  // What the next collectives of this group meet. See device.py.
  enum class Fault { None, Fails, PeerIsDead };
  void fault_next(Fault fault, const std::string& message);

 private:
  // One of NCCL's calls: a collective, or one message.
  struct Call {
    std::string kind;
    Tensors inputs, outputs;
    Transfer transfer;
    std::optional<Link::Message> message;
  };
  // Copies between a caller's list of tensors and the stacked one, on the stream of the kernel.
  struct Stacked {
    std::function<void()> before, after;
    Tensors list;
  };
  struct Communicator {
    Stream* own = nullptr;
    SharedMoment last;
    int lane = 0;
  };
  struct Group {  // between start and end of coalescing
    bool active = false, asynchronous = false, collective = false, point_to_point = false;
    int device = -1;
    std::vector<Call> calls;
    Tensors stashed;
  };
  struct Pending {  // what NCCL's watchdog looks at
    std::shared_ptr<Shelf> shelf;
    SharedMoment done;
  };

  WorkPointer collective(c10d::OpType type, bool asynchronous, Call call, const Stacked& stacked = {});
  WorkPointer fused(c10d::OpType type, bool asynchronous, std::vector<Call> calls);
  WorkPointer message(c10d::OpType type, const at::Tensor& tensor, int peer, bool sends);
  // Puts the calls as one kernel behind what the communicator did before.
  SharedMoment launch(Communicator& by, Stream& on, std::vector<Call> calls, const std::string& name,
                      uint64_t sequence, const std::shared_ptr<Failure>& failure);
  WorkPointer finished_work(c10d::OpType type, Stream& on, SharedMoment done, uint64_t sequence, const Tensors& outputs,
                            const Tensors& stashed, const std::shared_ptr<Failure>& failure, bool with_future);
  Communicator& communicator(const std::string& key, int device);
  // Once a group, and together: as NCCL, throws where two ranks of one host, as they name it (NCCL_HOSTID, else its
  // name), have one device.
  void refuse_a_shared_device(int device);
  void check(const Tensors& tensors) const;
  void refuse_if_failed();
  void let_go();

  c10::intrusive_ptr<Options> options_;
  c10::intrusive_ptr<c10d::Store> store_;
  MakeInner make_inner_;
  std::shared_ptr<Link> link_;
  std::map<std::pair<std::string, int>, Communicator> communicators_;
  Group group_;
  std::vector<Pending> pending_;
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();  // of the whole group, from its first one on
  uint64_t collectives_ = 0, messages_ = 0;
  int64_t splits_ = 0;
  bool eager_ = false, places_known_ = false, aborted_ = false, blocking_wait_ = false;
  Fault fault_ = Fault::None;
  std::string fault_message_;
};

}  // namespace sim

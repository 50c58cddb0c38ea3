// Gloo on the device. See staged.hpp.
#include "staged.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "operators.hpp"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Exchange = std::function<WorkPointer(Tensors& inputs, Tensors& outputs)>;

class StagedWork final : public c10d::Work {
 public:
  StagedWork(int rank, c10d::OpType type, int device, SharedMoment done, Tensors kept)
      : Work(rank, type), device_(device), done_(std::move(done)), kept_(std::move(kept)) {}
  bool isCompleted() override { return poll(done_); }
  bool isSuccess() const override { return true; }
  void synchronize() override { current_stream(device_).wait(done_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize_moment(done_, "gloo", /*by_operator=*/false);
    synchronize();
    kept_.clear();
    rethrow_asynchronous_error();
    return true;
  }

 private:
  int device_;
  SharedMoment done_;
  Tensors kept_;
};

Tensors host_copies(const Tensors& of) {
  Tensors made;
  for (const auto& one : of) made.push_back(at::empty(one.sizes(), one.options().device(at::kCPU)));
  return made;
}

class StagedGloo final : public c10d::Backend {
 public:
  explicit StagedGloo(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return gloo_->getBackendName(); }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  WorkPointer barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return stage(c10d::OpType::ALLREDUCE, tensors, tensors, [=, gloo = gloo_](Tensors& in, Tensors& out) {
      auto work = gloo->allreduce(in, options);
      out = in;
      return work;
    });
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return stage(c10d::OpType::BROADCAST, tensors, tensors, [=, gloo = gloo_](Tensors& in, Tensors& out) {
      auto work = gloo->broadcast(in, options);
      out = in;
      return work;
    });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return stage(c10d::OpType::REDUCE, tensors, tensors, [=, gloo = gloo_](Tensors& in, Tensors& out) {
      auto work = gloo->reduce(in, options);
      out = in;
      return work;
    });
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override {
    return stage(c10d::OpType::ALLGATHER, inputs, outputs.at(0), [=, gloo = gloo_](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return gloo->allgather(lists, in, options);
    });
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return stage(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [=, gloo = gloo_](Tensors& in, Tensors& out) {
      return gloo->_allgather_base(out[0], in[0], options);
    });
  }

 private:
  // Down to the host, across, and up again, one behind another on the group's stream.
  WorkPointer stage(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, Exchange exchange) {
    const auto device = inputs.at(0).device();
    const c10::DeviceGuard on(device);
    auto& side = own(device.index());
    side.wait(current_stream(device.index()).record());
    auto down = std::make_shared<Tensors>(host_copies(inputs)), up = std::make_shared<Tensors>(host_copies(outputs));
    copies(side, "memcpy_d2h", "copy_d2h", inputs, false, [down, from = aliases(inputs)] { copy_all(*down, from); });
    side.housekeeping([down, up, exchange = std::move(exchange)] {
      exchange(*down, *up)->wait();
    });
    copies(side, "memcpy_h2d", "copy_h2d", outputs, true, [up, to = aliases(outputs)] { copy_all(to, *up); });
    Tensors kept = inputs;
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<StagedWork>(getRank(), type, device.index(), side.record(), std::move(kept));
  }

  static Tensors aliases(const Tensors& of) {
    Tensors made;
    for (const auto& one : of) made.push_back(host_alias(one));
    return made;
  }
  static void copy_all(const Tensors& to, const Tensors& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  static void copies(Stream& side, const char* name, const char* kind, const Tensors& tensors, bool write,
                     std::function<void()> copy) {
    std::vector<Touched> touched;
    int64_t bytes = 0;
    for (const auto& one : tensors) {
      touch(touched, one, write);
      bytes += bytes_of(one);
    }
    const auto length_ns = length_of(kind, name, bytes);
    side.launch({"copy", name, length_ns, bytes}, touched, [copy = std::move(copy), length_ns](int64_t start_ns) {
      copy();
      return start_ns + length_ns;
    });
  }
  Stream& own(int device) {
    auto& found = streams_[device];
    if (found == nullptr) found = &new_stream(device, 0);
    return *found;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, Stream*> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> staged(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<StagedGloo>(gloo);
}

}  // namespace sim

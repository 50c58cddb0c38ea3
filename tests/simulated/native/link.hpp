// How the ranks of one group really exchange bytes: through an inner gloo group, in the threads of the streams.
//
// All waits can be ended by `abort()`, which gloo itself does not know. Must not: know streams or time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>

namespace sim {

// Thrown out of any wait when the group is aborted.
struct Aborted {};

// What a rank says before data move: what it is about to do, when it was ready, how long it takes.
struct Header {
  std::string kind;
  int64_t ready_ns = 0, length_ns = 0;
};

class Link {
 public:
  Link(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size);
  ~Link();
  const int rank, size;

  // Latest and longest over the group. Throws if a rank is about to do something else.
  Header agree(const Header& mine);
  // Rows of bytes in the order of ranks.
  at::Tensor allgather(const at::Tensor& bytes);
  // Pieces of `from` go to the ranks in order; `to` takes theirs. Sizes in bytes.
  void alltoall(const at::Tensor& to, const at::Tensor& from, std::vector<int64_t> to_sizes,
                std::vector<int64_t> from_sizes);

  // One message between this rank and a peer; several are on their way at once.
  struct Message {
    int peer;
    bool sends;
    at::Tensor bytes;  // contiguous
    Header mine, theirs;
  };
  // `lane` tells communicators apart that use the link at the same time.
  void say(std::vector<Message>& messages, int lane);   // fills `theirs`
  void move(std::vector<Message>& messages, int lane);

  void abort();
  bool aborted() const { return aborted_; }
  void wait_for_abort();

 private:
  void finish(const c10::intrusive_ptr<c10d::Work>& work);
  void finish_messages(const std::vector<c10::intrusive_ptr<c10d::Work>>& works);

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<c10d::Work*> under_way_;  // sends and receives, which have to be told one by one
};

}  // namespace sim

// Bytes between ranks. See link.hpp.
#include "link.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

namespace sim {
namespace {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;

int64_t number_of(const std::string& kind) {
  int64_t number = 0;
  for (const char letter : kind) number = (number * 131 + letter) % 1'000'000'007;
  return number;
}

constexpr int TAGS_PER_LANE = 8, DATA = 1, SENDER_SAYS = 2, RECEIVER_SAYS = 3;
int tag(int lane, int what) { return lane * TAGS_PER_LANE + what; }

}  // namespace

Link::Link(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
    : rank(rank), size(size), inner_(std::move(inner)) {}

Link::~Link() {
  // Gloo's destructor waits for what is under way, which behind a dead peer never ends.
  if (aborted_) (void)inner_.release();
}

Header Link::agree(const Header& mine) {
  if (size == 1) return mine;
  const auto said = at::tensor({number_of(mine.kind), mine.ready_ns, mine.length_ns}, at::kLong);
  auto all = at::empty({size, 3}, at::kLong);
  auto input = said.view({1, 3});
  finish(inner_->_allgather_base(all, input));
  const auto* rows = all.const_data_ptr<int64_t>();
  Header agreed = mine;
  for (int one = 0; one < size; ++one) {
    TORCH_CHECK(rows[one * 3] == rows[rank * 3], "rank ", one, " of the group has issued another collective than ",
                mine.kind, " of rank ", rank);
    agreed.ready_ns = std::max(agreed.ready_ns, rows[one * 3 + 1]);
    agreed.length_ns = std::max(agreed.length_ns, rows[one * 3 + 2]);
  }
  return agreed;
}

at::Tensor Link::allgather(const at::Tensor& bytes) {
  auto input = bytes.contiguous();
  auto all = at::empty({size, bytes.numel()}, at::kByte);
  if (size == 1) {
    all.copy_(input.view({1, -1}));
  } else if (bytes.numel() > 0) {
    auto flat = all.view({-1});
    finish(inner_->_allgather_base(flat, input));
  }
  return all;
}

void Link::alltoall(const at::Tensor& to, const at::Tensor& from, std::vector<int64_t> to_sizes,
                    std::vector<int64_t> from_sizes) {
  if (size == 1) {
    to.copy_(from);
    return;
  }
  auto output = to, input = from.contiguous();
  finish(inner_->alltoall_base(output, input, to_sizes, from_sizes));
}

void Link::say(std::vector<Message>& messages, int lane) {
  std::vector<WorkPointer> works;
  std::vector<at::Tensor> heard;
  for (auto& message : messages) {
    std::vector<at::Tensor> said{
        at::tensor({message.mine.ready_ns, message.mine.length_ns, message.bytes.numel()}, at::kLong)};
    std::vector<at::Tensor> theirs{at::zeros({3}, at::kLong)};
    heard.push_back(theirs[0]);
    works.push_back(inner_->send(said, message.peer, tag(lane, message.sends ? SENDER_SAYS : RECEIVER_SAYS)));
    works.push_back(inner_->recv(theirs, message.peer, tag(lane, message.sends ? RECEIVER_SAYS : SENDER_SAYS)));
  }
  finish_messages(works);
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto* said = heard[i].const_data_ptr<int64_t>();
    TORCH_CHECK(said[2] == messages[i].bytes.numel(), "a ", messages[i].mine.kind, " of ", messages[i].bytes.numel(),
                " bytes meets one of ", said[2]);
    messages[i].theirs = {messages[i].mine.kind, said[0], said[1]};
  }
}

void Link::move(std::vector<Message>& messages, int lane) {
  std::vector<WorkPointer> works;
  for (auto& message : messages) {
    std::vector<at::Tensor> one{message.bytes};
    works.push_back(message.sends ? inner_->send(one, message.peer, tag(lane, DATA))
                                  : inner_->recv(one, message.peer, tag(lane, DATA)));
  }
  finish_messages(works);
}

void Link::finish(const WorkPointer& work) {
  struct Signal {
    std::atomic<bool> done{false};
  };
  auto signal = std::make_shared<Signal>();
  work->getFuture()->addCallback(
      [this, signal](c10::ivalue::Future&) {
        {
          std::lock_guard<std::mutex> held(mutex_);
          signal->done = true;
        }
        changed_.notify_all();
      },
      /*uses_future=*/false);
  {
    std::unique_lock<std::mutex> held(mutex_);
    changed_.wait(held, [&] { return signal->done || aborted_; });
  }
  if (aborted_) throw Aborted{};
  work->wait();  // throws what gloo met
}

void Link::finish_messages(const std::vector<WorkPointer>& works) {
  {
    std::lock_guard<std::mutex> held(mutex_);
    for (const auto& work : works) under_way_.insert(work.get());
  }
  std::exception_ptr error;
  for (const auto& work : works) {
    try {
      if (!aborted_) work->wait();
    } catch (...) {
      error = std::current_exception();
      break;
    }
  }
  {
    std::lock_guard<std::mutex> held(mutex_);
    for (const auto& work : works) under_way_.erase(work.get());
  }
  if (aborted_) throw Aborted{};
  if (error) std::rethrow_exception(error);
}

void Link::abort() {
  std::set<c10d::Work*> told;
  {
    std::lock_guard<std::mutex> held(mutex_);
    aborted_ = true;
    for (auto* work : under_way_) work->abort();
  }
  changed_.notify_all();
}

void Link::wait_for_abort() {
  std::unique_lock<std::mutex> held(mutex_);
  changed_.wait(held, [&] { return aborted_.load(); });
  throw Aborted{};
}

}  // namespace sim

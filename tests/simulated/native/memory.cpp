// The caching allocator and page-locked memory. See memory.hpp.
#include "memory.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <tuple>

namespace sim {
namespace {

constexpr size_t GRAIN_BYTES = 512;
constexpr int POISON = 0xFF;

// Given back while other streams still used it: comes into the pool when they have passed.
struct Leaving {
  Block* block;
  std::vector<SharedMoment> users;
};

// Given back: to be held against the clock of its stream at that stream's next allocation, which may get these bytes.
struct GivenBack {
  Accesses accesses;
  Region whole;
  VectorClock polled;
};

struct Pool {
  std::mutex mutex;
  std::map<std::pair<Stream*, size_t>, std::vector<char*>> free;
  std::vector<Leaving> leaving;
  std::map<Stream*, std::vector<GivenBack>> unchecked;
  std::array<MemoryCounts, 8> counts{};
};
Pool& pool() {
  static auto* kept = new Pool;  // leaked: tensors die after static objects
  return *kept;
}

Region whole_of(const Block& block) { return {reinterpret_cast<uintptr_t>(block.begin), block.bytes, 0, 1}; }

// With the pool's lock: whoever has left, as the allocator finds out when it is asked for memory.
void take_back(Pool& from) {
  auto gone = [&](const Leaving& one) {
    const bool passed =
        std::all_of(one.users.begin(), one.users.end(), [](const SharedMoment& user) { return user->query(); });
    if (passed) {
      from.free[{one.block->own, one.block->bytes}].push_back(one.block->begin);
      delete one.block;
    }
    return passed;
  };
  from.leaving.erase(std::remove_if(from.leaving.begin(), from.leaving.end(), gone), from.leaving.end());
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  std::vector<SharedMoment> users;
  std::vector<size_t> protected_streams;
  for (auto* stream : block->used_on) {
    users.push_back(stream->record());
    protected_streams.push_back(stream->number);
  }
  GivenBack given{{}, whole_of(*block), {}};
  {
    std::lock_guard<std::mutex> issuing(issue_mutex());
    protect(block->accesses, protected_streams);
    given.accesses = std::move(block->accesses);
    given.polled = polled_clock();
    // Nobody gets the bytes before these have passed, and with them all that they waited for.
    for (const auto& user : users) join(given.polled, *user->before);
  }
  auto& all = pool();
  std::lock_guard<std::mutex> held(all.mutex);
  all.counts.at(block->own->device).live_bytes -= static_cast<int64_t>(block->bytes);
  all.unchecked[block->own].push_back(std::move(given));
  if (users.empty()) {
    all.free[{block->own, block->bytes}].push_back(block->begin);
    delete block;
  } else {
    all.leaving.push_back({block, std::move(users)});
  }
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device()));
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    bytes = (bytes + GRAIN_BYTES - 1) / GRAIN_BYTES * GRAIN_BYTES;
    auto& stream = current_stream();
    char* begin = nullptr;
    std::vector<GivenBack> unchecked;
    {
      auto& all = pool();
      std::lock_guard<std::mutex> held(all.mutex);
      take_back(all);
      unchecked.swap(all.unchecked[&stream]);
      auto& free = all.free[{&stream, bytes}];
      if (!free.empty()) {
        begin = free.back();
        free.pop_back();
      }
      auto& counts = all.counts.at(stream.device);
      counts.live_bytes += static_cast<int64_t>(bytes);
      counts.peak_bytes = std::max(counts.peak_bytes, counts.live_bytes);
      ++counts.allocations;
    }
    auto* block = new Block{begin, bytes, &stream, {}, {}};
    if (begin == nullptr) {
      void* fresh = nullptr;
      TORCH_CHECK(posix_memalign(&fresh, GRAIN_BYTES, bytes) == 0, "CUDA out of memory");
      block->begin = static_cast<char*>(fresh);
      std::memset(fresh, POISON, bytes);
    } else {
      stream.housekeeping([begin, bytes] { std::memset(begin, POISON, bytes); });
    }
    std::lock_guard<std::mutex> issuing(issue_mutex());
    auto& clock = stream.clock();
    for (auto& given : unchecked) given_away(given.accesses, given.whole, stream.number, clock, given.polled);
    // Fresh or not, the bytes are the stream's from here on: a user on another stream has to wait for this.
    ++clock[stream.number];
    access(block->accesses, whole_of(*block), true, stream.number, clock, "allocation");
    return {block->begin, block, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
};
Pinned& pinned() {
  static auto* kept = new Pinned;
  return *kept;
}

void free_pinned(void* pointer) {
  {
    auto& all = pinned();
    std::lock_guard<std::mutex> held(all.mutex);
    all.ranges.erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    const auto size = std::max<size_t>(bytes, 64);
    TORCH_CHECK(posix_memalign(&pointer, 64, size) == 0, "out of page-locked memory");
    auto& all = pinned();
    std::lock_guard<std::mutex> held(all.mutex);
    all.ranges[static_cast<const char*>(pointer)] = size;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

}  // namespace

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  const auto* at = static_cast<const char*>(pointer);
  auto& all = pinned();
  std::lock_guard<std::mutex> held(all.mutex);
  auto next = all.ranges.upper_bound(at);
  if (next == all.ranges.begin()) return false;
  --next;
  return at < next->first + next->second;
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &give_back ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

void record_stream(const c10::DataPtr& pointer, Stream& stream) {
  auto* block = block_of(pointer);
  if (block == nullptr || block->own == &stream) return;
  auto& users = block->used_on;
  if (std::find(users.begin(), users.end(), &stream) == users.end()) users.push_back(&stream);
}

MemoryCounts memory_counts(int device) {
  auto& all = pool();
  std::lock_guard<std::mutex> held(all.mutex);
  return all.counts.at(device);
}

void reset_peak(int device) {
  auto& all = pool();
  std::lock_guard<std::mutex> held(all.mutex);
  all.counts.at(device).peak_bytes = all.counts.at(device).live_bytes;
}

namespace {
struct AtLoad {
  AtLoad() { c10::SetAllocator(c10::DeviceType::CUDA, &the_device_allocator, 1); }
} at_load;
}  // namespace

}  // namespace sim

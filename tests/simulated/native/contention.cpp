// Which kernels are slowed down, and until when. See contention.hpp.
#include "contention.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "streams.hpp"

namespace sim {
namespace {

struct Slowed {
  Stream* stream;
  int64_t start_ns, length_ns;
  double factor;
};

struct Open {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<const Slowed*> kernels;  // whose ends are not final
  std::vector<const HostWait*> hosts;
  std::map<int, std::set<std::pair<int64_t, int64_t>>> collectives;  // by device; start and end
};
Open& open() {
  static auto* kept = new Open;  // leaked: the streams' threads use it until the process ends
  return *kept;
}
// Read without the lock, so that streams pay nothing where no kernel is slowed down.
std::atomic<int> open_kernels{0};

// With the lock: the end, if no further collective begins before it.
int64_t end_of(const Slowed& kernel) {
  auto at = static_cast<double>(kernel.start_ns), left = static_cast<double>(kernel.length_ns);
  for (const auto& [first, last] : open().collectives[kernel.stream->device]) {
    const auto begin = std::max(at, static_cast<double>(first)), end = static_cast<double>(last);
    if (end <= at) continue;
    if (at + left <= begin) break;
    left -= begin - at;
    const auto shared = std::min(end - begin, left * kernel.factor);
    left -= shared / kernel.factor;
    at = begin + shared;
  }
  return std::llround(at + left);
}

}  // namespace

// With the lock.
bool nothing_proceeds() {
  const auto& hosts = open().hosts;
  if (hosts.empty()) return false;
  if (std::any_of(hosts.begin(), hosts.end(), [](const HostWait* host) { return host->over_(); })) return false;
  const auto stands = [](Stream* stream) {
    const auto& kernels = open().kernels;
    return std::any_of(kernels.begin(), kernels.end(), [&](const Slowed* one) { return one->stream == stream; }) ||
           stream->stands();
  };
  const auto streams = streams_of(-1);
  return std::all_of(streams.begin(), streams.end(), stands);
}

HostWait::HostWait(std::function<bool()> over) : over_(std::move(over)) {
  auto& all = open();
  {
    std::lock_guard<std::mutex> held(all.mutex);
    all.hosts.push_back(this);
  }
  all.changed.notify_all();
}

HostWait::~HostWait() {
  auto& hosts = open().hosts;
  std::lock_guard<std::mutex> held(open().mutex);
  hosts.erase(std::find(hosts.begin(), hosts.end(), this));
}

void stream_stands() {
  if (open_kernels == 0) return;
  { std::lock_guard<std::mutex> held(open().mutex); }  // who waits has either seen it or is told
  open().changed.notify_all();
}

void collective_ran(int device, int64_t start_ns, int64_t end_ns) {
  std::lock_guard<std::mutex> held(open().mutex);
  open().collectives[device].emplace(start_ns, end_ns);
}

void forget_collectives() {
  std::lock_guard<std::mutex> held(open().mutex);
  open().collectives.clear();
}

int64_t slowed_end_ns(Stream& stream, int64_t start_ns, int64_t length_ns, double factor) {
  auto& all = open();
  const Slowed own{&stream, start_ns, length_ns, factor};
  std::unique_lock<std::mutex> held(all.mutex);
  ++open_kernels;
  all.kernels.push_back(&own);
  all.changed.notify_all();
  const auto later = [](const Slowed* one, const Slowed* other) { return end_of(*one) < end_of(*other); };
  all.changed.wait(held, [&] {
    return *std::min_element(all.kernels.begin(), all.kernels.end(), later) == &own && nothing_proceeds();
  });
  all.kernels.erase(std::find(all.kernels.begin(), all.kernels.end(), &own));
  --open_kernels;
  return end_of(own);
}

}  // namespace sim

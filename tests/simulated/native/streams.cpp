// Streams, events and the device's own record of them. See streams.hpp.
#include "streams.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <utility>

#include "contention.hpp"
#include "worker.hpp"

namespace sim {
namespace {

constexpr int MOST_DEVICES = 8;
constexpr int LOWEST_PRIORITY = 0, HIGHEST_PRIORITY = -3;  // torch keeps pools for four of CUDA's priorities

struct Record {
  std::mutex mutex;
  std::vector<Row> rows;
  std::vector<BlockedRow> blocked;
  std::map<std::string, int64_t> counts;
  std::string error;
};
Record& record_of_device() {
  static auto* kept = new Record;
  return *kept;
}

struct Streams {
  std::mutex mutex;
  std::array<std::vector<Stream*>, MOST_DEVICES> by_device;                // by id; 0 is the default stream
  std::vector<Stream*> by_number;
  std::array<std::map<int, std::vector<int64_t>>, MOST_DEVICES> pools;     // ids by priority
  std::array<std::map<int, int64_t>, MOST_DEVICES> handed_out;
};
Streams& all_streams() {
  static auto* kept = new Streams;  // leaked, like the threads that serve them
  return *kept;
}

// Which stream goes to which hardware queue. With issue_mutex().
struct Dealing {
  int64_t number = 0;  // counts the calls of set_hardware_queues
  size_t limit = 0;
  std::map<std::pair<int, int>, std::deque<HardwareQueue>> queues;  // by device and priority
};
Dealing& dealing() {
  static auto* kept = new Dealing;
  return *kept;
}

// With the lock of all_streams().
Stream* made(int device, int priority) {
  auto& all = all_streams();
  auto& list = all.by_device[device];
  list.push_back(new Stream(device, static_cast<int64_t>(list.size()), priority));
  return list.back();
}

thread_local int device_of_thread = 0;
thread_local std::array<int64_t, MOST_DEVICES> stream_of_thread{};
std::atomic<int> sync_debug_mode{0};
std::atomic<void (*)(const std::string&)> warning{nullptr};
std::atomic<Graph*> graph{nullptr};
thread_local int capture_mode = 0;  // cudaStreamCaptureModeGlobal
constexpr int RELAXED = 2;          // cudaStreamCaptureModeRelaxed

size_t next_number(Stream* stream) {
  auto& all = all_streams();
  all.by_number.push_back(stream);
  return all.by_number.size() - 1;
}

void forbidden_while_debugging(const char* name) {
  const int mode = sync_debug_mode;
  TORCH_CHECK(mode != 2, "called a synchronizing CUDA operation: ", name);
  if (mode == 1 && warning.load() != nullptr) {
    warning.load()(std::string("called a synchronizing CUDA operation: ") + name);
  }
}

// When the device sees what the host issues now.
int64_t seen_by_device_ns() { return host_now_ns() + settings()->submission_ns; }

// Copies and memsets have engines of their own.
bool is_slowed(const std::string& kind) { return kind == "op" || kind == "sleep"; }

}  // namespace

// ---- moments --------------------------------------------------------------------------------------------------------
bool Moment::query() const {
  TORCH_CHECK(!captured, "CUDA error: operation not permitted on an event last recorded in a capturing stream");
  std::lock_guard<std::mutex> held(mutex_);
  return happened_;
}
void Moment::wait() const {
  TORCH_CHECK(!captured, "CUDA error: operation not permitted on an event last recorded in a capturing stream");
  std::unique_lock<std::mutex> held(mutex_);
  changed_.wait(held, [&] { return happened_; });
}
int64_t Moment::at_ns() const {
  std::lock_guard<std::mutex> held(mutex_);
  return at_ns_;
}
int64_t Moment::row() const {
  std::lock_guard<std::mutex> held(mutex_);
  return row_;
}
void Moment::happen(int64_t at_ns, int64_t row) {
  {
    std::lock_guard<std::mutex> held(mutex_);
    happened_ = true;
    at_ns_ = at_ns;
    row_ = row;
  }
  changed_.notify_all();
}

// ---- a stream, on the host's side -----------------------------------------------------------------------------------
Stream::Stream(int device, int64_t id, int priority)
    : device(device), id(id), priority(priority), number(next_number(this)) {}

VectorClock& Stream::clock() {
  if (host_version_ != host_version()) {
    join(clock_, host_clock());
    host_version_ = host_version();
  }
  if (clock_.size() <= number) clock_.resize(number + 1, 0);
  return clock_;
}

void Stream::launch(const Description& what, const std::vector<Touched>& touched, Run run) {
  advance_host_ns(settings()->launch_cost_ns);
  if (capturing() == nullptr) wait_for_room();
  std::lock_guard<std::mutex> issuing(issue_mutex());
  auto& ordered = clock();
  ++ordered[number];
  for (const auto& one : touched) access(*one.block, one.region, one.write, number, ordered, what.name);
  Task task{Task::Kind::Kernel, seen_by_device_ns(), what, std::move(run), nullptr};
  static int64_t issued = 0;  // with issue_mutex()
  task.id = issued++;
  if (is_slowed(what.kind)) task.contention = settings()->contention;
  push(std::move(task));
}

void Stream::housekeeping(std::function<void()> run) {
  push({Task::Kind::Housekeeping, host_now_ns(), {}, [run = std::move(run)](int64_t start_ns) {
          run();
          return start_ns;
        }, nullptr});
}

SharedMoment Stream::record(bool timing) {
  advance_host_ns(settings()->event_cost_ns);
  auto moment = std::make_shared<Moment>();
  moment->stream = this;
  moment->captured = capturing() != nullptr;
  std::lock_guard<std::mutex> issuing(issue_mutex());
  moment->before = std::make_shared<const VectorClock>(clock());
  if (moment->captured) return moment;
  Task task{Task::Kind::Record, seen_by_device_ns(), {}, nullptr, moment};
  if (timing) task.cost_ns = settings()->event_on_device_cost_ns;
  push(std::move(task));
  return moment;
}

void Stream::wait(const SharedMoment& moment, const char* why, bool orders) {
  if (moment == nullptr) return;
  advance_host_ns(settings()->event_cost_ns);
  std::lock_guard<std::mutex> issuing(issue_mutex());
  if (orders) join(clock(), *moment->before);
  // Its own queue keeps the order already; a captured moment has no time of its own.
  if (moment->captured || moment->stream == this) return;
  Task task{Task::Kind::Wait, seen_by_device_ns(), {}, nullptr, moment};
  task.why = why;
  push(std::move(task));
}

void Stream::push(Task task) {
  if (auto* into = capturing()) {
    if (task.kind == Task::Kind::Kernel) into->tasks_.push_back(std::move(task));
    return;
  }
  auto* queue = task.kind == Task::Kind::Housekeeping ? nullptr : hardware_queue();
  if (queue == nullptr) return enqueue(std::move(task));
  const auto issue_ns = task.issue_ns;
  if (queue->last != nullptr && queue->last->stream != this) {
    Task behind{Task::Kind::Wait, issue_ns, {}, nullptr, queue->last};
    behind.why = "queue";
    enqueue(std::move(behind));
  }
  enqueue(std::move(task));
  queue->last = std::make_shared<Moment>();
  queue->last->stream = this;
  enqueue({Task::Kind::Record, issue_ns, {}, nullptr, queue->last});
}

// As ROCm's runtime deals them out (ROCm/clr, rocclr/device/rocm/rocdevice.cpp, acquireQueue and getQueueFromPool): at its
// first use a stream gets a queue of its own while there are fewer of its priority than GPU_MAX_HW_QUEUES, and then the
// one with the fewest streams, the first of several. So streams come to queues in turn. Kernels, copies, events and
// waits of streams on one queue are packets in it, in the order of issue. CUDA_DEVICE_MAX_CONNECTIONS bounds the same
// for CUDA; how its driver deals streams out is not published.
HardwareQueue* Stream::hardware_queue() {
  auto& dealt = dealing();
  if (dealt.limit == 0) return nullptr;
  if (dealt_ != dealt.number) {
    dealt_ = dealt.number;
    auto& queues = dealt.queues[{device, priority}];
    if (queues.size() < dealt.limit) queues.emplace_back();
    const auto fewest = [](const HardwareQueue& one, const HardwareQueue& other) { return one.streams < other.streams; };
    hardware_queue_ = &*std::min_element(queues.begin(), queues.end(), fewest);
    ++hardware_queue_->streams;
  }
  return hardware_queue_;
}

void set_hardware_queues(int64_t number) {
  for (auto* stream : streams_of(-1)) stream->drain();
  std::lock_guard<std::mutex> issuing(issue_mutex());
  auto& dealt = dealing();
  ++dealt.number;
  dealt.limit = static_cast<size_t>(number);
  dealt.queues.clear();
}

void Stream::enqueue(Task task) {
  {
    std::lock_guard<std::mutex> held(mutex_);
    if (!served_) {  // at the first task and not before: a process that has only loaded this can be forked
      served_ = true;
      std::thread([this] { serve(); }).detach();
    }
    if (task.kind == Task::Kind::Kernel) ++kernels_;
    queue_.push_back(std::move(task));
    ++pushed_;
  }
  changed_.notify_all();
}

void Stream::wait_for_room() {
  const auto depth = settings()->queue_depth;
  const auto behind = kernels_ - depth;  // the task that has to be done
  if (behind < 0) return;
  int64_t end_ns = 0;
  {
    const auto there_is_room = [&] { return static_cast<int64_t>(kernel_ends_.size()) > behind; };
    const HostWait waits([&] {
      std::lock_guard<std::mutex> held(mutex_);
      return there_is_room();
    });
    std::unique_lock<std::mutex> held(mutex_);
    changed_.wait(held, there_is_room);
    end_ns = kernel_ends_[behind];
  }
  advance_host_to_ns(end_ns);
}

bool Stream::query() {
  std::lock_guard<std::mutex> held(mutex_);
  return done_ >= pushed_;
}

void Stream::drain() {
  std::unique_lock<std::mutex> held(mutex_);
  const auto until = pushed_;
  held.unlock();
  const HostWait waits([&] {
    std::lock_guard<std::mutex> held(mutex_);
    return done_ >= until;
  });
  held.lock();
  changed_.wait(held, [&] { return done_ >= until; });
}

int64_t Stream::end_ns() {
  std::lock_guard<std::mutex> held(mutex_);
  return end_ns_;
}

void Stream::forget_kernels() {
  std::lock_guard<std::mutex> held(mutex_);
  kernel_ends_.clear();
  kernels_ = 0;
  last_row_ = -1;
}

// ---- a stream, in its thread ----------------------------------------------------------------------------------------
void Stream::serve() {
  const auto name = "cuda:" + std::to_string(device) + "/" + std::to_string(id);
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  prepare_worker();
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> held(mutex_);
      changed_.wait(held, [&] { return !queue_.empty(); });
      task = std::move(queue_.front());
      queue_.pop_front();
      at_ = task.words();
    }
    execute(task);
    task = Task{};  // what it holds is let go before it counts as done
    {
      std::lock_guard<std::mutex> held(mutex_);
      ++done_;
      at_.clear();
    }
    changed_.notify_all();
    stream_stands();
  }
}

std::string Stream::Task::words() const {
  switch (kind) {
    case Kind::Kernel: {
      const auto of_group = what.group.empty() ? "" : " " + std::to_string(what.sequence) + " of group " + what.group;
      return what.name + of_group;
    }
    case Kind::Housekeeping: return "poison";
    case Kind::Record: return "event";
    case Kind::Wait:
      return std::string("waits (") + why + ") for stream " + std::to_string(moment->stream->id) + " of device " +
             std::to_string(moment->stream->device);
  }
  return "";
}

std::vector<std::string> Stream::pending() {
  std::lock_guard<std::mutex> held(mutex_);
  std::vector<std::string> found;
  if (!at_.empty()) found.push_back(at_);
  for (const auto& task : queue_) found.push_back(task.words());
  return found;
}

void Stream::wait_for(const SharedMoment& moment) {
  {
    std::lock_guard<std::mutex> held(mutex_);
    waits_for_ = moment;
  }
  stream_stands();
  moment->wait();
  std::lock_guard<std::mutex> held(mutex_);
  waits_for_ = nullptr;
}

bool Stream::stands() {
  std::lock_guard<std::mutex> held(mutex_);
  return done_ >= pushed_ || (waits_for_ != nullptr && !waits_for_->query());
}

// Only this thread writes end_ns_ and last_row_; the lock is for those who read them.
void Stream::execute(Task& task) {
  const auto arrived_ns = std::max(end_ns_, task.issue_ns);
  auto end_ns = arrived_ns;
  switch (task.kind) {
    case Task::Kind::Record:
      end_ns += task.cost_ns;
      task.moment->happen(end_ns, last_row_);
      break;
    case Task::Kind::Wait: {
      wait_for(task.moment);
      end_ns = std::max(arrived_ns, task.moment->at_ns());
      if (end_ns > arrived_ns) {
        auto& record = record_of_device();
        std::lock_guard<std::mutex> held(record.mutex);
        record.blocked.push_back({device, id, arrived_ns, end_ns, task.moment->stream->device,
                                  task.moment->stream->id, task.moment->row(), task.why});
      }
      break;
    }
    case Task::Kind::Housekeeping:
    case Task::Kind::Kernel:
      try {
        end_ns = task.run(arrived_ns);
        if (task.contention != 1.0) end_ns = slowed_end_ns(*this, arrived_ns, end_ns - arrived_ns, task.contention);
        if (task.what.kind == "collective") collective_ran(device, arrived_ns, end_ns);
      } catch (const std::exception& error) {
        asynchronous_error(task.what.name + ": " + error.what());
      }
      task.run = nullptr;
      break;
  }
  int64_t row = last_row_;
  if (task.kind == Task::Kind::Kernel) {
    auto& record = record_of_device();
    std::lock_guard<std::mutex> held(record.mutex);
    row = task.id;
    record.rows.push_back({row, device, id, task.what, arrived_ns, end_ns});
  }
  std::lock_guard<std::mutex> held(mutex_);
  end_ns_ = end_ns;
  last_row_ = row;
  if (task.kind == Task::Kind::Kernel) kernel_ends_.push_back(end_ns);
}

// ---- which streams there are ----------------------------------------------------------------------------------------
int device_count() {
  static const int count = [] {
    const char* said = std::getenv("AORTA_SIMULATED_DEVICES");
    return said == nullptr ? 2 : std::clamp(std::atoi(said), 1, MOST_DEVICES);
  }();
  return count;
}

int current_device() { return device_of_thread; }

int exchange_device(int device) {
  const int before = device_of_thread;
  TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal");
  if (device >= 0) device_of_thread = device;
  return before;
}

Stream& stream_of(int device, int64_t id) {
  auto& all = all_streams();
  std::lock_guard<std::mutex> held(all.mutex);
  auto& list = all.by_device.at(device);
  if (list.empty()) made(device, 0);
  return *list.at(id);
}

Stream& current_stream(int device) {
  if (device < 0) device = device_of_thread;
  return stream_of(device, stream_of_thread.at(device));
}

int64_t exchange_stream(int device, int64_t id) { return std::exchange(stream_of_thread.at(device), id); }

Stream& new_stream(int device, int priority) {
  count("streams_created");
  stream_of(device, 0);
  priority = std::clamp(priority, HIGHEST_PRIORITY, LOWEST_PRIORITY);
  const auto most = settings()->pool_streams;
  auto& all = all_streams();
  std::lock_guard<std::mutex> held(all.mutex);
  auto& pool = all.pools[device][priority];
  auto& next = all.handed_out[device][priority];
  const auto place = static_cast<size_t>(next++ % most);
  while (pool.size() <= place) pool.push_back(made(device, priority)->id);
  return *all.by_device[device][pool[place]];
}

std::vector<Stream*> streams_of(int device) {
  auto& all = all_streams();
  std::lock_guard<std::mutex> held(all.mutex);
  return device < 0 ? all.by_number : all.by_device.at(device);
}

Stream* stream_numbered(size_t number) {
  auto& all = all_streams();
  std::lock_guard<std::mutex> held(all.mutex);
  return all.by_number.at(number);
}

// ---- what makes the host wait ---------------------------------------------------------------------------------------
void synchronize_stream(Stream& stream, const char* name, bool by_operator) {
  refuse_while_capturing(name);
  count(std::string("host_synchronisation:") + name);
  if (by_operator) forbidden_while_debugging(name);
  {
    std::lock_guard<std::mutex> issuing(issue_mutex());
    // Taken before the wait: what another thread issues meanwhile is not waited for.
    const VectorClock before = stream.clock();
    host_saw(before);
  }
  stream.drain();
  advance_host_to_ns(stream.end_ns());
  rethrow_asynchronous_error();
}

void synchronize_device(int device, const char* name) {
  refuse_while_capturing(name);
  count(std::string("host_synchronisation:") + name);
  const auto list = streams_of(device);
  {
    std::lock_guard<std::mutex> issuing(issue_mutex());
    VectorClock before;
    for (auto* stream : list) join(before, stream->clock());
    host_saw(before);
  }
  int64_t end_ns = 0;
  for (auto* stream : list) {
    stream->drain();
    end_ns = std::max(end_ns, stream->end_ns());
  }
  advance_host_to_ns(end_ns);
  rethrow_asynchronous_error();
}

void synchronize_moment(const SharedMoment& moment, const char* name, bool by_operator) {
  refuse_while_capturing(name);
  count(std::string("host_synchronisation:") + name);
  if (by_operator) forbidden_while_debugging(name);
  {
    const HostWait waits([&] { return moment->query(); });
    moment->wait();
  }
  advance_host_to_ns(moment->at_ns());
  std::lock_guard<std::mutex> issuing(issue_mutex());
  host_saw(*moment->before);
}

bool poll(const SharedMoment& moment) {
  if (capture_mode == RELAXED) {  // permitted at any time; a thread of its own, whose questions order nothing
    count("relaxed_queries");
    return moment == nullptr || moment->query();
  }
  refuse_while_capturing("event query");  // in global mode, torch's default, it ends the capture with an error
  if (moment == nullptr) return true;
  if (!moment->query()) return false;
  std::lock_guard<std::mutex> issuing(issue_mutex());
  host_polled(*moment->before);
  return true;
}

void set_sync_debug(int mode) { sync_debug_mode = mode; }
int sync_debug() { return sync_debug_mode; }
void set_warning(void (*warn)(const std::string&)) { warning = warn; }

void asynchronous_error(const std::string& what) {
  auto& record = record_of_device();
  std::lock_guard<std::mutex> held(record.mutex);
  if (!record.error.empty()) return;
  record.error = what;
  std::cerr << "[simulated device] " << what << std::endl;
}

void rethrow_asynchronous_error() {
  auto& record = record_of_device();
  std::string error;
  {
    std::lock_guard<std::mutex> held(record.mutex);
    error.swap(record.error);
  }
  TORCH_CHECK(error.empty(), "simulated device: a task failed: ", error);
}

// ---- graph capture --------------------------------------------------------------------------------------------------
Graph* capturing() { return graph; }

int exchange_capture_mode(int mode) { return std::exchange(capture_mode, mode); }

void refuse_while_capturing(const char* what) {
  TORCH_CHECK(graph.load() == nullptr, "CUDA error: operation not permitted when stream is capturing: ", what);
}

void Graph::begin() {
  TORCH_CHECK(graph.load() == nullptr, "another graph is being captured");
  tasks_.clear();
  graph = this;
}

void Graph::end() {
  TORCH_CHECK(graph.load() == this, "this graph is not being captured");
  graph = nullptr;
}

// ---- the device's own record ----------------------------------------------------------------------------------------
std::vector<Row> timeline() {
  auto& record = record_of_device();
  std::lock_guard<std::mutex> held(record.mutex);
  return record.rows;
}

std::vector<BlockedRow> blocked() {
  auto& record = record_of_device();
  std::lock_guard<std::mutex> held(record.mutex);
  return record.blocked;
}

void count(const std::string& what) {
  auto& record = record_of_device();
  std::lock_guard<std::mutex> held(record.mutex);
  ++record.counts[what];
}

std::map<std::string, int64_t> counts(const std::string& prefix) {
  auto& record = record_of_device();
  std::lock_guard<std::mutex> held(record.mutex);
  std::map<std::string, int64_t> found;
  for (const auto& [name, number] : record.counts) {
    if (name.compare(0, prefix.size(), prefix) == 0) found[name.substr(prefix.size())] = number;
  }
  return found;
}

void reset_record() {
  for (auto* stream : streams_of(-1)) stream->drain();
  for (auto* stream : streams_of(-1)) stream->forget_kernels();
  {
    std::lock_guard<std::mutex> issuing(issue_mutex());
    clear_races();
  }
  forget_collectives();
  auto& record = record_of_device();
  std::lock_guard<std::mutex> held(record.mutex);
  record.rows.clear();
  record.blocked.clear();
  record.counts.clear();
}

}  // namespace sim

// Streams, events and what the device itself saw of them.
//
// A stream is a queue with a thread that never needs Python's lock. Its tasks really run there, one after another;
// when they "started" and "ended" is computed along the way (max-plus): a start is the latest of the stream's previous
// end, the host's clock at the issue and the events waited for; an end is the start and the task's length (and longer
// under contention.hpp). Must not: know tensors or Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clock.hpp"
#include "races.hpp"

namespace sim {

class Stream;

// A point in a stream: what the newest record of an event stands for.
struct Moment {
  Stream* stream = nullptr;
  SharedClock before;     // all that is ordered before it
  bool captured = false;  // recorded while a graph was captured: it never happens
  bool query() const;
  void wait() const;        // really blocks the calling thread, and nothing else
  int64_t at_ns() const;    // once it has happened
  int64_t row() const;      // id of the stream's last row before it; -1: none

  void happen(int64_t at_ns, int64_t row);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool happened_ = false;
  int64_t at_ns_ = 0, row_ = -1;
};
using SharedMoment = std::shared_ptr<Moment>;

// What a task is, in the timeline's words.
struct Description {
  std::string kind;  // op, collective, copy, sleep, memset
  std::string name;
  int64_t length_ns = 0;
  int64_t bytes = 0;
  std::string group{};
  int64_t sequence = -1;
};

struct Row {
  int64_t id;  // in the order of issue
  int device;
  int64_t stream;
  Description what;
  int64_t start_ns, end_ns;
};

// A stretch in which a stream stood still because of something on another one.
struct BlockedRow {
  int device;
  int64_t stream;
  int64_t begin_ns, end_ns;
  int on_device;
  int64_t on_stream, on_row;
  std::string why;  // event; communicator: the one before it was still busy; queue: the hardware queue was
};

// What is issued to a hardware queue runs in the order of issue, whatever stream it comes from (streams.cpp has the
// rule and its source).
struct HardwareQueue {
  int streams = 0;
  SharedMoment last;  // the end of what was issued to it last
};
// How many a device has for each priority; 0: as many as streams. Streams are dealt out to queues anew.
void set_hardware_queues(int64_t number);

// The work of a task: told its start, it says its end. May throw: the next synchronisation of the host reports it.
using Run = std::function<int64_t(int64_t start_ns)>;

// The bytes a task touches, with the blocks they belong to.
struct Touched {
  Accesses* block;
  Region region;
  bool write;
};

class Stream {
 public:
  Stream(int device, int64_t id, int priority);
  const int device;
  const int64_t id;
  const int priority;
  const size_t number;  // over all devices, for vector clocks

  // A kernel, copy or collective: costs the host a launch, and waits for room in the queue.
  void launch(const Description& what, const std::vector<Touched>& touched, Run run);
  // Something that the device does in no time and shows nobody: poison on memory that is given out again.
  void housekeeping(std::function<void()> run);
  SharedMoment record(bool timing = false);
  // Whether it also orders accesses: a wait for a communicator does not, nobody may build on it.
  void wait(const SharedMoment& moment, const char* why = "event", bool orders = true);

  bool query();
  void drain();         // really blocks the calling thread until everything queued is done
  int64_t end_ns();     // of all that is done
  VectorClock& clock(); // with issue_mutex(); brought up to what the host knows

  int64_t kernels() const { return kernels_; }
  std::vector<std::string> pending();  // what it is at, and what is queued behind, in words
  void forget_kernels();  // restarts the count; after drain()
  bool stands();  // idle, or waits for another stream: does nothing before something else happens

 private:
  struct Task {
    enum class Kind { Kernel, Housekeeping, Record, Wait } kind;
    int64_t issue_ns;  // when the device sees it
    Description what;
    Run run;
    SharedMoment moment;
    const char* why = "";
    int64_t id = -1;      // of its row
    int64_t cost_ns = 0;  // of the stream, to write an event's time
    double contention = 1.0;
    std::string words() const;
  };
  friend class Graph;
  void push(Task task);  // with issue_mutex(), but for housekeeping
  void enqueue(Task task);
  HardwareQueue* hardware_queue();  // null: no limit is set
  void serve();
  void execute(Task& task);
  void wait_for(const SharedMoment& moment);
  void wait_for_room();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::string at_;  // in words; empty: idle
  SharedMoment waits_for_;
  uint64_t pushed_ = 0, done_ = 0;
  bool served_ = false;
  int64_t end_ns_ = 0, last_row_ = -1;
  std::vector<int64_t> kernel_ends_;  // in order
  std::atomic<int64_t> kernels_{0};
  VectorClock clock_;
  uint64_t host_version_ = 0;
  HardwareQueue* hardware_queue_ = nullptr;
  int64_t dealt_ = -1;  // in which dealing of streams to queues it got it
};

// ---- which streams there are ----------------------------------------------------------------------------------------
int device_count();
int current_device();
int exchange_device(int device);  // negative: stays; returns the one before
Stream& stream_of(int device, int64_t id);
Stream& current_stream(int device = -1);
int64_t exchange_stream(int device, int64_t id);
// From a pool of one priority, as CUDA hands them out: after pool_streams of them the first one comes again.
Stream& new_stream(int device, int priority);
std::vector<Stream*> streams_of(int device);  // negative: of all devices
Stream* stream_numbered(size_t number);

// ---- what makes the host wait ---------------------------------------------------------------------------------------
// `by_operator`: forbidden under set_sync_debug_mode("error"), as CUDA forbids it there.
void synchronize_stream(Stream& stream, const char* name, bool by_operator);
void synchronize_device(int device, const char* name);
void synchronize_moment(const SharedMoment& moment, const char* name, bool by_operator);
// The host looks without waiting: true also orders the memory it gives back because of it.
bool poll(const SharedMoment& moment);
void set_sync_debug(int mode);  // 0 default, 1 warn, 2 error
int sync_debug();
void set_warning(void (*warn)(const std::string&));
void rethrow_asynchronous_error();
void asynchronous_error(const std::string& what);

// ---- graph capture: tasks are kept, with their tensors, in place of run ---------------------------------------------
class Graph {
 public:
  void begin();
  void end();

 private:
  friend class Stream;
  std::vector<Stream::Task> tasks_;
};
Graph* capturing();
void refuse_while_capturing(const char* what);
// Of this thread: 0 global, 1 thread-local, 2 relaxed (cudaThreadExchangeStreamCaptureMode); returns the mode before.
int exchange_capture_mode(int mode);

// ---- the device's own record ----------------------------------------------------------------------------------------
std::vector<Row> timeline();
std::vector<BlockedRow> blocked();
void count(const std::string& what);                      // one more of it
std::map<std::string, int64_t> counts(const std::string& prefix);
void reset_record();  // waits for all streams first

}  // namespace sim

// What Python sees of the simulated device. Nothing that may wait holds Python's lock: a stream's thread never has it,
// but an operator's shape may be computed in Python meanwhile.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "guard.hpp"
#include "memory.hpp"
#include "operators.hpp"
#include "process_group.hpp"
#include "staged.hpp"
#include "streams.hpp"

namespace py = pybind11;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;
template <class T>
using Held = c10::intrusive_ptr<T>;

void warn_from_device(const std::string& message) { TORCH_WARN(message); }

// torch ships no headers of gloo's: the group that moves the bytes is made in Python, where it has a constructor.
Held<c10d::Backend> gloo(const Held<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout) {
  const py::gil_scoped_acquire locked;
  return py::module_::import("torch.distributed")
      .attr("ProcessGroupGloo")(store, rank, size, std::chrono::duration_cast<std::chrono::microseconds>(timeout))
      .cast<Held<c10d::Backend>>();
}

// Numbers are drawn when a stream comes to them: the generator is the host's again when nothing is queued. On a card it
// needs no such wait, so none is counted and no clock moves.
void drain(int device) {
  for (auto* stream : sim::streams_of(device)) stream->drain();
}

py::dict row_of(const sim::Row& row) {
  using namespace pybind11::literals;
  return py::dict("id"_a = row.id, "device"_a = row.device, "stream"_a = row.stream, "kind"_a = row.what.kind,
                  "name"_a = row.what.name, "start_ns"_a = row.start_ns, "end_ns"_a = row.end_ns,
                  "bytes"_a = row.what.bytes, "group"_a = row.what.group, "seq"_a = row.what.sequence);
}

py::dict blocked_row_of(const sim::BlockedRow& row) {
  using namespace pybind11::literals;
  return py::dict("device"_a = row.device, "stream"_a = row.stream, "begin_ns"_a = row.begin_ns,
                  "end_ns"_a = row.end_ns, "on_device"_a = row.on_device, "on_stream"_a = row.on_stream,
                  "on_row"_a = row.on_row, "why"_a = row.why);
}

py::dict side_of(const sim::RaceSide& side) {
  using namespace pybind11::literals;
  const auto* stream = sim::stream_numbered(side.stream);
  return py::dict("name"_a = side.name, "device"_a = stream->device, "stream"_a = stream->id, "write"_a = side.write,
                  "begin"_a = side.begin, "end"_a = side.end);
}

void define_settings(py::module_& m) {
  m.def("default_settings", [] {
    sim::default_settings();
    sim::set_hardware_queues(0);
  }, Unlocked());
  m.def("set_hardware_queues", &sim::set_hardware_queues, Unlocked());
  m.def("set_class_length", [](const std::string& name, int64_t fixed_ns, double ns_per_kib) {
    sim::settings()->classes[name] = {fixed_ns, ns_per_kib};
  });
  m.def("set_operator_length", [](const std::string& name, int64_t fixed_ns, double ns_per_kib) {
    sim::settings()->operators[name] = {fixed_ns, ns_per_kib};
  });
  m.def("set_collective_length", [](const std::string& kind, int64_t fixed_ns, double ns_per_byte) {
    sim::settings()->collectives[kind] = {fixed_ns, ns_per_byte};
  });
  m.def("set_number", [](const std::string& name, int64_t value) {
    auto held = sim::settings();
    const std::map<std::string, int64_t*> numbers{
        {"launch_cost_ns", &held->launch_cost_ns},
        {"event_cost_ns", &held->event_cost_ns},
        {"event_on_device_cost_ns", &held->event_on_device_cost_ns},
        {"submission_ns", &held->submission_ns},
        {"rate_ppm", &held->rate_ppm},
        {"queue_depth", &held->queue_depth},
        {"real_operator_ns", &held->real_operator_ns},
        {"real_collective_ns", &held->real_collective_ns},
        {"real_sleep_ns", &held->real_sleep_ns},
        {"pool_streams", &held->pool_streams}};
    *numbers.at(name) = value;
  });
  m.def("set_contention", [](double factor) { sim::settings()->contention = factor; });
}

void define_clock(py::module_& m) {
  m.def("host_ns", &sim::host_now_ns);
  m.def("advance_host", &sim::advance_host_ns);
  m.def("host_clock_address", [] { return reinterpret_cast<uintptr_t>(&sim::host_now_ns); });
}

void define_devices(py::module_& m) {
  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("exchange_device", &sim::exchange_device);
  m.def("current_stream", [](int device) { return sim::current_stream(device).id; });
  m.def("exchange_stream", &sim::exchange_stream);
  m.def("stream_priority", [](int device, int64_t id) { return sim::stream_of(device, id).priority; });
  m.def("synchronize", [](int device) { sim::synchronize_device(device, "device"); }, Unlocked());
  m.def("set_sync_debug", [](int mode) {
    sim::set_warning(&warn_from_device);
    sim::set_sync_debug(mode);
  });
  m.def("sync_debug", &sim::sync_debug);
  m.def(
      "sleep",
      [](int64_t length_ns) {
        const auto really_ns = std::min(length_ns, int64_t{sim::settings()->real_sleep_ns});
        sim::current_stream().launch({"sleep", "sleep", length_ns}, {}, [=](int64_t start_ns) {
          if (really_ns > 0) sim::sleep_until_real_ns(sim::real_now_ns() + really_ns);
          return start_ns + length_ns;
        });
      },
      Unlocked());
  m.def("elapsed_ms", [](uintptr_t one, uintptr_t other) {
    return sim::elapsed_ms(reinterpret_cast<void*>(one), reinterpret_cast<void*>(other));
  });
  m.def("event_ns", [](uintptr_t event) { return sim::event_ns(reinterpret_cast<void*>(event)); });
  m.def(
      "generator_state",
      [](int device) {
        drain(device);
        return sim::generator_of(device).get_state();
      },
      Unlocked());
  m.def(
      "set_generator_state",
      [](int device, const at::Tensor& state) {
        drain(device);
        sim::generator_of(device).set_state(state);
      },
      Unlocked());
  m.def(
      "seed",
      [](int device, uint64_t seed) {
        drain(device);
        sim::generator_of(device).set_current_seed(seed);
      },
      Unlocked());
  m.def("resize_storage", [](const at::Tensor& tensor, int64_t bytes) {
    sim::resize_storage(tensor.storage().unsafeGetStorageImpl(), static_cast<size_t>(bytes), tensor.device().index());
  }, Unlocked());
  py::class_<sim::Graph, std::shared_ptr<sim::Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", &sim::Graph::begin)
      .def("end", &sim::Graph::end);
  m.def("is_capturing", [] { return sim::capturing() != nullptr; });
}

void define_record(py::module_& m) {
  m.def("timeline", [] {
    py::list rows;
    for (const auto& row : sim::timeline()) rows.append(row_of(row));
    return rows;
  });
  m.def("waits", [] {
    py::list rows;
    for (const auto& row : sim::blocked()) rows.append(blocked_row_of(row));
    return rows;
  });
  m.def("races", [] {
    using namespace pybind11::literals;
    std::vector<sim::Race> found;
    {
      std::lock_guard<std::mutex> issuing(sim::issue_mutex());
      found = sim::races();
    }
    py::list rows;
    for (const auto& race : found) {
      rows.append(py::dict("first"_a = side_of(race.first), "second"_a = side_of(race.second), "begin"_a = race.begin,
                           "end"_a = race.end, "times"_a = race.times));
    }
    return rows;
  });
  m.def("pending", [] {
    std::map<std::pair<int, int64_t>, std::vector<std::string>> found;
    for (auto* stream : sim::streams_of(-1)) {
      auto tasks = stream->pending();
      if (!tasks.empty()) found[{stream->device, stream->id}] = std::move(tasks);
    }
    return found;
  });
  m.def("counts", &sim::counts);
  m.def("kernels", [] {
    std::map<std::pair<int, int64_t>, int64_t> found;
    for (const auto* stream : sim::streams_of(-1)) {
      if (stream->kernels() > 0) found[{stream->device, stream->id}] = stream->kernels();
    }
    return found;
  });
  m.def("memory", [](int device) {
    const auto counts = sim::memory_counts(device);
    return std::make_tuple(counts.live_bytes, counts.peak_bytes, counts.allocations);
  });
  m.def("reset_peak", &sim::reset_peak);
  m.def("reset", &sim::reset_record, Unlocked());
}

void define_process_group(py::module_& m) {
  using sim::SimulatedNccl;
  using Options = SimulatedNccl::Options;
  m.def("staged", &sim::staged);
  auto group = py::class_<SimulatedNccl, Held<SimulatedNccl>, c10d::Backend>(m, "ProcessGroupNCCL");
  py::class_<Options, Held<Options>, c10d::Backend::Options>(group, "Options")
      .def(py::init([](bool high) {
             auto made = c10::make_intrusive<Options>();
             made->is_high_priority_stream = high;
             return made;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_readwrite("split_from", &Options::split_from)
      .def_readwrite("split_color", &Options::split_color)
      .def("__copy__", [](const Options& self) { return c10::make_intrusive<Options>(self); })
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); });
  py::enum_<SimulatedNccl::Fault>(m, "Fault")
      .value("FAILS", SimulatedNccl::Fault::Fails)
      .value("PEER_IS_DEAD", SimulatedNccl::Fault::PeerIsDead);
  group
      .def(py::init([](Held<c10d::Store> store, int rank, int size, Held<Options> options) {
             return c10::make_intrusive<SimulatedNccl>(std::move(store), rank, size, std::move(options), &gloo);
           }),
           Unlocked())
      .def("perform_nocolor_split", [](const SimulatedNccl&, const at::Device&) {})
      .def("comm_split_count", &SimulatedNccl::splits)
      .def("_is_initialized", &SimulatedNccl::connected)
      .def("_set_default_timeout",
           [](SimulatedNccl& self, std::chrono::milliseconds timeout) { self.setTimeout(timeout); })
      .def("_group_start", [](const SimulatedNccl&) {})
      .def("_group_end", [](const SimulatedNccl&) {})
      .def("get_error", &SimulatedNccl::getError)
      .def_property_readonly("uid", &SimulatedNccl::getID)
      .def_property_readonly("options", &SimulatedNccl::getBackendOptions)
      .def("fault_next", &SimulatedNccl::fault_next);
}

}  // namespace

PYBIND11_MODULE(aorta_simulated_device, m) {
  define_settings(m);
  define_clock(m);
  define_devices(m);
  define_record(m);
  define_process_group(m);
}

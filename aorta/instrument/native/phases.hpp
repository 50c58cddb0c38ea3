// Step and phase of the training thread in a rank's progress file (`aorta/records/progress_file.py` has the layout).
//
// A step enters some ten phases, each behind work of the model that has emptied the processor's caches: what counts is
// how little memory a note touches. So these are plain C functions, and a phase is known by the identity of its name.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include "host_clock.hpp"
#include "progress.hpp"

namespace aorta {

class Phases {
 public:
  // The word of step and phase, that of the time, and how step, phase and the time's lowest bits share the former.
  struct Layout {
    int64_t state_at;
    int64_t since_at;
    int64_t step_shift;
    int64_t phase_shift;
    int64_t since_mask;
  };

  Phases(std::shared_ptr<Progress> progress, Layout layout, std::vector<py::str> names, int64_t step, size_t phase)
      : progress_(std::move(progress)),
        layout_(layout),
        names_(std::move(names)),
        step_phase_(number_of(py::str("step"))),
        step_(step),
        phase_(phase) {
    if (step_phase_ == names_.size() || phase_ >= names_.size()) {
      throw std::invalid_argument("phases without a step");
    }
  }

  // The phase before; `phase` itself where it is none.
  py::handle enter(py::handle phase) {
    const size_t number = number_of(phase);
    if (number == names_.size()) {  // no phase of the file
      return phase;
    }
    const py::handle before = names_[phase_];
    phase_ = number;
    store();
    return before;
  }

  void begin_step(int64_t step) {
    step_ = step;
    phase_ = step_phase_;
    store();
  }

 private:
  size_t number_of(py::handle phase) const {
    const auto is_it = [phase](const py::str& name) { return name.ptr() == phase.ptr(); };
    auto name = std::find_if(names_.begin(), names_.end(), is_it);
    if (name == names_.end() && PyUnicode_Check(phase.ptr()) != 0) {  // perhaps equal, and not interned
      name = std::find_if(names_.begin(), names_.end(), [phase](const py::str& other) { return other.equal(phase); });
    }
    return static_cast<size_t>(name - names_.begin());
  }

  // Two stores, each of a whole word: the kernel may end the process between them.
  void store() {
    const int64_t at_ns = now_ns();
    progress_->store(layout_.since_at, at_ns);
    progress_->store(
        layout_.state_at,
        step_ << layout_.step_shift | static_cast<int64_t>(phase_) << layout_.phase_shift | (at_ns & layout_.since_mask));
  }

  const std::shared_ptr<Progress> progress_;
  const Layout layout_;
  const std::vector<py::str> names_;
  const size_t step_phase_;
  int64_t step_;
  size_t phase_;
};

inline Phases& phases_of(PyObject* capsule) { return *static_cast<Phases*>(PyCapsule_GetPointer(capsule, nullptr)); }

// (phase: str) -> str
inline PyObject* enter_phase(PyObject* self, PyObject* phase) { return phases_of(self).enter(phase).inc_ref().ptr(); }

// (step: int) -> None
inline PyObject* begin_step(PyObject* self, PyObject* step) {
  const long long number = PyLong_AsLongLong(step);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  phases_of(self).begin_step(number);
  Py_RETURN_NONE;
}

// The two functions, of one object.
inline std::pair<py::object, py::object> phase_functions(std::unique_ptr<Phases> phases) {
  static PyMethodDef enter{"enter", enter_phase, METH_O, nullptr};
  static PyMethodDef begin{"begin_step", begin_step, METH_O, nullptr};
  const py::capsule self(phases.release(), [](void* held) { delete static_cast<Phases*>(held); });
  const auto function = [&self](PyMethodDef& method) {
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
  };
  return {function(enter), function(begin)};
}

}  // namespace aorta

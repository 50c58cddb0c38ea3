"""Rules of the steps that a metric is described over, and of the window that a run calibrates itself in."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_BASIS = ("tests/analysis/test_host_bound.py",)
_CALIBRATION = ("tests/runner/test_calibration.py",)

CALIBRATION: Final = (
    *rules(
        "aorta.analysis.host_bound",
        _BASIS,
        ("half of the steps may be open", "MOST_UNDECIDED: Final = 0.05", "MOST_UNDECIDED: Final = 0.5"),
        ("no step may be open", "MOST_UNDECIDED: Final = 0.05", "MOST_UNDECIDED: Final = 0.0"),
        ("kernels and marks always agree", "> AGREEMENT\n", "> 2.0\n"),
        ("kernels and marks have to be equal", "> AGREEMENT\n", "> 0.0\n"),
        ("a profiler costs nothing", "PROFILER_COST: Final = 0.05", "PROFILER_COST: Final = 5.0"),
        (
            "a run of calibrated steps is of marks",
            "if self._by_kernels is not None and used.any() and self._by_kernels[used].all():",
            "if False:",
        ),
        ("some calibrated steps make a run of kernels", "self._by_kernels[used].all()", "self._by_kernels[used].any()"),
        (
            "a contradiction is passed over",
            "if decided and not (self.contradicted and self._rests_on_compute(name)):",
            "if decided:",
        ),
        (
            "a contradiction concerns every metric",
            "(self.contradicted and self._rests_on_compute(name))",
            "self.contradicted",
        ),
        (
            "a contradicted mark is a bound",
            "return Basis(None, used, None, CONTRADICTED)",
            "return Basis(None, used, self._bounds(name), CONTRADICTED)",
        ),
        (
            "marks are bounds where kernels are known",
            "if self._by_kernels is not None and self._known_by_kernels(name):",
            "if False:",
        ),
        (
            "one rank's kernels stand for all",
            "        return all(\n            tables.steps.by_kernels is not None\n",
            "        return any(\n            tables.steps.by_kernels is not None\n",
        ),
        (
            "calibrated warm-up is used",
            "lambda steps: steps.of_kernels & ~steps.warmup",
            "lambda steps: steps.of_kernels",
        ),
        (
            "kernels of warm-up make a metric known",
            "tables.steps.column(name)[tables.steps.by_kernels & ~tables.steps.warmup]",
            "tables.steps.column(name)[tables.steps.by_kernels]",
        ),
        (
            "undecided warm-up counts",
            "        left_open = ~np.isnan(found[0][self._used])\n        own = np.asarray("
            "self._run.over_ranks(lambda steps: steps.column(name)), np.float64)[self._used]\n",
            "        left_open = ~np.isnan(found[0])\n        own = np.asarray("
            "self._run.over_ranks(lambda steps: steps.column(name)), np.float64)\n",
        ),
        ("null for another reason is decided", "left_open[known].mean()", "left_open.mean()"),
        (
            "a metric that one rank decides is decided",
            "if all(name not in tables.steps.bounds for tables in ranks):",
            "if any(name not in tables.steps.bounds for tables in ranks):",
        ),
        ("decided steps are no part of the bounds", "np.where(np.isnan(end), own, end)[self._used]", "end[self._used]"),
        (
            "warm-up is a part of the bounds",
            "np.where(np.isnan(end), own, end)[self._used]",
            "np.where(np.isnan(end), own, end)",
        ),
        ("at least is at most", "float(np.median(low[known])), float(", "float(np.median(high[known])), float("),
        (
            "all calibrations have to contradict",
            "        return any(\n            abs(each",
            "        return all(\n            abs(each",
        ),
        (
            "kernels contradict where they show less only",
            "abs(each.ratio_by_kernels - each.ratio_by_marks) > AGREEMENT",
            "each.ratio_by_marks - each.ratio_by_kernels > AGREEMENT",
        ),
        (
            "a record that does not tell is of a host that is ahead",
            "        if self._column(LEAD) is None:\n            return None\n",
            "",
        ),
        (
            "a host sets the pace where all metrics are open",
            "return any(self.undecided(name) > MOST_UNDECIDED for",
            "return all(self.undecided(name) > MOST_UNDECIDED for",
        ),
        (
            "a calibration without a ratio agrees",
            'None if middle("ratio_by_kernels") is None else not self.contradicted',
            "not self.contradicted",
        ),
        (
            "the windows of all ranks are one rank's steps",
            "0 if steps is None else int(steps.sum())",
            "max(one.steps for one in each)",
        ),
        ("a contradiction is not told", 'elif found is not None and found["agree"] is False:', "elif False:"),
        ("a host that sets the pace is not told", '    if pace["host_bound"]:\n', "    if False:\n"),
        (
            "why a calibration failed is not told",
            '        for problem in found["problems"]:\n',
            "        for problem in []:\n",
        ),
        (
            "a profiler's cost is told where no metric is of its steps",
            ' and ratio.get("source") == "kernels":\n            yield',
            ":\n            yield",
        ),
        ("who calibrated is told to calibrate", "if calibration is None else said", "if True else said"),
    ),
    *rules(
        "aorta.runner.calibration",
        _CALIBRATION,
        ("a window may begin with the first step", "start_step + max(warmup_steps, 1)", "start_step + warmup_steps"),
        ("a window may begin in the warm-up", "start_step + max(warmup_steps, 1)", "start_step + 1"),
        ("who does not instrument calibrates", '    if mode == "off":\n', "    if False:\n"),
        (
            "a calibration runs beside an outer profiler",
            "    if (tool := tracer_present(environment)) is not None:",
            "    if (tool := None) is not None:",
        ),
        (
            "the profiler may start in a window of profiling",
            "if _free(profiled, step - 1, step + asked)",
            "if _free(profiled, step, step + asked)",
        ),
        (
            "a window may end in one of profiling",
            "if _free(profiled, step - 1, step + asked)",
            "if _free(profiled, step - 1, step + asked - 1)",
        ),
        ("a window may reach behind the run", "min(asked, stop - begin)", "asked"),
        ("a window of no step is one", "if steps > 0 else none", "if steps >= 0 else none"),
        ("the profiler starts with the window", "if global_step == self._first - 1:", "if global_step == self._first:"),
        (
            "steps before the window are its own",
            "self._kernels if self._first <= global_step <= self._last else None",
            "self._kernels if global_step <= self._last else None",
        ),
        (
            "steps behind the window are its own",
            "self._kernels if self._first <= global_step <= self._last else None",
            "self._kernels if self._first <= global_step else None",
        ),
        (
            "the profiler stops one step early",
            "and global_step >= self._last and",
            "and global_step >= self._last - 1 and",
        ),
        (
            "the profiler is stopped again",
            "if self._kernels is not None and not self._kernels.known and global_step",
            "if self._kernels is not None and global_step",
        ),
        (
            "the profiler is stopped while a graph is captured",
            "global_step >= self._last and not is_capturing():",
            "global_step >= self._last:",
        ),
        (
            "the profiler goes on behind a captured end",
            "and global_step >= self._last and",
            "and global_step == self._last and",
        ),
        ("the profiler starts while a graph is captured", "        if is_capturing():\n", "        if False:\n"),
        (
            "a run that ends in its window leaves the profiler on",
            '    def close(self) -> None:\n        """There are no more steps of the training."""\n        if self._kernels is not None and not self._kernels.known and not is_capturing():\n',
            '    def close(self) -> None:\n        """There are no more steps of the training."""\n        if False:\n',
        ),
        ("steps of baselines are counted", 'step.phase != "train" or ', ""),
        ("steps before the window are counted", " or step.global_step < self._first:", ":"),
        (
            "the other steps are those of the window",
            "(self._inside_ms if inside else self._behind_ms)",
            "(self._behind_ms if inside else self._inside_ms)",
        ),
        (
            "the line is written with the first step behind the window",
            "and len(self._behind_ms) > self._last - self._first:",
            "and self._behind_ms:",
        ),
        (
            "the line is written one step too late",
            "and len(self._behind_ms) > self._last - self._first:",
            "and len(self._behind_ms) > self._last - self._first + 1:",
        ),
        ("the line is written twice", "kernels, self._kernels = self._kernels, None", "kernels = self._kernels"),
        ("the profiler is not given back", "            self._recording.abandon()\n", "            pass\n"),
        (
            "steps that are missing are no problem",
            "if problem is None and seen.steps <= self._last - self._first:",
            "if False:",
        ),
        (
            "one step of a window is enough",
            "if problem is None and seen.steps <= self._last - self._first:",
            "if problem is None and seen.steps < 1:",
        ),
        ("a problem of the kernels is passed over", "        problem = kernels.problem\n", "        problem = None\n"),
        (
            "what is hidden is told of all time",
            "ratio_by_marks=seen.marked_hidden_ns / at_most if at_most else None",
            "ratio_by_marks=seen.marked_hidden_ns / seen.comm_ns if seen.comm_ns else None",
        ),
        (
            "a window without communication hides none of it",
            "seen.hidden_ns / seen.comm_ns if seen.comm_ns else None",
            "seen.hidden_ns / seen.comm_ns if seen.comm_ns else 0.0",
        ),
        (
            "the share of kernels is their length",
            "length / 1e6, ran / length if length else None)",
            "length / 1e6, ran / 1e6 if length else None)",
        ),
        ("a block without a length is measured", "ran / length if length else None)", "ran / (length or 1))"),
        (
            "the longest step stands for the window",
            "window_step_ms=median(self._inside_ms)",
            "window_step_ms=max(self._inside_ms)",
        ),
        (
            "the shortest step stands for the others",
            "other_step_ms=median(self._behind_ms)",
            "other_step_ms=min(self._behind_ms)",
        ),
        (
            "a profiler that does not start ends the training",
            "            self._recording.start()\n        except ProfilerUnavailable as error:",
            "            self._recording.start()\n        except ZeroDivisionError as error:",
        ),
        (
            "a profiler that fails ends the training",
            "self._kernels.arrived(self._recording.stop())\n        except ProfilerUnavailable as error:",
            "self._kernels.arrived(self._recording.stop())\n        except ZeroDivisionError as error:",
        ),
        ("steps behind the window wait for kernels", "        self._recorder.kernels = None\n", ""),
        (
            "starting the profiler is not counted",
            "self._kernels.failed(str(error))\n        self._spent_s += time.monotonic() - began_s\n\n    def _stop",
            "self._kernels.failed(str(error))\n\n    def _stop",
        ),
        ("the time is in seconds", "setup_ms=self._spent_s * 1e3", "setup_ms=self._spent_s"),
    ),
)

"""Mutants of the device path's C++: each takes one rule away. Data; `switched` compiles all of them into one library.

The text between ⟪ and ⟫ is what changes; what stands around it only says which occurrence is meant. An expression
becomes a conditional one, a statement (it ends in `;` or `}`) a conditional statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.operators import ROOT

FOLDER: Final = "aorta/instrument/native"


@dataclass(frozen=True)
class NativeMutant:
    """`quote` stands once in the file, without its two brackets; what is between them becomes `new`."""

    rule: str
    file: str
    quote: str
    new: str

    @property
    def name(self) -> str:
        """The file, and what is then wrong."""
        return f"{FOLDER}/{self.file}: {self.rule}"

    @property
    def path(self) -> Path:
        """Of the source."""
        return ROOT / FOLDER / self.file

    @property
    def old(self) -> str:
        """What changes."""
        return self.quote.partition("⟪")[2].partition("⟫")[0]

    def diff(self) -> str:
        """What changes, and what it becomes."""
        return f"- {self.old}\n+ {self.new}"

    def span(self) -> tuple[int, int]:
        """Where it stands in the file.

        Raises:
            ValueError: the quote does not stand there exactly once.
        """
        text, around = self.path.read_text(), self.quote.replace("⟪", "").replace("⟫", "")
        if text.count(around) != 1 or not self.old:
            raise ValueError(f"{self.name}: the quote stands {text.count(around)} times in {self.file}")
        begin = text.index(around) + self.quote.index("⟪")
        return begin, begin + len(self.old)


def rules(file: str, *taken: tuple[str, str, str]) -> list[NativeMutant]:
    """The mutants of one file, each as its name, quote and new text."""
    return [NativeMutant(name, file, quote, new) for name, quote, new in taken]


WAIT = "{of, begin, clock_->mark(), /*blocked=*/true, /*over=*/true}"

NATIVE_MUTANTS: Final = (
    *rules(
        "device.hpp",
        ("events that order streams are not used again", "⟪pool->free_.emplace_back(gone);⟫", "delete gone;"),
        ("tensors are let go whether or not the device has passed", "⟪tensors.empty() || done->query()⟫", "true"),
        ("tensors are kept until somebody waits", "⟪tensors.empty() || done->query()⟫", "tensors.empty()"),
        (
            "a handle of ours is complete at once",
            "return ⟪done_->query()⟫; }\n  bool isSuccess() const override { return true; }",
            "true",
        ),
        ("every wait of every stream is a stall", "return ⟪current() == compute_⟫;", "true"),
        ("no stream computes", "return ⟪current() == compute_⟫;", "false"),
        ("the compute stream is never looked up again", "⟪compute_ = current();⟫", ""),
        ("a side stream has the default priority", "⟪priority_ ? *priority_ : priority_of(caller)⟫", "0"),
        (
            "the configured priority is not used",
            "⟪priority_ ? *priority_ : priority_of(caller)⟫",
            "priority_of(caller)",
        ),
        ("a side stream may be the caller's", "⟪*fresh == compute_ || *fresh == caller⟫", "false"),
        ("two groups may share a side stream", "⟪taken || (other && *other == *fresh)⟫", "taken"),
        (
            "the event that orders streams is recorded on the wrong one",
            "⟪orders_->recorded(before)->block(after);⟫",
            "orders_->recorded(after)->block(after);",
        ),
        ("a stream that does not compute joins nothing", "      wait();\n      ⟪joined(of);⟫", ""),
        ("waits outside of steps are marked", "if (⟪!step.is_open()⟫) {", "false"),
        ("a handle's wait is no stall", f"⟪step.wait({WAIT});⟫", "clock_->release(begin);"),
        ("a wait has blocked nobody", f"⟪step.wait({WAIT});⟫", "step.wait({of, begin, clock_->mark(), false, true});"),
        (
            "a wait has not come to its end",
            f"⟪step.wait({WAIT});⟫",
            "step.wait({of, begin, clock_->mark(), true, false});",
        ),
        (
            "a stall begins at its end",
            f"⟪step.wait({WAIT});⟫",
            "clock_->release(begin); step.wait({of, clock_->mark(), clock_->mark(), true, true});",
        ),
        ("the joined collective's name is dropped", "⟪behind.push_back(of);⟫", ""),
        (
            "a stream joins one collective at most",
            "⟪behind.push_back(of);⟫",
            "if (behind.empty()) { behind.push_back(of); }",
        ),
        ("a stream has joined the last one only", "⟪behind.size() > MOST_JOINED⟫", "behind.size() > 1"),
        ("all streams join as one", "auto& behind = joined_[⟪current().id()⟫];", "compute_.id()"),
        ("what was joined is told again", "⟪std::exchange(found->second, {})⟫", "found->second"),
        ("tensors are not held", "⟪held_.push_back(held);⟫", ""),
        ("tensors are let go only where a step begins", "⟪let_go();⟫\n    return held;", ""),
        ("all streams have the first one's priority", "⟪priorities_.find(stream.id())⟫", "priorities_.begin()"),
        ("tensors are let go in any case", "⟪held_.empty() || !held_.front()->over()⟫", "held_.empty()"),
        ("events are asked for while a graph is captured", "if (⟪is_capturing(current())⟫) {", "false"),
        ("what the device has passed is forgotten, and kept", "⟪oldest->let_go();⟫", ""),
        ("a wait with a limit of time is not the host's", "⟪answer = work_->wait(timeout);⟫  // the host waits", ""),
        ("who waits for a moved collective does not", "⟪done_->block(device_->current());⟫", ""),
        (
            "who waits for one that was left where it is does not",
            "device_->stalling(*step_, of_, [&] { ⟪answer = work_->wait(timeout);⟫ });",
            "",
        ),
        ("tensors outlive the wait", "⟪held_->let_go();⟫  // the caller's stream", ""),
        ("a future in a backward pass is not noted", "⟪span_->by_future.store(true, std::memory_order_release);⟫", ""),
        ("a future outside of a backward pass is noted", "⟪in_backward()⟫", "true"),
        ("a handle is never complete", "return ⟪work_->isCompleted()⟫;", "false"),
        ("a handle is complete at once", "return ⟪work_->isCompleted()⟫;", "true"),
        ("a handle's synchronize does nothing", "synchronize() override { ⟪wait(kNoTimeout);⟫ }", ""),
        ("a handle does not block the current stream", "blockCurrentStream() override { ⟪wait(kNoTimeout);⟫ }", ""),
        (
            "a handle knows of no failure",
            "exception() const override { return ⟪work_->exception()⟫;",
            "std::exception_ptr()",
        ),
        ("a handle has no result", "return ⟪work_->result()⟫;", "std::vector<at::Tensor>()"),
        ("a handle of ours has no limit of time", "if (⟪timeout == kNoTimeout⟫) {\n      return true;", "true"),
        ("a limit of time is never reached", "⟪std::chrono::steady_clock::now() < limit⟫", "true"),
        ("all priorities share a side stream", "⟪sides_.find({key, priority})⟫", "sides_.find({key, 0})"),
    ),
    *rules(
        "interceptor.cpp",
        ("what is captured is timed", "if (⟪device_ && aorta::is_capturing(device_->current())⟫) {", "false"),
        ("what is captured is not counted", "⟪++captured_;⟫", ""),
        (
            "a synchronous barrier ends on the device",
            "⟪group.on_device || (group.early && !asynchronous)⟫",
            "group.on_device",
        ),
        (
            "a blocking wait ends on the device",
            "⟪group.on_device || (group.early && !asynchronous)⟫",
            "group.on_device || group.early",
        ),
        ("a barrier is timed on the device", "!on_host && ⟪op.argument⟫ && (group", "true"),
        ("a future that is early is the end", "if (⟪on_host || !group.early⟫) {", "true"),
        ("a wait of the host is one of the compute stream", "const auto waits = ⟪device_ ? nullptr : step_⟫;", "step_"),
        ("what is collected is taken to be launched at once", "if (⟪group.on_device⟫) {\n      group.batch =", "false"),
        ("a batch never ends", "⟪std::exchange(group.batch, nullptr)⟫", "group.batch"),
        ("a batch is marked outside of steps", "⟪device_->computes() && step_->is_open()⟫", "device_->computes()"),
        ("a batch counts as many times as it has operations", "⟪span->launch = number;⟫", ""),
        ("a batch has no start", "span->launch = number;\n      ⟪span->start = marked();⟫", ""),
        ("a synchronous batch has no end", "⟪ended(batch->spans);⟫", ""),
        (
            "a synchronous batch is no stall",
            "⟪step_->wait({batch->last, begin, device_->clock().mark(), /*blocked=*/true, /*over=*/true});⟫",
            "device_->clock().release(begin);",
        ),
        ("a strategy's stream does not join a batch", "⟪device_->joined(batch->last);⟫", ""),
        ("the mark before an asynchronous batch is lost", "⟪device_->clock().release(begin);⟫", ""),
        (
            "a batch is named after its first operation",
            "⟪group.batch->last = row.name();⟫",
            "if (group.batch->spans.size() == 1) { group.batch->last = row.name(); }",
        ),
        (
            "a batch's tensors are not collected",
            "⟪group.batch->tensors.insert(group.batch->tensors.end(), tensors.begin(), tensors.end());⟫",
            "",
        ),
        ("sends and receives are numbered with the others", '⟪op.point_to_point ? op.kind : ""⟫', "std::string()"),
        (
            "marks are taken although no step is open",
            "return ⟪step_->is_open() ? device_->clock().mark() : NO_MARK⟫;",
            "device_->clock().mark()",
        ),
        ("our stream does not wait for the backend's", "⟪work.wait();⟫  // blocks `side`", ""),
        (
            "an asynchronous batch keeps no tensors",
            "batch->spans, ⟪std::move(batch->tensors)⟫);",
            "std::vector<IValue>()",
        ),
        (
            "ends beside the backend are marked on the caller's stream",
            "bool stacks = false) {\n    const c10::StreamGuard on(⟪side⟫);",
            "device_->current()",
        ),
        ("what the backend stacks is released under its kernel", "⟪stacks && wait_for_future(work)⟫", "false"),
        ("a batch stacks nothing", "⟪group.batch->stacks || op.stacks⟫", "false"),
        (
            "the transfers of an unbound group wait for the group's",
            "⟪group.shared ? peer : aorta::UNKNOWN⟫",
            "aorta::OF_THE_GROUP",
        ),
        (
            "nothing is known of an unbound group's transfers",
            "⟪group.shared ? peer : aorta::UNKNOWN⟫",
            "aorta::UNKNOWN",
        ),
        ("transfers with two peers share a side stream", 'op.kind + " ") + ⟪std::to_string(peer)⟫', "std::string()"),
        ("every pair of a bound group has a communicator", "if (⟪!group.shared.value_or(false)⟫) {", "true"),
        ("no pair has a communicator", "if (⟪!group.shared.value_or(false)⟫) {", "false"),
        ("why there is no time is not said", "⟪row.span->untimed = Untimed::NO_STREAM;⟫", ""),
        (
            "tensors of what is left where it is are not kept",
            "*work, {row.span}, ⟪std::move(tensors)⟫, stacks);",
            "std::vector<IValue>()",
        ),
        ("every collective is synchronous", "⟪!op.async_at || tensors[*op.async_at].toBool()⟫", "false"),
        ("every collective is asynchronous", "⟪!op.async_at || tensors[*op.async_at].toBool()⟫", "true"),
        (
            "asynchronous collectives stay on the backend's stream",
            "⟪device_->dedicated_async() && op.async_at⟫",
            "false",
        ),
        (
            "asynchronous collectives never have the backend's stream",
            "⟪device_->dedicated_async() && op.async_at⟫",
            "op.async_at.has_value()",
        ),
        ("a handle of ours has no outputs", "⟪add_tensors(tensors.front(), outputs);⟫", ""),
        (
            "asynchronous collectives are not moved",
            "if (⟪device_->dedicated()⟫) {",
            "device_->dedicated() && !asynchronous",
        ),
        (
            "synchronous collectives are not moved",
            "if (⟪device_->dedicated()⟫) {",
            "device_->dedicated() && asynchronous",
        ),
        ("nothing is moved", "if (⟪device_->dedicated()⟫) {", "false"),
        ("everything is moved", "if (⟪device_->dedicated()⟫) {", "true"),
        (
            "a collective on the caller's stream has no start",
            "⟪row.span->start = marked();⟫\n      if (const auto work",
            "",
        ),
        ("a moved collective does not wait for its inputs", "⟪device_->order(caller, side);⟫", ""),
        (
            "what is moved runs on the caller's stream",
            "on(⟪side⟫);\n      row.span->start = marked();\n      work",
            "caller",
        ),
        (
            "a moved collective's start is marked on the caller's stream",
            "⟪row.span->start = marked();⟫\n      work = original(asyn",
            "{ const c10::StreamGuard back(caller); row.span->start = marked(); }",
        ),
        (
            "a moved collective ends with its launch",
            "synchronously);\n      if (work) {\n        ⟪work->wait();⟫",
            "",
        ),
        (
            "the private event is recorded on the caller's stream",
            "      done = ⟪device_->done(side)⟫;",
            "device_->done(caller)",
        ),
        (
            "a moved collective's tensors are not kept",
            "      held = ⟪device_->hold(std::move(tensors), done)⟫;",
            "nullptr",
        ),
        (
            "a synchronous caller goes on at once",
            "⟪device_->stalling(*step_, row.name(), [&] { done->block(caller); });⟫",
            "",
        ),
        (
            "a synchronous caller's wait is no stall",
            "⟪device_->stalling(*step_, row.name(), [&] { done->block(caller); });⟫",
            "done->block(caller);",
        ),
        ("starts beside the backend do not wait for the caller", "⟪device_->order(caller, *side);⟫", ""),
        (
            "starts beside the backend are marked on the caller's stream",
            "on(⟪*side⟫);\n      row.span->start = marked();\n    }\n    auto work",
            "caller",
        ),
        ("a step begins without the device's", "⟪device_->begin();⟫", ""),
        ("the start of a failed step's collective is lost", "⟪device_->clock().release(row.span->start);⟫", ""),
        ("the begin of a failed step's wait is lost", "⟪device_->clock().release(wait.begin);⟫", ""),
        ("the end of a failed step's copy is lost", "⟪device_->clock().release(copy.end);⟫", ""),
        ("every tensor is the device's", "⟪on_host ? c10::DispatchKey::CPU : device_key_⟫", "device_key_"),
        ("all batches are one launch", "⟪launches_++⟫", "launches_.load()"),
        ("a batch of nothing is launched as one", "if (⟪!batch || batch->spans.empty()⟫) {", "!batch"),
        (
            "what is stacked in a batch has no stream",
            "⟪side ? Untimed::STACKED_IN_A_BATCH : Untimed::NO_STREAM⟫",
            "Untimed::NO_STREAM",
        ),
        (
            "both directions share a side stream where nothing is known",
            '⟪(group.shared ? " " : " " + op.kind + " ")⟫',
            'std::string(" ")',
        ),
    ),
    *rules(
        "copies.hpp",
        ("copies are timed while a graph is captured", "⟪is_capturing(device_->current())⟫", "false"),
        ("a copy on another device is marked here", "⟪index == own_.index()⟫", "true"),
        ("a copy has no end", "⟪copied.end = copies.device_->clock().mark();⟫", ""),
        ("a copy between devices is one within a device", "⟪from.device() != into->device()⟫", "false"),
        ("a conversion is a copy", "⟪from.dtype() == into.dtype()⟫", "true"),
        ("a transposition is a copy", "⟪(from.is_contiguous() && into.is_contiguous())⟫", "true"),
        (
            "directions are swapped",
            "⟪there ? Direction::D2H : Direction::H2D⟫",
            "there ? Direction::H2D : Direction::D2H",
        ),
        ("an empty copy is a copy", "⟪bytes_of(from, into) == 0⟫", "false"),
        ("elements are bytes", "⟪moved.numel() * static_cast<int64_t>(moved.element_size())⟫", "moved.numel()"),
        (
            "a value for the host is no copy",
            "return ⟪copies ? copies->timed(self, nullptr, original) : original()⟫;",
            "original()",
        ),
        ("a copy onto itself is a copy", "⟪!from.is_same(into)⟫", "true"),
        ("copies of every stream are the compute stream's", "⟪here && device_->computes()⟫", "here"),
        ("one value for many places is a copy", "⟪from.sizes() == into.sizes()⟫", "true"),
    ),
    *rules(
        "device_clock.hpp",
        (
            "marks are taken while a graph is captured",
            "    if (⟪is_capturing(stream)⟫) {\n      return NO_MARK;",
            "false",
        ),
        ("a mark does not say when it was recorded", "⟪slots_[slot].sent_ns = sent_ns;⟫", ""),
        (
            "the host's time is the device's",
            "return ⟪slots_[static_cast<size_t>(-mark - 1)].sent_ns⟫;",
            "std::optional<int64_t>()",
        ),
        ("the clock is exact", "return ⟪origin_bound_ns_⟫; }", "0"),
        ("marks are measured from the oldest epoch", "⟪first_epoch_ + epochs_.size() - 1⟫", "first_epoch_"),
        ("an epoch's marks are not counted", "⟪++epochs_.back().marks;⟫", ""),
        ("a mark is read before it has happened", "⟪!start_ns || !slot.event.query()⟫", "!start_ns"),
        ("an epoch's marks are not counted down", "⟪--epochs_[slots_[slot].epoch - first_epoch_].marks;⟫", ""),
        ("marks are not used again", ".marks;\n    ⟪free_.push_back(slot);⟫", ""),
        ("the widest bracket is kept", "⟪found.bound_ns < best->bound_ns⟫", "found.bound_ns > best->bound_ns"),
        ("the origin is where its bracket begins", "⟪before_ns + (after_ns - before_ns) / 2⟫", "before_ns"),
        ("the origin is exact", "⟪(after_ns - before_ns + 1) / 2⟫", "0"),
        (
            "times are cut off, not rounded",
            "return ⟪std::llrint(slots_[from].event.elapsedTime(slots_[to].event) * 1e6)⟫;",
            "static_cast<int64_t>(slots_[from].event.elapsedTime(slots_[to].event) * 1e6)",
        ),
        ("an epoch is read before it has begun", "⟪!slots_[epochs_[known + 1].slot].event.query()⟫", "false"),
        ("an epoch is forgotten one mark too early", "⟪epochs_.front().marks == 0⟫", "epochs_.front().marks <= 1"),
        ("an epoch is forgotten before the next one has a time", "⟪epochs_[1].start_ns⟫) {", "true"),
        ("the first events of steps are not used again", "⟪free_.push_back(epochs_.front().slot);⟫", ""),
        ("epochs move up and keep their numbers", "⟪++first_epoch_;⟫", ""),
        ("drift is not looked at", "⟪*start_ns + elapsed_ns(epochs_.back().slot, again.slot) - again.at_ns⟫", "0"),
    ),
    *rules(
        "ranges.hpp",
        ("passes of a failed step keep their marks", "⟪forget();⟫\n    open_ = true;", ""),
        ("a pass that a step left open goes on in the next", "⟪forget();⟫\n    return taken;", ""),
        ("forward passes outside of steps are marked", "if (⟪recorded()⟫) {\n      forward_", "true"),
        ("backward passes outside of steps are marked", "⟪recorded() && !backward_[block]⟫", "!backward_[block]"),
        (
            "a block whose inputs need no gradient never closes",
            "for (auto& pass : backward_) {\n        ⟪close(pass);⟫",
            "",
        ),
        ("the marks of a tail outside of steps are lost", "⟪self->release(begin);⟫", ""),
        (
            "a tail begins at its end",
            "⟪self->tails_.emplace_back(begin, end);⟫",
            "self->release(begin); self->tails_.emplace_back(self->moment(), end);",
        ),
        ("a failed step's passes keep their starts", "⟪release(pass.start_ns);⟫", ""),
        (
            "a failed step's tails keep their ends",
            "for (const auto& [begin, end] : tails_) {\n      release(begin);\n      ⟪release(end);⟫",
            "",
        ),
        ("blocks are timed on the host's clock", "⟪clock_ ? clock_->mark() : now_ns()⟫", "now_ns()"),
        ("a pass inside of another one ends it", "⟪forward_[block].back()⟫", "forward_[block].front()"),
        ("each gradient asks for the end of its pass", "⟪asked_in_.exchange(pass) != pass⟫", "true"),
    ),
    *rules(
        "reported.hpp",
        ("launches are not told apart", "⟪row.span->launch⟫,", "std::optional<int64_t>()"),
        (
            "a collective on the device is never taken by its future",
            "⟪row.span->by_future.load(std::memory_order_acquire)⟫",
            "false",
        ),
    ),
    *rules(
        "step.hpp",
        ("collectives are not counted", "row.seq = ⟪count++⟫;", "count"),
    ),
)

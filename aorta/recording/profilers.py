"""`aorta.Profiler` and `aorta.TorchProfiler`: profiler windows in a loop that AORTA did not write.

    with aorta.Profiler("traces", period_steps=50, warmup_steps=5, active_steps=3, dist_context=mesh) as profiler:
        for batch in data:
            ...
            profiler.step()

They are the presets `profiling=d9d` and `profiling=composer` of `train.py` with the arguments of the tools they follow;
other keys of the profiling group (docs/configuration.md) are given by name. Must not do more than a preset does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from aorta.config.profiling import PRESETS, ComposerProfiling, preset
from aorta.config.schema import Training
from aorta.errors import ConfigError
from aorta.profiling.profiler_plan import Counters
from aorta.recording.loop_profiler import LoopProfiler

Profiling: TypeAlias = str | Mapping[str, Any] | LoopProfiler
"""What `aorta.record` takes: the name of a preset, its keys (`preset` among them), or a profiler."""
_COMPOSER = ComposerProfiling()


class Profiler(LoopProfiler):
    """A window every `period_steps` steps, in `save_dir/step_<N>/`, named by rank and mesh coordinate and packed as
    `.tar.gz`. Nothing is touched before it is started.

    Args:
        save_dir: of the traces; may hold earlier windows, which stay.
        period_steps: steps of a whole cycle; the last `active_steps` of it are kept, the `warmup_steps` before them
            profiled and thrown away.
        dist_context: the mesh whose coordinate of this rank is in the names; None: the rank itself.
        run_name, timeout_s: as `LoopProfiler` takes them.
        settings: other keys of the profiling group.

    Raises:
        ValueError: the three numbers do not fit; names them.
        ConfigError: a setting is not allowed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        period_steps: int,
        warmup_steps: int,
        active_steps: int,
        dist_context: DeviceMesh | None,
        *,
        run_name: str | None = None,
        timeout_s: float = Training().timeout_s,
        **settings: Any,
    ) -> None:
        cycle = {"period": period_steps, "warmup": warmup_steps, "active": active_steps}
        asked = preset("d9d", {**cycle, **settings}, "aorta.Profiler")
        super().__init__(asked, folder=Path(save_dir), run_name=run_name, mesh=dist_context, timeout_s=timeout_s)


class TorchProfiler(LoopProfiler):
    """Windows named by templates, uploaded under templates, with memory and FLOPs: warm-up 1, active 4, once an epoch.

    Args:
        folder: of the traces, a template; relative to the current directory. Must be empty unless `overwrite`, or the
            loop resumes.
        filename: of a trace, a template.
        remote_file_name: of a trace at `remote_root`, a template or a whole address; None: no upload.
        memory_filename: of a page of memory over time, an .html template; None: none.
        memory_remote_file_name: the same for that page.
        overwrite: use a folder that holds files, and replace what is uploaded already.
        use_gzip: append `.gz`, and compress.
        record_shapes, profile_memory, with_stack, with_flops: as torch.profiler takes them.
        num_traces_to_keep: newest windows that stay on this disk; -1: all.
        run_name: for templates; None: the platform.
        steps_per_epoch: None: the whole loop is one epoch.
        samples_per_step: over all ranks; None: not known, and `{sample}` stays in a name as it is written.
        tokens_per_sample: the same for `{token}`.
        timeout_s: as `LoopProfiler` takes it.
        settings: other keys of the profiling group, such as `remote_root`, `wait` or `ranks`.

    Raises:
        ConfigError: a setting is not allowed.
    """

    def __init__(
        self,
        folder: str = str(_COMPOSER.folder),
        filename: str = _COMPOSER.filename,
        remote_file_name: str | None = _COMPOSER.remote_file_name,
        memory_filename: str | None = _COMPOSER.memory_filename,
        memory_remote_file_name: str | None = _COMPOSER.memory_remote_file_name,
        overwrite: bool = _COMPOSER.overwrite,
        use_gzip: bool = _COMPOSER.use_gzip,
        record_shapes: bool = _COMPOSER.record_shapes,
        profile_memory: bool = _COMPOSER.profile_memory,
        with_stack: bool = _COMPOSER.with_stack,
        with_flops: bool = _COMPOSER.with_flops,
        num_traces_to_keep: int = _COMPOSER.num_traces_to_keep,
        *,
        run_name: str | None = None,
        steps_per_epoch: int | None = None,
        samples_per_step: int | None = None,
        tokens_per_sample: int | None = None,
        timeout_s: float = Training().timeout_s,
        **settings: Any,
    ) -> None:
        named = {
            "folder": folder,
            "filename": filename,
            "remote_file_name": remote_file_name,
            "memory_filename": memory_filename,
            "memory_remote_file_name": memory_remote_file_name,
            "overwrite": overwrite,
            "use_gzip": use_gzip,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
            "num_traces_to_keep": num_traces_to_keep,
        }
        super().__init__(
            preset("composer", {**named, **settings}, "aorta.TorchProfiler"),
            run_name=run_name,
            counters=Counters(steps_per_epoch, samples_per_step, tokens_per_sample),
            timeout_s=timeout_s,
        )


def profiler_of(asked: Profiling | None, folder: Path, label: str | None, timeout_s: float) -> LoopProfiler:
    """Return the profiler of a recorded loop, switched off where none was asked for. `folder`: of the run, which holds
    a preset's traces. Raises ConfigError for a preset, key or value that is not allowed.
    """
    if isinstance(asked, LoopProfiler):
        return asked
    if isinstance(asked, str):
        asked = {"preset": asked}
    elif asked is None:
        asked = {"enabled": False}
    elif not isinstance(asked, Mapping):
        raise ConfigError(
            f"aorta.record: profiling={asked!r}: give a preset ({', '.join(PRESETS)}), a mapping of the profiling "
            "group's keys, or an aorta.Profiler or aorta.TorchProfiler"
        )
    name, keys = asked.get("preset", "aorta"), {key: value for key, value in asked.items() if key != "preset"}
    settings = preset(str(name), keys, "aorta.record(profiling=...)")
    try:
        return LoopProfiler(settings, root=folder, run_name=label, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError(f"aorta.record(profiling=...): {error}") from error

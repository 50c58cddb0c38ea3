"""Translates command-line arguments into Hydra's syntax.

`sys.argv[1:]` may be in the older AORTA's style, in Hydra's, or mixed. Older key names that still mean something are
renamed; those that do not are refused by name. Must not compose or read a configuration (only check that the file named
by `--config` exists).
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from aorta.config import CONFIG_DIR
from aorta.config.yaml_files import load_yaml, read_text
from aorta.errors import ConfigError

RENAMED: dict[str, str] = {
    "model.model_dim": "workload.model_dim",
    "model.num_heads": "workload.num_heads",
    "model.num_layers": "workload.num_layers",
    "model.mlp_hidden_dim": "workload.mlp_hidden_dim",
    "model.embedding_dim": "workload.embedding_dim",
    "model.vocab_size": "workload.vocab_size",
    "model.dropout": "workload.dropout",
    "model.num_dense_features": "workload.dense_features",
    "dataset.num_dense_features": "workload.dense_features",
    "dataset.sparse_features": "workload.categorical_features",
    "dataset.vocab_size": "workload.vocab_size",
    "distributed.mode": "parallel",
    "distributed.enable_overlap": "parallel.overlap",
    "telemetry.rocm_smi_interval_s": "telemetry.device_interval_s",
}
"""Keys of the older configuration -> their equivalents today."""

ALSO: dict[str, str] = {"workload.batch_size": "training.batch_size"}
"""Aliases of keys, for every workload."""

SHORT: dict[str, str] = {"baseline": "baseline.enabled"}
"""Sections that can be enabled by their own name -> the key that enables them."""

RETRANSLATED: dict[str, dict[str, str]] = {
    "fsdp.sharding_strategy": {
        "full_shard": "parallel.reshard_after_forward=true",
        "shard_grad_op": "parallel.reshard_after_forward=false",
    },
    "fsdp.backward_prefetch": {
        "backward_pre": "parallel.backward_prefetch=1",
        "none": "parallel.backward_prefetch=0",
        "null": "parallel.backward_prefetch=0",
    },
    "fsdp.forward_prefetch": {
        "true": "parallel.forward_prefetch=1",
        "false": "parallel.forward_prefetch=0",
    },
}
"""Older FSDP1 keys whose values are spelled differently today (compared in lower case)."""

REFUSED_VALUES: dict[str, str] = {
    "fsdp.sharding_strategy=no_shard": "use parallel=ddp",
    "fsdp.sharding_strategy=hybrid_shard": "use parallel=hsdp",
    "fsdp.backward_prefetch=backward_post": (
        "FSDP2 cannot prefetch after the gradients; use parallel=fsdp1 parallel.backward_prefetch=backward_post"
    ),
}

DEAD: dict[str, str] = {
    "fsdp.use_orig_params": (
        "FSDP2 always keeps the original parameters; with parallel=fsdp1 it is parallel.use_orig_params"
    ),
    "fsdp.limit_all_gathers": (
        "FSDP2 has no rate limiter: its memory use is deterministic without one; with parallel=fsdp1 it is "
        "parallel.limit_all_gathers"
    ),
    "fsdp.sync_module_states": "every rank initialises from training.seed",
    "fsdp.param_init_device": "parameters are made on the CPU from training.seed and moved",
    "distributed.overlap_reduce_scatter": "instrument.mode=dedicated puts every collective on a stream of its own",
    "distributed.overlap_clone_for_reduce_scatter": "tensors are kept alive until the collective has ended; no clone",
    "optimizer.name": "workload=resnet18 trains with SGD, the others with AdamW",
    "model.dense_dim": "dense features are projected straight to workload.model_dim",
    "dataset.dense_dim": "dense features are projected straight to workload.model_dim",
    "logging.level": "the log file of each rank always holds everything",
}
"""Keys of the older configuration that have no meaning today, and why."""

_CALL: Final = re.compile(r"\w+\(")
"""A sweep's function, such as `choice(1,2)`."""

LONGEST_ARGUMENT: Final = 10_000
"""Characters of one argument. Hydra's parser takes 2 s for a list of 5,000 numbers."""


def translate(words: Sequence[str], caller: Path, root: Path) -> list[str]:
    """Rewrite the older arguments; everything else passes through, with options before KEY=VALUE overrides: Hydra's
    command line accepts overrides only as one contiguous group, and the two styles mix.

    Args:
        words: the command line without the program's name.
        caller: folder against which a relative `--config` is resolved first; then `root`, the repository's.

    Raises:
        ConfigError: a missing or JSON configuration file, `--override` without an argument, a key that has no meaning
            today, an argument that is too long.
    """
    options: list[str] = []
    values: list[str] = []
    for word in words:
        if len(word) > LONGEST_ARGUMENT:
            raise ConfigError(
                f"{word[:40]}...: an argument of {len(word)} characters; at most {LONGEST_ARGUMENT} are read, since "
                "Hydra's parser takes seconds for more. Put long values into a file: --config mine.yaml"
            )
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name == "--config":
            if not equals and not queue:
                raise ConfigError("--config needs the path of a YAML file, as in --config config/default.yaml")
            options += _config_file(value if equals else queue.pop(0), caller, root)
        elif name == "--override":
            overrides = [value] if equals else []
            while queue and not queue[0].startswith("-"):
                overrides.append(queue.pop(0))
            if not overrides:
                raise ConfigError("--override needs at least one KEY=VALUE, as in --override training.max_steps=50")
            for override in overrides:
                if "=" not in override:
                    raise ConfigError(f"--override {override}: expected KEY=VALUE")
                values.append(_rename(_quote(override)))
        elif word == "--enable-rocm-metrics":
            values.append("telemetry.rocm_smi=true")
        elif word.startswith("-") or not (equals or word.startswith("~")):
            options.append(word)
        else:
            values.append(_rename(_quote(word) if equals else word))
    return options + values


def options_of_a_job(words: Sequence[str]) -> list[str]:
    """Return the options that a job of a sweep needs of its translated command line: its configuration.

    KEY=VALUE overrides are left out, since the sweeper assigns them; so is the option that makes it a sweep.
    """
    options = itertools.takewhile(lambda word: word.startswith("-") or not ("=" in word or word.startswith("~")), words)
    return [word for word in options if not is_multirun(word)]


def is_multirun(word: str) -> bool:
    """Return whether a word asks for a sweep."""
    return word == "-m" or (word.startswith("--m") and "--multirun".startswith(word))


def quoted(key: str, value: str) -> str:
    """Return `KEY='VALUE'` in Hydra's grammar, whatever quotes the value contains."""
    # Inside quotes, a backslash counts only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"{key}='{escaped}'"


def config_path(value: str, caller: Path, root: Path) -> Path:
    """Return the file that `--config` names: relative to the caller's folder, else to the repository.

    Raises:
        ConfigError: there is none.
    """
    tried = list(dict.fromkeys((base / value).resolve() for base in (caller, root)))
    if Path(value).parts[:1] == ("config",) and CONFIG_DIR.name != "config":  # an installed package has it elsewhere
        tried.append(CONFIG_DIR.joinpath(*Path(value).parts[1:]))
    # Path.is_file raises an error for a word too long to be a name.
    path = next((candidate for candidate in tried if os.path.isfile(candidate)), None)  # noqa: PTH113
    if path is None:
        raise ConfigError(f"--config {value}: no such file; looked at {' and '.join(map(str, tried))}")
    return path


def _config_file(value: str, caller: Path, root: Path) -> list[str]:
    path = config_path(value, caller, root)
    if path.suffix not in {".yaml", ".yml"}:
        raise ConfigError(f"--config {value}: only YAML is read (.yaml), not {path.suffix or 'a file without suffix'}")
    if path.parent in ((root / "config").resolve(), CONFIG_DIR):
        return [f"--config-name={path.stem}"]
    # Groups next to a user's file can be selected too; the file itself is read before Hydra composes.
    return [f"--config-dir={path.parent}", f"--config-name={path}"]


def _quote(override: str) -> str:
    """Quote a value that Hydra's grammar does not accept as it is: a second `=`, braces, an apostrophe, ..."""
    key, _, value = override.partition("=")
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        if value.startswith(("'", '"', "[")) or _CALL.match(value):
            return override  # a syntax error in a quoted value, a list or a sweep: Hydra says where
        return quoted(key, value)
    except RecursionError:
        raise ConfigError(f"{key}: its value is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python takes
        raise ConfigError(f"{key}: its value cannot be read: {error}") from None
    return override


def key_of_today(word: str) -> str:
    """Return the key that an override sets, under today's name."""
    key = word.partition("=")[0].lstrip("+~")
    if key in RETRANSLATED:
        return next(iter(RETRANSLATED[key].values())).partition("=")[0]
    return SHORT.get(key) or (RENAMED | ALSO).get(key, key)


def _rename(word: str) -> str:
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if bare in DEAD:
        raise ConfigError(f"{bare} is a key of the older configuration that has no meaning any more: {DEAD[bare]}")
    if bare in RETRANSLATED and equals:
        choice = value.strip("'\"").lower()
        if f"{bare}={choice}" in REFUSED_VALUES:
            raise ConfigError(f"{word}: {REFUSED_VALUES[f'{bare}={choice}']}")
        if choice not in RETRANSLATED[bare]:
            raise ConfigError(f"{word}: {value!r} is not one of {', '.join(RETRANSLATED[bare])}")
        return RETRANSLATED[bare][choice]
    if bare in SHORT and equals and not value.startswith("{"):  # Hydra itself handles a whole section
        return f"{SHORT[bare]}={value}"
    if (today := (RENAMED | ALSO).get(bare)) and equals:
        return f"{today}={value}"
    return word


SECTIONS: Final = frozenset({"model", "fsdp", "distributed", "logging"})
"""Sections that no configuration of today has."""
_STRATEGIES: Final = {"no_shard": "ddp", "hybrid_shard": "hsdp"}
"""`fsdp.sharding_strategy` -> what is a strategy of its own today."""
_UNUSED: Final = "the file trains with {mode}, which does not use it"


def expand(words: Sequence[str], caller: Path, root: Path) -> tuple[list[str], list[str]]:
    """Return the command line with older files' content in place of their `--config`, and what was left out.

    Args:
        caller, root: as in `override_words.translate`.

    Raises:
        ConfigError: a file is missing, cannot be read, or is no configuration.
    """
    expanded: list[str] = []
    notes: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name != "--config" or not (equals or queue):
            expanded.append(word)
            continue
        value = value if equals else queue.pop(0)
        content = _older(value, caller, root)
        if content is None:
            expanded.append(f"--config={value}")
            continue
        given = {key_of_today(other.removeprefix("--override=")) for other in [*expanded, *queue]}
        kept, left_out = _words(content, given)
        expanded += kept
        notes += [f"--config {value}: {note}" for note in left_out]
    return expanded, notes


def _older(value: str, caller: Path, root: Path) -> Mapping[str, Any] | None:
    """Return the content of a file of AORTA 2025; None for a file of today."""
    path = config_path(value, caller, root)
    try:
        if path.suffix == ".json":
            content = json.loads(read_text(path))
        elif path.suffix in {".yaml", ".yml"}:
            content = OmegaConf.to_container(load_yaml(path), resolve=True)
        else:
            return None
    except Exception as error:
        if path.suffix != ".json":
            return None  # where it is composed, the error is said
        raise ConfigError(f"--config {value}: cannot be read as JSON: {error}") from error
    if path.suffix == ".json" and not (isinstance(content, dict) and content and "defaults" not in content):
        raise ConfigError(f"--config {value}: not a configuration of AORTA 2025; configurations of today are YAML")
    if not isinstance(content, dict) or "defaults" in content:
        return None
    return content if path.suffix == ".json" or SECTIONS & content.keys() else None


def _words(content: Mapping[str, Any], given: set[str]) -> tuple[list[str], list[str]]:
    """Return the words of a file without the keys that are `given`, and what was left out of it."""
    leaves = dict(_leaves(content))
    sharding = str(leaves.get("fsdp.sharding_strategy")).lower()
    mode = str(leaves.pop("distributed.mode", "fsdp" if "fsdp" in content else "ddp")).lower()
    if mode == "fsdp" and sharding in _STRATEGIES:
        mode = _STRATEGIES[sharding]
        del leaves["fsdp.sharding_strategy"]
    words = [f"parallel={mode}"]
    notes = []
    for key, value in leaves.items():
        why = DEAD.get(key)
        if why is None and key.startswith("fsdp.") and mode not in ("fsdp", "hsdp"):
            why = _UNUSED.format(mode=mode)
        if why is not None:
            notes.append(f"{key} is left out: {why}")
        else:
            words.append(_word(key, value))
    if leaves.get("dataloader.num_workers") and "dataset.on_device" not in leaves:
        words.append("dataset.on_device=false")  # AORTA 2025 always fetched batches through its loader
    kept = []
    for word in words:
        key = key_of_today(word)
        if "parallel" in given and key.startswith("parallel.") and key not in given:
            notes.append(f"{word} is left out: the command line chooses the strategy; give {key} there as well")
        elif key not in given:
            kept.append(word)
    return kept, notes


def _leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _word(key: str, value: object) -> str:
    if isinstance(value, str):
        return quoted(key, value)
    return f"{key}={json.dumps(value)}"  # of numbers, null, true and lists, JSON's notation is Hydra's too

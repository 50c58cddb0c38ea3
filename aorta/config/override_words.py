"""Translates command-line arguments into Hydra's syntax, and reads YAML files that a user wrote.

`sys.argv[1:]` may be in the older style (`--config FILE --override KEY=VALUE ...`), in Hydra's, or mixed. Must not
compose a configuration, know what a file is for, or build what a few aliases of aliases unfold to.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from aorta.config import CONFIG_DIR
from aorta.errors import ConfigError

ALSO: Final = {"workload.batch_size": "training.batch_size"}
"""Another name of a key, for every workload."""
SHORT: Final = {"baseline": "baseline.enabled"}
"""Sections that can be enabled by their own name -> the key that enables them."""

_CALL: Final = re.compile(r"\w+\(")
"""A function of Hydra's grammar, such as `choice(1,2)`."""
LONGEST_ARGUMENT: Final = 10_000
"""Characters of one argument. Hydra's parser takes 2 s for a list of 5,000 numbers."""
MOST_ARGUMENTS: Final = 5_000
"""The schema has some 200 keys; Hydra takes a second for 10,000 arguments."""


def translate(words: Sequence[str], caller: Path, root: Path) -> list[str]:
    """Rewrite the older arguments; everything else passes through, with options before KEY=VALUE overrides: Hydra's
    command line accepts overrides only as one contiguous group, and the two styles mix.

    Args:
        words: the command line without the program's name.
        caller: folder against which a relative `--config` is resolved first; then `root`, the repository's.

    Raises:
        ConfigError: a missing or JSON configuration file, `--override` without an argument, an argument that is too
            long, too many of them.
    """
    options, values, queue = list[str](), list[str](), list(words)
    if len(words) > MOST_ARGUMENTS:
        raise ConfigError(
            f"{len(words)} arguments; at most {MOST_ARGUMENTS} are read. Put them into a file: --config mine.yaml"
        )
    for word in words:
        if len(word) > LONGEST_ARGUMENT:
            raise ConfigError(
                f"{word[:40]}...: an argument of {len(word)} characters; at most {LONGEST_ARGUMENT} are read, since "
                "Hydra's parser takes seconds for more. Put long values into a file: --config mine.yaml"
            )
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
            if wrong := [override for override in overrides if "=" not in override]:
                raise ConfigError(f"--override {wrong[0]}: expected KEY=VALUE")
            values += map(_override, overrides)
        elif word == "--enable-rocm-metrics":
            values.append("telemetry.rocm_smi=true")
        elif word.startswith("-") or not (equals or word.startswith("~")):
            options.append(word)
        else:
            values.append(_override(word))
    return options + values


def is_multirun(word: str) -> bool:
    """Return whether a word asks Hydra for a sweep."""
    short = word == "-m" or word.lstrip("+").upper() == "HYDRA.MODE=MULTIRUN"
    return short or (word.startswith("--m") and "--multirun".startswith(word))


def plan_of_sweep(words: Sequence[str], ranks: str | None) -> list[str]:
    """Return the `aorta ab` command that launches what `aorta train -m` with these words would have.

    Args:
        words: the user's, in the older style or in Hydra's, without `--nproc_per_node`.
        ranks: its value; None: it was not given, and a job would have had one rank.
    """
    varied, rest = list[str](), list[str]()
    folder = {"training.output_dir": "artifacts", "label": "sweep"}
    for word in words:
        key, _, value = word.removeprefix("--override=").lstrip("+").partition("=")
        if is_multirun(word) or word == "--override" or key.startswith(("hydra.", "hydra/")):
            continue
        several = False
        with suppress(HydraException, ValueError, RecursionError):
            several = "=" in word and OverridesParser.create().parse_override(f"{key}={value}").is_sweep_override()
        if key in folder:
            folder[key] = folder[key] if several else value.strip("'\"")
        elif several:
            varied += ["--vary", f"{key}={value}"]
        else:
            rest.append(word)
    if any(word.startswith("-") for word in rest):
        rest.insert(0, "--")
    placed = ["--output", "/".join(folder.values()), "--launches", "1", "--nproc_per_node"]
    return ["aorta", "ab", *placed, "1" if ranks is None else ranks if ranks.isdecimal() else "N", *varied, *rest]


def quoted(key: str, value: str) -> str:
    """Return `KEY='VALUE'` in Hydra's grammar, whatever quotes the value contains."""
    # Inside quotes, a backslash counts only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"{key}='{escaped}'"


def _config_file(value: str, caller: Path, root: Path) -> list[str]:
    """Return Hydra's options for the file that `--config` names: relative to the caller's folder, else to `root`."""
    tried = list(dict.fromkeys((base / value).resolve() for base in (caller, root)))
    if Path(value).parts[:1] == ("config",) and CONFIG_DIR.name != "config":  # an installed package has it elsewhere
        tried.append(CONFIG_DIR.joinpath(*Path(value).parts[1:]))
    # Path.is_file raises an error for a word too long to be a name.
    path = next((candidate for candidate in tried if os.path.isfile(candidate)), None)  # noqa: PTH113
    if path is None:
        raise ConfigError(f"--config {value}: no such file; looked at {' and '.join(map(str, tried))}")
    if path.suffix not in {".yaml", ".yml"}:
        raise ConfigError(f"--config {value}: only YAML is read (.yaml), not {path.suffix or 'a file without suffix'}")
    if path.parent in ((root / "config").resolve(), CONFIG_DIR):
        return [f"--config-name={path.stem}"]
    # Groups next to a user's file can be selected too; the file itself is read before Hydra composes.
    return [f"--config-dir={path.parent}", f"--config-name={path}"]


def _override(word: str) -> str:
    """Return an override with the key that an alias stands for, and with quotes around a value that Hydra's grammar
    does not accept as it is: a second `=`, braces, an apostrophe, ...
    """
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if not equals:
        return word
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        # A syntax error in a quoted value or a list: Hydra says where.
        if not (value.startswith(("'", '"', "[")) or _CALL.match(value)):
            value = quoted("", value)[1:]
    except RecursionError:
        raise ConfigError(f"{key}: its value is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python takes
        raise ConfigError(f"{key}: its value cannot be read: {error}") from None
    if bare in SHORT and not value.startswith("{"):  # Hydra itself handles a whole section
        return f"{SHORT[bare]}={value}"
    return f"{ALSO.get(bare, key)}={value}"


_LONGEST_BYTES: Final = 1 << 20
_MOST_VALUES: Final = 100_000
"""Of a file with its aliases unfolded; the whole configuration has some 200."""


def load_yaml(path: Path) -> Any:
    """Return the configuration in a file, as `OmegaConf.load` gives it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, longer than a configuration, not YAML, unfolds to more values than one has, or
            half of a surrogate pair is among its texts.
    """
    if path.exists() and not path.is_file():
        raise ValueError("a folder, a pipe or a device, not a file")
    with path.open("rb") as file:
        content = file.read(_LONGEST_BYTES + 1)
    if len(content) > _LONGEST_BYTES:
        raise ValueError(f"longer than {_LONGEST_BYTES >> 20} MiB, which no configuration is")
    text = content.decode("utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _unfolded(node, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases unfold to more than {_MOST_VALUES} values")
        return OmegaConf.load(io.StringIO(text))
    except RecursionError:
        raise ValueError("nested too deeply, or in itself") from None
    except (ValueError, OSError):
        raise
    except Exception as error:  # nothing of ours runs in there: whatever it raises is about the file
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def _unfolded(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node with its aliases unfolded, each node counted once."""
    if id(node) not in known:
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise ValueError("holds half of a surrogate pair, which is no character")
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for value in inner for part in (value if isinstance(value, tuple) else (value,))]
        known[id(node)] = 1 + sum(_unfolded(part, known) for part in parts)
    return known[id(node)]

"""`aorta train` and `train.py`: compose the configuration with Hydra, resolve it, run it.

The exit code is that of the run, and 1 for a configuration that cannot be run. Must not import torch
before the configuration is known to be good: `--help`, `--cfg job` and configuration errors stay fast, and work without
torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import hydra
from hydra._internal import hydra as _hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from aorta.command_line import command, to_stdout, tolerate_closed_terminal
from aorta.config import CONFIG_DIR, schema
from aorta.config.override_words import is_multirun, load_yaml, plan_of_sweep, translate
from aorta.config.resolve import HOW_TO_BUILD, Resolved, choices, keys_named, resolve
from aorta.config.schema import Rpc, Streams
from aorta.errors import EXIT_OK, AortaError, ConfigError, InputError, meant
from aorta.installation import checkout, training_program
from aorta.redaction import hide
from aorta.version import __version__

_HYDRA_OPTIONS: Final = (
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion"),
    *("config-path", "config-name", "config-dir", "experimental-rerun", "info"),
)
"""Of Hydra's command line, long ones."""
_INSTEAD: Final = "launch each value: aorta ab --vary"


@command()
def main(arguments: Sequence[str]) -> int:
    """Train with these overrides and options; returns the exit code. With `--nproc_per_node N` torchrun starts N ranks
    on this machine.
    """
    ranks, overrides = split_ranks(arguments)
    if any(map(is_multirun, overrides)):
        line = shlex.join(hide(plan_of_sweep(overrides, ranks)))
        raise InputError(
            "--multirun: train.py trains once. This launches every combination in turn, and compares it with the "
            f"base:\n  {line}\n  without --launches 1 it can give verdicts (docs/compare.md)"
        )
    if ranks is not None:
        # This process becomes torchrun, whose ranks run this command without the option.
        torchrun = [sys.executable, "-m", "aorta.distributed.torchrun", "--standalone", "--nproc_per_node", ranks]
        sys.stdout.flush()
        os.execv(sys.executable, [*torchrun, *training_program(checkout()), *overrides])
    sys.argv[1:] = overrides  # where Hydra reads them
    return compose(run, CONFIG_DIR)


def run(resolved: Resolved) -> int:
    if isinstance(resolved.config.workload, Rpc):
        from aorta.rpc.rpc_run import run_rpc

        return run_rpc(resolved)
    if isinstance(resolved.config.workload, Streams):
        from aorta.streams.streams_run import run_streams

        return run_streams(resolved)
    from aorta.recording.train import run_training

    return run_training(resolved)


def split_ranks(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--nproc_per_node`, or None, and the other arguments. Raises ConfigError for a value that is
    no number of ranks, and inside torchrun.
    """
    words, ranks = list(arguments), None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in {"--nproc_per_node", "--nproc-per-node"}:
            ranks = value if equals else next(iter(words[index + 1 :]), "")
            del words[index : index + (1 if equals else 2)]
            break
    if ranks is None:
        return None, words
    if not (ranks.isdecimal() and int(ranks) >= 1) and ranks not in {"gpu", "auto", "cpu"}:
        raise ConfigError(
            f"--nproc_per_node {ranks!r}: must be a number of ranks, or gpu, cpu or auto for one per device or core"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--nproc_per_node: torchrun has started the ranks already; give it to torchrun instead")
    return ranks, words


class _CheckedLoader(ConfigLoaderImpl):
    """Composes a configuration that may be somebody else's: checks it before anything in it is called."""

    def load_configuration(self, *arguments: Any, **named: Any) -> DictConfig:
        composed = super().load_configuration(*arguments, **named)
        if composed.hydra.mode == RunMode.MULTIRUN:  # by a file: Hydra then composes a single run
            raise ConfigError("hydra.mode: MULTIRUN: train.py trains once; aorta ab --vary launches combinations")
        installed = {target for _, target in _called(ConfigStore.instance().repo["hydra"])}
        plain = OmegaConf.to_container(composed.hydra)
        refused = [key for key, target in _called(plain) if target not in installed]
        keys = ("callbacks", "searchpath", "job.env_set")
        refused += [f"hydra.{key}" for key in keys if OmegaConf.select(composed.hydra, key)]
        if refused:
            raise ConfigError(
                f"{', '.join(refused)}: could run any program, so a configuration must not have it; remove it"
            )
        return composed

    def _process_config_searchpath(self, *_: Any) -> None:
        """Leave the search path as it is: Hydra would import the packages that a file names there."""


def _called(node: Any, key: str = "hydra") -> Iterator[tuple[str, str]]:
    """Yield the keys by which Hydra and `logging` find what they call, and its name."""
    node = OmegaConf.to_container(node.node) if isinstance(node, ConfigNode) else node
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            if name in {"_target_", "class", "()"}:
                yield f"{key}.{name}", str(value)
            yield from _called(value, f"{key}.{name}")


@command()
def compose(run: Callable[[Resolved], int], config_dir: Path) -> int:
    """Compose, resolve and call `run`; returns the process's exit code. `config_dir`: absolute path of `config/`."""
    if "--version" in sys.argv[1:]:  # Hydra would print its own
        to_stdout(f"aorta {__version__}")
        return EXIT_OK
    words = translate(sys.argv[1:], Path.cwd(), config_dir.parent)
    _check_options(words)
    sys.argv[1:] = map(_adopt, words)
    composed = _composed(config_dir)
    return EXIT_OK if composed is None else run(resolve(composed))


def _check_options(words: Sequence[str]) -> None:
    """Raise InputError for an option that Hydra does not have, with the keys that may be meant."""
    for index, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or any(option.startswith(name) for option in _HYDRA_OPTIONS):
            continue  # Hydra takes any beginning of an option's name
        following = next(iter(words[index + 1 :]), "")
        if not equals:
            value = following if following and "=" not in following and not following.startswith("-") else "VALUE"
        keys = keys_named(name.replace("-", "_"))
        meant = f"; did you mean {' or '.join(f'{key}={value}' for key in keys)}?" if keys else "."
        raise InputError(f"{word}: there is no such option{meant} Settings are KEY=VALUE: see aorta train --help")


def _adopt(word: str) -> str:
    """Give a user's own file a unique name, so that `default` in it is AORTA's whatever the file is called."""
    name, _, path = word.partition("=")
    if name != "--config-name" or not Path(path).is_absolute():
        return word
    try:
        content = load_yaml(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, DictConfig) or "defaults" not in content:
        raise ConfigError(f"--config {path}: {HOW_TO_BUILD}")
    alias = f"your-{Path(path).stem}"
    ConfigStore.instance().store(name=alias, node=content)
    return f"--config-name={alias}"


def _composed(config_dir: Path) -> DictConfig | None:
    """Return what Hydra composes of `sys.argv`; None after --help or --cfg."""
    composed: list[DictConfig] = []

    def keep(config: DictConfig) -> None:
        composed.append(config)

    schema.register()
    # Hydra would print and exit by itself; raising lets one place format every error.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _hydra.ConfigLoaderImpl = _CheckedLoader  # type: ignore[attr-defined]
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir), config_name="default")(keep)()
    except AortaError:
        raise
    except BrokenPipeError:  # --help | head: nobody reads on
        with tolerate_closed_terminal():
            raise
    except Exception as error:  # none of our code runs in there: any error is about the configuration
        raise ConfigError(explain(error)) from error
    return next(iter(composed), None)


def explain(error: Exception) -> str:
    """Return one message for an error of Hydra or OmegaConf: key, value, and choices."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = [known for known in error.options if not known.startswith("base_")]
        hint = meant(option, options, "; ")
        text = f"{group}={option}: there is no such {group}{hint}\n  there are: {', '.join(options)}"
    else:  # Hydra's search path, AORTA's `base_*` schemas and the advice to append are no choices
        visible = str(error).partition("Config search path:")[0].replace("To append to your config use +", "  in: ")
        visible = visible.replace("sweep over it, add --multirun to your command line", _INSTEAD)
        text = "\n".join(line for line in visible.strip().splitlines() if not line.strip().startswith("base_"))
    inner = str(chain[-1]).strip().splitlines()[0] if chain[1:] else ""
    if inner and inner not in text:
        text += f"\n  {inner}"
    if isinstance(error, OverrideParseException):
        text += f"\n  in: {error.override}"
        text += "\n  a value with '=', braces or commas needs quotes of its own: \"KEY='VALUE'\""
    key = next((str(found) for link in chain if (found := getattr(link, "full_key", None))), "")
    started = sys.argv[0] if sys.argv[0].startswith("aorta ") else "python train.py"
    return "\n".join([text, *choices(key), f"  see: {started} --help, {started} --cfg job"])

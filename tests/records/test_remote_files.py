"""sftp:// refuses a host without a known key, as ssh does; a stand-in for paramiko judges keys as it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from aorta.analysis.load.open import opened
from aorta.errors import ConfigError, InputError
from aorta.profiling.upload import Destination

KEY = "ssh-ed25519 AAAA"


class SSHException(Exception):
    pass


class RejectPolicy:
    def missing_host_key(self, _client: object, host: str, _key: str) -> None:
        raise SSHException(f"Server {host!r} not found in known_hosts")


class AutoAddPolicy:
    def missing_host_key(self, *_: object) -> None:
        pass


class SSHClient:
    def __init__(self) -> None:
        self._policy: RejectPolicy | AutoAddPolicy = RejectPolicy()
        self._known: dict[str, str] = {}

    def set_missing_host_key_policy(self, policy: RejectPolicy | AutoAddPolicy) -> None:
        self._policy = policy

    def load_system_host_keys(self, path: str) -> None:
        self._known |= dict(line.split(" ", 1) for line in Path(path).read_text().splitlines())

    def connect(self, host: str, **_: object) -> None:
        if host not in self._known:
            self._policy.missing_host_key(self, host, KEY)
        elif self._known[host] != KEY:
            raise SSHException(f"Host key for server {host!r} does not match")

    def open_sftp(self) -> object:
        return SimpleNamespace()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    paramiko = ModuleType("paramiko")
    for made in (SSHClient, SSHException, RejectPolicy, AutoAddPolicy):
        setattr(paramiko, made.__name__, made)
    vars(paramiko).update(WarningPolicy=AutoAddPolicy, MissingHostKeyPolicy=object)
    monkeypatch.setitem(sys.modules, "paramiko", paramiko)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    yield tmp_path
    del sys.modules["fsspec.implementations.sftp"], sys.modules["fsspec.implementations"].sftp
    for name in ("sftp", "ssh"):
        sys.modules["fsspec.registry"]._registry.pop(name, None)


@pytest.mark.parametrize("known", ["", "here ssh-ed25519 OTHER"], ids=["unknown", "changed"])
def test_a_host_without_its_known_key_is_refused(home: Path, known: str) -> None:
    (home / ".ssh" / "known_hosts").write_text(known)
    for address in ("sftp://here/x", "simplecache::ssh://here/x"):
        with pytest.raises(ConfigError, match="log in once with ssh"):
            Destination(address)
        with pytest.raises(InputError, match="log in once with ssh"), opened(address):
            pass


def test_a_known_host_is_taken(home: Path) -> None:
    (home / ".ssh" / "known_hosts").write_text(f"here {KEY}\n")
    assert Destination("sftp://here/x").where("y") == "sftp://here/x/y"

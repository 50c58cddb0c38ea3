"""Reads files that came from elsewhere, and writes files that appear under their names only when complete.

Two parts. *Reading*: regular files only, whole ones only up to a size.

    with open_regular(path) as file:
        ...
    facts = decode_json(read_small(folder / "rpc.json"), msgspec.json.Decoder(RpcFacts))

A pipe would be waited for without end, and a device such as `/dev/zero` has no end. *Writing*:

    write_whole(folder / "run.json", text)

Must not: know what a file is for, raise anything but OSError and ValueError when reading, or, where writing fails, keep
a part or touch the file that was there before.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from aorta.installation import scheme_of
from aorta.redaction import redact, redacted

T = TypeVar("T")

NOT_UTF8: Final = "backslashreplace"
"""How every writer of text writes a name that is not UTF-8, which names of files and kernels need not be."""
_NOT_OURS: Final = "a link or no regular file, which AORTA does not write to; remove it"
_SHARED: Final = stat.S_IWGRP | stat.S_IWOTH | stat.S_ISVTX
SMALL_BYTES: Final = 16 << 20
"""Longest file that is read whole. Decoded it takes some twenty times as much; the manifest of 1,000 ranks is 1 MB."""


_STDERR: Final = 2

OF_THIS_PROCESS: Final[set[int]] = set()
"""Open descriptors that a forked child (a data worker) must not write to or keep open: there they become /dev/null."""


def _give_up() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in OF_THIS_PROCESS:
        os.dup2(null, number, inheritable=False)
    os.close(null)
    OF_THIS_PROCESS.clear()


os.register_at_fork(after_in_child=_give_up)


def above_streams(file: int) -> int:
    """Return another descriptor of an open file if it has that of a standard stream, which was closed: libraries in C
    write there all the same.
    """
    if file > _STDERR:
        return file
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    os.close(file)
    return moved


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading its bytes.

    Raises:
        OSError: it cannot be opened; IsADirectoryError for a folder, and EINVAL for a pipe, a socket or a device.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # with O_NONBLOCK a pipe is not waited for
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
        return open(file, "rb", buffering=buffering)  # noqa: PTH123 - it is open already
    except BaseException:
        os.close(file)
        raise


def open_own(path: Path, *, new: bool = False, existing: bool = False, mode: int = 0o666) -> BinaryIO:
    """Open a file of AORTA's with a fixed name for reading and appending. What is in it stays: who empties it looks
    whose it is first.

    Args:
        new: a new file takes the place of whatever has the name.
        existing: it must be there.
        mode: of a new file.

    Raises:
        OSError: it cannot be opened, or is a link, has a second name, or is a pipe or a device: in a shared folder
            anybody may have put it there for another file to be written.
    """
    if new:
        path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (0 if existing else os.O_CREAT)
    try:
        file = above_streams(os.open(path, flags | (os.O_EXCL if new else 0), mode))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise OSError(errno.EINVAL, _NOT_OURS, str(path)) from error
        raise
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        os.close(file)
        raise OSError(errno.EINVAL, _NOT_OURS, str(path))
    return open(file, "r+b", buffering=0)  # noqa: PTH123 - it is open already


def remote_files(location: str) -> Any:
    """Return fsspec, for a location that may be given to it. For an address with sftp:// it refuses hosts without a
    known key, as ssh does; left to itself it takes any key.

    Raises:
        ImportError: what such an address needs is not installed.
        ValueError: as `scheme_of`.
    """
    scheme = scheme_of(location)
    import fsspec  # loaded only where something is not on this disk

    if scheme in ("sftp", "ssh"):
        from fsspec.implementations import sftp

        sftp.SFTPFileSystem._connect = partialmethod(_connect, sftp.paramiko)
    return fsspec


def _connect(system: Any, paramiko: Any) -> None:
    system.client = paramiko.SSHClient()  # whose policy is to refuse
    for known in ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts"):
        with suppress(FileNotFoundError):
            system.client.load_system_host_keys(str(Path(known).expanduser()))
    try:
        system.client.connect(system.host, **system.ssh_kwargs)
    except paramiko.SSHException as error:
        raise OSError(f"{error}; if its key is not known, log in once with ssh and compare it") from error
    system.ftp = system.client.open_sftp()


def read_small(path: Path) -> bytes:
    """Return the whole content of a file.

    Raises:
        OSError: as `open_regular`; EFBIG where it is longer than `SMALL_BYTES`.
    """
    with open_regular(path) as file:
        content = file.read(SMALL_BYTES + 1)
    if len(content) > SMALL_BYTES:
        raise OSError(errno.EFBIG, f"larger than {SMALL_BYTES >> 20} MiB", str(path))
    return content


def decode_json(content: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Return what JSON text says.

    Raises:
        ValueError: it is not JSON, not of the decoder's type, not UTF-8, or nested too deeply; the message says which.
    """
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


_HALF: Final = re.compile(r"(?<!\\ud[89ab][0-9a-f]{2})\\(ud[c-f][0-9a-f]{2})")
"""A byte that is not UTF-8 as `json.dumps` writes it, which is not JSON: its backslash is doubled (`NOT_UTF8`)."""


def json_text(document: Any) -> str:
    """Return a document of built-in types as indented JSON, without secrets."""
    return _HALF.sub(r"\\\\\1", json.dumps(redacted(document), indent=2, allow_nan=False)) + "\n"


def read_lines(path: Path, kind: Any) -> tuple[list[Any], list[str]]:
    """Return the JSON lines of a file, also while another process writes it.

    Args:
        kind: what a line may be, as `msgspec.json.Decoder` takes it.

    Returns:
        The lines, and of each that is none its number and why, as `journal.jsonl:7: ...`.

    Raises:
        OSError: as `open_regular`.
    """
    decoder = msgspec.json.Decoder(kind)
    decoded, problems = [], []
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(SMALL_BYTES), b""), start=1):
            try:
                decoded.append(decoder.decode(line.removesuffix(b"\n")))
            except (ValueError, RecursionError) as error:
                problems.append(f"{path.name}:{number}: {error}")
    return decoded, problems


@contextmanager
def whole_file(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, with the same suffixes, whose file takes that name when the block ends
    without an error; where the block wrote none, nothing changes. Files of one `ExitStack` take their names together,
    once all are written.

    Args:
        new: nothing may have the name yet.

    Raises:
        FileExistsError: something has.
    """
    # Nobody can put a link there who does not know the name.
    part = path.with_name(f".part.{secrets.token_hex(8)}.{path.name}")
    try:
        yield part
        if new:
            try:
                os.link(part, path)
                part.unlink()
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                path.open("xb").close()  # nobody else takes the name from now on
        if part.exists():
            part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that appears under its name only when it is complete; an error leaves an earlier one as it was. Text
    is written without secrets, bytes as they are.
    """
    with whole_file(path) as part:
        part.write_bytes(redact(content).encode(errors=NOT_UTF8) if isinstance(content, str) else content)


def lock_file(file: BinaryIO, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed, or return False while another process holds it. Where the disk has no locks
    there is none, and nobody is kept out.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def shared_folder(path: Path) -> None:
    """Make a folder that may be written by those who may write the one around it, who could not move it otherwise."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        shared_folder(path.parent)
    path.mkdir(exist_ok=True)
    mode, around = (stat.S_IMODE(folder.stat().st_mode) for folder in (path, path.parent))
    if mode | around & _SHARED != mode:
        path.chmod(mode | around & _SHARED)


def shared_lock(path: Path) -> BinaryIO:
    """Open a file to be locked, which may be opened by those who may write its folder, and by nobody else: whoever may
    read it could hold the lock. Raises OSError as `open_own`.
    """
    file = open_own(path, mode=0o600)
    folder, own = path.parent.stat(), os.fstat(file.fileno())
    if own.st_uid == os.geteuid():
        with suppress(OSError):  # not a member of the folder's group
            os.fchown(file.fileno(), -1, folder.st_gid)
        writers = folder.st_mode & 0o022
        os.fchmod(file.fileno(), 0o600 | writers | writers << 1)
    return file


def unused(path: Path) -> Path:
    """Return `path`, or the first of `path-2`, `path-3`, ... where nothing is yet."""
    free, copies = path, 1
    while free.exists():
        copies += 1
        free = path.with_name(f"{path.name}-{copies}")
    return free

"""Uploads saved files through fsspec: `file://`, `s3://`, `gs://`, `az://`, `sftp://`, ...

An address is checked once before the run; each file then appears there whole, under its name, and nothing is replaced
unless requested. Must not delete anything, here or there, except its own check file and partial uploads.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import Any

from aorta.config.profiling import IN_PROCESS, fill
from aorta.errors import ConfigError
from aorta.installation import CACHED, FILE_SYSTEMS, scheme_of
from aorta.records.files import remote_files, whole_file

_log = logging.getLogger(__name__)
ATTEMPTS = 3
"""Attempts per file, as many as Composer's uploader makes."""
BACKOFF_S = (1.0, 4.0)
CHECK = ".aorta-upload-check"
_TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "EBUSY", "EAGAIN", "EINTR", "EPIPE", "ETIMEDOUT", "ECONNRESET", "ECONNREFUSED"),
        *("ECONNABORTED", "ENETUNREACH", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENOTCONN"),
    )
    if hasattr(errno, name)
)
_TRANSIENT_CLASSES = frozenset(
    # error classes of botocore, aiohttp and Azure; by name, so that none of them need be installed
    ("HTTPClientError", "ClientConnectionError", "ServerTimeoutError", "ServiceRequestError", "ServiceResponseError")
)
_TOO_MANY_REQUESTS, _REQUEST_TIMEOUT = 429, 408
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def error_line(error: BaseException) -> str:
    """Return an error in one line; where there was no room, with what to do."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        text += "; make room there, or choose another folder for traces"
    return text


def compressed(path: PurePosixPath, compression: str) -> PurePosixPath:
    """Return the name with the suffix of its compression, unless it already has it."""
    name = path.name
    if compression == "gz" and not name.endswith(".gz"):
        name += ".gz"
    elif compression == "tar.gz" and not name.endswith(".tar.gz"):
        name = name.removesuffix(".gz").removesuffix(".json") + ".tar.gz"
    return path.with_name(name)


class Destination:
    """One upload destination.

    Raises:
        ConfigError: fsspec does not know the scheme, or its package is not installed; says what to install.
    """

    def __init__(
        self,
        address: str,
        template: str = "{file}",
        *,
        overwrite: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address, self._template = address.rstrip("/") or address, template
        self._overwrite, self._sleep = overwrite, sleep
        try:
            self._fs, root = remote_files(address).core.url_to_fs(address)
        except ImportError as error:
            scheme = scheme_of(address)
            package = FILE_SYSTEMS[scheme]
            how = f"run: pip install {package}" if package else f"fsspec says: {error}"
            raise ConfigError(
                f"profiling.remote_root={address}: {scheme}:// needs a package that is not installed; {how}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"profiling.remote_root={error}") from error
        except Exception as error:
            raise ConfigError(f"profiling.remote_root={address}: cannot be opened: {error_line(error)}") from error
        self._root, protocols = str(root), self._fs.protocol
        self._local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    @property
    def durable(self) -> bool:
        """Whether what is put there outlives this process."""
        return not self.address.removeprefix(CACHED).startswith(IN_PROCESS)

    def name(self, values: Mapping[str, Any], file: PurePosixPath, compression: str) -> str:
        """Return the name of a file at the destination.

        Args:
            values: variables of file templates.
            file: its path below the trace folder, compression included.
        """
        wanted = PurePosixPath(fill(self._template, {**values, "file": str(file)}).lstrip("/"))
        return str(compressed(wanted, compression))

    def where(self, name: str) -> str:
        return f"{self.address}/{name.lstrip('/')}"

    def check(self, who: str) -> None:
        """Write a small file and delete it again, before anything depends on the destination.

        Args:
            who: distinguishes processes that check at the same time.

        Raises:
            ConfigError: nothing can be written there; says why.
        """
        path = self._path(f"{CHECK}-{who}")
        try:
            self._retried(lambda: self._fs.makedirs(self._root, exist_ok=True) if self._local else None)
            self._retried(lambda: self._fs.pipe_file(path, b"AORTA can write here.\n"))
        except Exception as error:
            raise ConfigError(
                f"profiling.remote_root={self.address}: nothing can be written there: {error_line(error)}; check the "
                "address and the credentials, or set profiling.remote_root=null"
            ) from error
        try:
            self._fs.rm_file(path)
        except Exception as error:  # noqa: BLE001  writing may be allowed and deleting not; uploads only need to write
            _log.debug("upload: %s stays: %s", path, error_line(error))

    def put(self, source: Path, name: str) -> str:
        """Upload one file; returns its full address. Transient errors are retried.

        Raises:
            FileExistsError: a different file has this name, and replacing was not requested.
            Exception: the error of the last attempt.
        """
        path = self._path(name)
        tries = 0

        def copy() -> None:
            if self._local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with whole_file(Path(path), new=not self._overwrite) as part:
                    shutil.copyfile(source, part)
                return
            self._fs.invalidate_cache()
            if self._overwrite:
                self._fs.put_file(str(source), path)
            elif self._fs.exists(path):
                raise FileExistsError(path)
            else:  # on S3 `create` is also atomic; elsewhere the check above is all there is
                self._fs.put_file(str(source), path, mode="create")

        def once() -> None:
            nonlocal tries
            tries += 1
            try:
                copy()
            except FileExistsError:
                # An attempt whose answer got lost may have succeeded.
                if tries == 1 or not self._same(source, path):
                    raise
            size, wanted = self._size(path), source.stat().st_size
            if size is not None and size != wanted:
                raise OSError(errno.EIO, f"{path} has {size} bytes there and {wanted} here")

        try:
            self._retried(once)
        except FileExistsError:
            raise FileExistsError(f"{self.where(name)} already exists, and profiling.overwrite is false") from None
        return self.where(name)

    def holds(self, source: Path, name: str) -> bool:
        """Return whether `name` has as many bytes there as `source`, in a place that outlives this process. False where
        that cannot be determined.
        """
        if not self.durable:
            return False
        try:
            return bool(self._size(self._path(name)) == source.stat().st_size)
        except Exception as error:  # noqa: BLE001  the file here stays, which loses nothing; it is logged
            _log.warning("upload: %s stays, its copy could not be verified: %s", source, error_line(error))
            return False

    def _path(self, name: str) -> str:
        name = name.lstrip("/")
        return f"{self._root.rstrip('/')}/{name}" if self._root else name

    def _retried(self, call: Callable[[], Any]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                call()
                return
            except Exception as error:
                if attempt == ATTEMPTS or not may_pass(error):
                    raise
                pause_s = BACKOFF_S[attempt - 1]
                _log.info("upload: try %d of %d: %s; again in %g s", attempt, ATTEMPTS, error_line(error), pause_s)
                self._sleep(pause_s)

    def _size(self, path: str) -> Any:
        self._fs.invalidate_cache()
        return self._fs.info(path).get("size")

    def _same(self, source: Path, path: str) -> bool:
        if self._size(path) != source.stat().st_size:
            return False
        with self._fs.open(path, "rb") as there, source.open("rb") as here:
            return file_digest(there, "sha256").digest() == file_digest(here, "sha256").digest()


def destination(
    root: str | None, template: str | None, known: Mapping[str, Any], *, overwrite: bool
) -> Destination | None:
    """Return the configured destination; None where nothing is to be uploaded.

    Args:
        root: `profiling.remote_root`; not needed where the template is a full address.
        template: of names.
        known: variables known before the run.

    Raises:
        ConfigError: the destination cannot be used.
    """
    if template is not None and "://" in template:
        begin, brace, rest = fill(template, known).partition("{")
        root, _, name = begin.rpartition("/")
        template = name + brace + rest
    return Destination(root, template, overwrite=overwrite) if root and template is not None else None


def may_pass(error: BaseException) -> bool:
    """Return whether an error is transient: caused by the network or the server rather than by the request."""
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:  # an HTTP answer
            return status >= 500 or status in (_TOO_MANY_REQUESTS, _REQUEST_TIMEOUT)
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if any(known.__name__ in _TRANSIENT_CLASSES for known in type(error).__mro__):
        return True
    return type(error) is OSError and (error.errno is None or error.errno in _TRANSIENT)

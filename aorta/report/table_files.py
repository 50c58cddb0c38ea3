"""Writes tables into files for other tools, frame by frame: CSV, gzipped CSV, Parquet.

    rows = write_table(frames, folder / "steps.parquet")

Must not hold more than one frame.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from aorta.errors import InputError
from aorta.installation import install_command
from aorta.records.files import NOT_UTF8
from aorta.redaction import redact

if TYPE_CHECKING:
    import pandas as pd

FORMATS: Final = ("csv", "csv.gz", "parquet")
"""Each is the suffix of its files."""


def check_format(form: str) -> None:
    """Check that files of this format can be written.

    Raises:
        InputError: what it needs is not installed.
    """
    if form == "parquet" and find_spec("pyarrow") is None:
        raise InputError(f"writing Parquet needs pyarrow: {install_command('parquet')}; csv needs nothing")


def write_table(frames: Iterable[pd.DataFrame], path: Path) -> int:
    """Write all rows of frames that have the same columns; the suffix of `path` says in which format. A Parquet file
    has a row group per frame. Returns the number of rows.
    """
    frames = map(_redacted, frames)
    return _write_parquet(frames, path) if path.suffix == ".parquet" else _write_csv(frames, path)


def _redacted(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame without secrets in its texts."""
    for name, column in frame.select_dtypes(exclude="number").items():
        shown = {value: redact(value) for value in column.unique() if isinstance(value, str)}
        if any(value != text for value, text in shown.items()):
            frame = frame.assign(**{str(name): column.map(lambda value, shown=shown: shown.get(value, value))})
    return frame


def _write_csv(frames: Iterable[pd.DataFrame], path: Path) -> int:
    count = 0
    with _text_file(path) as file:
        for place, frame in enumerate(frames):
            texts = frame.select_dtypes(exclude="number")
            plain = frame.assign(**{str(name): texts[name].map(_plain, na_action="ignore") for name in texts})
            plain.to_csv(file, index=False, header=place == 0)
            count += len(frame)
    return count


def _plain(cell: object) -> object:
    """Quote text that a spreadsheet would take for a formula, and keep in its row what `csv` does not quote."""
    begin = "'" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else ""
    return begin + cell.replace("\r", "\\r") if isinstance(cell, str) else cell


@contextmanager
def _text_file(path: Path) -> Iterator[IO[str]]:
    if path.suffix != ".gz":
        with path.open("w", encoding="utf-8", errors=NOT_UTF8, newline="") as file:
            yield file
        return
    with (
        path.open("wb") as raw,
        # No name, which is a temporary one, and no time: the same rows are the same bytes.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", errors=NOT_UTF8, newline="") as file,
    ):
        yield file


def _write_parquet(frames: Iterable[pd.DataFrame], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, count = None, 0
    try:
        for frame in frames:
            # A file has one schema but dictionaries differ from frame to frame, so categories become strings.
            plain = frame.astype({name: "string" for name in frame.columns if frame[name].dtype == "category"})
            table = pa.Table.from_pandas(plain, preserve_index=False)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += len(frame)
    finally:
        if writer is not None:
            writer.close()
    return count

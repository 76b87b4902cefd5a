"""CSV on stdout, as in RFC 4180: a header, CRLF, quotes where needed; text that a spreadsheet would run is marked."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence

from gpuboard.model.text import clean

_FORMULAS = ("=", "+", "-", "@")  # a cell that begins so is a formula in a spreadsheet


def write(header: Sequence[str], rows: Iterable[Sequence[str | int | float | None]]) -> None:
    """Write a table in UTF-8. Unknown values (None) are empty fields.

    Text has no control characters, so that a record is a line. Text that begins like a formula gets an apostrophe.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows([_field(value) for value in row] for row in rows)
    sys.stdout.buffer.write(text.getvalue().encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _field(value: str | int | float | None) -> str | int | float:
    if not isinstance(value, str):
        return "" if value is None else value
    words = clean(value, 4096)
    return f"'{words}" if words.lstrip().startswith(_FORMULAS) else words

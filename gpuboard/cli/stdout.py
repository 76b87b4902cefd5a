"""JSON for programs, on stdout: UTF-8, whatever the locale is."""

from __future__ import annotations

import sys

import msgspec

from gpuboard.model.late import plain


def write_json(value: object) -> None:
    """Write ``value`` as one line of JSON, not flushed. Raises OSError."""
    sys.stdout.buffer.write(msgspec.json.encode(value, enc_hook=plain) + b"\n")

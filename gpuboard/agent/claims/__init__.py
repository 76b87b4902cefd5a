"""Claims on the GPUs of this node: small files in a sticky folder."""

MYPY = False
if MYPY:
    from typing import Any, Literal  # novm

    Kind = Literal["conflict", "disk", "folder", "invalid", "lapsed", "not-found", "not-yours"]


class Refuse(Exception):
    """The node refuses a call. ``kind`` is for programs (docs/agent-protocol.md), ``message`` for users."""

    def __init__(self, kind: "Kind", message: str, detail: "Any" = None) -> None:
        Exception.__init__(self, message)
        self.kind = kind
        self.message = message
        self.detail = detail

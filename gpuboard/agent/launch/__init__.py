"""The node's part of a launch: guard, supervisor, workers, store, preflight facts, teardown."""

MYPY = False
if MYPY:
    from typing import Any


class CallRefused(Exception):
    """A call of the head that gets an error as its reply: kind, message and detail of docs/launch-protocol.md."""

    def __init__(self, kind: str, message: str, detail: "Any" = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.detail = detail

"""The error tree. Each class has its exit code; a message has what failed, on what, why, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gpuboard.model.text import lines

if TYPE_CHECKING:
    from gpuboard.model.request import Refusal


ExitCode = Literal[1, 2, 3, 4, 5, 6, 130]


class GpuboardError(Exception):
    """Base of all errors. ``exit_code`` is the command's exit code (``gpuboard --help`` lists them).

    The message is safe to print and to encode, whatever it quotes: no control characters except line ends, and no
    surrogates.
    """

    exit_code: ExitCode = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(lines(message))


class UsageError(GpuboardError):
    """The command line, a config file or a rank map is invalid."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file has an unknown key, a wrong type or a value out of range; the message names file and key."""


class Refused(GpuboardError):
    """A request that was not granted; ``refusal`` has a reason for every GPU that was considered."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class NeverPossible(Refused):
    """This cluster can never satisfy the request. Only raised when every node was read."""

    exit_code = 3


class NotFree(Refused):
    """Not free now, the wait timed out, or nodes that might satisfy the request could not be read."""

    exit_code = 4


class NoSuchLease(GpuboardError):
    """No lease with that id, or it belongs to another user."""

    exit_code: ExitCode = 5


class NoNodeReached(GpuboardError):
    """No node could be read; ``nodes``: their names, where these are known."""

    exit_code = 6

    def __init__(self, message: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class Interrupted(GpuboardError):
    """SIGINT or SIGTERM arrived before a command or rank was started."""

    exit_code = 130

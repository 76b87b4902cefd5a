"""The error tree. Each class carries its exit code; a message says what, where, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gpuboard.model.text import lines

if TYPE_CHECKING:
    from gpuboard.model.request import Refusal


ExitCode = Literal[1, 2, 3, 4, 5, 6, 130]


class GpuboardError(Exception):
    """Anything gpuboard says no to. ``exit_code`` is what the command exits with (DESIGN: exit codes).

    The message is safe to print and to encode, whatever it quotes: no control characters but line ends, no surrogates.
    """

    exit_code: ExitCode = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(lines(message))


class UsageError(GpuboardError):
    """The command line, a config file or a rank map says something that cannot be understood."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file has an unknown key, a wrong type or a value out of range; the message names file and key."""


class Refused(GpuboardError):
    """A request that was not granted; ``refusal`` has a reason for every GPU that was looked at."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class NeverPossible(Refused):
    """The request can never be met by this cluster. Only raised when every node was read."""

    exit_code = 3


class NotFree(Refused):
    """Not free now, or the wait ran out, or nodes that could have served were not readable."""

    exit_code = 4


class NoSuchLease(GpuboardError):
    """No lease of that id, or it is somebody else's."""

    exit_code = 5


class NoNodeReached(GpuboardError):
    """Not one node gave a reading."""

    exit_code = 6


class Interrupted(GpuboardError):
    """The person pressed ctrl-C (or TERM arrived) before a command or rank had started."""

    exit_code = 130

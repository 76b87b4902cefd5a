"""The commands' names, and which one a command line has. Imports nothing: loaded before the agent starts."""

from __future__ import annotations

GROUPS = {  # by package
    "see": ("board", "status", "ps", "record", "serve"),
    "reserve": ("allocate", "leases", "renew", "release", "env"),
    "use": ("run", "launch", "runs", "logs", "attach", "stop", "explain"),
    "setup": ("demo", "config", "doctor"),
}
COMMANDS = {name: group for group, names in GROUPS.items() for name in names}
_EVALUATED = {"allocate", "env"}


def split(argv: list[str]) -> tuple[str | None, list[str]]:
    """Return the command and its arguments, including the flags before the command."""
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "--":
        position += 2 if argv[position] in {"--nodes", "--config"} else 1
    if position >= len(argv) or argv[position] == "--":
        return None, argv
    return argv[position], argv[:position] + argv[position + 1 :]


def is_evaluated(argv: list[str]) -> bool:
    """Return whether a shell evaluates the output: of `allocate` and `env`.

    Also where a mistyped option before the command makes another word the command: `--node gpu01 allocate`.
    """
    name = split(argv)[0]
    return name in _EVALUATED or (name not in COMMANDS and name != "help" and not _EVALUATED.isdisjoint(argv))

"""The commands' names, and which one a command line has. Imports little: loaded before the agent starts."""

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

    Also where the command is mistyped, or another word is in its place, after a mistyped option: `--node gpu01 env`.
    """
    name = split(argv)[0]
    if name in COMMANDS or name == "help":
        return name in _EVALUATED
    return not _EVALUATED.isdisjoint(argv) or (name is not None and meant(name) in _EVALUATED)


def meant(name: str) -> str | None:
    """Return the command with the name nearest to one that is no command's, or None."""
    from gpuboard.cli.options import nearest  # late: needed only for an error

    return nearest(name[:100], list(COMMANDS))

"""Settings: flag > GPUBOARD_* > user TOML > site TOML > default, each value with its origin."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpuboard import files, paths
from gpuboard.errors import ConfigError
from gpuboard.model.decoding import convert
from gpuboard.model.state import Thresholds
from gpuboard.model.text import quoted, shown
from gpuboard.model.units import parse_duration, parse_size, parse_whole


class StateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``[state]``: the thresholds of a GPU's state. Sizes in bytes, durations as ``15m``."""

    busy_utilization: int = 5
    occupied_memory: int = 512 * 2**20
    stale_intervals: float = 3.0
    stale_min: str = "5s"
    idle_after: str = "15m"
    ignore_processes: tuple[str, ...] = Thresholds().ignore_processes
    ignore_below: int = 512 * 2**20

    def thresholds(self) -> Thresholds:
        """Return the values that :func:`gpuboard.model.state.judge` takes."""
        return Thresholds(
            busy_utilization=self.busy_utilization,
            occupied_memory=self.occupied_memory,
            stale_intervals=self.stale_intervals,
            stale_min_s=parse_duration(self.stale_min),
            idle_after_s=parse_duration(self.idle_after),
            ignore_processes=self.ignore_processes,
            ignore_below=self.ignore_below,
        )


class SlurmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``[slurm]``: how Slurm is queried, and the defaults for jobs of `allocate`."""

    interval: str = "30s"  # minimum time between two query cycles; longer where the controller is slow
    time: str = "1h"  # a job's limit without --for
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    cpus_per_gpu: int = 0  # 0: Slurm's default
    mem_per_gpu: str = ""  # a size; "": Slurm's default
    args: list[str] = []  # further options of sbatch, placed before those of --slurm
    patience: str = "10s"  # without --wait: how long Slurm may take to schedule a job
    silence: str = "3m"  # a job ends itself after this time without a heartbeat from its owner's keeper


class RunsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``[runs]``: which ended launches are kept, with their logs."""

    max_age: str = "90d"
    max_size: str = "10GiB"  # of all together; the oldest are deleted first

    def limits(self) -> tuple[float, int]:
        """Return both in seconds and bytes."""
        return parse_duration(self.max_age), parse_size(self.max_size)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings. Names are the keys of the TOML files; the environment variable GPUBOARD_<NAME> sets one."""

    cluster: str = ""  # the name shown; "" takes the nodeset
    nodes: list[
        str
    ] = []  # nodesets, and sources of nodes (cluster/inventory/sources.py); []: Slurm's, else this machine
    interval: str = "auto"  # "auto": 1 s up to 64 nodes, 5 s above
    connect_timeout: str = "10s"
    max_connections: int = 64  # ssh connections that are set up at a time
    ssh_config: str = "~/.ssh/config"
    known_hosts: tuple[str, ...] = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
    python: str = "python3"  # the nodes' interpreter for the agent
    ledger: str = "nodes"  # the only value; nothing reads it: a node with Slurm is Slurm's, see leases/composite.py
    claims_dir: str = "/var/tmp"
    max_lease: str = "24h"
    scheduler: str = "auto"  # "auto": Slurm where it is installed, else none
    ssh: str = "own"  # with Slurm, the nodes that ssh may connect to: "own": those of the user's jobs; "all"
    transport: str = "asyncssh"  # how other machines are reached: "asyncssh", "openssh", "paramiko"
    slurm: SlurmSettings = SlurmSettings()
    state: StateSettings = StateSettings()
    runs: RunsSettings = RunsSettings()
    users: dict[str, str] = {}  # a node's name of a user -> the name to show
    theme: str = "auto"  # of the board; "auto": the last one chosen, else one that suits the terminal
    glyphs: str = "auto"  # "auto": Unicode where locale and terminal have it, else ASCII
    keys: dict[str, dict[str, str | list[str]]] = {}  # the board's: screen -> action -> key or keys

    def interval_s(self, nodes: int) -> float:
        """Return the interval between readings for ``nodes`` nodes, in seconds."""
        if self.interval != "auto":
            return parse_duration(self.interval)
        return 1.0 if nodes <= 64 else 5.0


class Configuration(msgspec.Struct, frozen=True):
    """The settings in force and, for each key, where its value came from."""

    settings: Settings
    origins: dict[str, str]


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "state": StateSettings,
    "slurm": SlurmSettings,
    "runs": RunsSettings,
}
_BY_HAND = ("environment", "command line")  # origins that are not files
_DURATIONS = (
    "interval", "connect_timeout", "max_lease", "state.stale_min", "state.idle_after", "slurm.interval", "slurm.time",
    "slurm.patience", "slurm.silence", "runs.max_age",
)  # fmt: skip
_SPANS = {  # for those that load nodes or Slurm, or that exceed what poll() accepts
    "interval": ("0.2s", "1d"),
    "connect_timeout": ("0.1s", "1h"),
    "slurm.interval": ("1s", "1d"),
    "slurm.patience": ("0.1s", "1d"),
    "runs.max_age": ("1s", "366d"),
}
_DEPTH_MAX = 16
_QUOTED = re.compile(  # strings, closed or not, and comments
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?|\'\'\'(?:[^\']|\'(?!\'\'))*+(?:\'\'\')?'
    r'|"(?:[^"\\\n]|\\.)*+"?|\'[^\'\n]*+\'?|#[^\n]*+',
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_DEPTH_MAX}}}")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # except blanks and line ends
_ANY = ("0.001s", "366d")
_SIZES = ("slurm.mem_per_gpu", "runs.max_size")
# Empty values have a meaning for these and for [keys]; an empty entry of `nodes` has a message of its own.
_MAY_BE_EMPTY = ("cluster", "nodes", "slurm.partition", "slurm.account", "slurm.qos", "slurm.reservation",
                 "slurm.mem_per_gpu")  # fmt: skip
_RANGES = {
    "max_connections": (1, 4096),
    "state.busy_utilization": (1, 101),  # 101: utilization alone never makes a GPU busy
    "state.occupied_memory": (0, 2**50),
    "state.stale_intervals": (1, 1000),
    "state.ignore_below": (0, 2**50),
    "slurm.cpus_per_gpu": (0, 4096),
}
_TYPES = {
    "array": "a list",
    "bool": "a boolean",
    "float": "a decimal number",
    "int": "a whole number",
    "object": "a table",
    "str": "a string",
}
_CHOICES = {
    "ledger": ("nodes",),
    "scheduler": ("auto", "none", "slurm"),
    "ssh": ("own", "all"),
    "transport": ("asyncssh", "openssh", "paramiko"),
    "glyphs": ("auto", "unicode", "ascii"),
}


def load(env: Mapping[str, str], flags: Mapping[str, Any], file: Path | None = None) -> Configuration:
    """Return the settings in force. ``flags`` holds what the command line set; ``file`` replaces the user's TOML.

    Raises ConfigError naming file and key for an unknown key, a wrong type or a value out of range.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = [
        (shown(path), _read(path, must_exist=path == file))
        for path in (paths.SITE_CONFIG, file or paths.user_config(env))
    ]
    sources.append(("environment", _from_env(env)))
    sources.append(("command line", dict(flags)))
    for origin, values in sources:
        _split_keys(values)
        try:
            _check(values, origin)
        except ConfigError as error:
            found = re.fullmatch(r"environment: (\w+)(.*)", str(error), re.DOTALL)
            raise ConfigError(f"GPUBOARD_{found[1].upper()}{found[2]}") if found else error from None
        for key, value in values.items():
            _put(merged, key, value)
        origins |= {key: origin for key, _ in flat(values)}
    settings = convert(merged, Settings)
    for key, paths_of, most in (
        ("ssh_config", (settings.ssh_config,), files.SSH_CONFIG_MAX),
        ("known_hosts", settings.known_hosts, files.KNOWN_HOSTS_MAX),
    ):
        for file_of in paths_of:  # ssh reads them too, and would block on a FIFO
            if why := files.trouble(os.path.expanduser(file_of), most):
                raise ConfigError(f"{origins.get(key, 'default')}: {key} = {quoted(file_of)} cannot be read: {why}")
    return Configuration(settings, {key: origins.get(key, "default") for key, _ in flat(msgspec.to_builtins(settings))})


def _read(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return parse_toml(files.read(path, files.CONFIG_MAX))
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{shown(path)}: no such config file; check --config or GPUBOARD_CONFIG") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: cannot be read: it is not UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{shown(path)}: not valid TOML: {error}") from error


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the tables in a TOML file. Raises ValueError, also for nesting deeper than _DEPTH_MAX.

    tomllib needs a stack frame per bracket, and quadratic time and memory for keys with many dots.
    """
    text = data.decode("utf-8-sig")  # some editors write a byte order mark
    bare = _QUOTED.sub("_", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", bare):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEPTH_MAX:
            raise ValueError(f"brackets nest deeper than {_DEPTH_MAX}")
    if _LONG_KEY.search(bare):
        raise ValueError(f"a key has more than {_DEPTH_MAX} parts")
    import tomllib  # late: only where there is a file

    return tomllib.loads(text)


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings from GPUBOARD_* variables.

    Inside a lease GPUBOARD_NODES describes the lease (`allocate` sets it), so it is no setting there.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        text = env.get(f"GPUBOARD_{field.name.upper()}")
        if text is None or (field.name == "nodes" and env.get("GPUBOARD_LEASE")):
            continue
        if field.type is int:
            try:
                values[field.name] = parse_whole(text, *_RANGES[field.name])
            except ValueError as error:
                raise ConfigError(f"GPUBOARD_{field.name.upper()}: {error}") from None
        elif field.type is str:
            values[field.name] = text
        elif field.name in {"nodes", "known_hosts"}:
            values[field.name] = text.split() if field.name == "known_hosts" else [text]
    return values


def _check(values: dict[str, Any], origin: str) -> None:
    """Raise ConfigError for the first entry of ``values`` that is not a valid setting."""
    try:
        convert(values, Settings)
    except msgspec.ValidationError as error:
        message = str(error)
        words, _, path = message.partition(" - at `$.")
        path = path.removesuffix("`")
        if words.startswith("Object contains unknown field"):
            section: type[msgspec.Struct] = _SECTIONS.get(path, Settings)
            known = ", ".join(sorted(field.name for field in msgspec.structs.fields(section)))
            words = words.replace("Object contains unknown field", "unknown key")
            message = f"{words}{f' in [{path}]' if path else ''}; keys are: {known}"
        elif match := re.fullmatch(r"Expected `(.*)`, got `(.*)`", words):
            key = _wrong_key(values) if "[...]" in path else path  # [keys] and [users] have no fixed keys
            wanted, got = (" or ".join(_TYPES.get(name, name) for name in text.split(" | ")) for text in match.groups())
            message = f"{key}: must be {wanted}, not {got}"
        raise ConfigError(f"{origin}: {message}") from None
    found = dict(flat(values))
    for key, value in found.items():
        for text in (key, *(value if isinstance(value, (list, tuple)) else (value,))):
            if isinstance(text, str) and _CONTROL.search(text):
                raise ConfigError(f"{origin}: {shown(key)}: {quoted(text)} has a control character")
            if text == "" and key not in (*_DURATIONS, *_SIZES, *_MAY_BE_EMPTY) and not key.startswith("keys."):
                raise ConfigError(f"{origin}: {shown(key)}: an empty value; remove the key for its default")
        if isinstance(value, int) and value.bit_length() > 63:  # Python does not print integers of 4,300 digits
            raise ConfigError(f"{origin}: {key}: the number is too large")
    for key in _DURATIONS:
        if key in found and (key, found[key]) != ("interval", "auto"):
            try:
                seconds = parse_duration(found[key])
            except ValueError as error:
                raise ConfigError(f"{origin}: {key}: {error}{', or auto' * (key == 'interval')}") from None
            least, most = _SPANS.get(key, _ANY)
            if not parse_duration(least) <= seconds <= parse_duration(most):
                raise ConfigError(f"{origin}: {key} = {quoted(found[key])} is not between {least} and {most}")
    for key in _SIZES:
        if found.get(key) or (key in found and key != "slurm.mem_per_gpu"):
            try:
                parse_size(found[key])
            except ValueError as error:
                raise ConfigError(f"{origin}: {key}: {error}") from None
    for key, choices in _CHOICES.items():
        if key in found and found[key] not in choices:
            raise ConfigError(f"{origin}: {key} = {quoted(found[key])} is not one of: {', '.join(choices)}")
    for key, (low, high) in _RANGES.items():
        if key in found and not low <= found[key] <= high:
            raise ConfigError(f"{origin}: {key} = {found[key]!r} is not between {low} and {high}")
    if not found.get("claims_dir", "/").startswith("/"):
        raise ConfigError(f"{origin}: claims_dir = {quoted(found['claims_dir'])} must be an absolute path")
    if re.search("[\ud800-\udfff]", found.get("claims_dir", "")):  # the nodes get it as JSON
        raise ConfigError(f"{origin}: claims_dir = {quoted(found['claims_dir'])} is not UTF-8")
    for text in found.get("nodes", ()):
        if not text.strip():
            raise ConfigError(f"{origin}: nodes holds an empty nodeset; write gpu01 or gpu[01-16,20]")
        if text.startswith("hostfile:") and origin not in _BY_HAND and not text[9:].startswith(("/", "~")):
            raise ConfigError(f"{origin}: nodes: {quoted(text)} must be an absolute path: commands run in any folder")


def _wrong_key(table: Mapping[str, Any], around: Callable[[Any], Any] = lambda inner: inner) -> str:
    """Return the dotted name of the first key of ``table`` that is invalid inside ``around``."""
    for key, value in table.items():
        alone = partial(_within, around, key)
        try:
            convert(alone(value), Settings)
        except msgspec.ValidationError:
            inner = _wrong_key(value, alone) if isinstance(value, dict) else ""
            return f"{key}.{inner}" if inner else key
    return ""


def _within(around: Callable[[Any], Any], key: str, inner: Any) -> Any:
    return around({key: inner})


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested tables as (dotted key, value)."""
    return [
        leaf
        for key, value in values.items()
        for leaf in (flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)])
    ]


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key``: tables are merged, anything else is replaced."""
    if isinstance(value, dict):
        table = values[key] = values[key] if isinstance(values.get(key), dict) else {}
        for inner, below in value.items():
            _put(table, inner, below)
    else:
        values[key] = value


def _split_keys(values: dict[str, Any]) -> None:
    """Treat ``"cluster.reserve" = "R"`` in [keys] as ``cluster.reserve = "R"``, which differs in TOML."""
    keys = values.get("keys")
    if not isinstance(keys, dict):
        return
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        screen, dot, action = key.partition(".")
        _put(tables, screen if dot else key, {action: value} if dot else value)
    values["keys"] = tables

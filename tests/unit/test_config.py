"""Settings: precedence, origins of values, and messages of refused ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gpuboard.config import Settings, load
from gpuboard.errors import ConfigError


def user_file(folder: Path, text: str) -> dict[str, str]:
    """Write the user's config file; return the environment that finds it."""
    (folder / "gpuboard").mkdir()
    (folder / "gpuboard" / "config.toml").write_text(text, encoding="utf-8")
    return {"XDG_CONFIG_HOME": str(folder)}


def test_defaults_without_any_source(tmp_path: Path) -> None:
    configuration = load({"HOME": str(tmp_path)}, {})
    assert configuration.settings == Settings()
    assert set(configuration.origins.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    env = user_file(tmp_path, 'nodes = ["gpu01"]\ncluster = "file"\ninterval = "3s"\nledger = "nodes"\n')
    env |= {"GPUBOARD_CLUSTER": "env", "GPUBOARD_NODES": "gpu02"}
    configuration = load(env, {"nodes": ["gpu03"]})
    settings = configuration.settings
    assert (settings.nodes, settings.cluster, settings.interval, settings.python) == (
        ["gpu03"], "env", "3s", "python3",
    )  # fmt: skip
    origins = configuration.origins
    assert [origins[key] for key in ("nodes", "cluster", "interval", "python")] == [
        "command line", "environment", str(tmp_path / "gpuboard" / "config.toml"), "default",
    ]  # fmt: skip


def test_a_section_is_merged_key_by_key(tmp_path: Path) -> None:
    env = user_file(tmp_path, '[state]\nbusy_utilization = 9\n[users]\nali = "alice"\n')
    configuration = load(env, {})
    assert configuration.settings.state.thresholds().busy_utilization == 9
    assert configuration.settings.state.occupied_memory == 512 * 2**20
    assert configuration.settings.users == {"ali": "alice"}
    assert configuration.origins["state.occupied_memory"] == "default"


def test_every_default_may_stand_in_a_file(tmp_path: Path) -> None:
    tables: dict[str, dict[str, object]] = {"": {}}
    for key, value in msgspec.to_builtins(Settings()).items():
        if isinstance(value, dict):
            tables[key] = value
        else:
            tables[""][key] = value
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value or value == 0]
    configuration = load(user_file(tmp_path, "\n".join(lines)), {})
    assert configuration.settings == Settings()
    assert configuration.origins["runs.max_age"] == str(tmp_path / "gpuboard" / "config.toml")


def test_numbers_in_the_environment() -> None:
    assert load({"GPUBOARD_MAX_CONNECTIONS": "7"}, {}).settings.max_connections == 7


def test_inside_a_lease_gpuboard_nodes_is_no_setting() -> None:
    settings = load({"GPUBOARD_NODES": "gpu02", "GPUBOARD_LEASE": "k3f9"}, {}).settings
    assert settings.nodes == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 3", "nodes: must be a list, not a whole number"),
        ("nodes = [3]", "nodes[0]: must be a string, not a whole number"),
        ('nodes = [""]', "nodes holds an empty nodeset"),
        ('node = ["gpu01"]', "unknown key `node`"),
        ("[state]\nbusy = 3", "unknown key `busy` in [state]; keys are: busy_utilization"),
        ('interval = "3"', "interval: '3' is not a duration"),
        ('interval = "30d"', "interval = '30d' is not between 0.2s and 1d"),
        ('connect_timeout = "2h"', "connect_timeout = '2h' is not between 0.1s and 1h"),
        ('[slurm]\ninterval = "0.5s"', "slurm.interval = '0.5s' is not between 1s and 1d"),
        ('[runs]\nmax_age = "0.5s"', "runs.max_age = '0.5s' is not between 1s and 366d"),
        ('[runs]\nmax_age = "old"', "runs.max_age: 'old' is not a duration"),
        ('[runs]\nmax_size = ""', "runs.max_size: '' is not a size"),
        ('max_lease = "never"', "max_lease: 'never' is not a duration"),
        ('[state]\nidle_after = "15"', "state.idle_after: '15' is not a duration"),
        ("max_connections = 0", "max_connections = 0 is not between 1 and 4096"),
        ("max_connections = true", "max_connections: must be a whole number, not a boolean"),
        ("[state]\nbusy_utilization = -1", "state.busy_utilization = -1 is not between 1 and 101"),
        ('claims_dir = "tmp"', "claims_dir = 'tmp' must be an absolute path"),
        ('python = ""', "python: an empty value; remove the key for its default"),
        ('[users]\nalice = ""', "users.alice: an empty value"),
        ('[state]\nignore_processes = ["Xorg", ""]', "state.ignore_processes: an empty value"),
        ('ledger = "sqlite"', "ledger = 'sqlite' is not one of: nodes"),
        ("nodes = [", "not valid TOML"),
        ("state = 3", "state: must be a table, not a whole number"),
        (
            "[keys]\napp.quit = 'q'\ncluster.sort = 3",
            "keys.cluster.sort: must be a string or a list, not a whole number",
        ),
        ("[keys.app]\nquit = ['q', 4]", "keys.app.quit: must be a string, not a whole number"),
        ("[users]\n'a.b' = 'A'\nroot = 1", "users.root: must be a string, not a whole number"),
    ],
)
def test_a_bad_file_is_refused_with_file_key_and_remedy(tmp_path: Path, text: str, words: str) -> None:
    env = user_file(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load(env, {})
    assert words in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "gpuboard" / "config.toml"))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GPUBOARD_INTERVAL": "x"}, "GPUBOARD_INTERVAL: 'x' is not a duration, or auto"),
        ({"GPUBOARD_MAX_CONNECTIONS": "many"}, "GPUBOARD_MAX_CONNECTIONS: 'many' is not a whole number from 1 to 4096"),
        ({"GPUBOARD_MAX_CONNECTIONS": "0"}, "GPUBOARD_MAX_CONNECTIONS: '0' is not"),
        ({"GPUBOARD_LEDGER": "x"}, "GPUBOARD_LEDGER = 'x'"),
        ({"GPUBOARD_CLAIMS_DIR": "/tmp/\udcff"}, "GPUBOARD_CLAIMS_DIR = '/tmp/.udcff' is not UTF-8"),
    ],
)
def test_a_bad_variable_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.split(" is ", maxsplit=1)[0]):
        load(env, {})


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('\ufeffcluster = "lab"\r\n', encoding="utf-8")
    assert load({}, {}, file).settings.cluster == "lab"


def test_only_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load({}, {}, tmp_path / "absent.toml")
    assert load({"XDG_CONFIG_HOME": str(tmp_path)}, {}).settings == Settings()


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load({}, {}, file)


def test_a_named_file_replaces_the_users(tmp_path: Path) -> None:
    env = user_file(tmp_path, 'cluster = "user"')
    named = tmp_path / "named.toml"
    named.write_text('python = "python3.9"', encoding="utf-8")
    settings = load(env, {}, named).settings
    assert (settings.cluster, settings.python) == ("", "python3.9")


@pytest.mark.parametrize(("interval", "nodes", "seconds"), [("auto", 64, 1.0), ("auto", 65, 5.0), ("2s", 100, 2.0)])
def test_interval(interval: str, nodes: int, seconds: float) -> None:
    assert Settings(interval=interval).interval_s(nodes) == seconds

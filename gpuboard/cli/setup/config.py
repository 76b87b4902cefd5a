"""`gpuboard config`: the settings in force and where each came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

import msgspec

from gpuboard import paths
from gpuboard.cli.context import Context
from gpuboard.cli.say import say
from gpuboard.cluster.inventory.nodes import folded
from gpuboard.config import Settings, flat
from gpuboard.errors import GpuboardError
from gpuboard.model.text import clean

NAME = "config"
HELP = "show the settings in force and where each came from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON: settings with values and origins, nodes")
    parser.epilog = "example:\n  gpuboard config\n  gpuboard config --nodes 'gpu[01-03]' --json"


def run(args: argparse.Namespace, context: Context) -> int:
    """Print every setting with its value and origin."""
    configuration = context.configuration
    values = dict(flat(msgspec.to_builtins(configuration.settings)))
    rows = {key: {"value": value, "origin": configuration.origins.get(key, "default")} for key, value in values.items()}
    if context.said:
        rows["nodes"] = {"value": context.said, "origin": "command line"}
    problems = _key_problems(configuration.settings) + _theme_problems(configuration.settings, context.env)
    names: list[str] = []
    try:
        names = [node.name for node in context.nodes()]
    except GpuboardError as error:
        if context.said:
            raise
        problems.append(str(error))  # what is set is worth showing all the same, and shows why
    if args.json:
        print(json.dumps({"schema": 1, "settings": rows, "nodes": names, "problems": problems}, ensure_ascii=False))
        return 0
    width = max(len(key) for key in rows)
    shown = {key: clean(json.dumps(row["value"], ensure_ascii=False), 200) for key, row in rows.items()}
    column = min(40, max(len(text) for text in shown.values()))
    for key, row in rows.items():
        print(f"{key:<{width}}  {shown[key]:<{column}}  {clean(str(row['origin']))}")
    for words in problems:
        say(words)
    if names:
        print(f"\nnodes: {folded(names)} ({len(names)})")
    print(f"\nfiles looked at: {paths.SITE_CONFIG}, {context.config_file or paths.user_config(context.env)}")
    return 0


def _key_problems(settings: Settings) -> list[str]:
    """Return what is wrong with the board's keys: which actions there are is known to its screens alone."""
    if not settings.keys:
        return []
    from gpuboard.board.keys import remap  # 400 ms: all of the board

    return remap(settings.keys).problems


def _theme_problems(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the board's theme, and with the files of the user's own themes."""
    if settings.theme == "auto" and not any((paths.user_config(env).parent / "themes").glob("*.toml")):
        return []
    from gpuboard.board.theme import themes  # late: textual is needed to check one

    found, problems = themes.load_all(env)
    return problems + themes.unknown(settings.theme, found)

"""`gpuboard config`: show the settings in force and the origin of each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

import msgspec

from gpuboard import paths
from gpuboard.cli.context import Context
from gpuboard.cli.stderr import report
from gpuboard.cluster.inventory.first_run import config_of
from gpuboard.cluster.inventory.nodes import folded
from gpuboard.config import Settings, flat
from gpuboard.errors import GpuboardError
from gpuboard.model.text import clean

NAME = "config"
HELP = "show the settings in force and where each comes from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1): settings, nodes, problems")
    parser.epilog = "example:\n  gpuboard config\n  gpuboard config --nodes 'gpu[01-03]' --json"


def run(args: argparse.Namespace, context: Context) -> int:
    """Print every setting with its value and origin."""
    configuration = context.configuration
    values = dict(flat(msgspec.to_builtins(configuration.settings)))
    rows = {key: {"value": value, "origin": configuration.origins.get(key, "default")} for key, value in values.items()}
    if context.nodesets:
        rows["nodes"] = {"value": context.nodesets, "origin": "command line"}
    problems = problems_of(configuration.settings, context.env)
    names: list[str] = []
    try:
        names = [node.name for node in context.nodes()]
    except GpuboardError as error:
        if context.nodesets:
            raise
        problems.append(str(error))  # the settings are still shown: they explain the error
    if args.json:
        print(json.dumps({"schema": 1, "settings": rows, "nodes": names, "problems": problems}))
        return 0
    width = max(len(key) for key in rows)
    shown = {key: clean(json.dumps(row["value"], ensure_ascii=False), 200) for key, row in rows.items()}
    column = min(40, max(len(text) for text in shown.values()))
    for key, row in rows.items():
        print(f"{key:<{width}}  {shown[key]:<{column}}  {clean(str(row['origin']))}")
    for problem in problems:
        report(problem)
    if names:
        print(f"\nnodes: {folded(names)} ({len(names)})")
    print(f"\nconfig files: {paths.SITE_CONFIG}, {context.config_file or config_of(context.env)}")
    return 0


def problems_of(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Return the errors in the settings of the board, which start without them."""
    return _key_problems(settings) + _theme_problems(settings, env)


def _key_problems(settings: Settings) -> list[str]:
    """Return the errors in [keys]. The board's screens define the actions, so this imports the board."""
    if not settings.keys:
        return []
    from gpuboard.board.keys import remap  # 400 ms: imports the board

    return remap(settings.keys).problems


def _theme_problems(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Return the errors in the board's theme setting and in the user's theme files."""
    if settings.theme == "auto" and not any((paths.user_config(env).parent / "themes").glob("*.toml")):
        return []
    from gpuboard.board.theme import themes  # late: imports textual

    found, problems = themes.load_all(env)
    return problems + themes.unknown(settings.theme, found)

"""The bindings of all screens by id, and the config's ``[keys]``, which gives actions other keys.

textual's own ``set_keymap`` ignores unknown ids, and an action whose key is given to another loses it without an error.
So the keymap is checked here first: every problem is reported, and the action in question keeps its key.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import KEY_TO_UNICODE_NAME, REPLACED_KEYS, Keys
from textual.screen import ModalScreen, Screen

import gpuboard.board

_MODIFIERS = ("ctrl", "alt", "shift", "super")
_OURS = "gpuboard.board."
# textual's own: quit, copy, go through fields
_TEXTUALS = frozenset({"ctrl+q", "ctrl+c", "super+c", "tab", "shift+tab"})
_NAMED = frozenset(str(key.value) for key in Keys if "+" not in key.value and "<" not in key.value)


class Action(NamedTuple):
    """An action with its keys."""

    id: str  # those of a screen begin with the name of the action that opens it
    name: str
    keys: tuple[str, ...]
    description: str
    section: str  # the screen's title
    owner: type[DOMNode]


class Remapped(NamedTuple):
    """The keymap from the config's ``[keys]``, and what is wrong there."""

    keymap: dict[str, str]  # for textual's set_keymap: id → keys with commas between
    problems: list[str]


def load_screens() -> None:
    """Import every module of the board, so that all bindings are known."""
    for module in pkgutil.walk_packages(gpuboard.board.__path__, "gpuboard.board."):
        if not module.name.startswith("gpuboard.board.web"):  # need textual-serve, and have no bindings
            importlib.import_module(module.name)


def actions() -> list[Action]:
    """Return every action of the loaded modules; call ``load_screens`` first for all of the board."""
    return [action for owner in _owners() for action in _declared(owner)]


def remap(config: Mapping[str, Mapping[str, str | list[str]]]) -> Remapped:
    """Return the keymap for ``[keys]`` and its problems; an action whose new key clashes keeps its old one."""
    if not config:
        return Remapped({}, [])
    load_screens()
    known = {action.id: action for action in actions()}
    wanted: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for screen, table in config.items():
        for name, keys in table.items():
            id_ = f"{screen}.{name}"
            if id_ not in known:
                problems.append(f"[keys] {id_}: no such action; the help screen (?) lists the names")
                continue
            texts = [keys] if isinstance(keys, str) else keys
            found = [normal(text) for text in texts]
            bad = [text for text, key in zip(texts, found, strict=True) if key is None]
            if bad or not found:
                problems.append(
                    f"[keys] {id_} = {bad[0] if bad else ''!r}: not a key; write R, ctrl+r, f5 or question_mark"
                )
                continue
            wanted[id_] = tuple(key for key in found if key is not None)
    while (clash := _clash(wanted)) is not None:
        loser, key, other = clash
        action = known.get(other)
        whose = f"{other} ({action.description})" if action else "textual itself"
        problems.append(
            f"[keys] {loser} = {key!r}: this is the key of {whose}; {loser} keeps {', '.join(known[loser].keys)}"
        )
        del wanted[loser]
    return Remapped({id_: ",".join(keys) for id_, keys in wanted.items()}, problems)


def normal(text: str) -> str | None:
    """Return a key as textual names it (``?`` → ``question_mark``, ``shift+r`` → ``R``), or None if it is not a key."""
    *modifiers, key = text.strip().split("+") if text.strip() != "+" else ["+"]
    if text.strip().endswith("++"):
        *modifiers, key = [*text.strip()[:-2].split("+"), "+"]
    modifiers = [modifier.lower() for modifier in modifiers]
    if len(set(modifiers)) != len(modifiers) or any(modifier not in _MODIFIERS for modifier in modifiers):
        return None
    if len(key) == 1:
        if not key.isprintable():
            return None
        if key.isalpha() and "shift" in modifiers:
            modifiers.remove("shift")
            key = key.upper()
        if key.isalpha() and "ctrl" in modifiers:
            key = key.lower()
        elif not key.isalnum():
            key = _name_of(key)
    elif key.lower() in _NAMED:
        key = key.lower()
    elif not _is_character(key):
        return None
    return "+".join([*(modifier for modifier in _MODIFIERS if modifier in modifiers), key])


def _clash(wanted: Mapping[str, tuple[str, ...]]) -> tuple[str, str, str] | None:
    """Return the first remapped action with another's key: its id, the key, the other's id ("": textual's)."""
    for context in _contexts():
        taken: dict[str, str] = dict.fromkeys(_TEXTUALS, "")
        together = context.screen + context.app + [action for widget in context.widgets for action in widget]
        # actions that keep their keys first: in a clash the remapped one loses
        for action in sorted(together, key=lambda action: action.id in wanted):
            for key in wanted.get(action.id, action.keys):
                other = taken.setdefault(key, action.id)
                if other != action.id and action.id in wanted:
                    return action.id, key, other
    return None


class _Context(NamedTuple):
    """The actions that are active together."""

    screen: list[Action]
    widgets: list[list[Action]]  # of each widget that can have the focus
    app: list[Action]


def _contexts() -> Iterator[_Context]:
    owners = _owners()
    app = [action for owner in owners if issubclass(owner, App) for action in _declared(owner)]
    widgets = [owner for owner in owners if not issubclass(owner, (App, Screen))]
    for screen in (owner for owner in _classes(Screen) if _is_ours(owner)):
        chain = {
            action.id: action for owner in reversed(screen.__mro__) if owner in owners for action in _declared(owner)
        }
        inside = [_declared(widget) for widget in widgets if _is_on(widget, screen)]
        needed: frozenset[str] = getattr(screen, "INSTEAD_OF", frozenset())
        below = [] if issubclass(screen, ModalScreen) else [action for action in app if action.id not in needed]
        yield _Context(list(chain.values()), inside, below)


def _is_on(widget: type[DOMNode], screen: type[DOMNode]) -> bool:
    """Return whether a screen has a kind of widget: its module, or a base class's, names the class."""
    named = (
        value for owner in screen.__mro__ if _is_ours(owner) for value in vars(sys.modules[owner.__module__]).values()
    )
    return any(isinstance(value, type) and issubclass(value, widget) for value in named)


def _owners() -> list[type[DOMNode]]:
    """Return our classes that declare bindings: the app first, then screens, then widgets."""
    found = [owner for owner in _classes(DOMNode) if _is_ours(owner) and "BINDINGS" in vars(owner)]
    return sorted(found, key=lambda owner: (not issubclass(owner, App), not issubclass(owner, Screen), owner.__name__))


def _declared(owner: type[DOMNode]) -> list[Action]:
    keys: dict[str, list[str]] = {}
    first: dict[str, Binding] = {}
    for binding in Binding.make_bindings(owner.BINDINGS):
        keys.setdefault(binding.id or "", []).append(binding.key)
        first.setdefault(binding.id or "", binding)
    section = getattr(owner, "TITLE_WORDS", "") or _SECTIONS[_prefix(owner)]
    return [
        Action(id_, binding.action, tuple(keys[id_]), binding.description, section, owner)
        for id_, binding in first.items()
    ]


_SECTIONS = {
    "app": "Everywhere",
    "gpus": "GPUs",
    "grid": "Lists",
    "picture": "Picture of the cluster",
    "columns": "Columns of the table",
    "filter": "Filter keys",
    "dialog": "Dialogs",
    "replay": "Replay of a recording",
}


def _prefix(owner: type[DOMNode]) -> str:
    for binding in owner.BINDINGS:
        if isinstance(binding, Binding) and binding.id:
            return binding.id.partition(".")[0]
    return ""


def _is_ours(owner: type[DOMNode]) -> bool:
    return owner.__module__.startswith(_OURS)


def _classes(root: type[DOMNode]) -> Iterable[type[DOMNode]]:
    found: dict[type[DOMNode], None] = {}
    waiting = [root]
    while waiting:
        for child in waiting.pop().__subclasses__():
            if child not in found:
                found[child] = None
                waiting.append(child)
    return found


def _name_of(character: str) -> str:
    """Return textual's name of a character that is neither letter nor digit."""
    (binding,) = Binding.make_bindings([Binding(character, "x", "x")]) if character != "," else (None,)
    return "comma" if binding is None else binding.key


def _is_character(name: str) -> bool:
    if name in KEY_TO_UNICODE_NAME or name in REPLACED_KEYS:
        return True
    try:
        unicodedata.lookup(name.replace("_", " ").upper())
    except KeyError:
        return False
    return True

"""JSON by the functions in C that ``json`` uses, without that module: its ``re`` is a tenth of an agent's start.

Where they are missing, or need more than in CPython 3.6 to 3.13, ``json`` itself is used.
"""

MYPY = False
if MYPY:
    from typing import Any, Callable


class _Rules:
    """What the scanner asks a ``json.JSONDecoder`` for."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_constant = {"-Infinity": -float("inf"), "Infinity": float("inf"), "NaN": float("nan")}.__getitem__

    def __init__(self, parse_int: "Callable[[str], Any]") -> None:
        self.parse_int = parse_int


def _refuse(value: "Any") -> "Any":
    raise TypeError("JSON has no form of %s" % type(value).__name__)


try:
    from _json import encode_basestring, encode_basestring_ascii, make_encoder, make_scanner

    _encode = make_encoder(None, _refuse, encode_basestring, None, ":", ",", False, False, True)  # type: Any
    _encode_file = make_encoder(None, _refuse, encode_basestring_ascii, None, ": ", ", ", True, False, True)  # type: Any
    _scanner = make_scanner  # type: Any
    _scanner(_Rules(int))
except (ImportError, AttributeError, TypeError):
    _encode = None


def compact(value: "Any") -> str:
    """Return ``value`` as JSON without spaces: ``{"a":[1,null]}`` for ``{"a": [1, None]}``.

    Raises TypeError for what JSON has no form of.
    """
    if _encode is None:
        import json  # late: only without its parts

        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return "".join(_encode(value, 0))


def sorted_ascii(value: "Any") -> str:
    """Return ``value`` as JSON in ASCII with sorted keys: ``{"a": [1, null]}``. Raises TypeError as ``compact``."""
    if _encode is None:
        import json  # late: only without its parts

        return json.dumps(value, sort_keys=True)
    return "".join(_encode_file(value, 0))


def parsed(text: str, parse_int: "Callable[[str], Any]" = int) -> "Any":
    """Return the value of a JSON text. ``parse_int`` is called with the digits of each integer.

    Raises ValueError for any other text, RecursionError where it is nested too deep.
    """
    if _encode is None:
        import json  # late: only without its parts

        return json.loads(text, parse_int=parse_int)
    text = text.strip(" \t\n\r")
    try:
        value, end = _scanner(_Rules(parse_int))(text, 0)
    except StopIteration:
        raise ValueError("not a JSON value")
    if end != len(text):
        raise ValueError("more than a JSON value")
    return value

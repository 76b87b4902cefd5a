"""The source text of the agent's modules, to run them under another interpreter."""

import importlib.util


def source(name: str) -> str:
    """Return the source of module ``name``, to run it under another interpreter. Raises ImportError."""
    spec = importlib.util.find_spec(name)
    text = spec.loader.get_source(name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if text is None:
        raise ImportError("no source of %s here" % name, name=name)
    return str(text)

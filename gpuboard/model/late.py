"""A sequence whose elements are made when one of them is first looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, overload

T = TypeVar("T")

_MAKING = threading.RLock()  # reentrant: elements may be made of others


if TYPE_CHECKING:
    from collections.abc import Sequence as _Sequence
else:  # no abstract class: isinstance() is slow for those, and used for each node of each scene

    class _Sequence(Generic[T]):
        __slots__ = ()


class Late(_Sequence[T]):
    """Elements that differ from those of ``base`` in numbers alone, made once, by any thread.

    A board reads a thousand nodes a second and shows a few: of the others only ``base`` is needed.
    """

    __slots__ = ("_made", "_make", "base")

    def __init__(self, base: Sequence[T], make: Callable[[], list[T]]) -> None:
        """``make``: returns as many elements as there are in ``base``."""
        self.base = base
        self._make: Callable[[], list[T]] | None = make
        self._made: list[T] | None = None

    def made(self) -> list[T]:
        """Return the elements; the same list each time."""
        if self._made is None:
            with _MAKING:  # two threads must not get two lists: elements are compared by identity
                if self._make is not None:
                    self._made, self._make = self._make(), None
        assert self._made is not None
        return self._made

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[T]:
        return iter(self.made())

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        return self.made()[place]

    def __eq__(self, other: object) -> bool:
        return self.made() == (other.made() if isinstance(other, Late) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.made())


Sequence.register(Late)


def base_of(elements: Sequence[T]) -> Sequence[T]:
    """Return elements that have everything but their newest numbers; the same object while only those change."""
    return elements.base if isinstance(elements, Late) else elements


def plain(value: object) -> object:
    """Return what msgspec encodes in place of ``value``: an ``enc_hook``. Raises NotImplementedError."""
    if isinstance(value, Late):
        return value.made()
    raise NotImplementedError(f"a {type(value).__name__} is not encoded")

"""`BoundedMap`: a mapping with a maximum number of keys, so that keys from outside cannot fill the memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class BoundedMap(OrderedDict[KeyT, ValueT]):
    """A mapping of at most `most` keys, ordered by when each key was last set.

    If there are more, the key that was set the longest time ago is dropped.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

"""Pairs: what of one ordered list belongs to what of another, by keys that are tried one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from difflib import SequenceMatcher
from typing import Generic, TypeVar

T = TypeVar("T")


class Pairs(Generic[T]):
    """Pairs of items of two lists: `found` has the index in the second by that in the first. What is a pair stays one."""

    def __init__(self, a: Sequence[T], b: Sequence[T]) -> None:
        self.a, self.b = a, b
        self.found: dict[int, int] = {}

    def add(self, first: int, second: int) -> None:
        """Makes these a pair, unless one of them belongs to another."""
        if first not in self.found and second not in self.found.values():
            self.found[first] = second

    def match(
        self,
        key: Callable[[T], Hashable],
        key_b: Callable[[T], Hashable] | None = None,
        *,
        once: bool = False,
        within: Callable[[T], bool] | None = None,
    ) -> None:
        """Pairs items whose keys are equal; `once` only if no other item of the list has the key. None is no key."""
        first, second = self._left()
        keys_a = {index: key(self.a[index]) for index in first if within is None or within(self.a[index])}
        keys_b = {index: (key_b or key)(self.b[index]) for index in second}
        counts = [Counter(keys.values()) for keys in (keys_a, keys_b)]
        by_key = {value: index for index, value in reversed(keys_b.items()) if value is not None}
        for index, value in keys_a.items():
            if value in by_key and not (once and any(count[value] > 1 for count in counts)):
                self.add(index, by_key[value])

    def in_order(self, key: Callable[[T], Hashable]) -> None:
        """Pairs items whose keys are equal, in their order, between those that are pairs already."""
        first, second = self._left()
        gaps: dict[int, tuple[list[int], list[int]]] = {}
        fences = self._fences()
        for index in first:
            gaps.setdefault(sum(a < index for a, _ in fences), ([], []))[0].append(index)
        for index in second:
            gaps.setdefault(sum(b < index for _, b in fences), ([], []))[1].append(index)
        for left, right in gaps.values():
            keys_a, keys_b = ([key(items[index]) for index in of] for items, of in ((self.a, left), (self.b, right)))
            for block in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():
                for step in range(block.size):
                    self.add(left[block.a + step], right[block.b + step])

    def _left(self) -> tuple[Collection[int], Collection[int]]:
        taken = set(self.found.values())
        return [i for i in range(len(self.a)) if i not in self.found], [i for i in range(len(self.b)) if i not in taken]

    def _fences(self) -> list[tuple[int, int]]:
        """The longest pairs in the order of both lists, beginning with the first."""
        fences: list[tuple[int, int]] = []
        for pair in sorted(self.found.items()):
            if not fences or pair[1] > fences[-1][1]:
                fences.append(pair)
        return fences

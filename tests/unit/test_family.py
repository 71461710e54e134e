"""Who descends from a process, as /proc tells it: nobody may slip through while it is read."""

from __future__ import annotations

import pytest

from leased.client import family

ROOT, PARENT, CHILD = 1, 2, 3


class Proc:
    """`children` and `living` as they are at each reading; the parent ends before reading number `orphaned_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: dict[int, list[int]] = {ROOT: [PARENT], PARENT: [CHILD]}
        self.living = {PARENT, CHILD}
        self.readings = 0
        self.orphaned_at = -1
        monkeypatch.setattr(family, "_children", self._children)
        monkeypatch.setattr(family, "_lives", self._lives)

    def _children(self, pid: int) -> list[int]:
        self._read()
        return list(self.children.get(pid, ()))

    def _lives(self, pid: int) -> bool:
        self._read()
        return pid in self.living

    def _read(self) -> None:
        if self.readings == self.orphaned_at:  # the parent ends, a zombie from now on, and its child is the subreaper's
            self.living.discard(PARENT)
            self.children = {ROOT: [PARENT, CHILD]}
        self.readings += 1


@pytest.mark.parametrize("at", range(6))
def test_an_orphan_is_seen_whenever_its_parent_ends(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = Proc(monkeypatch)
    proc.orphaned_at = at
    assert family.descendants(ROOT) != []


def test_zombies_are_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    proc = Proc(monkeypatch)
    assert sorted(family.descendants(ROOT)) == [PARENT, CHILD]
    proc.living.discard(PARENT)
    assert family.descendants(ROOT) == [CHILD]
    proc.living.clear()
    assert family.descendants(ROOT) == []

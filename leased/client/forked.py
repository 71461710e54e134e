"""After a fork the child starts anew: connections, watches and held leases are the parent's, and the child says nothing on them."""

from __future__ import annotations

import os
import weakref

from leased.light import Protocol


class Inherited(Protocol):
    def left_to_parent(self) -> None:
        """Called once in every forked child, before anything else runs there."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()

leave_to_parent = _inherited.add
"""Registers something for as long as it lives."""


def _in_child() -> None:
    for each in [*_inherited]:
        each.left_to_parent()


os.register_at_fork(after_in_child=_in_child)

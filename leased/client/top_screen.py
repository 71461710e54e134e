"""The live table of `lease top`, drawn by rich: the leases, and below them what happened last, as the daemon tells it.

The only module that imports rich.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leased.client import wording
from leased.client.errors import DaemonUnreachable, LeasedClientError, OutcomeUnknown
from leased.client.shell import EXIT_YES
from leased.client.top_table import COLUMNS, View, cells, contention, heading, look
from leased.client.watching import Gap

if TYPE_CHECKING:
    from leased.client.sync import Client
    from leased.client.watching import Watch

_EVENTS: Final = 6
_SOON_SECONDS: Final = 5.0  # of what is left: shown in another colour, because a holder that lives has renewed by then
_KEY_SECONDS: Final = 0.1  # how soon `q` is seen


def show(client: Client, view: View) -> int:
    """Until `q` or an interrupt.  A daemon that goes away is waited for."""
    console = Console()
    happened: deque[str] = deque(maxlen=_EVENTS)
    before, looked_at = None, 0.0
    with _Keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        watch = _watch(client, view)
        while True:
            try:
                now, at = look(client, view), time.monotonic()
                live.update(draw(now, contention(before, now, at - looked_at), happened, console.height), refresh=True)
                before, looked_at = now, at
            except (DaemonUnreachable, OutcomeUnknown) as wrong:
                live.update(Text(wording.failed(wrong, client.socket), style="red"), refresh=True)
            until = time.monotonic() + view.every
            while (left := until - time.monotonic()) > 0:
                if pressed():
                    if watch is not None:
                        watch.close()
                    return EXIT_YES
                watch = _listen(watch, happened, min(left, _KEY_SECONDS))


def draw(seen: dict[str, Any], rates: str, happened: deque[str], height: int) -> Group:
    """The whole screen, no higher than the terminal is."""
    table = Table(expand=True, box=None, header_style="bold reverse", pad_edge=False)
    for name in COLUMNS:
        right = name in {"LEFT", "WAITING"}
        table.add_column(
            name, no_wrap=True, justify="right" if right else "left", overflow="ellipsis", ratio=2 if name == "KEY" else None
        )
    shown = seen["leases"][: max(1, height - 4 - _EVENTS)]
    for lease in shown:
        soon = (lease.get("expires_in_seconds") or 0.0) < _SOON_SECONDS
        table.add_row(*map(Text, cells(lease)), style="red" if lease.get("waiting") else "yellow" if soon else "")
    hidden = seen["total"] - len(shown)
    lines: list[RenderableType] = [Text(heading(seen), style="bold"), Text(rates, style="dim"), table]
    lines += [Text(f"and {hidden} more", style="dim")] if hidden > 0 else []
    return Group(*lines, *(Text(line, style="dim", no_wrap=True) for line in happened))


def _watch(client: Client, view: View) -> Watch | None:
    try:
        return client.watch(scope=view.scope)
    except LeasedClientError:  # too many watches, or no daemon now: the table is worth having without its last lines
        return None


def _listen(watch: Watch | None, happened: deque[str], seconds: float) -> Watch | None:
    """Takes what is told within `seconds`; a watch that is over is done without."""
    until = time.monotonic() + seconds
    if watch is None:
        time.sleep(seconds)
        return None
    try:
        while (left := until - time.monotonic()) > 0:
            told = watch.take(left)
            if told is None:
                break
            happened.append(wording.missed(told) if isinstance(told, Gap) else wording.happened(told))
    except LeasedClientError:
        time.sleep(max(0.0, until - time.monotonic()))
    return watch


class _Keys:
    """The terminal's keys one by one, not echoed, for the length of a block; called, it tells whether `q` was pressed."""

    def __enter__(self) -> _Keys:
        self._before: list[Any] | None = None
        if sys.stdin is not None and sys.stdin.isatty():
            import termios
            import tty

            self._before = termios.tcgetattr(0)
            tty.setcbreak(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def __call__(self) -> bool:
        if self._before is None or not select.select([0], [], [], 0)[0]:
            return False
        return os.read(0, 64)[:1] in {b"q", b"Q", b"\x1b", b""}

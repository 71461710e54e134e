#!/usr/bin/env python3
"""Several processes share one folder of work, while the daemon that keeps them apart is killed with -9 under them.

    python demo.py [--files 60] [--workers 4]

Runs its own daemon on throw-away paths; nothing else on the host is touched.  Exit 0: it is proven that every file was done exactly
once, although the daemon was killed twice, one worker was killed and one was frozen past its lease.  Exit 1: it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from proof import judge
from sink import Sink
from stage import Daemon, Stage, Unproven, fast_directory
from worker import TTL_SECONDS

LONGEST_SECONDS = 120.0  # it takes about 12; a host that needs ten times as long has another problem


def make_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(1, count + 1):
        lines = (f"{random.randint(1, 40)} x {random.randint(1, 9999)}\n" for _ in range(random.randint(20, 200)))
        (folder / f"order-{number:03}.txt").write_text("".join(lines))


def play(stage: Stage, files: int, workers: int) -> None:
    """The story.  Each act waits for what it needs to be true, not for a time to pass."""
    for _ in range(workers):
        stage.hire()
    stage.until(lambda: stage.finished >= files // 10, "work is under way")
    frozen = stage.freeze_one_at_work()

    stage.until(lambda: stage.finished >= files // 4, "work goes on")
    stage.kill_daemon()

    stage.until(lambda: stage.finished >= files // 2, "work goes on after the first kill")
    killed = stage.freeze_one_at_work()
    stage.kill_worker(killed)
    stage.hire()

    stage.until(lambda: stage.finished >= files * 2 // 3, "work goes on after a worker's death")
    stage.kill_daemon()

    stage.until(lambda: frozen.name in stage.sink.done() and killed.name in stage.sink.done(), "others take over both files")
    stage.thaw(frozen)
    stage.until(lambda: stage.all_left, "every worker finds nothing left to do")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--files", type=int, default=60, help="how many files of work (20 to 999)")
    options.add_argument("--workers", type=int, default=4, help="how many worker processes (3 to 16)")
    given = options.parse_args()
    if not 20 <= given.files <= 999 or not 3 <= given.workers <= 16:
        options.error("--files takes 20 to 999, --workers 3 to 16")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = Path(tempfile.mkdtemp(prefix="leased-demo-"))
    place = Path(tempfile.mkdtemp(prefix="leased-demo-", dir=fast_directory()))
    with contextlib.ExitStack() as closing:
        closing.callback(shutil.rmtree, home, ignore_errors=True)
        closing.callback(shutil.rmtree, place, ignore_errors=True)
        make_files(home / "tasks", given.files)
        daemon = Daemon(home, place)
        closing.callback(daemon.close)
        sink = Sink(home / "sink.db")
        print(
            f"{given.files} files in {home / 'tasks'}, {given.workers} worker processes, one daemon at {daemon.socket}.\n"
            f"Before it touches a file each worker takes the lease file:NAME, for {TTL_SECONDS:g} s; results go to an SQLite file that refuses\n"
            "generations which have been overtaken.  Watch the daemon and the workers being killed.\n",
            flush=True,
        )
        daemon.start()
        stage = Stage(daemon, home / "tasks", home / "sink.db", sink, time.monotonic() + LONGEST_SECONDS)
        closing.callback(stage.close)
        play(stage, given.files, given.workers)
        return 0 if judge(stage, home / "tasks", daemon.stop()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unproven as why:
        sys.exit(f"demo: NOT PROVEN: {why}")
    except KeyboardInterrupt:
        sys.exit(130)

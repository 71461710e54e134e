"""One worker: takes files from a folder that several workers share, and asks a lease for each before it touches it.

    python worker.py NAME TASKS_FOLDER SINK_FILE       (the daemon's socket in LEASED_SOCKET)

Tells what it does as JSON lines on standard output.  Ends when every file has a result.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

from sink import Sink, Stale

from leased import Client
from leased.client.errors import DaemonUnreachable, LeaseLost, LeaseRefused, OutcomeUnknown

TTL_SECONDS = 5.0
ROUNDS = 150_000  # of the seal: about a tenth of a second of honest work on one processor


def process(text: str) -> str:
    """The work itself: add up a file of `quantity x price` lines, and seal the sum."""
    total = sum(int(quantity) * int(price) for quantity, _, price in (line.split() for line in text.splitlines()))
    return f"{total} {hashlib.pbkdf2_hmac('sha256', text.encode(), str(total).encode(), ROUNDS).hex()[:16]}"


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def one(client: Client, sink: Sink, worker: str, path: Path, wait: float) -> None:
    """Try to do one file.  Whatever stands in the way ends the attempt, and the file stays for whoever comes next."""
    name = path.name
    try:
        with client.lease(f"file:{name}", ttl=TTL_SECONDS, wait=wait) as lease:
            if not sink.begin(name, lease.generation):
                return
            tell("begun", name=name, generation=lease.generation)
            result = process(path.read_text())
            sink.write(name, lease.generation, worker, result)
            tell("done", name=name, generation=lease.generation)
    except LeaseRefused as refused:
        tell("refused", name=name, generation=refused.refusal.generation)
    except Stale:
        tell("stale", name=name, generation=lease.generation)
    except LeaseLost as lost:  # after the write: the result is in, and the guard has judged it
        tell("lost", name=name, generation=lost.generation)
    except (DaemonUnreachable, OutcomeUnknown):  # no lease, no work
        tell("away", name=name)
        time.sleep(0.05)


def main(worker: str, tasks: str, sink_path: str) -> None:
    sink = Sink(Path(sink_path))
    files = sorted(Path(tasks).iterdir())
    with Client() as client:
        while open_files := [path for path in files if path.name not in sink.done()]:
            # Everybody in an order of their own; where only files in other hands are left, queue for one of them.
            wait = 1.0 if len(open_files) <= 4 else 0.0
            for path in random.sample(open_files, min(4, len(open_files))):
                one(client, sink, worker, path, wait)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Synchronous Python clients under load: N processes, each acquiring and releasing through a client library, one pair after the other.

    python client_load.py SYSTEM SOCKET --processes N --seconds S

SYSTEM is `leased` (leased.Client) or `redis` (redis-py's Lock).  Prints one JSON object.  All processes are forked from this one once the
library is imported; each makes its own connection, warms up, and starts to count when all are ready.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable

WARM_UP_PAIRS = 50
KEYS = 1_000_000
TTL_SECONDS = 60
Pair = Callable[[str], None]


def leased_pair(socket: str) -> Pair:
    from leased import Client

    client = Client(socket)

    def pair(key: str) -> None:
        grant = client.try_acquire(key, TTL_SECONDS)
        if not grant or not client.release(grant):
            raise SystemExit(f"{key} was not granted and released: {grant!r}")

    return pair


def redis_pair(socket: str) -> Pair:
    from redis import Redis

    client = Redis(unix_socket_path=socket)

    def pair(key: str) -> None:
        lock = client.lock(key, timeout=TTL_SECONDS)
        if not lock.acquire(blocking=False):
            raise SystemExit(f"{key} was not acquired")
        lock.release()  # raises where the lock was not owned any more

    return pair


PAIRS = {"leased": leased_pair, "redis": redis_pair}


def child(system: str, socket: str, number: int, seconds: float, ready: int, go: int, told: int) -> None:
    """One process: says when it is ready, waits for all, counts."""
    pair = PAIRS[system](socket)
    draw = random.Random(number * 7919 + 1).randrange
    for _ in range(WARM_UP_PAIRS):
        pair(f"bench:{number}:{draw(KEYS)}")
    os.write(ready, b"r")
    os.read(go, 1)  # ends when the parent closes its end
    cpu = time.process_time()
    took: list[float] = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        pair(f"bench:{number}:{draw(KEYS)}")
        before, now = now, time.perf_counter()
        took.append(now - before)
    took.sort()
    answer = {"pairs": len(took), "cpu": time.process_time() - cpu, "p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100]}
    os.write(told, json.dumps(answer).encode() + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=PAIRS)
    parser.add_argument("socket")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    PAIRS[options.system](options.socket)  # imports what the children need, and connects nothing
    ready_read, ready = os.pipe()
    go, go_write = os.pipe()
    told_read, told = os.pipe()
    children = []
    for number in range(options.processes):
        pid = os.fork()
        if pid == 0:
            for mine in (ready_read, go_write, told_read):
                os.close(mine)
            status = 1
            try:
                child(options.system, options.socket, number, options.seconds, ready, go, told)
                status = 0
            except BaseException as wrong:
                print(f"client_load: {type(wrong).__name__}: {wrong}", file=sys.stderr, flush=True)
            os._exit(status)
        children.append(pid)
    os.close(ready)
    os.close(told)
    seen = 0
    while seen < options.processes and (some := os.read(ready_read, options.processes)):
        seen += len(some)
    os.close(go_write)
    with os.fdopen(told_read) as lines:
        answers = [json.loads(line) for line in lines]
    if sum([os.waitpid(pid, 0)[1] for pid in children]) or len(answers) != options.processes:
        return 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    middle = sorted(answer["p50"] for answer in answers)[len(answers) // 2]
    print(
        json.dumps(
            {
                "per_second": sum(answer["pairs"] for answer in answers) / options.seconds,
                "cpu_us_per_pair": 1e6 * sum(answer["cpu"] for answer in answers) / sum(answer["pairs"] for answer in answers),
                "cores": sum(answer["cpu"] for answer in answers) / options.seconds,
                "latency_us": {"p50": round(middle * 1e6, 1), "p99": round(max(answer["p99"] for answer in answers) * 1e6, 1)},
                "memory_mib": used.ru_maxrss >> 10,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

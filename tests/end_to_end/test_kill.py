"""kill -9, again and again, under the load of clients that retry: nothing acknowledged is lost, nothing is granted twice.

Every call of every client is recorded on CLOCK_BOOTTIME and judged by `simulation/history.py`, which knows the contract and not the
code.  Client threads also complain themselves about what one client can see: a live lease denied, a repeat answered with another fence.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from typing import Any

import pytest
from daemons import Daemon, HungUp, MakeDaemon, Rpc, run_leased
from history import History

KILLS = 50
CLIENTS = 10
SEED = 20261129
PAUSE_SECONDS = 0.012  # the longest a client rests between two calls: the load is to meet every kill, not to fill the processors
KINDS = {
    "short": (0.2, 1.5),  # lapses all the time, also while the daemon is down
    "middle": (30.0, 60.0),  # short enough to be waited out: never flushed
    "long": (61.0, 600.0),  # flushed before it is answered
}
KEYS = [f"{kind} {number}" for kind in KINDS for number in range(10)]


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Client(threading.Thread):
    """One holder.  It knows its leases by their fences, loses answers with the daemon, and asks again."""

    def __init__(self, daemon: Daemon, number: int, history: History) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self.held: dict[str, dict[str, Any]] = {}
        self.attempts: dict[str, dict[str, Any]] = {}
        self.unpresented: dict[str, int] = {}  # and how many answers had been lost when it was granted
        self.complaints: list[str] = []
        self.answered = 0
        self.lost = 0
        self.repeated_across_a_crash = 0
        self.stopping = threading.Event()
        self.abandoned = threading.Event()
        self._daemon = daemon
        self._history = history
        self._random = random.Random(SEED + number)
        self._rpc: Rpc | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.step()
                time.sleep(self._random.uniform(0, PAUSE_SECONDS))
        except Exception as error:
            self.complaints.append(repr(error))
            raise

    def step(self) -> None:
        key = self._random.choice(list(self.held) if self.held and self._random.random() < 0.5 else KEYS)
        if key not in self.held:
            self.acquire(key) if self._random.random() < 0.9 else self.insist("check", key=key)
            return
        if key in self.unpresented:
            self.repeat(key)
            return
        choice = self._random.random()
        mine = {"key": key, "holder": self.name, "fence": self.held[key]["fence"]}
        if choice < 0.5:
            self.prolong("renew" if choice < 0.35 else "lease", mine)
        elif choice < 0.75:
            del self.held[key]
            self.insist("release", key=key, fence=mine["fence"])
        elif choice < 0.9:
            self.insist("check", key=key, generation=self.held[key]["generation"])
        elif key in self.attempts:
            self.insist("lease", **self.attempts.pop(key))  # after a renewal a refusal, before one the grant again: the judge knows
        elif key.startswith("short"):
            del self.held[key]  # forgotten: it must lapse by itself

    def acquire(self, key: str) -> None:
        low, high = KINDS[key.split()[0]]
        attempt = {"key": key, "holder": self.name, "ttl_seconds": round(self._random.uniform(low, high), 3)}
        if self._random.random() < 0.9 or not key.startswith("short"):
            attempt["request_id"] = secrets.token_urlsafe(24)
        if self._random.random() < 0.04:
            attempt["wait_seconds"] = round(self._random.uniform(0.05, 0.3), 3)
        reply = self.insist("lease", **attempt)
        if reply["acquired"] is not True:
            return
        self.held[key], self.attempts[key] = reply, attempt
        if not key.startswith("short") and self._random.random() < 0.3:
            self.unpresented[key] = self.lost

    def repeat(self, key: str) -> None:
        """A crash lies between the grant and this, and nobody has presented the fence: it is the same grant again."""
        if self.lost == self.unpresented[key]:
            return
        del self.unpresented[key]
        known, again = self.held[key], self.insist("lease", **self.attempts[key])
        if (again["acquired"], again.get("fence"), again.get("generation")) == (True, known["fence"], known["generation"]):
            self.repeated_across_a_crash += 1
        else:
            self.complaints.append(f"repeat of {known['generation']} of {key}: {again.get('reason', again.get('generation'))}")

    def prolong(self, operation: str, mine: dict[str, Any]) -> None:
        key = mine["key"]
        known = self.held[key]
        low, high = KINDS[key.split()[0]]
        ttl = {} if self._random.random() < 0.3 else {"ttl_seconds": round(self._random.uniform(low, high), 3)}
        began, lost = boottime(), self.lost
        reply = self.insist(operation, **mine, **ttl)
        if reply["acquired"] is True:
            self.held[key] = reply
            return
        ends = known["expires_boottime"]
        if self.lost != lost and ttl:  # a renewal whose answer was lost may have made it end sooner
            ends = min(ends, began + ttl["ttl_seconds"])
        if boottime() < ends:
            self.complaints.append(f"generation {known['generation']} of {key} was live, and {operation} said {reply['reason']}")
        del self.held[key]

    def insist(self, operation: str, **params: Any) -> dict[str, Any]:
        """Until there is an answer that is not null."""
        while not self.abandoned.is_set():
            reply = self.ask(operation, params)
            if reply is None:
                time.sleep(0.005)
            elif reply.get("acquired", reply.get("released", reply.get("held"))) is None:
                time.sleep(0.02)
            else:
                return reply
        raise SystemExit  # of this thread

    def ask(self, operation: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """Once; None where the answer was lost, or where nobody could be asked."""
        if self._rpc is None:
            try:
                self._rpc = self._daemon.rpc()
            except OSError:
                return None
        sent = boottime()
        try:
            reply = self._rpc.call(operation, **params)
        except (OSError, HungUp):
            self._history.add(self.name, operation, params, sent, None, None)
            self._rpc.close()
            self._rpc = None
            self.lost += 1
            return None
        self._history.add(self.name, operation, params, sent, boottime(), reply)
        self.answered += 1
        return reply


@pytest.mark.slow
def test_fifty_kills_lose_nothing_and_grant_nothing_twice(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    history = History(check_boottime=True)
    clients = [Client(daemon, number, history) for number in range(CLIENTS)]
    try:
        killed_while_starting = kill_again_and_again(daemon, clients, history)
    finally:
        for client in clients:
            client.abandoned.set()

    assert complaints(clients) == []
    history.late_allowance = max((float(line["seconds"]) for line in daemon.events("loop.late")), default=0.0)
    assert history.judge() == []
    # The judge says nothing of a history in which nothing happened.
    grants = [record for record in history.records if record.grant]
    assert len(grants) > 10 * KILLS and {record.params["key"] for record in grants} == set(KEYS)
    assert sum(1 for record in history.records if record.renewal) > 5 * KILLS
    assert sum(client.lost for client in clients) > KILLS
    assert sum(client.repeated_across_a_crash for client in clients) > KILLS / 2
    assert killed_while_starting > 0
    assert any(client.held for client in clients), "nobody held anything across the last kill"
    assert daemon.events("daemon.recovering") == [], "kill -9 forgets nothing, so nothing is waited out"
    assert "Traceback" not in daemon.logs()
    assert daemon.terminate() == 0
    fsck = run_leased("fsck", "--state-dir", daemon.state_dir, "--runtime-dir", daemon.runtime_dir)
    assert fsck.returncode == 0, fsck.stdout + fsck.stderr


def kill_again_and_again(daemon: Daemon, clients: list[Client], history: History) -> int:
    """At the end the daemon runs once more and each client has renewed what it holds.  Returns how many starts did not get to their end."""
    began = time.monotonic()
    daemon.start()
    start_seconds = time.monotonic() - began
    for client in clients:
        client.start()
    chance = random.Random(SEED)
    killed_while_starting = 0
    for _ in range(KILLS):
        if chance.random() < 0.25:  # a crash within the start, at any of its steps
            starts = len(daemon.events("daemon.started"))
            time.sleep(chance.uniform(0.4, 1.1) * start_seconds)
            killed_while_starting += len(daemon.events("daemon.started")) == starts
        else:
            daemon.wait_ready()
            time.sleep(chance.uniform(0.02, 0.4))
        daemon.kill()
        history.crash("kill", boottime())
        daemon.spawn()
        assert complaints(clients) == []
    daemon.wait_ready()
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join(30)
        assert not client.is_alive(), client.name
    daemon.kill()
    history.crash("kill", boottime())
    daemon.start()
    for client in clients:
        for key in list(client.held):
            client.prolong("renew", {"key": key, "holder": client.name, "fence": client.held[key]["fence"]})
    return killed_while_starting


def complaints(clients: list[Client]) -> list[str]:
    return [complaint for client in clients for complaint in client.complaints]

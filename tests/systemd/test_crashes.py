"""kill -9, a hung lane, a stopped process: the door stays open, the living keep their leases and the dead do not."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Iterator

import pytest
from daemons import HungUp, Rpc
from inhabitants import SERVICE, Holder, eventually, held, kill_daemon, outside, running, settled
from lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow]

WALL = 0x40000000  # threads too
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207


class Callers:
    """Connects again and again from another thread and counts what becomes of it."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._stop = threading.Event()
        self.answered = self.cut_off = 0
        self.refused: list[str] = []
        self.slowest = 0.0
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _call(self) -> None:
        path = self._lab.path("/run/leased/leased.sock")
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                with Rpc(path) as rpc:
                    rpc.call("check", key="any")
                self.answered += 1
            except HungUp:  # it was being served when the daemon was killed
                self.cut_off += 1
            except OSError as error:
                self.refused.append(repr(error))
            self.slowest = max(self.slowest, time.monotonic() - begun)
            time.sleep(0.005)


def test_a_loop_of_kills_closes_no_door_and_frees_only_the_dead(lab: Lab) -> None:
    settled(lab)
    with Holder(lab, "living", "loop:living") as living, Holder(lab, "dying", "loop:dying") as dying, Callers(lab) as callers:
        killed = [kill_daemon(lab)]
        assert (held(lab, "loop:living"), held(lab, "loop:dying")) == ("living", "dying")
        daemon = running(lab)
        lab.run("kill", "-STOP", str(daemon))  # so that it hears nothing of what comes next
        dying.kill()
        lab.run("kill", "-9", str(daemon))
        eventually(lambda: lab.main_pid(SERVICE) not in {0, daemon})
        assert held(lab, "loop:dying") is None, "its descriptor came back from the store, readable"
        killed += [kill_daemon(lab) for _ in range(5)]
        assert len(set(killed)) == 6
        settled(lab)
        told = lab.show(SERVICE, "ActiveState", "NRestarts")
        assert told["ActiveState"] == "active" and int(told["NRestarts"]) >= 7, "more than a default start limit allows"
        assert lab.show("leased.socket", "ActiveState")["ActiveState"] == "active"
        assert held(lab, "loop:living") == "living"
        with lab.rpc() as rpc:
            assert rpc.call("check", key="loop:living", generation=living.generations["loop:living"])["current"] is True
        living.kill()
        eventually(lambda: held(lab, "loop:living") is None)
    assert callers.refused == []
    assert callers.answered > 20
    assert callers.cut_off <= 7, "one connection can be under way at each kill"


def test_a_bound_process_leaves_nothing_in_the_descriptor_store(lab: Lab) -> None:
    settled(lab)
    before = int(lab.show(SERVICE, "NFileDescriptorStore")["NFileDescriptorStore"])
    with Holder(lab, "one", "store:a", "store:b"):
        eventually(lambda: int(lab.show(SERVICE, "NFileDescriptorStore")["NFileDescriptorStore"]) == before + 2)
    eventually(lambda: held(lab, "store:a") is None and held(lab, "store:b") is None)
    eventually(lambda: int(lab.show(SERVICE, "NFileDescriptorStore")["NFileDescriptorStore"]) == before)


def test_a_restart_keeps_leases_and_binds(lab: Lab) -> None:
    settled(lab)
    with Holder(lab, "kept", "restart:bound") as kept:
        lab.systemctl("restart", SERVICE)
        assert held(lab, "restart:bound") == "kept"
        kept.kill()
        eventually(lambda: held(lab, "restart:bound") is None)


@pytest.fixture(scope="module")
def short_watchdog(lab: Lab) -> Iterator[None]:
    """The watchdog of the unit bites after 3 s."""
    settings = lab.path(f"/run/systemd/system/{SERVICE}.d")
    settings.mkdir(parents=True)
    (settings / "watchdog.conf").write_text("[Service]\nWatchdogSec=3s\nTimeoutAbortSec=2s\n")
    lab.systemctl("daemon-reload")
    lab.systemctl("restart", SERVICE)
    settled(lab)
    yield
    shutil.rmtree(settings)
    lab.systemctl("daemon-reload")
    lab.systemctl("restart", SERVICE)


def test_the_watchdog_ends_what_is_stopped_and_nothing_that_idles(lab: Lab, short_watchdog: None) -> None:
    idle = running(lab)
    with Holder(lab, "patient", "watchdog:key", bind="none") as patient:
        begun = time.monotonic()
        while time.monotonic() < begun + 4.0:  # nobody asks for anything: only its own rounds keep it alive
            assert lab.main_pid(SERVICE) == idle
            time.sleep(0.5)
        lab.systemctl("kill", "--signal=STOP", "--kill-whom=main", SERVICE)
        assert eventually(lambda: lab.main_pid(SERVICE) not in {0, idle})
        assert held(lab, "watchdog:key") == "patient"
        with lab.rpc() as rpc:
            fence = patient.fences["watchdog:key"]
            assert rpc.call("release", key="watchdog:key", holder="patient", fence=fence)["released"] is True
    assert "Watchdog timeout" in lab.journal("", "_PID=1")
    cores = ("find", "/var/lib/systemd/coredump", "/var/lib/leased", "-name", "core*", "-newer", "/run/lab-boot-id", "-type", "f")
    assert lab.run(*cores, check=False).stdout == ""


def test_a_lane_that_hangs_while_its_process_lives_is_ended_with_its_whereabouts(lab: Lab, short_watchdog: None) -> None:
    daemon = running(lab)
    mark = lab.journal_entries()[-1]["__CURSOR"]
    hung = _Seized(outside(lab, daemon))  # the thread of the lane alone: all others go on
    try:
        threads = _states(outside(lab, daemon))
        assert threads.pop(outside(lab, daemon)) == "t" and threads and set(threads.values()) == {"S"}
        eventually(lambda: lab.main_pid(SERVICE) not in {0, daemon})
    finally:
        hung.let_go()
    assert held(lab, "whatever") is None
    said = lab.journal(SERVICE, f"--after-cursor={mark}")
    assert "Current thread" in said or "Thread 0x" in said, "faulthandler tells where every thread was"


def _states(pid: int) -> dict[int, str]:
    """The state of every thread, by its number."""
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        with open(f"/proc/{pid}/task/{task}/stat") as file:  # noqa: PTH123
            found[int(task)] = file.read().rpartition(")")[2].split()[0]
    return found


class _Seized:
    """One thread, held by ptrace from another thread of ours: a tracer must be the one that asks."""

    def __init__(self, thread: int) -> None:
        self._ready, self._done = threading.Event(), threading.Event()
        self._failed = 0
        self._thread = threading.Thread(target=self._hold, args=(thread,))
        self._thread.start()
        self._ready.wait(20)
        assert self._failed == 0, os.strerror(self._failed)

    def _hold(self, thread: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            if libc.ptrace(request, thread, None, None) != 0:
                self._failed = ctypes.get_errno()
        os.waitpid(thread, WALL)  # until it is stopped
        self._ready.set()
        while not self._done.wait(0.02):
            number, status = os.waitpid(thread, WALL | os.WNOHANG)  # else its death would not be told to its parent
            if number and not os.WIFSTOPPED(status):
                return

    def let_go(self) -> None:
        self._done.set()
        self._thread.join()  # the end of the tracer lets the traced go on

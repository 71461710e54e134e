"""`lease run` against the real daemon: what the command gets, what ends it, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, MakeDaemon, environment
from lease_runs import boot, ended, marked, start, tree, until

CAUGHT = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
STUBBORN = "trap '' TERM HUP INT QUIT; (trap '' TERM; exec sleep 300) & setsid sleep 301 & echo ready; while :; do sleep 0.05; done"
"""A command that heeds no TERM, with a child in its group and one in a session of its own."""


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4()}"


@pytest.fixture
def mark() -> Iterator[str]:
    """For the environment, which descendants inherit whatever becomes of their parents; nobody is left with it at the end."""
    name = uuid.uuid4().hex
    yield name
    for pid in marked(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def held(daemon: Daemon, key: str) -> bool:
    with daemon.rpc() as rpc:
        answer = rpc.call("check", key=key)["held"]
    assert answer is not None
    return bool(answer)


def waiting(daemon: Daemon, key: str) -> int:
    with daemon.rpc() as rpc:
        return int(rpc.call("check", key=key)["waiting"])


def ready(run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    line = run.stdout.readline()
    assert line == "ready\n", (line, run.communicate())


# ---- what the command gets


def test_the_command_has_the_lease_in_its_environment_and_nowhere_else(daemon: Daemon, key: str) -> None:
    show = "import os, sys, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('LEASE')}), flush=True); input()"
    run = start(daemon, key, "--holder", "me", "--", sys.executable, "-c", show, stdin=subprocess.PIPE)
    assert run.stdout is not None
    told = json.loads(run.stdout.readline())
    with daemon.rpc() as rpc:
        checked = rpc.call("check", key=key)
        assert rpc.call("renew", key=key, holder="me", fence=told["LEASE_FENCE"])["acquired"] is True
    assert told.pop("LEASE_EXPIRES_AT").startswith("20")
    everywhere = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [run.pid, *tree(run.pid)])
    assert len(tree(run.pid)) == 2 and told.pop("LEASE_FENCE").encode() not in everywhere
    assert told == {
        "LEASE_KEY": key, "LEASE_HOLDER": "me", "LEASE_GENERATION": str(checked["generation"]), "LEASED_SOCKET": str(daemon.socket),
    }  # fmt: skip
    code, out, err = ended_after(run, "line\n")
    assert (code, out, err) == (0, "", "")
    assert not held(daemon, key)


def ended_after(run: subprocess.Popen[str], said: str) -> tuple[int, str, str]:
    out, err = run.communicate(said, timeout=30)
    return run.returncode, out, err


def test_standard_input_passes_through(daemon: Daemon, key: str) -> None:
    run = start(daemon, key, "--", "cat", stdin=subprocess.PIPE)
    assert ended_after(run, "one\ntwo\n") == (0, "one\ntwo\n", "")


def test_signals_are_as_a_command_expects_them(daemon: Daemon, key: str) -> None:
    """No shell between: some unblock everything when they start."""
    shows = ("grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status")
    plain = subprocess.run(shows, stdout=subprocess.PIPE, text=True, restore_signals=True, check=True)
    assert ended(start(daemon, key, "--", *shows)) == (0, plain.stdout, "")


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", 137), ("kill -TERM $$", 143), ("kill -ABRT $$", 134)],
)
def test_the_exit_code_is_the_commands(daemon: Daemon, key: str, script: str, code: int) -> None:
    assert ended(start(daemon, key, "--", "sh", "-c", script)) == (code, "", "")
    assert not held(daemon, key)


def test_a_command_that_cannot_be_run(daemon: Daemon, key: str, tmp_path: Path) -> None:
    plain = tmp_path / "no-program"
    plain.write_text("")
    assert ended(start(daemon, key, "--", "no-such-program")) == (
        127, "", "lease: cannot run no-such-program: No such file or directory\n",
    )  # fmt: skip
    assert ended(start(daemon, key, "--", str(plain)))[::2] == (126, f"lease: cannot run {plain}: Permission denied\n")
    assert not held(daemon, key)


def test_refused_and_timed_out(daemon: Daemon, key: str) -> None:
    with daemon.rpc() as rpc:
        rpc.call("lease", key=key, holder="other")
    runs = [start(daemon, *words, key, "--", "echo", "ran") for words in (("-n",), ("-w", "0.2"), ("-nE", "9"), ("-w0", "-E0"))[:2]]
    runs += [start(daemon, *words, key, "--", "echo", "ran") for words in (("-n", "-E", "9"), ("-w0", "-E0"))]
    for run, expected in zip(runs, (75, 75, 9, 0), strict=True):
        code, out, err = ended(run)
        assert (code, out) == (expected, "")
        assert err.startswith(f"lease: {key} is held by other")


def test_without_a_daemon_nothing_runs(daemon: Daemon, key: str, tmp_path: Path) -> None:
    code, out, err = ended(start(daemon, key, "--socket", str(tmp_path / "none"), "--", "echo", "ran"))
    assert (code, out) == (69, "") and "Is it running?" in err


def test_it_gets_the_lease_when_it_is_free_and_renews_it(daemon: Daemon, key: str) -> None:
    with daemon.rpc() as rpc, daemon.rpc() as watcher:
        fence = rpc.call("lease", key=key, holder="other")["fence"]
        watcher.call("watch", key=key)
        run = start(daemon, key, "--ttl", "1", "--", "sleep", "2")
        until(lambda: waiting(daemon, key))
        rpc.call("release", key=key, fence=fence)
        assert ended(run) == (0, "", "")
        kinds = []
        while kinds[-2:] != ["renewed", "released"] or kinds.count("released") < 2:
            kinds.append(watcher.receive()[2][0]["type"])
    assert kinds.count("granted") == 1 and kinds.count("renewed") >= 4 and "lapsed" not in kinds


# ---- signals


@pytest.mark.parametrize("number", [*CAUGHT, signal.SIGKILL])
def test_a_signal_while_waiting_ends_the_wait_and_leaves_nothing(daemon: Daemon, key: str, number: signal.Signals) -> None:
    with daemon.rpc() as rpc:
        fence = rpc.call("lease", key=key, holder="other")["fence"]
        run = start(daemon, key, "--", "echo", "ran")
        until(lambda: waiting(daemon, key))
        run.send_signal(number)
        assert ended(run) == (-9 if number == signal.SIGKILL else 128 + number, "", "")
        until(lambda: not waiting(daemon, key))
        rpc.call("release", key=key, fence=fence)
    assert not held(daemon, key)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)])
def test_a_grant_that_was_on_its_way_when_signals_came_is_given_back(
    daemon: Daemon, key: str, numbers: tuple[signal.Signals, ...]
) -> None:
    """The wrapper is stopped while the grant arrives, so that it finds the signals, all of them at once, before it finds the answer."""
    with daemon.rpc() as rpc:
        fence = rpc.call("lease", key=key, holder="other")["fence"]
        run = start(daemon, key, "--", "echo", "ran")
        until(lambda: waiting(daemon, key))
        run.send_signal(signal.SIGSTOP)
        rpc.call("release", key=key, fence=fence)
        assert held(daemon, key)
        for number in numbers:
            run.send_signal(number)
        run.send_signal(signal.SIGCONT)
        code, *said = ended(run)
        assert code - 128 in numbers and said == ["", ""]
    assert not held(daemon, key)


@pytest.mark.parametrize("number", CAUGHT)
def test_a_signal_is_passed_on_to_the_command(daemon: Daemon, key: str, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    run = start(daemon, key, "--", "sh", "-c", f"trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.05; done")
    ready(run)
    run.send_signal(number)
    assert ended(run)[:2] == (5, f"got {name}\n")  # the shell may say that its sleep got the signal too
    assert not held(daemon, key)


def test_a_command_that_dies_of_the_signal_takes_its_children_along(daemon: Daemon, key: str, mark: str) -> None:
    run = start(daemon, key, "--", "sh", "-c", "setsid sleep 300 & sleep 301 & echo ready; wait", MARK=mark)
    ready(run)
    run.terminate()
    assert ended(run)[0] == 143
    assert marked(mark) == []
    assert not held(daemon, key)


def test_what_was_ignored_stays_ignored(daemon: Daemon, key: str) -> None:
    """As under nohup, or in the background of a script."""
    script = "trap '' HUP INT; exec \"$@\""
    run = subprocess.Popen(
        ["sh", "-c", script, "-", sys.executable, "-m", "leased.client.command", "run", key, "--", "sh", "-c", "echo ready; read line"],
        env=os.environ | {"LEASED_SOCKET": str(daemon.socket), "PYTHONPATH": str(Path(__file__).parents[2])}, cwd="/",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    ready(run)
    run.send_signal(signal.SIGHUP)
    run.send_signal(signal.SIGINT)
    assert ended_after(run, "line\n") == (0, "", "")


def test_a_killed_wrapper_leaves_nobody_running_and_the_lease_free(daemon: Daemon, key: str, mark: str) -> None:
    run = start(daemon, key, "--kill-after", "0.2", "--", "sh", "-c", STUBBORN, MARK=mark)
    ready(run)
    assert len(marked(mark)) >= 5  # itself, its guardian, the command and its two children
    run.kill()
    assert ended(run)[0] == -9
    until(lambda: not marked(mark), "somebody is left")
    until(lambda: not held(daemon, key), "the lease is left")


def test_a_killed_wrapper_gives_the_command_a_moment_to_clean_up(daemon: Daemon, key: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    run = start(daemon, key, "--", "sh", "-c", f"trap 'echo clean >{told}; exit' TERM; echo ready; while :; do sleep 0.05; done")
    ready(run)
    run.kill()
    ended(run)
    until(lambda: not held(daemon, key))
    assert told.read_text() == "clean\n"


def test_a_killed_guardian_takes_the_command_along(daemon: Daemon, key: str, mark: str) -> None:
    run = start(daemon, key, "--", "sh", "-c", STUBBORN, MARK=mark)
    ready(run)
    os.kill(tree(run.pid)[0], signal.SIGKILL)
    code, _, err = ended(run)
    assert code == 137 and "guards the command was killed" in err
    assert marked(mark) == []
    assert not held(daemon, key)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(daemon: Daemon, key: str, mark: str, number: signal.Signals) -> None:
    """Moments all over the start and somewhat beyond, wherever in it this machine happens to be then."""
    runs = []
    for step in range(8):
        run = start(daemon, f"{key}-{step}", "--ttl", "2", "--kill-after", "0.2", "--", "sh", "-c", "sleep 300 & wait", MARK=mark)
        time.sleep(0.03 * step + 0.02)
        run.send_signal(number)
        runs.append(run)
    for run in runs:
        code, _, err = ended(run)
        unborn = number == signal.SIGINT and "KeyboardInterrupt" in err  # while Python itself starts: nothing is asked for yet
        assert code in {-number, 128 + number} or unborn, (code, err)
    until(lambda: not marked(mark), "somebody is left")
    for step in range(8):
        if number == signal.SIGKILL:  # killed between the grant and the guardian, the lease has to lapse
            until(lambda at=step: not held(daemon, f"{key}-{at}"))  # type: ignore[misc]
        else:
            assert not held(daemon, f"{key}-{step}")


# ---- the end of the lease


def beating(path: Path) -> str:
    """A command that heeds no signal it can ignore and writes the boot clock down every few milliseconds."""
    return (
        "import os, signal, sys, time\n"
        "for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"
        f"file = os.open({str(path)!r}, os.O_WRONLY | os.O_CREAT)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    os.pwrite(file, b'%.6f' % time.clock_gettime(time.CLOCK_BOOTTIME), 0)\n"
        "    time.sleep(0.002)\n"
    )


def daemons_deadline(daemon: Daemon, key: str) -> float:
    """A lower bound: a renewal that comes after this only moves it on."""
    before = boot()
    with daemon.rpc() as rpc:
        return before + float(rpc.call("check", key=key)["expires_in_seconds"])


@pytest.mark.parametrize("who", ["daemon", "wrapper"])
def test_without_renewals_the_command_ends_before_the_lease_does(
    daemon: Daemon, key: str, mark: str, tmp_path: Path, who: str
) -> None:
    """A daemon that hangs answers no renewal; a wrapper that is stopped sends none."""
    run = start(daemon, key, "--ttl", "2", "--", sys.executable, "-c", beating(tmp_path / "beat"), MARK=mark)
    ready(run)
    hung = daemon.stopped() if who == "daemon" else stopped_wrapper(run)
    deadline = daemons_deadline(daemon, key)
    with hung:
        until(
            lambda: not [pid for pid in marked(mark) if cmdline(pid).startswith(f"{sys.executable}\0-c\0")],
            "the command outlives its lease",
        )
    last = float((tmp_path / "beat").read_text())
    code, _, err = ended(run)
    assert code == 79 and "no renewal was answered in time; the command is ended" in err.replace(")", "")
    assert deadline - 2 < last < deadline
    assert marked(mark) == []


@contextlib.contextmanager
def stopped_wrapper(run: subprocess.Popen[str]) -> Iterator[None]:
    run.send_signal(signal.SIGSTOP)
    yield
    run.send_signal(signal.SIGCONT)


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def revoke(daemon: Daemon, key: str) -> None:
    with daemon.rpc() as rpc:
        assert rpc.call("revoke", key=key, reason="test")["revoked"] is True


def test_a_revoked_lease_ends_the_command_by_term_and_then_by_kill(daemon: Daemon, key: str, mark: str) -> None:
    polite = "trap 'echo told; exit 3' TERM; (trap '' TERM; exec sleep 300) & echo ready; while :; do sleep 0.05; done"
    run = start(daemon, key, "--ttl", "3", "--kill-after", "1", "--", "sh", "-c", polite, MARK=mark)
    ready(run)
    revoke(daemon, key)
    code, out, err = ended(run)
    assert (code, out) == (79, "told\n") and "is lost (its renewal was refused); the command is ended" in err
    assert marked(mark) == []


def test_on_lost_kill_tells_nobody(daemon: Daemon, key: str) -> None:
    script = "trap 'echo told' TERM; echo ready; while :; do sleep 0.05; done"
    run = start(daemon, key, "--ttl", "1", "--on-lost", "kill", "--", "sh", "-c", script)
    ready(run)
    revoke(daemon, key)
    assert ended(run)[:2] == (79, "")


def test_on_lost_ignore_lets_the_command_run_on_and_says_so(daemon: Daemon, key: str) -> None:
    run = start(
        daemon,
        key,
        "--ttl",
        "1",
        "--on-lost",
        "ignore",
        "--",
        "sh",
        "-c",
        "echo ready; read line; echo done",
        stdin=subprocess.PIPE,
    )
    ready(run)
    revoke(daemon, key)
    assert run.stderr is not None
    assert "is lost (its renewal was refused); the command runs on without it" in run.stderr.readline()
    with daemon.rpc() as rpc:
        assert rpc.call("lease", key=key, holder="next")["acquired"] is True
    assert ended_after(run, "line\n")[:2] == (79, "done\n")
    assert held(daemon, key)  # the next one's: it is not released


def test_what_the_command_leaves_behind_is_ended_before_the_release(daemon: Daemon, key: str, mark: str) -> None:
    run = start(
        daemon,
        key,
        "--kill-after",
        "0.2",
        "--",
        "sh",
        "-c",
        "(trap '' TERM; exec sleep 300) & setsid sleep 301 & exit 4",
        MARK=mark,
    )
    assert ended(run)[0] == 4
    assert marked(mark) == []
    assert not held(daemon, key)


def test_a_process_whose_first_thread_has_ended_is_no_zombie(daemon: Daemon, key: str) -> None:
    """It looks like one in /proc; it keeps the streams open, and so the test would not end."""
    threads = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[50]).start(); ctypes.CDLL(None).syscall(60, 0)"
    )
    script = '"$0" -c "$1" & until grep -q "^State:.Z" /proc/$!/status; do sleep 0.01; done'
    assert ended(start(daemon, key, "--", "sh", "-c", script, sys.executable, threads)) == (0, "", "")
    assert not held(daemon, key)


def test_bound_to_the_process_the_lease_ends_with_it(daemon: Daemon, key: str) -> None:
    run = start(daemon, key, "--bind", "process", "--", "sh", "-c", "echo ready; sleep 300")
    ready(run)
    with daemon.rpc() as rpc:
        (lease,) = [each for each in rpc.call("list", limit=1000)["leases"] if each["key"] == key]
        assert lease["bind"] == "process"
    run.kill()
    until(lambda: not held(daemon, key))
    ended(run)


def test_without_room_for_a_process_nothing_runs_and_nothing_is_held(daemon: Daemon, key: str) -> None:
    code = (
        "import os, sys\n"
        "def full(): raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "os.fork = full\n"
        "from leased.client.command import main\n"
        f"sys.exit(main(['run', {key!r}, '--', 'echo', 'ran']))"
    )
    own = environment() | {"LEASED_SOCKET": str(daemon.socket)}
    run = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (126, "", "lease: cannot run echo: Resource temporarily unavailable\n")
    assert not held(daemon, key)

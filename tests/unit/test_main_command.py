"""The `leased` command from outside: help, exit codes, and sentences where a traceback would be of no use."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import states
import structlog
import trio
from selection import COMPILED

from leased import __main__ as command
from leased import service
from leased.errors import ConfigError, LeasedError, StateLocked, StateRefused, StoreError, StoreFull
from leased.exits import WrongUse, first_of, judged
from leased.state.environment import DirectoryLock
from leased.state.records import RecordDamaged

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a verb on the directories below tmp_path; the exit code and what was printed on both streams."""
    (tmp_path / "empty.toml").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a login has one; cron and CI may not
    before = os.umask(0o022)

    def ran(*words: str, **paths: Path) -> tuple[int, str, str]:
        chosen = {"config": tmp_path / "empty.toml", "state_dir": tmp_path / "state", "runtime_dir": tmp_path / "run"} | paths
        places = [f"--{name.replace('_', '-')}={path}" for name, path in chosen.items()]
        code = command.main([*words, *places] if words and not words[-1].startswith("--h") and words[0] in VERBS else list(words))
        return code, *capsys.readouterr()

    try:
        yield ran
    finally:
        os.umask(before)
        structlog.reset_defaults()


VERBS = ("serve", "check-config", "fsck", "backup", "restore")


# ---- help and usage


def test_the_help_page_names_verbs_files_and_exit_codes(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(re.search(rf"^    {verb}\b", out, re.MULTILINE) for verb in VERBS)
    for said in ("/etc/leased/leased.toml", "$LEASED_SOCKET", "exit codes: 0 well; 1 fsck found something; 64 wrong usage; 69"):
        assert said in out
    assert max(len(line) for line in out.splitlines()) <= 132


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_help_page(run: Run, verb: str) -> None:
    code, out, err = run(verb, "--help")
    assert (code, err) == (0, "")
    assert f"usage: leased {verb}" in out and "--state-dir DIR" in out


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, leased.__main__ as m; m.main(['--help']); print(*sorted({'trio', 'lmdb', 'structlog'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("\n\n"), "the last line, what was loaded, is empty"


def test_the_version(run: Run) -> None:
    code, out, _ = run("--version")
    build = re.escape(" (compiled)") if COMPILED else ""
    assert code == 0 and re.fullmatch(rf"leased \d+\.\d+\S*{build}\n", out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the following arguments are required: VERB: `leased --help` shows how"),
        (("fskc",), "invalid choice: 'fskc'"),
        (("backup",), "the following arguments are required: FILE: `leased backup --help` shows how"),
        (("fsck", "--jso"), "unrecognized arguments: --jso"),
    ],
)
def test_wrong_usage_is_64(run: Run, words: tuple[str, ...], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (64, "")
    assert said in err and err.startswith("usage: leased")


def test_a_wrong_configuration_is_78(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("wait_out_second = 3\nmax_leases = 0\n")
    code, out, err = run("check-config", config=file)
    assert (code, out) == (78, "")
    assert [line.partition(": ")[0] for line in err.splitlines()] == ["leased", "leased"]
    assert "wait_out_second" in err and "max_leases" in err
    code, out, _ = run("check-config")
    assert code == 0 and f'state_dir = "{tmp_path / "state"}"' in out


# ---- fsck, backup, restore through the command


def test_a_state_through_all_three_verbs(run: Run, tmp_path: Path) -> None:
    states.make(tmp_path)
    code, out, err = run("fsck")
    assert (code, "clean" in err) == (0, True)
    assert all(line.startswith("note: ") for line in out.splitlines())
    assert run("backup", str(tmp_path / "copy"))[0] == 0
    code, _, err = run("backup", str(tmp_path / "copy"))
    assert (code, err) == (
        64, f"leased: {tmp_path}/copy exists: a backup overwrites nothing: remove it, or name another file\n",
    )  # fmt: skip
    assert run("restore", str(tmp_path / "copy"), "--no-holders")[0] == 0
    code, out, _ = run("fsck", "--json")
    assert code == 0 and "nothing is waited for" in out
    (tmp_path / "state" / "initialised").write_text("")
    code, out, err = run("fsck")
    assert code == 1 and "it names the install id nothing that is one" in out and "findings: 1" in err
    os.truncate(tmp_path / "state" / "data.mdb", 8192)
    assert run("fsck")[0] == 78
    code, out, err = run("backup", str(tmp_path / "other"))
    assert (code, out) == (78, "") and "kills its reader" in err


@pytest.mark.parametrize("words", [("agent", "list"), ("outbox", "list"), ("backup", "copy")])
def test_who_names_the_socket_needs_no_runtime_directory(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)  # as under cron, su and in containers
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LEASED_SOCKET", str(tmp_path / "nobody"))
    command.main([*words[:-1], str(tmp_path / "copy") if words[0] == "backup" else words[-1]])
    told = capsys.readouterr().err
    assert "XDG_RUNTIME_DIR" not in told and f"{tmp_path}/.local/state/leased" in told


def test_a_state_in_use_is_69(run: Run, tmp_path: Path) -> None:
    states.make(tmp_path)
    assert run("backup", str(tmp_path / "copy"))[0] == 0
    lock = DirectoryLock(tmp_path / "state")
    try:
        for words in (("fsck",), ("restore", str(tmp_path / "copy"))):
            code, out, err = run(*words)
            assert (code, out) == (69, "")
            assert (
                err == f"leased: {tmp_path}/state is in use by another leased process: stop it first, or name another directory\n"
            )
        code, _, err = run("serve", socket=tmp_path / "socket")
        assert code == 78, "systemd must not try again"
        assert "in use by another leased process" in err
    finally:
        lock.close()


def test_somebody_elses_state_is_77(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states.make(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for words in (("fsck",), ("backup", str(tmp_path / "copy"))):
        code, out, err = run(*words)
        assert (code, out) == (77, "")
        assert err == (
            f"leased: {tmp_path}/state: it belongs to uid {os.getuid()}, not to uid {os.getuid() + 1}: "
            "run this as the user it belongs to, or as root\n"
        )


def test_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    states.make(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "leased", "fsck", "--state-dir", str(tmp_path / "state"), "--runtime-dir", str(tmp_path / "run")]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# ---- serve that cannot


def test_a_socket_somebody_listens_on_is_69_and_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        code, _, err = run("serve", socket=path)
    assert code == 69
    assert complaint(err) == [
        f"leased: {path}: another process listens on this socket: stop what listens there, or remove the file if nothing does, "
        "or name another socket"
    ]


def test_a_file_where_the_socket_should_be_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("precious")
    code, _, err = run("serve", socket=path)
    assert code == 69
    assert complaint(err)[0].startswith(f"leased: {path}: Address already in use: stop what listens there, or remove the file")
    assert path.read_text() == "precious"


def test_a_socket_below_a_file_is_named(run: Run, tmp_path: Path) -> None:
    code, _, err = run("serve", socket=tmp_path / "empty.toml" / "socket")
    assert code == 69
    assert f"{tmp_path}/empty.toml" in complaint(err)[0] and "name another place" in complaint(err)[0]


def test_a_state_directory_that_cannot_be_made_is_78(run: Run, tmp_path: Path) -> None:
    code, _, err = run("serve", socket=tmp_path / "socket", state_dir=tmp_path / "empty.toml" / "state")
    assert code == 78
    assert complaint(err) == [f"leased: {tmp_path}/empty.toml/state: Not a directory: leased needs a directory it can write"]


def test_a_damaged_state_is_78(run: Run, tmp_path: Path) -> None:
    states.make(tmp_path)
    (tmp_path / "state" / "data.mdb").write_bytes(b"no database" * 1000)
    code, _, err = run("serve", socket=tmp_path / "socket")
    assert code == 78
    assert "is damaged" in complaint(err)[0] and "run `leased fsck`, then restore a backup" in complaint(err)[0]


def test_an_error_out_of_a_nursery_is_unwrapped(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> int:
        async def inner() -> None:
            raise StoreError("the disk: is gone")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            async with trio.open_nursery() as deeper:
                deeper.start_soon(inner)
        return 0

    monkeypatch.setattr(service, "run", fails)
    code, out, err = run("serve", socket=tmp_path / "socket")
    assert (code, out, err) == (69, "", "leased: the disk: is gone\n")


def test_a_mistake_of_the_program_is_told_without_its_text(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> int:
        raise ZeroDivisionError("secret of a caller")

    monkeypatch.setattr(service, "run", fails)
    code, _, err = run("serve", socket=tmp_path / "socket")
    assert code == 70
    assert "internal error: ZeroDivisionError; please report it with these lines" in err
    assert f"{Path(__file__)}:" in err and "secret" not in err and "Traceback" not in err


def complaint(err: str) -> list[str]:
    """The lines that are not the log's."""
    return [line for line in err.splitlines() if line.startswith("leased: ")]


# ---- which error means which


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (WrongUse("x exists: remove it"), 64, "x exists: remove it"),
        (ConfigError("a\nb"), 78, "a\nb"),
        (StateRefused("newer"), 78, "newer"),
        (StateLocked("held"), 69, "held"),
        (StoreError("io"), 69, "io"),
        (StoreFull("full"), 69, "full"),
        (RecordDamaged("the tick"), 78, "the state is damaged: the tick: run `leased fsck`, which says where and what to do"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 77,
         "/x: Permission denied: run this as the user it belongs to, or as root"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 69,
         "/x: No space left on device: give the file system more room, or name another place"),
        (OSError(errno.EADDRINUSE, "Address already in use"), 69,
         "/s: Address already in use: stop what listens there, or remove the file if nothing does, or name another socket"),
        (OSError(errno.EMFILE, "Too many open files"), 69, "Too many open files"),
        (OSError("AF_UNIX path too long"), 69, "AF_UNIX path too long"),
    ],
)  # fmt: skip
def test_what_each_error_means(error: BaseException, code: int, said: str) -> None:
    assert judged(error, socket="/s") == (code, said)
    assert judged(BaseExceptionGroup("", [BaseExceptionGroup("", [error])]), socket="/s") == (code, said)


def test_a_lock_is_final_for_a_daemon_only() -> None:
    assert judged(StateLocked("held"), serving=True) == (78, "held")
    assert judged(StateLocked("held")) == (69, "held")


def test_every_error_of_ours_has_a_meaning() -> None:
    def all_of(kind: type[LeasedError]) -> Iterator[type[LeasedError]]:
        for each in kind.__subclasses__():
            yield each
            yield from all_of(each)

    of_commands = {each for each in all_of(LeasedError) if each.__module__ in {"leased.errors", "leased.exits"}}
    internal = {each.__name__ for each in of_commands if each.__name__ != "PeerError" and judged(each("x"))[0] == 70}
    assert internal == set()
    assert first_of(WrongUse("x")).args == ("x",)

"""`leased`: the daemon's own command.  Each verb imports what it needs, so that the help page needs nothing."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Final

from leased.version import VERSION

if TYPE_CHECKING:
    from leased.config import Config

_NOWHERE: Final = "/run/unused"
_UNUSED: Final = f"{_NOWHERE}.sock"
"""For verbs that need no socket, so that they need no $XDG_RUNTIME_DIR to find one: cron has none."""

_ABOUT: Final = """Leases for the processes and AI agents of one host: one holder per key, until it is released or its time is up.
This command runs the daemon and looks after its state; `lease` is the one that takes leases."""

_MORE: Final = """`leased VERB --help` tells more of a verb.

files, for root and the system's service; else below $XDG_CONFIG_HOME, $XDG_STATE_HOME and $XDG_RUNTIME_DIR:
  /etc/leased/leased.toml   the configuration; none is needed
  /run/leased/leased.sock   the socket ($LEASED_SOCKET and --socket name another)
  /var/lib/leased           the state that is kept
  /run/leased-state         the state of this boot; on tmpfs

exit codes: 0 well; 1 fsck found something; 64 wrong usage; 69 not now (locked, no room, socket in use); 70 internal;
77 not permitted; 78 the configuration, or a state that must not be opened.

  leased serve --socket /tmp/l.sock --state-dir ~/leased --runtime-dir /dev/shm/leased
  leased backup /srv/backups/leased-$(date +%F)"""

_SERVE: Final = """Runs until SIGTERM or SIGINT, then tells the state of every lease, so that the next start has nothing to wait for.
SIGHUP reads the configuration again.  It logs to standard error."""

_CHECK_CONFIG: Final = "Prints every key with its value, defaults included, or every mistake of the file."

_FSCK: Final = """Proves every invariant of both stores and changes nothing.  The daemon must be stopped.  Findings go to standard output, one
a line; a line that begins with "note:" is nothing wrong.

exit codes: 0 no findings; 1 findings; 69 a daemon is running; 77 not permitted; 78 the state must not be opened."""

_BACKUP: Final = """Writes the ledger (long leases, billing records, agent keys, switches) to FILE, which must not exist: private, flushed, and read
back before it gets its name.  A running daemon goes on serving: it makes the copy itself for operators, and where none answers at the socket
its ledger is read beside it.  No fence is in the copy, but the hashing secret is.

exit codes: 0 written; 1 written, but records of the ledger are damaged; 64 FILE cannot be used; 69 no room; 77 not permitted;
78 the state cannot be read."""

_RESTORE: Final = """Puts a backup in the place of the ledger; what was there is kept beside it.  The daemon must be stopped.  All leases are lost,
and the next start grants nothing for 3600 s, the longest ttl, because somebody may still hold one."""


def main(arguments: list[str] | None = None) -> int:
    """The exit code.  Whatever goes wrong is told in sentences on standard error.  `arguments` as in sys.argv[1:]."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a path must not make fsck fail
    options = argparse.Namespace(verb="", socket=None)
    try:
        _parser().parse_args(arguments, options)
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing complains while Python ends
        from leased.exits import EXIT_BROKEN_PIPE

        return EXIT_BROKEN_PIPE
    except BaseException as error:
        return _complain(error, options)


def _complain(error: BaseException, options: argparse.Namespace) -> int:
    from leased.exits import first_of, judged

    error = first_of(error)
    prefix, told = "", False
    if options.verb == "serve":
        from leased.log import ERROR_PREFIX, is_journal
        from leased.not_started import NotStarted

        if is_journal(sys.stderr, os.environ):
            prefix, told = ERROR_PREFIX, isinstance(error, NotStarted)
        error = error.error if isinstance(error, NotStarted) else error
    code, text = judged(error, serving=options.verb == "serve", socket=getattr(options, "listening_at", ""))
    for line in text.splitlines() if not told else ():
        print(f"{prefix}leased: {line}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code for a wrong command line, and texts as they are written."""

    def __init__(self, **more: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)  # type: ignore[arg-type]

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        print(f"leased: {message}: `{self.prog} --help` shows how", file=sys.stderr)
        raise SystemExit(64)


def _version() -> str:
    """`leased 0.1.0`, and whether the hot path of this installation is compiled (contrib/compiled)."""
    compiled = any(Path(__file__).with_name(f"rules{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    return f"leased {VERSION}{' (compiled)' if compiled else ''}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="leased", description=_ABOUT, epilog=_MORE)
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs", parser_class=_Parser)

    serve = verbs.add_parser("serve", help="run the daemon", description=_SERVE)
    serve.add_argument("--socket", metavar="PATH", help="the Unix socket to listen on")
    serve.add_argument("--http", metavar="ADDR:PORT", help="also serve HTTP there")
    serve.set_defaults(run=_serve)
    check = verbs.add_parser("check-config", help="read the configuration and say what it comes to", description=_CHECK_CONFIG)
    check.set_defaults(run=_check_config)
    fsck = verbs.add_parser("fsck", help="prove every invariant of a stopped daemon's state", description=_FSCK)
    fsck.add_argument("--json", action="store_true", help="the findings as a list of {level, code, path, text}")
    fsck.set_defaults(run=_fsck, socket=_UNUSED)
    backup = verbs.add_parser("backup", help="copy the ledger to one file, also while the daemon runs", description=_BACKUP)
    backup.add_argument("file", metavar="FILE", help="a file that does not exist yet")
    backup.add_argument("--socket", metavar="PATH", help="the Unix socket of the daemon")
    backup.set_defaults(run=_backup)
    restore = verbs.add_parser("restore", help="put a backup in the place of the ledger", description=_RESTORE)
    restore.add_argument("file", metavar="FILE", help="a file that `leased backup` wrote")
    restore.add_argument(
        "--no-holders", action="store_true", help="you know that nobody holds a lease any more: grant at once after the start"
    )
    restore.set_defaults(run=_restore, socket=_UNUSED)

    from leased.agent_command import ABOUT, configure

    agent = verbs.add_parser("agent", help="keys for agents: add, list, revoke", description=ABOUT)
    agent.add_argument("--socket", metavar="PATH", help="the Unix socket of the daemon")
    configure(agent)
    agent.set_defaults(run=_agent)

    from leased import outbox_command

    outbox = verbs.add_parser(
        "outbox", help="billing events that upstream will not take: list, retry, drop", description=outbox_command.ABOUT
    )
    outbox.add_argument("--socket", metavar="PATH", help="the Unix socket of the daemon")
    outbox_command.configure(outbox)
    outbox.set_defaults(run=_outbox)

    from leased import install_units

    units = verbs.add_parser("install-units", help="systemd's units for this installation", description=install_units.ABOUT)
    install_units.configure(units)
    units.set_defaults(run=_install_units, socket=_UNUSED)

    for verb in (serve, check, fsck, backup, restore, agent, outbox):
        verb.add_argument("--config", metavar="FILE", help="the configuration file")
        verb.add_argument("--state-dir", metavar="DIR", help="the state that is kept")
        verb.add_argument("--runtime-dir", metavar="DIR", help="the state of this boot; on tmpfs")
    for group in (agent, outbox):
        _also_behind(group)
    return parser


def _also_behind(group: argparse.ArgumentParser) -> None:
    """`leased agent add NAME --socket PATH` as well as `leased agent --socket PATH add NAME`: people write either."""
    for action in group._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                for option in ("--socket", "--config", "--state-dir", "--runtime-dir"):
                    verb.add_argument(option, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _config(options: argparse.Namespace, *, runtime: bool = True) -> Config:
    """`runtime`: the verb needs the runtime directory.  One that asks a daemon, or opens the ledger alone, does not: cron, containers and
    `su` have no $XDG_RUNTIME_DIR to find it, nor a daemon at the default path, unless the configuration names its socket."""
    from leased.config import load

    environ = dict(os.environ)
    if not runtime and not environ.get("XDG_RUNTIME_DIR"):
        environ["XDG_RUNTIME_DIR"] = _NOWHERE

    def absolute(name: str) -> str | None:
        value = getattr(options, name, None)
        return None if value is None else str(Path(value).absolute())

    return load(
        options.config, root=os.geteuid() == 0, environ=environ, socket=absolute("socket"), state_dir=absolute("state_dir"),
        runtime_dir=absolute("runtime_dir"), http=getattr(options, "http", None),
    )  # fmt: skip


def _serve(options: argparse.Namespace) -> int:
    from leased.errors import LeasedError

    try:
        config = _config(options)
    except LeasedError as error:
        from leased.not_started import tell

        raise tell(error) from None
    options.listening_at = str(config.socket)
    import trio

    from leased import log, service

    log.configure(config.log.level, config.log.format)
    os.umask(0o077)
    return trio.run(
        lambda: service.run(
            config,
            ready=lambda path: log.get_logger().info("daemon.ready", socket=str(path)),
            read=lambda: _config(options),
            speak=lambda now: log.configure(now.log.level, now.log.format),
        )
    )


def _check_config(options: argparse.Namespace) -> int:
    from leased.config import describe

    for key, value in describe(_config(options)):
        print(f"{key} = {value}")
    return 0


def _fsck(options: argparse.Namespace) -> int:
    from leased.fsck import run

    return run(_config(options), sys.stdout, as_json=options.json)


def _backup(options: argparse.Namespace) -> int:
    from leased.backup import backup

    return backup(_config(options, runtime=False), Path(options.file), sys.stdout)


def _restore(options: argparse.Namespace) -> int:
    from leased.backup import restore

    return restore(_config(options), Path(options.file), sys.stdout, no_holders=options.no_holders)


def _agent(options: argparse.Namespace) -> int:
    from leased.agent_command import run

    config = _config(options, runtime=False)
    options.listening_at = str(config.socket)
    return run(config, options, sys.stdout, sys.stderr)


def _outbox(options: argparse.Namespace) -> int:
    from leased.outbox_command import run

    config = _config(options, runtime=False)
    options.listening_at = str(config.socket)
    return run(config, options, sys.stdout, sys.stderr, sys.stdin)


def _install_units(options: argparse.Namespace) -> int:
    from leased.install_units import run

    return run(options, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())

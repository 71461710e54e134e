"""`leased`: the daemon's own command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from leased.errors import ConfigError, StateLocked, StateRefused, StoreError
from leased.version import VERSION

if TYPE_CHECKING:
    from leased.config import Config

EXIT_UNAVAILABLE: Final = 69
EXIT_INTERNAL: Final = 70
EXIT_CONFIG: Final = 78


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 (fsck found something), 64, 69, 70 or 78, as the manual lists them."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        return _complain(str(error), EXIT_CONFIG)
    except (StateLocked, StateRefused) as error:
        return _complain(str(error), EXIT_CONFIG)
    except StoreError as error:
        return _complain(str(error), EXIT_UNAVAILABLE)
    except OSError as error:
        return _complain(str(error), EXIT_UNAVAILABLE)
    except KeyboardInterrupt:
        return 130


def _complain(text: str, code: int) -> int:
    for line in text.splitlines():
        print(f"leased: {line}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="leased", description="Leases for the processes and AI agents of one host.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"leased {VERSION}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    serve = verbs.add_parser("serve", help="run the daemon", allow_abbrev=False)
    _paths(serve)
    serve.add_argument("--socket", metavar="PATH", help="the Unix socket to listen on")
    serve.add_argument("--http", metavar="ADDR:PORT", help="also serve HTTP there")
    serve.set_defaults(run=_serve)
    check = verbs.add_parser("check-config", help="read the configuration and say what it comes to", allow_abbrev=False)
    _paths(check)
    check.set_defaults(run=_check_config)
    fsck = verbs.add_parser(
        "fsck", help="walk both stores and prove every invariant; the daemon must be stopped", allow_abbrev=False
    )
    _paths(fsck)
    fsck.set_defaults(run=_fsck)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code for a wrong command line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(64)


def _paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the configuration file")
    parser.add_argument("--state-dir", metavar="DIR", help="the durable state")
    parser.add_argument("--runtime-dir", metavar="DIR", help="the volatile state; on tmpfs")


def _config(options: argparse.Namespace) -> Config:
    from leased.config import load

    def absolute(name: str) -> str | None:
        value = getattr(options, name, None)
        return None if value is None else str(Path(value).absolute())

    return load(
        options.config, root=os.geteuid() == 0, environ=os.environ, socket=absolute("socket"), state_dir=absolute("state_dir"),
        runtime_dir=absolute("runtime_dir"), http=getattr(options, "http", None),
    )  # fmt: skip


def _serve(options: argparse.Namespace) -> int:
    config = _config(options)
    import trio

    from leased import daemon, log

    log.configure(config.log.level, config.log.format)
    os.umask(0o077)
    return trio.run(lambda: daemon.run(config, ready=lambda path: log.get_logger().info("daemon.ready", socket=str(path))))


def _check_config(options: argparse.Namespace) -> int:
    from leased.config import describe

    for key, value in describe(_config(options)):
        print(f"{key} = {value}")
    return 0


def _fsck(options: argparse.Namespace) -> int:
    from leased.fsck import run

    return run(_config(options), sys.stdout)


if __name__ == "__main__":
    sys.exit(main())

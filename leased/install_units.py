"""`leased install-units`: systemd's units for a leased that no package brought, with the path it runs from; and their removal.

The units are those of the folder systemd/ of the sources, which an installation has as leased/units: there is no second copy.  Only files that
this command wrote are ever overwritten or removed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from leased.exits import EXIT_UNAVAILABLE, EXIT_YES, WrongUse
from leased.version import VERSION

ABOUT: Final = """Writes the units of systemd/ with the path of this very installation in them, and says what to do next; --enable does it.
For hosts without a package: install leased where every user can run it (/usr/bin/python3 -m venv /opt/leased), then run
/opt/leased/bin/leased install-units --enable as root.  With --user the daemon is one's own, and leased may live in the home directory.

exit codes: 0 done; 64 it cannot be done like this; 69 systemd refused; 77 not permitted."""

STAMP: Final = "# Written by `leased install-units`"
PACKAGED: Final = "/usr/bin/leased"  # what ExecStart= of the units names
DIRECTORY_MODE: Final = 0o755
FILE_MODE: Final = 0o644
HIDDEN: Final = ("/home", "/root", "/run/user")  # by ProtectHome=yes
OTHERS: Final = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)
"""Where else units of the system may come from."""
COMMAND_SECONDS: Final = 120.0


class File(NamedTuple):
    path: Path
    text: str


class Place(NamedTuple):
    """Where units go.  `root` is what a host's own root will be later ("/" for this host)."""

    units: Path
    sysusers: Path | None
    root: Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", action="store_true", help="a daemon of this user's own, by `systemctl --user`")
    parser.add_argument("--root", metavar="DIR", default="/", help="write below DIR: an image, or a package in the making")
    parser.add_argument("--prefix", metavar="DIR", help="DIR/lib/systemd/system and DIR/lib/sysusers.d; by default /usr/local")
    parser.add_argument("--enable", action="store_true", help="make the users, enable and start the socket, too")
    parser.add_argument("--remove", action="store_true", help="stop it and remove what this command wrote; the state stays")
    parser.add_argument("--dry-run", action="store_true", help="show the files and commands, and change nothing")


def run(options: argparse.Namespace, out: TextIO, *, environ: Mapping[str, str] = os.environ) -> int:
    """The exit code.  Raises WrongUse and OSError."""
    place = _place(options, environ)
    if options.enable and place.root != Path("/"):
        raise WrongUse(
            "--enable is for this host, --root for another: enable it there, by `systemctl --root=DIR enable leased.socket`"
        )
    if (
        (options.enable or (options.remove and place.root == Path("/")))
        and not options.dry_run
        and not _manager(options.user, environ)
    ):
        if options.enable:
            raise WrongUse("no systemd runs here that could enable anything: leave --enable out")
        systemd_runs = False
    else:
        systemd_runs = place.root == Path("/")
    if options.remove:
        return _remove(options, place, out, systemd_runs=systemd_runs)
    command = _command(place.root)
    if not options.user:
        _must_be_everybodys()
    files = list(_files(place, command, user=options.user))
    for each in files:
        _must_be_ours(each.path)
    if not options.user:
        _must_be_alone(place)
    commands = _next(options.user, place)
    if options.dry_run:
        for each in files:
            print(f"# ---- {each.path}\n{each.text}", file=out)
    else:
        for each in files:
            print(f"{'wrote' if _write(each) else 'unchanged:'} {each.path}", file=out)
    if not options.enable or options.dry_run:
        print("next:", *(f"  {shlex.join(each)}" for each in commands), sep="\n", file=out)
    elif (code := _done(commands, out)) != EXIT_YES:
        return code
    if not options.user:
        print("  usermod -aG leased-clients NAME  # for each user that may ask; it counts from their next login", file=out)
    return EXIT_YES


def _remove(options: argparse.Namespace, place: Place, out: TextIO, *, systemd_runs: bool) -> int:
    systemctl = ["systemctl", "--user"] if options.user else ["systemctl"]
    targets = [each.path for each in _files(place, PACKAGED, user=options.user)]
    ours = [path for path in targets if path.exists() and _is_ours(path)]
    for path in set(targets) - set(ours):
        if path.exists():
            print(f"left alone: {path} is not of this command's making", file=out)
    if not ours:
        print("nothing to remove: this command has written no unit here", file=out)
        return EXIT_YES
    names = [path.name for path in ours if path.suffix in {".socket", ".service"}]
    if systemd_runs and (code := _done([[*systemctl, "disable", "--now", *names]], out, dry=options.dry_run)) != EXIT_YES:
        return code
    for path in ours:
        if not options.dry_run:
            path.unlink()
        print(f"{'would remove' if options.dry_run else 'removed'} {path}", file=out)
    if systemd_runs:
        _done([[*systemctl, "daemon-reload"]], out, dry=options.dry_run)
    kept = (
        "its state and configuration"
        if options.user
        else "/var/lib/leased, /etc/leased, the user leased and the group leased-clients"
    )
    print(f"kept: {kept}", file=out)
    return EXIT_YES


# ---- what goes where


def _place(options: argparse.Namespace, environ: Mapping[str, str]) -> Place:
    root = Path(options.root).absolute()
    if options.user:
        if options.prefix is not None:
            raise WrongUse("--prefix is for the system's units; those of a user are in $XDG_CONFIG_HOME/systemd/user")
        home = environ.get("XDG_CONFIG_HOME", "")
        if not home.startswith("/"):
            if not environ.get("HOME", "").startswith("/"):
                raise WrongUse("neither $XDG_CONFIG_HOME nor $HOME is set: one of them tells where a user's units are")
            home = f"{environ['HOME']}/.config"
        return Place(_below(root, Path(home) / "systemd/user"), None, root)
    prefix = Path(options.prefix or "/usr/local")
    if not prefix.is_absolute():
        raise WrongUse(f"--prefix {prefix}: name it from the root on: it begins with /")
    return Place(_below(root, prefix / "lib/systemd/system"), _below(root, prefix / "lib/sysusers.d"), root)


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def sources() -> Path:
    """The folder systemd/, in an installation or in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "units", package.parent / "systemd"):
        if (folder / "leased.service").is_file():
            return folder
    raise WrongUse(f"{package}/units: the units are not part of this installation: install leased again")


def _files(place: Place, command: str, *, user: bool) -> Iterable[File]:
    folder = sources() / "user" if user else sources()
    for source in sorted(folder.iterdir()):
        if source.suffix in {".service", ".socket"}:
            yield File(place.units / source.name, stamped(source.read_text(), command))
        elif source.suffix == ".sysusers" and place.sysusers is not None:
            yield File(place.sysusers / f"{source.stem}.conf", stamped(source.read_text(), command))


def stamped(text: str, command: str) -> str:
    """A unit with our mark at its head and `command` where a package's would be."""
    replaced = re.sub(rf"(?<=[=\s]){re.escape(PACKAGED)}(?=\s)", command.replace("\\", r"\\"), text)
    return f"{STAMP} of leased {VERSION}; change it by a drop-in: systemctl edit UNIT\n{replaced}"


def _command(root: Path) -> str:
    """What starts this installation, as ExecStart= takes it, seen from within `root`."""
    script = Path(sys.executable).parent / "leased"
    words = [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "leased"]
    if root != Path("/") and Path(words[0]).is_relative_to(root):
        words[0] = f"/{Path(words[0]).relative_to(root)}"
    if any(re.search(r"[\s\"'$%;\\]", word) for word in words):
        raise WrongUse(f"{words[0]}: systemd would take this path apart: install leased where the path has only plain characters")
    return " ".join(words)


# ---- what must not be


def _must_be_everybodys() -> None:
    """The service runs as a user of its own, in a sandbox without home directories.  Raises WrongUse for what it could not run."""
    import sysconfig

    remedy = "/usr/bin/python3 -m venv /opt/leased && /opt/leased/bin/pip install SOURCES; or take --user, for a daemon of your own"
    for path in (
        Path(sys.executable),
        Path(sys.executable).resolve(),
        Path(__file__).resolve().parent,
        Path(sysconfig.get_path("stdlib")),
    ):
        hidden = next((each for each in HIDDEN if path.is_relative_to(each)), None)
        if hidden is not None:
            raise WrongUse(
                f"{path} is below {hidden}, which a service of the system cannot see: install leased elsewhere: {remedy}"
            )
        for part in (path, *path.parents):
            wanted = stat.S_IROTH | stat.S_IXOTH if part == path else stat.S_IXOTH
            if part.stat().st_mode & wanted != wanted:
                raise WrongUse(
                    f"{part} (mode {stat.S_IMODE(part.stat().st_mode):04o}) keeps the service's user from {path}: chmod it, or {remedy}"
                )


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(STAMP)) == STAMP.encode()


def _must_be_ours(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not _is_ours(path)):
        raise WrongUse(f"{path} exists and is not of this command's making: move it away, or write a drop-in beside it")


def _must_be_alone(place: Place) -> None:
    """Two sets of units would be one too many: which of them counts is decided by their directories."""
    for folder in OTHERS:
        other = place.root / folder / "leased.service"
        if other.parent.resolve() != place.units.resolve() and other.exists() and not other.is_symlink():
            raise WrongUse(f"{other} is there already, from a package or by hand: remove that first, or leave it at that")


# ---- doing it


def _write(file: File) -> bool:
    """False: it was there already, as it is."""
    if file.path.exists() and file.path.read_text() == file.text:
        return False
    for folder in reversed([each for each in (file.path.parent, *file.path.parent.parents) if not each.exists()]):
        folder.mkdir()
        folder.chmod(DIRECTORY_MODE)
    growing = file.path.with_name(f".{file.path.name}.new")
    growing.unlink(missing_ok=True)
    descriptor = os.open(growing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "w") as open_file:
        os.fchmod(descriptor, FILE_MODE)
        open_file.write(file.text)
    growing.replace(file.path)
    return True


def _manager(user: bool, environ: Mapping[str, str]) -> bool:
    """Is there a systemd to talk to?"""
    if user:
        return Path(environ.get("XDG_RUNTIME_DIR", "/nowhere"), "systemd").is_dir()
    return Path("/run/systemd/system").is_dir()


def _next(user: bool, place: Place) -> list[list[str]]:
    if user:
        return [
            ["systemctl", "--user", *words]
            for words in (("daemon-reload",), ("enable", "--now", "leased.socket"), ("try-restart", "leased.service"))
        ]
    if place.root != Path("/"):
        return [["systemd-sysusers", f"--root={place.root}"], ["systemctl", f"--root={place.root}", "enable", "leased.socket"]]
    users = [["systemd-sysusers", str(place.sysusers / "leased.conf")]] if place.sysusers is not None else []
    return users + [
        ["systemctl", *words]
        for words in (("daemon-reload",), ("enable", "--now", "leased.socket"), ("try-restart", "leased.service"))
    ]


def _done(commands: list[list[str]], out: TextIO, *, dry: bool = False) -> int:
    import subprocess

    for command in commands:
        print(f"{'would run' if dry else 'running'} {shlex.join(command)}", file=out)
        if dry:
            continue
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
            )
            code, said = done.returncode, done.stderr.strip() or done.stdout.strip()
        except FileNotFoundError:
            code, said = 127, "there is no such command here"
        except subprocess.TimeoutExpired:
            code, said = 1, f"it was not over after {COMMAND_SECONDS:g} s"
        if code != 0:
            print(f"leased: {shlex.join(command)} failed ({code}): {said}", file=sys.stderr)
            return EXIT_UNAVAILABLE
    return EXIT_YES

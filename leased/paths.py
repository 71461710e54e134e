"""Where things are when nobody says so: the same rule for the daemon and for every client.

Text only, and nothing imported that a client would wait for.
"""

from __future__ import annotations

from leased.light import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

SOCKET_VARIABLE: Final = "LEASED_SOCKET"


class Paths(NamedTuple):
    """The defaults.  None: the environment does not tell (no XDG_RUNTIME_DIR, no HOME), and somebody has to."""

    config_file: str | None
    socket: str | None
    state_dir: str | None
    runtime_dir: str | None


def default_paths(root: bool, environ: Mapping[str, str]) -> Paths:
    """System paths for root and for the system's service, else the caller's own by the XDG base directory specification.

    The service, which does not run as root, is known by the directories systemd hands it: they are honoured, and stand
    below /var/lib and /run.  A variable of the XDG specification that is not an absolute path counts as unset, as it says.
    """
    state = _handed_by_systemd(environ, "STATE_DIRECTORY", "leased")
    runtime = _handed_by_systemd(environ, "RUNTIME_DIRECTORY", "leased-state")
    below_run = (runtime or "").startswith("/run/") and not (runtime or "").startswith("/run/user/")
    service = below_run or (state or "").startswith("/var/lib/")
    if root or service:
        own = Paths("/etc/leased/leased.toml", "/run/leased/leased.sock", "/var/lib/leased", "/run/leased-state")
    else:
        running = _absolute(environ, "XDG_RUNTIME_DIR")
        config = _absolute(environ, "XDG_CONFIG_HOME") or _below_home(environ, ".config")
        kept = _absolute(environ, "XDG_STATE_HOME") or _below_home(environ, ".local/state")
        own = Paths(
            config and f"{config}/leased/leased.toml",
            running and f"{running}/leased/leased.sock",
            kept and f"{kept}/leased",
            running and f"{running}/leased-state",
        )
    return own._replace(state_dir=state or own.state_dir, runtime_dir=runtime or own.runtime_dir)


def default_socket(root: bool, environ: Mapping[str, str]) -> str | None:
    """The socket a client connects to when it is given none: $LEASED_SOCKET, else the default.  None: nothing tells."""
    return environ.get(SOCKET_VARIABLE) or default_paths(root, environ).socket


def _absolute(environ: Mapping[str, str], name: str) -> str | None:
    value = environ.get(name, "")
    return (value.rstrip("/") or None) if value.startswith("/") else None


def _below_home(environ: Mapping[str, str], name: str) -> str | None:
    home = _absolute(environ, "HOME")
    return home and f"{home}/{name}"


def _handed_by_systemd(environ: Mapping[str, str], name: str, usual: str) -> str | None:
    """The directory systemd made for this service, of several the one with the usual name.

    Only one that is named after leased: a daemon or client started by hand below another service inherits that one's variables.
    """
    ours = [path for path in environ.get(name, "").split(":") if path.startswith("/") and "/leased" in path]
    return next((path for path in ours if path.endswith(f"/{usual}")), ours[0] if ours else None)

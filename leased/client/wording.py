"""The command's sentences: short, whole, and true at 3 a.m.  Everything a daemon or another tenant wrote is made printable."""

from __future__ import annotations

import time

from leased.client.answers import Checked, Ended, Grant, Refusal, Unknown
from leased.client.errors import DaemonUnreachable, LeasedClientError, PermissionDenied, RateLimited

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from leased.client.scopes import ResumePacket, SwitchState
    from leased.client.watching import Gap, LeaseEvent


def shown(text: object) -> str:
    """Text as one line without control characters: a holder label must not be able to move a terminal's cursor."""
    plain = str(text)
    return plain if plain.isprintable() else "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in plain)


def lasting(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def at(seconds: float) -> str:
    """The local time of day, `seconds` from now."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


def _standing(answer: Refusal | Checked | Ended, expires_in: float | None) -> str:
    held = f"held by {shown(answer.held_by)} (generation {answer.generation})"
    return held if expires_in is None else f"{held}, free in about {lasting(expires_in)} at {at(expires_in)}"


def granted(grant: Grant, *, show_fence: bool = False) -> str:
    verb = "renewed" if grant.renewed else "yours"
    text = (
        f"{shown(grant.key)} is {verb} until {at(grant.expires_in_seconds)} ({lasting(grant.expires_in_seconds)}): "
        f"holder {shown(grant.holder)}, generation {grant.generation}."
    )
    return f"{text}\nfence {grant.fence}" if show_fence else text


FENCE_NOT_KEPT = (
    "the fence was not kept, so nobody can renew or release this lease and it will lapse; "
    "use --fence-out FILE, --format env or --show-fence"
)


def refused(refusal: Refusal) -> str:
    key = shown(refusal.key)
    standing = _standing(refusal, refusal.expires_in_seconds)
    if refusal.reason == "held":
        return f"{key} is {standing}."
    if refusal.reason == "same_label":
        return f"{key} is {standing}: your own holder label, but without its fence this is no renewal."
    if refusal.reason == "wrong_fence":
        now = f"; it is {standing}" if refusal.held_by is not None else ""
        return f"The fence given is not the live lease's on {key}{now}."
    if refusal.reason == "wrong_holder":
        now = f": it is {standing}" if refusal.held_by is not None else ""
        return f"The lease on {key} was taken under another holder label{now}. Give that label by --holder or LEASE_HOLDER."
    if refusal.reason == "lapsed":
        return f"The lease on {key} is lost: it lapsed or was ended. Stop the work it protected, then acquire it again."
    if refusal.reason == "spent":
        return f"The grant this attempt got on {key} has ended; ask again."
    return f"{key} was refused: {shown(refusal.reason)}."


def unknown(answer: Unknown) -> str:
    reason = shown(answer.reply.get("text") or answer.reason)
    if answer.reason == "superseded":
        return f"This call's place in the line for {shown(answer.key)} was taken by a later one with the same request id."
    again = lasting(answer.retry_after_seconds)
    return f"Nobody can tell now who holds {shown(answer.key)} ({reason}). Do not go on; ask again in {again}."


def checked(answer: Checked) -> str:
    key = shown(answer.key)
    if answer.held is None:
        return f"Nobody can tell now who holds {key} ({shown(answer.reason or 'no reason given')})."
    if not answer.held:
        return free(answer.key)
    waiting = f"; {answer.waiting} waiting" if answer.waiting else ""
    return f"{key} is {_standing(answer, answer.expires_in_seconds)}{waiting}."


def free(key: str) -> str:
    return f"{shown(key)} is free."


def current(answer: Checked, generation: int) -> str:
    verdict = "is" if answer.current else "is not"
    return f"Generation {generation} {verdict} the live lease on {shown(answer.key)}. {checked(answer)}"


def ended(answer: Ended, key: str, verb: str) -> str:
    """`verb`: released or revoked."""
    named = shown(key)
    if answer.ended:
        of = f" of {shown(answer.held_by)}" if answer.held_by else ""
        return f"{named} is {verb} (generation {answer.generation}{of})."
    if answer.ended is None:
        return f"Nobody can tell now whether {named} was {verb} ({shown(answer.reason)}). Ask again."
    if answer.maybe:
        return f"{named} is no longer held: {verb} just now (the first answer was lost), or lapsed before."
    if answer.reason == "not_holder":
        return (
            f"{named} was not {verb}: it is {_standing(answer, answer.reply.get('expires_in_seconds'))}, and this is not its fence."
        )
    return f"{named} was not {verb}: nothing is held there (it lapsed or was ended before)."


def listed(lease: dict[str, Any]) -> str:
    """One line: key, holder, generation, time left, and what else is set."""
    key = lease.get("key")
    name = shown(key) if key is not None else f"#{shown(lease.get('key_hash'))}"
    left = lasting(lease.get("expires_in_seconds") or 0.0)
    more = "".join(
        f"  {field} {shown(lease[field])}"
        for field in ("scope", "bind", "namespace")
        if lease.get(field) is not None and lease[field] != "none"
    )
    return f"{name}  held by {shown(lease.get('holder'))}  generation {lease.get('generation')}  free in {left}{more}"


_MORE: Final = {"process_exited": "its process ended", "connection_closed": "its connection was closed", "switch": ""}
"""What a reason among the events means, where its word alone does not say it."""


def happened(event: LeaseEvent) -> str:
    """One line: when, what, to which key, who."""
    key = shown(event.key) if event.key is not None else f"#{shown(event.key_hash)}"
    what = shown(event.type).replace("_", " ")
    line = f"{at(0)}  {what:<13}  {key}  holder {shown(event.holder)}  generation {event.generation}"
    more = _MORE.get(event.reason or "", shown(event.reason or ""))
    scope = f"  scope {shown(event.scope)}" if event.scope is not None else ""
    return f"{line}{scope}{f'  ({more})' if more else ''}"


def missed(gap: Gap) -> str:
    if gap.from_seq is None or gap.to_seq is None:
        return f"{at(0)}  gap: the connection was lost and is back; what happened between is not known"
    return f"{at(0)}  gap: {gap.to_seq - gap.from_seq + 1} events came faster than they were read, and are not shown"


def armed(switch: SwitchState) -> str:
    scope = shown(switch.scope)
    if not switch.armed or switch.due_in_seconds is None:
        return f"The switch of {scope} is not armed{_last_missed(switch)}."
    agent = f", agent {shown(switch.agent_id)}" if switch.agent_id is not None else ""
    due = f"{lasting(switch.due_in_seconds)} (at {at(switch.due_in_seconds)})"
    return (
        f"The switch of {scope} is armed{agent}: without another heartbeat in {due} its leases are released{_last_missed(switch)}."
    )


def _last_missed(switch: SwitchState) -> str:
    return f"; it was last missed at {shown(switch.last_missed_at)}" if switch.last_missed_at is not None else ""


def resumed(packet: ResumePacket) -> list[str]:
    """The scope's leases, its switch, and what a missed switch released."""
    scope = shown(packet.scope)
    if not packet:
        return [f"Nothing is known of {scope}: no live lease, and it never had a switch."]
    lines = [listed(lease) for lease in packet.leases] or [f"{scope} has no live lease."]
    if packet.switch is None:
        return [*lines, f"{scope} has no switch."]
    lines.append(armed(packet.switch))
    for lease in packet.switch.released:
        key = lease.get("key")
        name = shown(key) if key is not None else f"#{shown(lease.get('key_hash'))}"
        lines.append(f"  it released {name}  generation {lease.get('generation')}")
    return lines


def told(reply: dict[str, Any], prefix: str = "") -> list[str]:
    """Any map as lines "name value", nested names joined by dots."""
    lines: list[str] = []
    for name, value in reply.items():
        if isinstance(value, dict):
            lines += told(value, f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{shown(name)} {'-' if value is None else shown(value)}")
    return lines


def failed(wrong: LeasedClientError, socket: str) -> str:
    """What went wrong, and what to do about it."""
    text = shown(wrong)
    if isinstance(wrong, DaemonUnreachable):
        return (
            f"{text}.\nIs it running?  `systemctl status leased` tells, `leased serve` starts one; "
            "another socket is named by --socket PATH or LEASED_SOCKET."
        )
    if isinstance(wrong, PermissionDenied) and "may not connect" in text:
        return f"{text}.\nThe socket's group may: `ls -l {shown(socket)}` shows which, and an administrator can add you to it."
    if isinstance(wrong, RateLimited):
        return f"{text}.  A limit of the daemon is reached (`lease info` lists them); try again in a while."
    return text

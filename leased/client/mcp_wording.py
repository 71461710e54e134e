"""What an answer means, in one or two plain sentences for a model.  None of them repeats what others wrote: a holder label could be an
instruction."""

from __future__ import annotations

from typing import Any, Final

from leased.client.answers import Reply
from leased.client.errors import (
    DaemonUnreachable,
    InvalidArgument,
    LeasedClientError,
    OutcomeUnknown,
    PermissionDenied,
    RateLimited,
)

_REFUSED: Final = {
    "held": "Somebody else holds this key.",
    "same_label": "It is held under your own label, by an earlier call of yours or by another agent that uses this server. Only whoever has "
    "its fence holds it.",
    "wrong_fence": "The fence you gave is not the live lease's: yours has ended.",
    "wrong_holder": "The lease was taken under another holder label: give the label of its grant.",
    "lapsed": "Your lease has ended: it lapsed, or it was released or revoked.",
    "spent": "The grant of this attempt has ended already.",
}
_NOT_YOURS: Final = "You do NOT have the lease. Do not touch what it protects."


def meaning(tool: str, reply: Reply, *, repeated: bool = False) -> str:
    """Empty where the answer speaks for itself.  `repeated`: the question was sent twice because an answer was lost."""
    if "acquired" in reply:
        return _acquired(tool, reply)
    if "released" in reply:
        return _released(reply, repeated)
    if "held" in reply:
        return _checked(reply)
    return ""


def _acquired(tool: str, reply: Reply) -> str:
    acquired = reply["acquired"]
    if acquired is True:
        secret, again = ("token", "claim it again with the token") if tool == "agent_lock" else ("fence", "renew it")
        return (
            f"You have the lease for {_seconds(reply['expires_in_seconds'])} from now. Release it when you are done; {again} before then if "
            f"you need longer. The {secret} is secret."
        )
    again = _again(reply)
    if acquired is None:
        return f"{_NOT_YOURS} Nobody can tell now who has it, and that is no permission. {again}"
    if tool == "renew" and reply.get("reason") != "wrong_holder":
        return f"{_NOT_YOURS} {_because(reply)} Stop the work it protected now."
    return f"{_NOT_YOURS} {_because(reply)} {again}"


def _because(reply: Reply) -> str:
    return _REFUSED.get(str(reply.get("reason")), "It was refused.")


def _again(reply: Reply) -> str:
    seconds = reply.get("retry_after_seconds")
    return "Call again when you need it." if seconds is None else f"Call again in {_seconds(seconds)}, or do something else."


def _released(reply: Reply, repeated: bool) -> str:
    if reply["released"] is True:
        return "It is no longer yours. Touch what it protected no more without a new lease."
    if reply["released"] is None:
        return "Nobody can tell whether it is released. It ends by itself at the latest when its time is up."
    if repeated:
        return "It is not yours any more: an earlier try of this call, whose answer was lost, released it, or it had ended before."
    return "It was not yours to release: your lease had ended before, so others may have worked meanwhile."


def _checked(reply: Reply) -> str:
    if reply["held"] is None:
        return "Nobody can tell now who holds it, and that is no permission."
    if reply.get("current") is False:
        return "The lease of that generation is over. If it was yours, stop the work it protected."
    return "" if reply["held"] else "Free at this moment, which is no permission: only `lease` can make it yours."


def _seconds(seconds: Any) -> str:
    return f"{float(seconds):.1f} s"


def failed(wrong: LeasedClientError) -> str:
    """Why there is no answer, and what to do.  `wrong` never holds a secret."""
    text = f"{wrong}."
    if isinstance(wrong, DaemonUnreachable):
        advice = "Nothing happened, and you have no lease. The daemon must be started (`leased serve`), or this server told its socket: ask."
    elif isinstance(wrong, PermissionDenied):
        advice = "Nothing happened. Calling again will not help: tell whoever runs this."
    elif isinstance(wrong, RateLimited):
        advice = "Nothing happened, and you have no lease by this call. Call again later."
    elif isinstance(wrong, InvalidArgument):
        advice = "Nothing happened. Correct that argument and call again."
    elif isinstance(wrong, OutcomeUnknown):
        advice = "It may or may not have happened. Act as if you had no lease, and call again."
    else:
        advice = "Act as if you had no lease."
    return f"{text} {advice}"

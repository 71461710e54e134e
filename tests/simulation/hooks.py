"""Where the referee listens in the daemon.  Nothing is changed: each hook calls on, after telling the referee."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parties import Asked, Slot

from leased.doors.rpc import RpcPeer
from leased.errors import PeerError
from leased.gate import Unknown
from leased.lane import Outcome


def judged_peer(world: Any) -> type[RpcPeer]:
    """The class of a connection whose answers the referee reads."""

    class JudgedPeer(RpcPeer):
        __slots__ = ("connection",)

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.connection = world.admitting
            connection = self.connection
            self.pidfd = lambda: world.pidfd(connection)

        def answer(self, call: Any, reply: Any) -> None:
            if call.msgid is not None and not self.closed:
                world.referee.answered(world.referee.asked[self.connection, call.msgid], reply)
            super().answer(call, reply)

        def _say_error(self, msgid: int, error: PeerError) -> None:
            if msgid and not self.closed:
                world.referee.answered(world.referee.asked[self.connection, msgid], f"{error.code}: {error.text}")
            elif not msgid:
                self.connection.refused = True
            super()._say_error(msgid, error)

    return JudgedPeer


def hooked(world: Any) -> None:
    """Listen in on this life of the daemon."""
    daemon, referee, notices = world.daemon, world.referee, world.notices
    lessor, lane = daemon.lessor, daemon.lessor.lane
    current: list[Slot] = []

    def asked(call: Any) -> Asked:
        found: Asked = referee.asked[call.peer.connection, call.msgid]
        return found

    # ---- consequences, each told of before it happens

    def granted(call: Any, key_hash: bytes, lease: Any, *_: Any) -> None:
        notices.granted(asked(call), world.place_of(key_hash), lease)

    def renewed(call: Any, key_hash: bytes, lease: Any, *_: Any) -> None:
        notices.renewed(asked(call), world.place_of(key_hash), lease)

    def ended(key_hash: bytes, lease: Any, change: str, reason: str, *_: Any) -> None:
        notices.ended(world.place_of(key_hash), lease, change, reason)

    def undone(key_hash: bytes, lease: Any) -> None:
        notices.grant_undone(world.place_of(key_hash), lease)

    def moved(key_hash: bytes, deadline: float) -> None:
        notices.renewal_undone(world.place_of(key_hash), deadline)

    told_of: dict[str, Callable[..., None]] = {
        "_granted": granted,
        "_after_renewal": renewed,
        "_ended": ended,
        "_undone": undone,
        "moved": moved,
    }
    ours = set(told_of.values()) | {referee.decided, referee.looked_at, referee.wait_ends, notices.missed, notices.bind_ends}

    def after(consequence: Callable[..., object], *arguments: Any) -> None:
        name = getattr(consequence, "__name__", "")
        if name in told_of:
            lane._after.append((told_of[name], arguments))
        lane._after.append((consequence, arguments))

    lane.after = after

    def queueing(name: str, which: int) -> None:
        original = getattr(lessor.queues, name)

        def queue(*waiters: Any) -> None:
            if current and waiters[which].call.msgid == current[-1].asked.msgid:
                current[-1].queued = True
            original(*waiters)

        setattr(lessor.queues, name, queue)

    queueing("add", 0)
    queueing("replace", 1)

    def committed_unseen() -> None:
        """A commit whose consequences will not happen: what it says has happened all the same."""
        for consequence, arguments in lane._after:
            if consequence in ours:
                consequence(*arguments)

    world.traps.unseen = committed_unseen
    run = lane.run

    def lane_run(work: Callable[..., None], *arguments: Any) -> Outcome:
        world.traps.kind = work.__name__
        outcome: Outcome = run(work, *arguments)
        if outcome is not Outcome.COMMITTED:
            referee.trouble.store_at = world.time
        return outcome

    lane.run = lane_run

    # ---- decisions

    def decision(operate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def decide(call: Any, request: Any) -> None:
            slot = Slot(asked(call))
            lane._after.append((referee.decided, (slot,)))
            current.append(slot)
            try:
                operate(call, request)
            except Unknown as unknown:
                slot.unknown = unknown.reason
                raise
            except PeerError as error:
                slot.failed = str(error)
                raise
            finally:
                current.pop()

        return decide

    lessor.operations = {kind: decision(operate) for kind, operate in lessor.operations.items()}
    standing = lessor.standing

    def looked_at(key_hash: bytes, text: str | None = None) -> Any:
        """What looking at a key does to it (a lapse, the grant to the head of its line) comes before what is decided on what is found there."""
        entry = lane._after[-1] if current else None
        if entry is None or entry[1] != (current[-1],):
            return standing(key_hash, text)
        lane._after[-1] = (referee.looked_at, (world.place_of(key_hash),))
        try:
            return standing(key_hash, text)
        finally:
            lane._after.append(entry)

    lessor.standing = looked_at

    def before(owner: Any, name: str, tell: Callable[..., None]) -> None:
        """`tell` gets a place among the consequences ahead of what owner.name stages."""
        original = getattr(owner, name)

        def told(*arguments: Any) -> None:
            tell(*arguments)
            original(*arguments)

        told.__name__ = name
        setattr(owner, name, told)

    scopes = {lessor.digests.scope_key(*place): place for place in world.scopes}
    before(lessor, "end_wait", lambda waiter: lane._after.append((referee.wait_ends, (asked(waiter.call),))))
    before(daemon.switches, "_miss", lambda key: lane._after.append((notices.missed, (scopes[key],))))

    def bind_ends(ends: list[tuple[bytes, int, str]]) -> None:
        told = [(world.place_of(key_hash), generation, reason) for key_hash, generation, reason in ends]
        lane._after.append((notices.bind_ends, (told,)))

    before(daemon.binds, "end_all", bind_ends)

    # ---- connections and time

    hung_up = daemon.board._hung_up

    def told_hung_up(peer: Any) -> None:
        hung_up(peer)
        notices.hung_up(peer.connection)

    daemon.board._hung_up = told_hung_up
    turn = daemon.board.turn

    def judged_turn(judged: float | None = None, wait: float = 0.0) -> bool:
        referee.judged = None if judged is None else judged + world.clock.booted
        world.first_pass(referee.judged)
        if referee.judged is not None:
            world.was_deaf(referee.judged)
        try:
            done: bool = turn(judged, wait)
        finally:
            referee.judged = None
        return done

    daemon.board.turn = judged_turn
    tick = daemon.upkeep.tick

    def told_tick(*arguments: Any) -> bool:
        referee.judged = None
        world.first_pass(None)
        more: bool = tick(*arguments)
        if not more:
            notices.ticked()
            world.recoveries.remember_switches()
        return more

    daemon.upkeep.tick = told_tick

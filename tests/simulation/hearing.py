"""What a watcher heard, held against what was noticed while it watched: nothing missing, nothing made up, nothing out of order on one key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parties import NEVER, Heard, Told
from replies import Place
from world import World


def judge(world: World, heard: Heard) -> Iterator[str]:
    if heard.begun < 0 or not heard.on:
        return
    events: list[Told] = world.referee.hearable
    seq = 0
    came: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    gaps = False
    for each in heard.came:
        if each["method"] == "gap":
            if each["from_seq"] != seq + 1 or each["to_seq"] < each["from_seq"]:
                yield f"a gap from {each['from_seq']} after {seq} (section 2: watch)"
            seq, gaps = each["to_seq"], True
            continue
        if each["seq"] != seq + 1:
            yield f"event {each['seq']} after {seq} (section 6: seq counts from 1)"
        seq = each["seq"]
        place = world.place_of(bytes.fromhex(each["key_hash"]))
        came[place].append((each["type"], each["generation"]))
        lease = world.referee.known.get(each["generation"])
        if (
            lease is None
            or (lease.place, lease.holder, lease.scope) != (place, each["holder"], each["scope"])
            or each["key"] not in (None, place[1])
        ):
            yield f"an event tells of {each}, which is not generation {each['generation']}"
    expected: dict[Place, list[Told]] = defaultdict(list)
    for event in events[heard.begun : heard.ended]:
        in_scope = heard.scope is None or event.scope == heard.scope
        if event.place[0] == heard.namespace and heard.key in (None, event.place[1]) and in_scope:
            expected[event.place].append(event)
    earlier = {(event.type, event.generation) for event in events[: heard.begun]}
    for place in {**expected, **came}:
        yield from _one_key(
            place, expected[place], came[place], earlier, ends=heard.ended_at if heard.complete else -NEVER, gaps=gaps
        )


def _one_key(
    place: Place,
    expected: list[Told],
    came: list[tuple[str, int]],
    earlier: set[tuple[str, int]],
    *,
    ends: float,
    gaps: bool,
) -> Iterator[str]:
    # How much of what was due may be behind what came: more than one answer, for a renewal that was taken back looks like the next, which stood.
    reached = {0}
    for type, generation in came:
        before, reached = reached, set()
        for start in before:
            at = start
            while at < len(expected):
                if (expected[at].type, expected[at].generation) == (type, generation):
                    reached.add(at + 1)
                if not expected[at].optional and not gaps:
                    break
                at += 1
            if type in ("granted", "renewed") and (type, generation) in earlier:
                reached.add(start)  # decided before the watch began, flushed and told after
        if not reached:
            due = [(each.type, each.generation) for each in expected[min(before) : min(before) + 3]]
            yield f"{type} {generation} of {place} is told where {due} was due"
            return
    if not gaps and ends > -NEVER:
        missing = [
            (each.type, each.generation) for each in expected[max(reached) :] if not each.optional and each.certain_at < ends
        ]
        if missing:
            yield f"{missing} of {place} are not told (section 2: never silence)"

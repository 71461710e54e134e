"""What is only looked at: `list`, `info`, and the operator's `revoke` beside them.

These run in the lane like everything else, so they see exactly what has been decided before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from leased import model, rules
from leased.calls import Call
from leased.clock import rfc3339
from leased.config_keys import Config
from leased.errors import PeerError
from leased.holds import MAX_HOLD_SECONDS, Held
from leased.lessor import Lessor
from leased.model import Identity, Reply
from leased.start import Start
from leased.version import VERSION

log = structlog.get_logger()

PAGE_BYTES: Final = 128 * 1024  # a page ends here even below its limit; the cursor goes on
ENTRY_BYTES: Final = 260  # an entry without its texts
SCANNED_AT_ONCE: Final = 5000  # records read for one page when a holder is asked for; then the page ends early


class Views:
    def __init__(self, lessor: Lessor, start: Start, config: Config, install_id: str, connections: Callable[[], int]) -> None:
        self._lessor = lessor
        self._start = start
        self.config = config
        self._install_id = install_id
        self._connections = connections
        self._since = lessor.now.boot
        lessor.operations[model.ListRequest] = self.list
        lessor.operations[model.InfoRequest] = self.info
        lessor.operations[model.RevokeRequest] = self.revoke

    def list(self, call: Call, request: model.ListRequest) -> None:
        lessor = self._lessor
        lessor.gate.admit_reading()
        identity = call.identity
        after = request.cursor or 0
        if request.all:
            require_operator(identity, "all")
            items = lessor.index.of_all(after)
        else:
            items = lessor.index.of_namespace(identity.namespace, after, request.scope)
        entries: list[Reply] = []
        size, cursor, scanned = 0, None, 0
        for generation, key_hash in items:
            if len(entries) >= request.limit or size >= PAGE_BYTES or scanned >= SCANNED_AT_ONCE:
                cursor = str(after)
                break
            after = generation
            scanned += 1
            record = lessor.record(key_hash)
            if record is None or record.generation != generation:
                continue
            if request.holder not in {None, record.holder} or (request.all and request.scope not in {None, record.scope}):
                continue
            text = lessor.index.texts.get(key_hash)
            entry = rules.listed(record, text, key_hash, lessor.now)
            if request.all:
                entry["namespace"] = record.namespace
            entries.append(entry)
            size += ENTRY_BYTES + len(text or "") * 2 + len(record.holder) + len(record.scope or "")
        lessor.lane.after(call.answer, {"leases": entries, "cursor": cursor})

    def revoke(self, call: Call, request: model.RevokeRequest) -> None:
        lessor = self._lessor
        lessor.gate.admit_reading()
        identity = call.identity
        require_operator(identity, "revoke")
        if request.key_hash is not None:
            key_hash = request.key_hash
        else:
            assert request.key is not None
            key_hash = lessor.digests.key_hash(request.namespace or identity.namespace, request.key)
        record = lessor.standing(key_hash, request.key)
        namespace = request.namespace or (identity.namespace if request.key is not None else None)
        if record is not None and namespace not in {
            None,
            record.namespace,
        }:  # another's lease stands: what the ledger has of it stays
            lessor.lane.after(call.answer, rules.revoke(None, lessor.now).reply)
            return
        if record is None:
            lessor.gate.admit_unknown_key(lessor.now.boot)
        decision = rules.revoke(record, lessor.now)
        if decision.lease is not None:
            lessor.end(key_hash, decision.lease, rules.REVOKED, request.reason)
            lessor.lane.after(self._revoked, identity, key_hash, decision.lease.generation, request.reason)
        # The old fence is dead only when no power cut can bring its lease back: until then nothing is said.
        lessor.lane.after(self._tell_revoked, call, key_hash, decision.reply)
        if decision.lease is not None and lessor.queues:
            lessor.pass_on(key_hash)

    def _revoked(self, identity: Identity, key_hash: bytes, generation: int, reason: str) -> None:
        log.warning("lease.revoked", key_hash=key_hash.hex(), generation=generation, reason=reason, uid=identity.uid)

    def _tell_revoked(self, call: Call, key_hash: bytes, reply: Reply) -> None:
        lessor = self._lessor
        number = lessor.journal.end(key_hash)
        if number is None:
            call.answer(reply)
            return
        otherwise: Reply = {"revoked": None, "reason": "store", "retry_after_seconds": rules.UNKNOWN_RETRY_SECONDS}
        lessor.holds.add_plain(number, lessor.now.boot + MAX_HOLD_SECONDS, Held(call, reply), otherwise)

    def info(self, call: Call, request: model.InfoRequest) -> None:
        self._lessor.lane.after(call.answer, self.describe(call.identity))

    def describe(self, identity: Identity) -> Reply:
        """`info`: what a caller may rely on, and what an operator looks at first."""
        lessor, config = self._lessor, self.config
        limits = config.limits
        now = lessor.now
        return {
            "name": "leased",
            "version": VERSION,
            "namespace": identity.namespace,
            "operator": identity.operator,
            "install_id": self._install_id,
            "limits": {
                "max_leases": config.max_leases,
                "max_leases_per_namespace": limits.max_leases_per_namespace,
                "max_connections": limits.max_connections,
                "max_connections_per_uid": limits.max_connections_per_uid,
                "max_waiters_per_key": limits.max_waiters_per_key,
                "max_waiters_per_namespace": limits.max_waiters_per_namespace,
                "max_waiters_per_connection": limits.max_waiters_per_connection,
                "max_watchers_per_uid": limits.max_watchers_per_uid,
                "max_switches_per_namespace": limits.max_switches_per_namespace,
                "max_spent_request_ids": limits.max_spent_request_ids,
                "requests_per_second_per_uid": limits.requests_per_second_per_uid,
                "message_seconds": limits.message_seconds,
                "max_message_bytes": 65536,
                "max_key_bytes": model.MAX_KEY_BYTES,
                "max_holder_bytes": model.MAX_HOLDER_BYTES,
                "min_ttl_seconds": model.MIN_TTL_SECONDS,
                "max_ttl_seconds": model.MAX_TTL_SECONDS,
                "max_wait_seconds": model.MAX_WAIT_SECONDS,
            },
            "store": {
                "state": self._state(),
                "wait_out_seconds": lessor.gate.wait_out,
                "no_grant_for_seconds": max(0.0, lessor.gate.no_grant_before - now.boot),
                "ledger_settled": not lessor.journal.unsettled,
                "ledger_pending": len(lessor.journal),
                "ledger_flushes": lessor.journal.flushes,
                "ledger_failures": lessor.journal.failures,
                "ledger_error": lessor.journal.last_error if lessor.journal.unsettled else "",
                "damaged_records": len(lessor.damaged),
            },
            "clock": {"boottime": now.boot, "boot_id": now.boot_id, "wall": rfc3339(now.wall)},
            "uptime_seconds": max(0.0, now.boot - self._since),
            "leases": lessor.index.count(identity.namespace),
            "waiting": lessor.queues.of_namespace(identity.namespace),
            "counts": dict(lessor.counts) if identity.operator else None,
            "connections": self._connections() if identity.operator else None,
        }

    def _state(self) -> str:
        lessor = self._lessor
        gate = lessor.gate
        return gate.shut or gate.closed or lessor.lane.broken or ("recovering" if gate.recovering(lessor.now.boot) else "ok")


def require_operator(identity: Identity, what: str) -> None:
    if not identity.operator:
        raise PeerError(
            "permission_denied", f"{what} is for operators: uid 0, the daemon's own user, and members of operator_group"
        )

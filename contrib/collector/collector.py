#!/usr/bin/env python3
"""A collector for the billing events of `leased`: takes CloudEvents batches over HTTP, keeps each event once by its id, shows totals.

    python collector.py --listen 127.0.0.1:8700 --database events.db --token-file token

It is small so that it can be read, and whole so that it can be relied on: a batch is answered 202 when it is on the disk, a repeat changes
nothing, and an event that comes again under its id with other words in it is kept as it first was and counted as a conflict.  Only the
standard library is needed.  It speaks plain HTTP: beyond this host, put it behind something that speaks TLS.

    POST /events   application/cloudevents-batch+json    202 {"new": 3, "repeats": 0}
    GET  /totals                                         {"events", "conflicts", "amounts": [{"subject", "type", "currency", "events", "amount"}]}

With --demand, a batch is only taken with an x402 payment of that amount.  The payment is recorded and neither verified nor settled: this
is for trying out how `leased` pays, and no way to be paid.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hmac
import json
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

MEDIA_TYPE = "application/cloudevents-batch+json"
MAX_BODY_BYTES = 1 << 20
MAX_BATCH_EVENTS = 1000
MICRO = 1_000_000
SECONDS = 30.0  # for one request

_TABLES = """
CREATE TABLE IF NOT EXISTS events (
    source TEXT NOT NULL, id TEXT NOT NULL, type TEXT NOT NULL, subject TEXT NOT NULL, time TEXT NOT NULL,
    currency TEXT NOT NULL, micro INTEGER NOT NULL, whole TEXT NOT NULL, PRIMARY KEY (source, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conflicts (source TEXT NOT NULL, id TEXT NOT NULL, whole TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS payments (signature TEXT PRIMARY KEY, key TEXT NOT NULL);
"""


class Malformed(ValueError):
    """What is wrong with a batch, as a sentence."""


class Event(NamedTuple):
    source: str
    id: str
    type: str
    subject: str
    time: str
    currency: str
    micro: int
    whole: str


class Taken(NamedTuple):
    new: int
    repeats: int


class Store:
    """The events in SQLite.  One connection, one user at a time; a batch is one flushed transaction."""

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)

    def take(self, events: list[Event]) -> Taken:
        """When this returns they are on the disk."""
        new = 0
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                for event in events:
                    added = self._database.execute("INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", event).rowcount
                    new += added
                    if not added:
                        self._compare(event)
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
        return Taken(new, len(events) - new)

    def _compare(self, event: Event) -> None:
        """The same id with other words in it is no repeat."""
        question = "SELECT whole FROM events WHERE source = ? AND id = ?"
        (whole,) = self._database.execute(question, (event.source, event.id)).fetchone()
        if whole != event.whole:
            self._database.execute("INSERT INTO conflicts VALUES (?, ?, ?)", (event.source, event.id, event.whole))

    def pay(self, signature: str, key: str) -> bool:
        """Record a payment; False for one that came with another batch before."""
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO payments VALUES (?, ?)", (signature, key))
            (there,) = self._database.execute("SELECT key FROM payments WHERE signature = ?", (signature,)).fetchone()
        return bool(there == key)

    def totals(self) -> dict[str, Any]:
        with self._lock:
            rows = self._database.execute(
                "SELECT subject, type, currency, COUNT(*), SUM(micro) FROM events GROUP BY subject, type, currency ORDER BY 1, 2, 3"
            ).fetchall()
            (conflicts,) = self._database.execute("SELECT COUNT(*) FROM conflicts").fetchone()
        names = ("subject", "type", "currency", "events")
        amounts = [dict(zip(names, row, strict=False)) | {"amount": amount_text(row[4])} for row in rows]
        return {"events": sum(row[3] for row in rows), "conflicts": conflicts, "amounts": amounts}

    def close(self) -> None:
        with self._lock:
            self._database.close()


def amount_text(micro: int) -> str:
    """Integer micro-units as the shortest decimal string: 2000 is "0.002"."""
    whole, rest = divmod(micro, MICRO)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")


def micro_of(text: object) -> int:
    """A decimal string as integer micro-units.  Raises Malformed."""
    whole, point, rest = text.partition(".") if isinstance(text, str) else ("", "", "")
    digits = whole.isascii() and whole.isdigit() and (rest.isascii() and rest.isdigit() if point else True)
    if not digits or len(whole) > 12 or len(rest) > 6:
        raise Malformed('amount must be a decimal string such as "0.002", with at most 6 decimals')
    return int(whole) * MICRO + int(rest.ljust(6, "0") or 0)


def read_batch(body: bytes) -> list[Event]:
    """Raises Malformed."""
    try:
        batch = json.loads(body)
    except (ValueError, RecursionError):
        raise Malformed("the body is not JSON") from None
    if not isinstance(batch, list) or len(batch) > MAX_BATCH_EVENTS:
        raise Malformed(f"the body must be an array of at most {MAX_BATCH_EVENTS} events")
    return [_event(at, each) for at, each in enumerate(batch)]


def _event(at: int, each: Any) -> Event:
    if not isinstance(each, dict) or each.get("specversion") != "1.0":
        raise Malformed(f"event {at} is not a CloudEvent 1.0")
    fields = [each.get(name) for name in ("source", "id", "type", "subject", "time")]
    facts = each.get("data")
    if not all(isinstance(field, str) and 0 < len(field) <= 1024 for field in fields) or not isinstance(facts, dict):
        raise Malformed(f"event {at} must have source, id, type, subject and time as strings, and data as an object")
    currency = facts.get("currency")
    if not isinstance(currency, str):
        raise Malformed(f"event {at} has no currency")
    source, name, kind, subject, time = map(str, fields)
    return Event(source, name, kind, subject, time, currency, micro_of(facts.get("amount")), json.dumps(each, sort_keys=True))


class Terms(NamedTuple):
    """What has to be paid for a batch, if anything; addresses and chain as x402 names them."""

    amount: int
    payee: str
    network: str
    asset: str

    def demand(self, url: str) -> str:
        """The header PAYMENT-REQUIRED."""
        offer = {
            "scheme": "exact",
            "network": self.network,
            "asset": self.asset,
            "amount": str(self.amount),
            "payTo": self.payee,
            "maxTimeoutSeconds": 300,
            "extra": {"name": "USDC", "version": "2"},
        }
        whole = {"x402Version": 2, "error": "payment is required", "resource": {"url": url}, "accepts": [offer]}
        return base64.b64encode(json.dumps(whole).encode()).decode()

    def met_by(self, signature: str) -> bool:
        try:
            payload = json.loads(base64.b64decode(signature, validate=True))
            authorization = payload["payload"]["authorization"]
            return bool(authorization["to"].lower() == self.payee.lower() and int(authorization["value"]) == self.amount)
        except (binascii.Error, ValueError, KeyError, TypeError, AttributeError):
            return False


class Collector(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], store: Store, token: str = "", terms: Terms | None = None) -> None:
        super().__init__(address, Door)
        self.store = store
        self.token = token
        self.terms = terms


class Door(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "leased-collector"
    timeout = SECONDS
    server: Collector

    def do_GET(self) -> None:
        if self.path != "/totals":
            self.answer(404, {"error": "GET /totals is what there is to see"})
        elif self.allowed():
            self.answer(200, self.server.store.totals())

    def do_POST(self) -> None:
        body = self.body()
        if body is None:
            return
        if self.path != "/events":
            self.answer(404, {"error": "batches go to POST /events"})
        elif self.allowed() and self.paid():
            self.take(body)

    def take(self, body: bytes) -> None:
        if self.headers.get_content_type() != MEDIA_TYPE:
            self.answer(415, {"error": f"the type must be {MEDIA_TYPE}"})
            return
        try:
            taken = self.server.store.take(read_batch(body))
        except Malformed as wrong:
            self.answer(400, {"error": str(wrong)})
        except sqlite3.Error as wrong:
            self.answer(503, {"error": f"the database cannot be written: {wrong}"}, {"Retry-After": "5"})
        else:
            self.answer(202, taken._asdict())

    def body(self) -> bytes | None:
        """None when it has been refused."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.refuse(411, "Content-Length is needed")
        elif int(length[:12]) > MAX_BODY_BYTES:
            self.refuse(413, f"at most {MAX_BODY_BYTES} bytes are taken at once")
        else:
            return self.rfile.read(int(length))
        return None

    def allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if not self.server.token or hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return True
        self.answer(401, {"error": "a bearer token is needed"}, {"WWW-Authenticate": "Bearer"})
        return False

    def paid(self) -> bool:
        terms = self.server.terms
        if terms is None:
            return True
        signature = self.headers.get("PAYMENT-SIGNATURE", "")
        if terms.met_by(signature) and self.server.store.pay(signature, self.headers.get("Idempotency-Key", "")):
            return True
        url = f"http://{self.headers.get('Host', 'localhost')}/events"
        self.answer(402, {"error": "payment is required"}, {"PAYMENT-REQUIRED": terms.demand(url)})
        return False

    def refuse(self, status: int, text: str) -> None:
        """What follows on this connection cannot be told from the body: it ends."""
        self.close_connection = True
        self.answer(status, {"error": text})

    def answer(self, status: int, whole: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(whole).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """One line for each request would be one for each batch, for ever."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", default="127.0.0.1:8700", metavar="ADDR:PORT")
    parser.add_argument("--database", default="events.db", type=Path, metavar="FILE")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the bearer token callers must bring")
    parser.add_argument("--demand", metavar="AMOUNT", help='ask for a payment for each batch, such as "0.004"; it is not settled')
    parser.add_argument("--payee", default="0x" + "00" * 20, metavar="ADDRESS")
    parser.add_argument("--network", default="eip155:84532", metavar="CAIP-2")
    parser.add_argument("--asset", default="0x036CbD53842c5426634e7929541eC2318f3dCF7e", metavar="ADDRESS")
    options = parser.parse_args(words)
    host, _, port = options.listen.rpartition(":")
    terms = Terms(micro_of(options.demand), options.payee, options.network, options.asset) if options.demand else None
    token = options.token_file.read_text().strip() if options.token_file else ""
    store = Store(options.database)
    with Collector((host, int(port)), store, token, terms) as collector:
        print(f"collector: http://{host}:{collector.server_port}/events into {options.database}", file=sys.stderr, flush=True)
        try:
            collector.serve_forever()
        except KeyboardInterrupt:
            pass
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

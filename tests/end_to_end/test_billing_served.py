"""The whole path on one machine: refusals at the daemon, `usage`, the outbox and its command, the reference collector."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import TOKEN, collector_module
from daemons import POLL_SECONDS, ROOT, Daemon, MakeDaemon

from leased.state.ledger import Ledger
from leased.state.outbox import encode_event
from leased.tariff import REFUSAL, Event

KEY = "gpu:0"
DEADLINE_SECONDS = 20.0


def eventually(question: Callable[[], Any]) -> Any:
    until = time.monotonic() + DEADLINE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < until, "it does not happen"
        time.sleep(POLL_SECONDS)
    return answer


class CollectorProcess:
    """contrib/collector as its users run it."""

    def __init__(self, home: Path, *more: str) -> None:
        self.token_file = home / "token"
        self.token_file.write_text(TOKEN + "\n")
        command = [
            sys.executable,
            str(ROOT / "contrib/collector/collector.py"),
            "--listen",
            "127.0.0.1:0",
            "--database",
            str(home / "events.db"),
        ]
        self._process = subprocess.Popen(
            [*command, "--token-file", str(self.token_file), *more], stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        assert self._process.stderr is not None
        self.url = self._process.stderr.readline().split()[1]

    def call(self, path: str, body: bytes | None = None, token: str = TOKEN, **headers: str) -> tuple[int, Any, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()} | {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.url.removesuffix("/events") + path, body, named)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
                return response.status, json.load(response), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error), dict(error.headers)

    def totals(self) -> Any:
        status, totals, _ = self.call("/totals")
        assert status == 200
        return totals

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    made = CollectorProcess(tmp_path)
    yield made
    made.close()


def billed(make_daemon: MakeDaemon, url: str | None = None, token_file: Path | None = None, more: str = "") -> Daemon:
    config = f"[billing]\nenabled = true\n{more}"
    if url is not None:
        config += f'[upstream]\nurl = "{url}"\ntimeout_seconds = 5\n'
        config += f'token_file = "{token_file}"\n' if token_file is not None else ""
    return make_daemon(config).start()


def refuse(daemon: Daemon, count: int) -> list[str]:
    """So many billed refusals.  The ids of their events."""
    with daemon.rpc() as rpc:
        if not rpc.call("check", key=KEY)["held"]:
            assert rpc.call("lease", key=KEY, holder="holder")["acquired"] is True
        told = rpc.call("usage")["refusals_billed"]
        charges = [rpc.call("lease", key=KEY, holder=f"late-{told + number}")["charge"] for number in range(count)]
    assert [charge["amount"] for charge in charges] == ["0.002"] * count
    return [charge["event_id"] for charge in charges]


def command(daemon: Daemon, *words: str, typed: str = "", socket: bool = True) -> tuple[int, str, str]:
    """`leased outbox` beside the daemon."""
    places = [f"--config={daemon.config_path}", f"--state-dir={daemon.state_dir}", f"--runtime-dir={daemon.runtime_dir}"]
    called = [sys.executable, "-m", "leased", "outbox", *places, f"--socket={daemon.socket}", *words]
    done = subprocess.run(called, input=typed, capture_output=True, text=True, timeout=60, cwd="/")
    return done.returncode, done.stdout, done.stderr


def bury(daemon: Daemon, count: int) -> None:
    """The daemon is stopped; so many events of its ledger are dead letters now."""
    ledger = Ledger(daemon.state_dir)
    events = [
        Event(f"{number:032x}", REFUSAL, "local", 2_000, "USDC", "ab" * 20, "cd" * 16, 1_790_000_000.0) for number in range(count)
    ]
    ops = [("event", "another", number + 1, encode_event(event), 1000) for number, event in enumerate(events)]
    ledger.apply([*ops, *(("bury", number + 1, "upstream answered 422") for number in range(count))])
    ledger.close()


# ---- the path


def test_what_is_billed_arrives_at_the_collector(make_daemon: MakeDaemon, collector: CollectorProcess) -> None:
    daemon = billed(make_daemon, collector.url, collector.token_file)
    refuse(daemon, 7)
    with daemon.rpc() as rpc:
        assert rpc.call("agent_lock", key="other", op="claim")["charge"]["amount"] == "0.001"
        eventually(lambda: rpc.call("usage")["pending_upstream"] == 0)
        usage = rpc.call("usage")
        since = rpc.call("usage", since="2200-01-01T00:00:00Z")
    totals = collector.totals()
    assert (totals["events"], totals["conflicts"]) == (8, 0)
    assert totals["amounts"] == [
        {"subject": "local", "type": "leased.agent_lock.called", "currency": "USDC", "events": 1, "amount": "0.001"},
        {"subject": "local", "type": "leased.refusal.billed", "currency": "USDC", "events": 7, "amount": "0.014"},
    ]
    assert (usage["amount"], usage["refusals_billed"], usage["calls_billed"], since["amount"]) == ("0.015", 7, 1, "0")
    assert daemon.terminate() == 0


def test_a_wrong_credential_keeps_everything_until_the_file_is_right(
    make_daemon: MakeDaemon, collector: CollectorProcess, tmp_path: Path
) -> None:
    """The file is read again when it has changed: no restart."""
    credential = tmp_path / "credential"
    credential.write_text("wrong")
    daemon = billed(make_daemon, collector.url, credential)
    refuse(daemon, 3)
    eventually(lambda: daemon.events("upstream.refused"))
    assert daemon.events("upstream.refused")[0]["status"] == 401
    assert collector.totals()["events"] == 0
    credential.write_text(TOKEN)
    eventually(lambda: collector.totals()["events"] == 3)
    eventually(lambda: daemon.events("upstream.recovered"))
    assert TOKEN not in daemon.logs() and "wrong" not in daemon.logs()


def test_an_upstream_that_is_not_there_costs_no_lease_anything(make_daemon: MakeDaemon) -> None:
    daemon = billed(make_daemon, "http://127.0.0.1:9/events")
    refuse(daemon, 5)
    eventually(lambda: daemon.events("upstream.failed"))
    with daemon.rpc() as rpc:
        usage = rpc.call("usage")
        assert (usage["pending_upstream"], usage["amount"]) == (5, "0.01")
        assert rpc.call("lease", key="free", holder="A")["acquired"] is True
    assert command(daemon, "list")[1].endswith(
        "0 dead letters; 5 events wait to be shipped\nupstream takes nothing now: later; the log says more\n"
    )


def test_the_collector_asks_for_what_it_documents(tmp_path: Path) -> None:
    collector = CollectorProcess(tmp_path, "--demand", "0.004", "--payee", "0x" + "ab" * 20)
    try:
        event = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "subject": "local", "time": "2026-01-01T00:00:00Z"}
        body = json.dumps([event | {"data": {"amount": "0.002", "currency": "USDC"}}]).encode()
        media = {"Content_Type": "application/cloudevents-batch+json"}
        status, _, headers = collector.call("/events", body, **media)
        assert status == 402
        from leased.payer import read_demand
        from leased.upstream import Answer

        (offer,) = read_demand(Answer(402, 0.0, (("payment-required", headers["PAYMENT-REQUIRED"]),))).offers
        assert (offer.amount, offer.network) == (4_000, "eip155:84532")
        payload = {"payload": {"authorization": {"to": "0x" + "AB" * 20, "value": "4000"}}}
        paid = base64.b64encode(json.dumps(payload).encode()).decode()
        assert collector.call("/events", body, Payment_Signature=paid, Idempotency_Key="a", **media)[:2] == (
            202,
            {"new": 1, "repeats": 0},
        )
        assert collector.call("/events", body, Payment_Signature=paid, Idempotency_Key="a", **media)[:2] == (
            202,
            {"new": 0, "repeats": 1},
        )
        assert collector.call("/events", body, Payment_Signature=paid, Idempotency_Key="b", **media)[0] == 402
    finally:
        collector.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"{}", "must be an array"),
        (b"[7]", "not a CloudEvent"),
        (b'[{"specversion": "1.0"}]', "must have source"),
        (
            b'[{"specversion":"1.0","source":"s","id":"1","type":"t","subject":"x","time":"z","data":{"amount":0.002,"currency":"USDC"}}]',
            "decimal string",
        ),
    ],
)
def test_the_collector_says_what_is_wrong_with_a_batch(collector: CollectorProcess, body: bytes, said: str) -> None:
    status, told, _ = collector.call("/events", body, Content_Type="application/cloudevents-batch+json")
    assert status == 400 and said in told["error"]
    assert collector.call("/events", b"[]", token="no", Content_Type="application/cloudevents-batch+json")[0] == 401
    assert collector.call("/events", b"[]", Content_Type="text/plain")[0] == 415
    assert collector.call("/nowhere")[0] == 404


def test_an_event_that_comes_again_with_other_words_is_a_conflict(tmp_path: Path) -> None:
    module = collector_module()
    store = module.Store(tmp_path / "events.db")
    event = module.Event("s", "1", "t", "local", "z", "USDC", 2_000, "one")
    assert store.take([event, event]) == (1, 1)
    assert store.take([event._replace(micro=9, whole="two")]) == (0, 1)
    totals = store.totals()
    assert (totals["events"], totals["conflicts"], totals["amounts"][0]["amount"]) == (1, 1, "0.002")
    store.close()


# ---- dead letters, with a daemon and without


def test_dead_letters_are_listed_tried_again_and_dropped_beside_a_running_daemon(
    make_daemon: MakeDaemon, collector: CollectorProcess
) -> None:
    daemon = billed(make_daemon, collector.url, collector.token_file)
    daemon.terminate()
    bury(daemon, 4)
    daemon.start()
    code, out, _ = command(daemon, "list")
    assert code == 0
    assert (
        out.splitlines()[0] == '1\tleased.refusal.billed 0.002 USDC in "local" at 2026-09-21T14:13:20.000Z: upstream answered 422'
    )
    assert out.splitlines()[-1] == "4 dead letters; 0 events wait to be shipped"
    assert command(daemon, "retry", "2")[:2] == (0, "back in the outbox: 1\n")
    eventually(lambda: collector.totals()["events"] == 1)
    assert command(daemon, "retry", "2")[0] == 1
    code, out, err = command(daemon, "drop", "1", typed="n\n")
    assert (code, out) == (1, "") and "delete dead letter 1 for good? [y/N]" in err
    assert command(daemon, "drop", "1", typed="y\n")[:2] == (0, "deleted: 1\n")
    assert command(daemon, "retry", "--all", "--json")[:2] == (0, '{"retried": 2}\n')
    eventually(lambda: collector.totals()["events"] == 3)
    listed = json.loads(command(daemon, "list", "--json")[1])
    assert (listed["dead"], listed["dead_letters"], listed["waiting"], listed["payment"]) == ([], 0, 0, None)
    assert [line["event"] for name in ("outbox.retried", "outbox.dropped") for line in daemon.events(name)] == [
        "outbox.retried"
    ] * 2 + ["outbox.dropped"]
    with daemon.rpc() as rpc:
        assert rpc.call("usage")["dead_letters"] == 0


def test_dead_letters_without_a_daemon(make_daemon: MakeDaemon) -> None:
    daemon = billed(make_daemon)
    daemon.terminate()
    bury(daemon, 3)
    assert len(json.loads(command(daemon, "list", "--json")[1])["dead"]) == 3
    assert command(daemon, "retry", "1")[:2] == (0, "back in the outbox: 1\n")
    assert command(daemon, "drop", "--all", "--yes")[:2] == (0, "deleted: 2\n")
    assert command(daemon, "drop", "--all", "--yes")[0] == 1
    code, out, _ = command(daemon, "list")
    assert (code, out) == (0, "0 dead letters; 1 events wait to be shipped\n")
    assert command(daemon, "drop", "--payment", "--yes")[0] == 1
    daemon.start()
    with daemon.rpc() as rpc:
        assert rpc.call("usage")["pending_upstream"] == 1


def test_pages_of_dead_letters_are_one_list(make_daemon: MakeDaemon) -> None:
    daemon = billed(make_daemon)
    daemon.terminate()
    bury(daemon, 450)
    without = json.loads(command(daemon, "list", "--json")[1])
    daemon.start()
    beside = json.loads(command(daemon, "list", "--json")[1])
    assert [letter["sequence"] for letter in beside["dead"]] == list(range(1, 451))
    assert beside["dead"] == without["dead"]
    with daemon.rpc() as rpc:
        page = rpc.call("outbox_list", limit=2)
        assert ([letter["sequence"] for letter in page["dead"]], page["cursor"]) == ([1, 2], "2")
        assert [letter["sequence"] for letter in rpc.call("outbox_list", limit=1, cursor="449")["dead"]] == [450]


@pytest.mark.parametrize("words", [("drop",), ("retry", "x"), ("retry", "1", "--all"), ("drop", "0", "--yes"), ("nonsense",)])
def test_wrong_usage_is_said(make_daemon: MakeDaemon, words: tuple[str, ...]) -> None:
    daemon = make_daemon()
    code, out, err = command(daemon, *words)
    assert (code, out) == (64, "")
    assert err.splitlines()[-1].startswith("leased: ")


def test_without_any_state_the_command_says_what_to_do(make_daemon: MakeDaemon) -> None:
    code, _, err = command(make_daemon(), "list")
    assert code == 78 and "start the daemon once" in err


def test_lease_usage_tells_people_and_programs(make_daemon: MakeDaemon) -> None:
    daemon = billed(make_daemon)
    refuse(daemon, 2)

    def lease(*words: str) -> tuple[int, str]:
        called = [sys.executable, "-m", "leased.client.command", "usage", "--socket", str(daemon.socket), *words]
        done = subprocess.run(called, capture_output=True, text=True, timeout=60, cwd="/")
        return done.returncode, done.stdout + done.stderr

    code, out = lease()
    assert code == 0
    assert out.splitlines()[0] == "0.004 USDC in local: 2 refusals, 0 agent-lock calls."
    code, out = lease("--json", "--since", "2200-01-01T00:00:00Z")
    assert (code, json.loads(out)["amount"]) == (0, "0")
    code, out = lease("--since", "yesterday")
    assert code == 64 and "since must be an RFC 3339 instant" in out


@pytest.mark.packages
@pytest.mark.slow
def test_a_daemon_with_a_wallet_pays_what_is_asked_within_its_caps(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """The official package in a real daemon; the collector looks at the payment and does not settle it."""
    payee, asset = "0x" + "ab" * 20, "0x036cbd53842c5426634e7929541ec2318f3dcf7e"
    wallet = tmp_path / "wallet"
    wallet.write_text("4c" * 32)
    wallet.chmod(0o600)
    collector = CollectorProcess(tmp_path, "--demand", "0.004", "--payee", payee)
    try:
        more = f'[x402]\nwallet_key_file = "{wallet}"\nnetworks = "eip155:84532"\nassets = "{asset}"\npayees = "{payee}"\n'
        more += 'max_per_batch = "0.005"\nmax_per_day = "0.01"\n'
        daemon = billed(make_daemon, collector.url, collector.token_file, more)
        for count in (3, 2):
            refuse(daemon, count)
            with daemon.rpc() as rpc:
                eventually(lambda rpc=rpc: rpc.call("usage")["pending_upstream"] == 0)
        assert collector.totals()["events"] == 5
        paid = daemon.events("upstream.paid")
        assert [(line["amount"], line["events"], line["payee"]) for line in paid] == [("0.004", 3, payee), ("0.004", 2, payee)]
        refuse(daemon, 1)  # a third would go above the cap of the day
        eventually(lambda: daemon.events("upstream.unpaid"))
        daemon.kill()
        daemon.start()
        eventually(lambda: len(daemon.events("upstream.unpaid")) == 2)
        assert "max_per_day" in daemon.events("upstream.unpaid")[1]["error"]
        assert collector.totals()["events"] == 5
        assert json.loads(command(daemon, "list", "--json")[1])["failing"] == "unpaid"
        assert "4c4c" not in daemon.logs()
    finally:
        collector.close()

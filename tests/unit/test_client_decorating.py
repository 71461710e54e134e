from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator

import pytest
from loops import Loop, under_both

from leased import LeaseLost, LeaseRefused
from leased.testing import FakeLeased


def keys(fake: FakeLeased) -> list[str]:
    return [fields["key"] for operation, fields in fake.calls if operation == "lease"]


def test_each_call_holds_a_lease_of_its_own_and_gives_what_the_function_gives() -> None:
    fake = FakeLeased()
    client = fake.client("me")

    @client.leased("report:{day}/{part}", ttl=30, scope="night")
    def write(day: str, part: int = 7) -> tuple[str, str | None]:
        """Writes."""
        return day, client.check(f"report:{day}/{part}").held_by

    assert write("monday") == ("monday", "me")
    assert write(part=2, day="tuesday") == ("tuesday", "me")
    assert keys(fake) == ["report:monday/7", "report:tuesday/2"]
    assert [operation for operation, _ in fake.calls] == ["lease", "check", "release"] * 2
    assert (fake.calls[0][1]["ttl_seconds"], fake.calls[0][1]["scope"]) == (30, "night")
    assert (write.__name__, write.__doc__) == ("write", "Writes.")
    assert list(inspect.signature(write).parameters) == ["day", "part"]


def test_the_key_may_be_a_function_of_the_same_arguments() -> None:
    fake = FakeLeased()

    class Store:
        name = "a"

        @fake.client().leased(lambda self, row: f"{self.name}/{row % 10}")
        def write(self, row: int) -> int:
            return row

    assert Store().write(123) == 123
    assert keys(fake) == ["a/3"]


def test_attributes_of_arguments_and_doubled_braces_are_formatted_as_ever() -> None:
    fake = FakeLeased()

    @fake.client().leased("{{x}}:{store.real}")
    def one(store: int) -> None: ...

    @fake.client().leased("{{x}}")
    def two() -> None: ...

    one(5)
    two()
    assert keys(fake) == ["{x}:5", "{x}"]


def test_a_refusal_keeps_the_function_from_running_and_a_loss_is_told() -> None:
    fake = FakeLeased()
    client = fake.client()
    ran: list[str] = []

    @client.leased("k", ttl=30)
    def work(how: str) -> None:
        ran.append(how)
        if how == "lose":
            fake.lose("k")
        if how == "fail":
            raise KeyError(how)
        if how == "again":
            work("inner")

    with pytest.raises(LeaseLost):
        work("lose")
    with pytest.raises(KeyError):
        work("fail")
    with pytest.raises(LeaseRefused, match="same_label"):
        work("again")
    fake.hold("k")
    with pytest.raises(LeaseRefused, match="somebody else"):
        work("never")
    assert ran == ["lose", "fail", "again"]


def test_what_a_lease_for_the_call_would_not_cover_is_refused_when_it_is_decorated() -> None:
    client, other = FakeLeased().client(), FakeLeased().async_client()

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def both() -> AsyncIterator[int]:
        yield 1

    for function in (coroutine, generator, both):
        with pytest.raises(TypeError, match="is not over when its call returns"):
            client.leased("k")(function)
    for function in (generator, both, len):
        with pytest.raises(TypeError, match="no coroutine function"):
            other.leased("k")(function)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="'nigth', which is no parameter"):
        client.leased("report:{nigth}")(lambda night: night)


@under_both
async def test_a_coroutine_function_is_held_for_as_long_as_it_runs(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client("me")

    @client.leased("{what}", ttl=30)
    async def work(what: str) -> str | None:
        await fake.sleep(100)
        return (await client.check(what)).held_by

    assert await work("k") == "me"
    assert (await client.check("k")).held is False

    @client.leased(lambda: "j", ttl=30)
    async def lose() -> None:
        fake.lose("j")
        await fake.sleep(11)
        await loop.for_ever()

    with pytest.raises(LeaseLost):
        await lose()

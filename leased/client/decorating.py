"""`@client.leased("report:{day}")`: a function that holds a lease for the length of each call."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from leased.client.async_client import AsyncClient
    from leased.client.sync import Client

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


class Leasing(Protocol):
    """A decorator that keeps the type of what it decorates."""

    def __call__(self, function: Callable[Q, S], /) -> Callable[Q, S]: ...


class AsyncLeasing(Protocol):
    def __call__(self, function: Callable[Q, Coroutine[Any, Any, S]], /) -> Callable[Q, Coroutine[Any, Any, S]]: ...


def leased(client: Client, key: str | Callable[..., str], terms: dict[str, Any]) -> Leasing:
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if _waits(function):
            raise TypeError(
                f"{_name(function)} is not over when its call returns, so a lease for the call would not cover it: "
                "decorate coroutine functions by an AsyncClient, and use `with client.lease(...)` inside of generators"
            )
        key_of = _key_of(key, function)

        @wraps(function)
        def holding(*args: P.args, **kwargs: P.kwargs) -> R:
            with client.lease(key_of(*args, **kwargs), **terms):
                return function(*args, **kwargs)

        return holding

    return cast(Leasing, decorate)


def async_leased(client: AsyncClient, key: str | Callable[..., str], terms: dict[str, Any]) -> AsyncLeasing:
    def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{_name(function)} is no coroutine function: decorate it by a Client")
        key_of = _key_of(key, function)

        @wraps(function)
        async def holding(*args: P.args, **kwargs: P.kwargs) -> R:
            async with client.lease(key_of(*args, **kwargs), **terms):
                return await function(*args, **kwargs)

        return holding

    return cast(AsyncLeasing, decorate)


def _waits(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _key_of(key: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., str]:
    """The key for each call.  Raises ValueError for a format that names what is no parameter: now, not at the first call."""
    if not isinstance(key, str):
        return key
    form = key
    named = [name for _, name, _, _ in string.Formatter().parse(form) if name is not None]
    if not named:
        literal = form.format()
        return lambda *args, **kwargs: literal
    signature = inspect.signature(function)
    for name in named:
        if name.partition(".")[0].partition("[")[0] not in signature.parameters:
            raise ValueError(f"the key {form!r} needs {name!r}, which is no parameter of {_name(function)}")

    def formatted(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return form.format(**bound.arguments)

    return formatted


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))

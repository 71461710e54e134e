"""What stands in for `typing` at run time does what `typing` does, as far as it is used."""

from __future__ import annotations

import pickle
import typing
from typing import Any

import pytest

from leased import light


class Light(light.NamedTuple):
    """Of two."""

    name: str
    bounds: tuple[int, ...] = (1, 2)

    def told(self) -> str:
        return f"{self.name} {self.bounds}"

    @property
    def low(self) -> int:
        return self.bounds[0]


class Real(typing.NamedTuple):
    """Of two."""

    name: str
    bounds: tuple[int, ...] = (1, 2)

    def told(self) -> str:
        return f"{self.name} {self.bounds}"

    @property
    def low(self) -> int:
        return self.bounds[0]


@pytest.mark.parametrize("kind", [Light, Real])
def test_named_tuples_are_named_tuples(kind: Any) -> None:
    made = kind("k")
    assert made == ("k", (1, 2)) == tuple(kind(bounds=(1, 2), name="k"))
    assert (made.told(), made.low) == ("k (1, 2)", 1)
    assert made._replace(name="j") == kind("j")
    assert repr(made) == f"{kind.__name__}(name='k', bounds=(1, 2))"
    assert pickle.loads(pickle.dumps(made)) == made
    assert (kind.__doc__, kind.__module__, kind._fields) == ("Of two.", __name__, ("name", "bounds"))
    assert kind._field_defaults == {"bounds": (1, 2)}
    assert set(kind.__annotations__) == {"name", "bounds"}
    assert not hasattr(made, "__dict__")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        kind()
    with pytest.raises(AttributeError):
        made.name = "j"


A = light.TypeVar("A")


class Box(light.Generic[A]):
    __slots__ = ("held",)

    def __init__(self, held: A) -> None:
        self.held = held


def test_a_generic_class_stays_itself_whatever_it_is_given() -> None:
    class Texts(Box[str]):
        __slots__ = ()

    assert Box[int] is Box  # type: ignore[comparison-overlap]
    assert Texts.__mro__[1] is Box
    assert not hasattr(Texts("a"), "__dict__")

"""The names of `typing` that a class statement needs when it runs, without `typing`, whose import costs half of what Python's start does.

Type checkers take them for the real ones.  What only annotations need is imported from `typing` under TYPE_CHECKING, which a module
that clients import sets to False itself: checkers know that name and hold it for true.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generic as Generic
    from typing import NamedTuple as NamedTuple
    from typing import Protocol as Protocol
    from typing import TypeVar as TypeVar
else:

    class Generic:
        """A base that takes any parameters and stays what it is."""

        __slots__ = ()

        def __class_getitem__(cls, _parameters):
            return cls

    class Protocol:
        """The base of a description.  What fits one does not inherit from it, and nothing asks at run time whether it fits."""

        __slots__ = ()

    def TypeVar(name):
        return name

    class _Tuples(type):
        """Makes of a class body what `typing.NamedTuple` makes of it."""

        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            from collections import namedtuple

            fields = body["__annotations__"]
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])
            for attribute, value in body.items():
                if attribute != "__module__":
                    setattr(made, attribute, value)
            return made

    class NamedTuple(metaclass=_Tuples):
        __slots__ = ()

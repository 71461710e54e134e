"""The names of `typing` that a class statement needs when it runs, without `typing`, whose import costs a command half its start.

Type checkers take them for what they stand for.  What only annotations need is imported from `typing` under TYPE_CHECKING, which
modules a client imports set to False themselves: checkers know that name.
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
        """A base that nobody inherits from at run time but the descriptions themselves."""

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
                if attribute not in {"__module__", "__slots__"}:
                    setattr(made, attribute, value)
            return made

    class NamedTuple(metaclass=_Tuples):
        pass

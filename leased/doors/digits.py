"""Regular expressions for numbers within bounds, written as strings: what JSON Schema needs to say which strings count as numbers."""

from __future__ import annotations

MANY = 20  # digits after the point, or zeros ahead; the daemon takes numbers of up to 40 characters


def integer_pattern(low: float, high: float) -> str:
    """Anchored; digits without a sign or zeros ahead."""
    return f"^(?:{_between(int(low), int(high))})$"


def decimal_pattern(low: float, high: float) -> str:
    """Anchored; digits, zeros ahead allowed, with or without decimals.  `low` is an integer or a tenth.  Forms with an exponent and those without
    a digit before the point are taken too and not announced."""
    zeros, decimals = f"0{{0,{MANY}}}", f"(?:\\.[0-9]{{0,{MANY}}})?"
    parts = []
    first = int(low)
    if low > first:  # 0.1: the first decimal counts
        tenth = round((low - first) * 10)
        parts.append(f"{first}\\.[{tenth}-9][0-9]{{0,{MANY}}}")
        first += 1
    if first < int(high):
        parts.append(f"(?:{_between(first, int(high) - 1)}){decimals}")
    parts.append(f"{int(high)}(?:\\.0{{0,{MANY}}})?")
    return f"^{zeros}(?:{'|'.join(parts)})$"


def _between(low: int, high: int) -> str:
    """All of low..high, both at least 0, as alternatives of digit classes."""
    parts: list[str] = []
    at = low
    while at <= high:
        parts.append(_block(at, end := _reach(at, high)))
        at = end + 1
    return "|".join(parts)


def _reach(at: int, high: int) -> int:
    """The largest end such that at..end has one digit class for each place: 130..199 is 1[3-9][0-9]."""
    best = at
    span = 1
    while at % span == 0:
        place = at // span % 10
        for digit in range(9, place - 1, -1):
            end = at + (digit - place) * span + span - 1
            if end <= high and len(str(end)) == len(str(at)):
                best = max(best, end)
                break
        span *= 10
        if span > high * 10:
            break
    return best


def _block(low: int, high: int) -> str:
    places = []
    for first, last in zip(str(low), str(high), strict=True):
        places.append(first if first == last else f"[{first}-{last}]")
    return "".join(places)

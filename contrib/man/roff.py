"""Plain text to man(7): the little of it that these pages need."""

from __future__ import annotations

import re
from typing import Final

DATE: Final = "2026-11-29"
"""Of the pages' form, not of what the program says: that is of its version."""


def escaped(text: str) -> str:
    """Text that roff prints as it is written."""
    text = (
        text.replace("\\", "\\e")
        .replace("-", "\\-")
        .replace("`", "\\(ga")
        .replace("'", "\\(aq")
        .replace("^", "\\(ha")
        .replace("~", "\\(ti")
    )
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def prose(text: str) -> str:
    """A paragraph: `code` in bold, one sentence a line."""
    text = " ".join(text.split())
    parts = re.split(r"`([^`]*)`", text)
    made = "".join(f"\\fB{escaped(part)}\\fR" if at % 2 else escaped(part) for at, part in enumerate(parts))
    return re.sub(r"(?<=[.:;]) +(?=[A-Z0-9(\\])", "\n", made)


class Page:
    """One manual page, built from the top."""

    def __init__(self, name: str, section: int, about: str, version: str) -> None:
        self._lines = [
            '.\\" Made by contrib/man/generate.py from the program itself; change that.',
            f'.TH {name.upper()} {section} {DATE} "leased {version}" "leased"',
            ".SH NAME",
            f"{escaped(name)} \\- {escaped(about)}",
        ]

    def section(self, title: str) -> None:
        self._lines.append(f'.SH "{title}"' if " " in title else f".SH {title}")

    def part(self, title: str) -> None:
        self._lines.append(f'.SS "{escaped(title)}"')

    def says(self, text: str) -> None:
        """Paragraphs, parted by empty lines; those that are indented stay as they are."""
        for at, paragraph in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
            if at:
                self._lines.append(".PP")
            if paragraph.startswith("  "):
                self.literal(*(line[2:] for line in paragraph.splitlines()))
            else:
                self._lines.append(prose(paragraph))

    def paragraph(self, text: str) -> None:
        """After items, back at the margin."""
        self._lines += [".PP", prose(text)]

    def literal(self, *lines: str) -> None:
        self._lines += [".nf", ".RS 4", *map(escaped, lines), ".RE", ".fi"]

    def item(self, names: list[str], metavar: str, text: str) -> None:
        """An option, a variable, a code: its names, what it takes, what it is."""
        shown = ", ".join(f"\\fB{escaped(name)}\\fR" for name in names)
        self._lines += [".TP", f"{shown} \\fI{escaped(metavar)}\\fR" if metavar else shown, prose(text) or "\\&"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

"""Text that somebody else wrote, made fit for a terminal."""

from __future__ import annotations


def plain(text: str, *, lines: bool = False) -> str:
    """``text`` with escapes in the place of all that does not print: control characters, changes of direction, ...

    Line breaks are kept if there may be several ``lines``.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or (lines and letter == "\n") else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")

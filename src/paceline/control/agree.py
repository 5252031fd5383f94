"""*Agree*: every rank brings a word, and all ranks learn the same thing: every word, and which ranks are missing.

This is the only way in which the words of all ranks are gathered. The encoding, the bounds, the numbering of turns and
the refusal of bytes that are not a message are written here, once. All ranks bring as many items to a topic, and of the
same types. A word of another form is refused as well, so that whoever reads the words may rely on their form. What
differs is the *line* that words travel over:

- `StoreLine` goes over the store. It needs no connection between ranks, so that it works before there is one and after
  one broke, and it can name the ranks that did not come.
- `TensorLine` goes over an all-gather of bytes, by gloo or through shared memory. It takes no longer than a collective,
  which matters where ranks compare in every call what they are about to do. It needs a connection, and an error of that
  connection is an error of the agreement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.control import wire
from paceline.control.wire import Item, MessageKind
from paceline.errors import BadArgumentError, BadTypeError, DisagreementError
from paceline.settings import SECRET

Word = tuple[Item, ...]

ENCODING_BYTES = 64
"""What the encoding adds to the texts and bytes of a word, if the word has only a few items."""
WORD_LIMIT_BYTES = wire.LIMIT_BYTES - ENCODING_BYTES
"""How long a word may be on a line that sets no other limit."""


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a group brought to one `Line.agree`; the same on all of them."""

    topic: str
    words: tuple[Word | None, ...]
    """By rank; None for a rank that did not come in time, or whose message was refused."""

    @property
    def values(self) -> tuple[Item | None, ...]:
        """The first item of each word, by rank."""
        return tuple(None if word is None else word[0] for word in self.words)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose words are missing."""
        return tuple(rank for rank, word in enumerate(self.words) if word is None)

    @property
    def equal(self) -> bool:
        """Whether all ranks came, with the same word."""
        return None not in self.words and len(set(self.words)) == 1

    @property
    def differing(self) -> tuple[int, ...]:
        """The ranks whose word is not that of the lowest rank that came."""
        came = [word for word in self.words if word is not None]
        return tuple(rank for rank, word in enumerate(self.words) if word is not None and word != came[0])

    def reduce(self, how: Callable[[list[int]], int]) -> int:
        """Apply ``how`` (``sum``, ``min`` or ``max``) to the numbers of the ranks that came."""
        return how([value for value in self.values if isinstance(value, int)])


class Line(ABC):
    """Where the ranks of a group agree. All of them agree on the same topics in the same order."""

    def __init__(self, *, name: str, rank: int, size: int, limit_bytes: int = WORD_LIMIT_BYTES) -> None:
        """``name`` tells this line from others of the job, so that a word of one is refused on another."""
        self.rank = rank
        self.size = size
        self._name = name
        self._limit_bytes = limit_bytes + ENCODING_BYTES
        self._turns: dict[str, int] = {}
        self._reader = wire.Reader()

    def agree(self, topic: str, *word: Item, timeout_s: float) -> Agreement:
        """Bring ``word`` and learn what every rank brought. A word consists of 64-bit integers, texts and bytes.

        Raises ``DisagreementError`` if the words of other ranks were sealed with another secret.
        """
        _check(topic, word)
        if self.size == 1:
            return Agreement(topic, (word,))
        turn = self._turns[topic] = self._turns.get(topic, -1) + 1
        places = [f"{self._name}/{topic}/{turn}/{rank}" for rank in range(self.size)]
        try:
            mine = wire.encode(MessageKind.WORD, word, place=places[self.rank], limit_bytes=self._limit_bytes)
        except ValueError as error:
            raise BadArgumentError(f"{error} Ranks can agree on a digest of it instead ({topic}).") from error
        found = self.gather(topic, turn, mine, timeout_s=timeout_s)
        words = [
            theirs if theirs and _form(theirs) == _form(word) else None for theirs in map(self._read, found, places)
        ]
        if None in words:
            self.refuse_other_secrets(found)
        return Agreement(topic, tuple(words))

    @abstractmethod
    def gather(self, topic: str, turn: int, word: bytes, *, timeout_s: float) -> list[bytes | None]:
        """Everybody's bytes in this turn, by rank; the same on all ranks."""

    def refuse_other_secrets(self, words: Sequence[bytes | None]) -> None:
        """Raise if some ranks have sealed their words with another secret than this rank has."""
        others = [rank for rank, word in enumerate(words) if word and wire.has_other_secret(word)]
        if others:
            who = f"rank {', '.join(map(str, others))}"
            raise DisagreementError(
                f"Ranks were started with different secrets: the messages of {who} do not fit the {SECRET} of this "
                f"rank ({self.rank}). Set {SECRET} to the same text on all ranks, or unset it on all of them."
            )

    def _read(self, data: bytes | None, place: str) -> Word | None:
        match data and self._reader.read(MessageKind.WORD, data, place=place, limit_bytes=self._limit_bytes):
            case (tuple(word),):
                return word
        return None


def _form(word: Word) -> list[type]:
    return list(map(type, word))


def _check(topic: str, word: Word) -> None:
    if not word:
        raise BadArgumentError(f"Ranks cannot agree on an empty word ({topic}).")
    for item in word:
        if isinstance(item, bool) or not isinstance(item, (int, str, bytes)):
            raise BadTypeError(f"Ranks agree on numbers, texts and bytes, not on a {type(item).__name__} ({topic}).")
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise BadArgumentError(f"{item} does not fit into 64 bits; ranks cannot agree on it ({topic}).")

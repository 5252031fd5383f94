"""The seal of a message: who may have written it, and where it belongs.

::

    mark 8 | HMAC-SHA256 of the place and the content, cut to 16

The HMAC is keyed with the job's secret (`settings.secret`). Whoever does not know the secret cannot make a message that
fits, and cannot change one or move it to another place. Without a secret the seal protects against accidents only,
because everybody can compute it. The *mark* tells secrets apart without giving them away, so that ranks that were
started with different ones can say so.
"""

from __future__ import annotations

import functools
import hashlib
import hmac

from paceline import settings

MARK_BYTES = 8
MAC_BYTES = 16
SEAL_BYTES = MARK_BYTES + MAC_BYTES


def make(place: str, content: bytes) -> bytes:
    """The seal of ``content`` at ``place``."""
    # The place is hashed, because two texts side by side could be divided in another way.
    where = hashlib.sha256(place.encode()).digest()
    secret = settings.secret()
    return _mark(secret) + hmac.digest(secret, where + content, "sha256")[:MAC_BYTES]


def fits(seal: bytes, place: str, content: bytes) -> bool:
    """Whether this is the seal of ``content`` at ``place``."""
    return hmac.compare_digest(seal, make(place, content))


def mark() -> bytes:
    """What ranks with the same secret have in common; it may be seen by anybody."""
    return _mark(settings.secret())


@functools.lru_cache(maxsize=1)
def _mark(secret: bytes) -> bytes:
    return hmac.digest(secret, b"Paceline: which secret this is", "sha256")[:MARK_BYTES]

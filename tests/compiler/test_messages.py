"""What ranks tell each other while they compile is checked before it is used."""

from __future__ import annotations

import json
import random

import pytest

from paceline import errors
from paceline.compiler.consensus import shapes
from paceline.compiler.consensus.shared_compile import Artifacts, Kernel


def _mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(3):
            case 0:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            case 1:
                del changed[rng.randrange(len(changed)) :]
                changed += b"}"
            case 2:
                at = rng.randrange(len(changed))
                changed[at:at] = rng.choice([b"[", b"1e999", b'"?"', b"-1", b"null", b"\xff"])
    return bytes(changed)


def test_what_cannot_be_understood_is_refused():
    sizes = {"L['x']": [None, [3, "?"], [["S", 1], 1]], "L['n']": [12, "?", "?"]}
    message = shapes.encode("f (train.py:3)", sizes)
    assert shapes.decode(message, 0) == ("f (train.py:3)", sizes)
    artifacts = Artifacts(b"cache", {"ab/cabc0123456789.main.so": Kernel("bindings", b"library")})
    packed = artifacts.encode()
    assert Artifacts.decode(packed) == artifacts
    rng = random.Random(0)
    refused = 0
    for _ in range(5000):
        for decode, data in ((lambda data: shapes.decode(data, 1), message), (Artifacts.decode, packed)):
            try:
                decode(_mutated(data, rng))
            except errors.DisagreementError:
                refused += 1
    assert refused > 5000


@pytest.mark.parametrize("name", ["../evil.main.so", "/etc/x.main.so", "ab/cabc0123456789.main.py", "ab/../x.main.so"])
def test_kernels_go_nowhere_but_where_inductor_looks(name):
    with pytest.raises(errors.DisagreementError, match="name"):
        Artifacts.decode(Artifacts(b"", {name: Kernel("bindings", b"x")}).encode())


@pytest.mark.parametrize(
    "sizes",
    [
        {"x": [1, 2]},
        {"x": [True, None, None]},
        {"x": [2**63, None, None]},
        {"x": [None, [1] * 65, None]},
        {"x": [None, None, [["S", 64]]]},
        {"x" * 1001: [1, None, None]},
    ],
)
def test_sizes_of_the_wrong_form_are_refused(sizes):
    with pytest.raises(errors.DisagreementError, match="rank 1"):
        shapes.decode(json.dumps({"frame": "f", "sizes": sizes}).encode(), 1)

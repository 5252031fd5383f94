"""The numbers of ``csrc/pl.h``, which Python has, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paceline.transport.shm import codes

HEADER = (Path(codes.__file__).parent / "csrc" / "pl.h").read_text(encoding="utf-8")


def _defined(name: str) -> int:
    found = re.search(rf"#define {name} (\d+)", HEADER)
    assert found is not None, name
    return int(found[1])


def _enumerated(name: str, prefix: str) -> list[str]:
    """The members of an enum, which count from 0; not the last one if it is their number, such as PL_OPS."""
    body = re.search(rf"enum {name} \{{(.*?)\}}", HEADER, re.DOTALL)
    assert body is not None, name
    members = (
        re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL).replace(" ", "").replace("\n", "").strip(",").split(",")
    )
    assert all(member.startswith(prefix) for member in members), members
    is_counted = members[-1] == f"{name.upper()}S"
    return [member.removeprefix(prefix) for member in members[: -1 if is_counted else None]]


def _short(dtype: torch.dtype) -> str:
    """As the header calls it: F32 for torch.float32."""
    kinds = {"bfloat": "BF", "float": "F", "complex": "C", "uint": "U", "int": "I", "bool": "BOOL"}
    name = str(dtype).removeprefix("torch.")
    kind = next(kind for kind in kinds if name.startswith(kind))
    return kinds[kind] + name.removeprefix(kind)


PYTHONS = {
    "pl_op": [op.name for op in sorted(codes.Op)],
    "pl_kind": [kind.name for kind in sorted(codes.Kind)],
    "pl_status": [status.name for status in sorted(codes.Outcome)],
    "pl_dtype": [_short(dtype) for dtype in sorted(codes.DTYPES, key=codes.DTYPES.__getitem__)],
    "pl_phase": [phase.upper() for phase in codes.PHASES],
}


@pytest.mark.parametrize("name", PYTHONS)
def test_enumerations_are_those_of_the_header(name: str) -> None:
    assert PYTHONS[name] == _enumerated(name, "PL_AT_" if name == "pl_phase" else "PL_")


def test_numbers_are_those_of_the_header() -> None:
    assert (_defined("PL_ABI"), _defined("PL_MAX_RANKS")) == (codes.ABI, codes.MAX_RANKS)
    for numbers in (codes.Op, codes.Kind, codes.Outcome, codes.DTYPES.values()):
        assert sorted(numbers) == list(range(len(numbers)))

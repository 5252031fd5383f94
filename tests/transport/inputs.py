"""Inputs that any rank can make for any other, and what a collective must make of them.

The numbers are small integers: sums, products, minima and averages of them are exact in every dtype, so results are
compared to the bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
# The integers gloo can reduce; it refuses the others.
GLOO_INTEGERS = (torch.int8, torch.int32, torch.int64, torch.uint8)
OTHER_INTEGERS = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
GLOO_DTYPES = (*FLOATS, *COMPLEX, *GLOO_INTEGERS, torch.bool)

# Elements. 1024 floats are the 4 KB of the issue; 40,001 leave the one-round path; 300,007 are more than one chunk.
SMALL_SIZES = (0, 1, 7, 1023, 1024)
SIZES = (*SMALL_SIZES, 40_001, 300_007)
HUGE = 2_000_003


def supports(op: str, dtype: torch.dtype) -> bool:
    """Whether gloo defines ``op`` on ``dtype`` (integers it refuses altogether are judged as their kin)."""
    if dtype.is_complex:
        return op in ("SUM", "AVG")
    if dtype.is_floating_point:
        return not op.startswith("B")
    return op != "AVG"


def defined(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[torch.dtype, str]]:
    """Each of ``dtypes`` with each operation that goes with it."""
    return ((dtype, op) for dtype, op in itertools.product(dtypes, OPS) if supports(op, dtype))


def reduce_op(op: str) -> dist.ReduceOp.RedOpType:
    """The c10d operation named ``op``."""
    return getattr(dist.ReduceOp, op)


@functools.cache
def _base(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(seed))


def values(count: int, dtype: torch.dtype, *, rank: int, seed: int = 0, op: str = "SUM") -> torch.Tensor:
    """``count`` small integers of ``rank`` as ``dtype``."""
    numbers = _base(count, 1000 * seed + rank)
    if dtype == torch.bool:
        return numbers % 2 == 1
    if op == "PRODUCT":
        numbers = 1 + numbers % 2
    elif dtype.is_signed:
        numbers = numbers - 3
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers * 2 - 1).double()).to(dtype)
    return numbers.to(dtype)


def reduced(op: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What ``op`` makes of one tensor a rank."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        fold = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or, "BXOR": torch.logical_xor}
        return functools.reduce(fold.get(op, torch.logical_and), inputs)
    # Wide enough to be exact; the conversion back wraps as the narrow type would have.
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    folds = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    total = functools.reduce(folds[op], [tensor.to(wide) for tensor in inputs])
    if op == "AVG":
        # A conversion to integers rounds toward zero.
        total = total / len(inputs)
    return total.to(dtype)


def every(count: int, dtype: torch.dtype, world_size: int, *, seed: int = 0, op: str = "SUM") -> list[torch.Tensor]:
    """The inputs of all ranks."""
    return [values(count, dtype, rank=rank, seed=seed, op=op) for rank in range(world_size)]


def is_rounded(op: str, world_size: int) -> bool:
    """Whether the result is rounded: a third of a sum is, a half or a quarter is not."""
    return op == "AVG" and world_size & (world_size - 1) != 0


def same(got: torch.Tensor, want: torch.Tensor, *what: object, rounded: bool = False) -> None:
    """Equal in dtype, shape and every bit (or to one rounding), or an error that says where ``what`` differs."""
    label = " ".join(str(part) for part in what)
    assert got.dtype == want.dtype, f"{label}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{label}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    if torch.equal(_plain(got), _plain(want)):
        return
    if rounded and torch.allclose(got, want, rtol=torch.finfo(got.dtype).eps, atol=0):
        return
    wrong = (_plain(got) != _plain(want)).flatten().nonzero().flatten()
    first = int(wrong[0])
    raise AssertionError(
        f"{label}: {len(wrong)} of {got.numel()} elements differ, first at {first}: "
        f"{got.flatten()[first].item()}, expected {want.flatten()[first].item()}"
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # torch compares few of the unsigned types; their bits it can.
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.contiguous().view(signed[tensor.dtype]) if tensor.dtype in signed else tensor


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Call ``work`` with 0, 1, ... on as many threads at once; raise what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        started = [pool.submit(work, index) for index in range(count)]
    for one in started:
        one.result()

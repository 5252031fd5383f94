"""Progress files that were changed at random, against everything that reads them.

    python -m tests.control.file_fuzz --files 200000    a soak
    python -m tests.control.file_fuzz --seed 1234       one of them again, with what the doctor says

A job of two ranks is made anew from each seed, and the file of one rank is changed. Whoever reads it has to leave it
out, or to show what it says with escapes. Nobody may crash, wait, take much memory, or print a control character.
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.control import progress
from paceline.control.diagnosis import explain
from paceline.control.jobs import records
from paceline.control.progress import Progress, read_file
from paceline.control.whereabouts import of_record
from paceline.run.doctor import doctor, verdicts
from tests.control._common import control_characters, within

LIMIT_S = 5.0
"""How long the readers of one job may take. They take a millisecond, but the machine may be busy."""
LIMIT_BYTES = 1 << 29
"""How much more memory they may take than the process has. A reader that counts up to 2**62 takes more at once."""

_INTS = [struct.pack("<q", n) for n in (0, 1, -1, 2, 33, 1 << 16, 1 << 22, 1 << 31, 1 << 32, 1 << 62, -(1 << 63))]
_TIMES = [struct.pack("<d", t) for t in (0.0, -1.0, 1e10, 1e12, 1e18, 1e300, float("inf"), float("nan"), 5e-324)]
_NUMBERS_AT = [
    *range(8, 64, 8),  # who it is: six integers, and when the file was made
    *range(progress._STATE_AT, progress._WAITING_AT, 8),
    *range(progress._RING_AT, progress.FILE_BYTES, progress._ENTRY.size),
]
_TEXTS_AT = [64, 128, progress._WAITING_AT, progress._FAILED_AT, progress._REPORT_AT, progress._RING_AT + 8]
_TEXTS = [
    b"\x1b]0;owned\x07\x1b[2J",
    b"line\npaceline: another\r\x08\x08",
    b"\x9b31m\xc2\x9b31m",
    "\u202etxt.exe\u2028\u200b".encode(),
    b"\xff\xfe\xed\xa0\x80\xc3",
    bytes(range(1, 128)),
    b"",
    b"x" * 5000,
]


def valid_files() -> list[bytes]:
    """The files of a job of two ranks, one of which has failed."""
    made = []
    for rank in range(2):
        one = Progress(None, rank=rank, size=2, wrapper=1)
        for number in range(5 + rank):
            one.begin_forward(trains=True)
            one.start("all-reduce", f"bucket {number}", torch.ones(1))
        one.begin_wait("the all-reduce of bucket 4")
        one.note_report("Rank 0 has waited 30 s.\n  rank 0: here")
        made.append(one)
    made[1].fail("rank 1 raised in its program: ValueError: a bad batch")
    return [bytes(one._memory) for one in made]


def _flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.choice((1, 100, 100_000)))


def _set_number(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 4))):
        at = rng.choice(_NUMBERS_AT)
        data[at : at + 8] = rng.choice(_INTS + _TIMES)


def _set_text(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 3))):
        at, text = rng.choice(_TEXTS_AT), rng.choice(_TEXTS)
        data[at : at + len(text)] = text
        del data[progress.FILE_BYTES :]


def _scramble(data: bytearray, rng: random.Random) -> None:
    start, count = rng.randrange(8, len(data)), rng.choice((8, 64, 1000, len(data)))
    data[start : start + count] = rng.randbytes(len(data[start : start + count]))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip_bits,
    _cut,
    _extend,
    _set_number,
    _set_number,
    _set_text,
    _set_text,
    _scramble,
)


def mutated(data: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if len(found) > 8:
            rng.choice(MUTATIONS)(found, rng)
    return bytes(found)


def read_all(directory: Path) -> str:
    """Have every reader look at the job, and return what they say."""
    out = io.StringIO()
    doctor(directory, out=out)
    found = [record for file in sorted(directory.iterdir()) if (record := read_file(file)) is not None]
    answers = {record.rank: of_record(record, directory, ask=False) for record in found}
    size = found[0].size if found else 2
    assert list(records(directory).values()) == found
    return "\n".join([out.getvalue(), *verdicts(directory), str(explain(answers, size))])


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process have `LIMIT_BYTES` more than it has, so that whoever wants more fails, and not the machine."""
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check(seed: int, directory: Path, files: list[bytes]) -> tuple[bool, str]:
    """Whether the changed file of this seed was read, and what was said of it; raises if a reader did wrong."""
    changed = seed % 2
    for rank, data in enumerate(files):
        (directory / f"wrapper1.rank{rank}").write_bytes(mutated(data, seed) if rank == changed else data)
    with within(LIMIT_S):
        told = read_all(directory)
    if bad := control_characters(told):
        raise AssertionError(f"control characters were printed: {bad}")
    return read_file(directory / f"wrapper1.rank{changed}") is not None, told


def run(seeds: range | list[int], directory: Path) -> tuple[int, list[str]]:
    """How many changed files could be read, and what was wrong."""
    files, wrong, were_read = valid_files(), [], 0
    with little_memory():
        for seed in seeds:
            try:
                were_read += check(seed, directory, files)[0]
            except Exception as error:
                again = f"python -m tests.control.file_fuzz --seed {seed}"
                wrong.append(f"file {seed} ({again}): {type(error).__name__}: {error}")
    return were_read, wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.control.file_fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=20_000, metavar="N", help="how many; default 20,000")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="seed of the first; default 0")
    parser.add_argument("--seed", type=int, help="only this file")
    options = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="file-fuzz-") as name:
        if options.seed is not None:
            with little_memory():
                print(check(options.seed, Path(name), valid_files())[1])
            return 0
        were_read, wrong = run(range(options.start, options.start + options.files), Path(name))
    for line in wrong[:20]:
        print(line)
    seconds = time.monotonic() - started
    print(f"{options.files} files in {seconds:.0f} s, of which {were_read} could be read; {len(wrong)} faults found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

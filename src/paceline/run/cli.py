"""The ``paceline`` command. Each sub-command is a function from its parsed flags to an exit code.

::

    paceline train [--nproc N] [--script PATH] [flags of the script ...]
    paceline doctor [--stacks] [PATH]

A wrong flag or value gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline.run.doctor import doctor as _doctor
from paceline.run.launch import launch

_EXAMPLE = Path("examples") / "train_gpt.py"


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that complains in one line, since a usage text above it would hide what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (``sys.argv`` by default) and return its exit code."""
    parser = _Parser(prog="paceline", description="Data-parallel training that can be looked at.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train = commands.add_parser(
        "train",
        help="run a training script on ranks of this machine",
        description=(
            "Start N ranks of a training script on this machine, one thread each (OMP_NUM_THREADS if set). "
            "Rank 0 writes to the terminal; what other ranks write is shown if they fail. "
            "Ctrl-C ends all of them cleanly; a second Ctrl-C ends them at once."
        ),
        epilog=f"All other flags go to the script. For its own: python {_EXAMPLE} --help",
        # An abbreviation would swallow flags that are meant for the script.
        allow_abbrev=False,
    )
    train.add_argument("--nproc", type=_rank_count, default=2, metavar="N", help="ranks to start (default: 2)")
    train.add_argument("--script", type=Path, metavar="PATH", help=f"what to run (default: {_EXAMPLE})")
    doctor = commands.add_parser(
        "doctor",
        help="say what a job is waiting for, or what it died of",
        description=(
            "Read the files that the ranks of a job on this host keep, and say where each of them is, who waits for "
            "whom, and what failed first. The job may run or be dead; one that ended well leaves nothing."
        ),
    )
    doctor.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a job's directory (default: the newest)")
    doctor.add_argument("--stacks", action="store_true", help="ask ranks that run for the stacks of their threads")
    flags, rest = parser.parse_known_args(argv)
    if flags.command == "doctor":
        if rest:
            doctor.error(f"unrecognized arguments: {' '.join(rest)}")
        return _doctor(flags.path, with_stacks=flags.stacks)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    script = flags.script if flags.script is not None else find_example()
    if script is None:
        train.error(
            f"{_EXAMPLE} is neither beside this package nor in the current directory; "
            f"run this in a checkout of Paceline, or name your own script with --script PATH"
        )
    if not script.is_file():
        train.error(f"argument --script: there is no file {str(script)!r}")
    return launch([sys.executable, str(script), *rest], nproc=flags.nproc)


def find_example() -> Path | None:
    """Return the example of the checkout that this package or the current directory belongs to."""
    checkout = Path(__file__).resolve().parents[3]
    for root in (checkout, Path.cwd()):
        if (root / _EXAMPLE).is_file():
            return root / _EXAMPLE
    return None


def _rank_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return count

"""The ``paceline`` command. Each sub-command is a function from its parsed flags to an exit code.

::

    paceline run [--swap] [--bind auto|none] [torchrun's flags] SCRIPT [flags of the script ...]
    paceline train [--nproc N] [--script PATH] [flags of the script ...]
    paceline doctor [--stacks] [PATH]
    paceline bench [--nproc N]
    paceline env

A wrong flag or value gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.run.doctor import doctor
from paceline.run.flags import Parser, rank_count
from paceline.run.launch import launch

_EXAMPLE = Path("examples") / "train_gpt.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (``sys.argv`` by default) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="paceline", description="Data-parallel training that can be looked at.")
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("run", help="run a script of yours on several ranks, with torchrun's flags", add_help=False)
    train = _add_train(commands)
    looking = _add_doctor(commands)
    bench = commands.add_parser("bench", help="measure gloo and shared memory on this machine, in less than a minute")
    bench.add_argument("--nproc", type=rank_count, default=2, metavar="N", help="ranks to start (default: 2)")
    env = commands.add_parser("env", help="say what a bug report should: versions, memory, cores")
    if argv[:1] == ["run"]:
        # Its flags are torchrun's, and what follows the script is the script's.
        from paceline.run.torchrun import run_script  # late, because it imports torch's launcher

        return run_script(argv[1:])
    flags, rest = parser.parse_known_args(argv)
    if flags.command == "train":
        return _train(train, flags, rest)
    if rest:
        {"doctor": looking, "bench": bench, "env": env}[flags.command].error(
            f"unrecognized arguments: {' '.join(rest)}"
        )
    if flags.command == "doctor":
        return doctor(flags.path, with_stacks=flags.stacks)
    if flags.command == "bench":
        from paceline.run.bench import bench as measure

        return measure(flags.nproc)
    from paceline.run.report import report

    return report()


def _versions() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return f"paceline {version('paceline')} (torch {version('torch')}, Python {python})"


def _add_train(commands: Any) -> Parser:
    train: Parser = commands.add_parser(
        "train",
        help="train the example on ranks of this machine",
        description=(
            "Start N ranks of a training script on this machine, one thread each (OMP_NUM_THREADS if set). "
            "Rank 0 writes to the terminal; what other ranks write is shown if they fail. "
            "Ctrl-C ends all of them cleanly; a second Ctrl-C ends them at once."
        ),
        epilog=f"All other flags go to the script. For its own: python {_EXAMPLE} --help",
        # An abbreviation would swallow flags that are meant for the script.
        allow_abbrev=False,
    )
    train.add_argument("--nproc", type=rank_count, default=2, metavar="N", help="ranks to start (default: 2)")
    train.add_argument("--script", type=Path, metavar="PATH", help=f"what to run (default: {_EXAMPLE})")
    return train


def _add_doctor(commands: Any) -> Parser:
    looking: Parser = commands.add_parser(
        "doctor",
        help="say what a job is waiting for, or what it died of",
        description=(
            "Read the files that the ranks of a job on this host keep, and say where each of them is, who waits for "
            "whom, and what failed first. The job may run or be dead; one that ended well leaves nothing."
        ),
    )
    looking.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a job's directory (default: the newest)")
    looking.add_argument("--stacks", action="store_true", help="ask ranks that run for the stacks of their threads")
    return looking


def _train(train: Parser, flags: argparse.Namespace, rest: list[str]) -> int:
    if flags.script is None and rest and rest[0].endswith(".py"):
        train.error(f"this trains the example. To run a script of yours: paceline run {' '.join(rest)}")
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

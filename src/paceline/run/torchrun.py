"""``paceline run``: torchrun, with what a job on CPUs wants and with a word on why it ended.

torch's launcher (``torch.distributed.run``) starts the ranks, on one host or several, and starts them again if one has
failed. All its flags work here. This file prepares what the ranks find in their environment, has each of them run on
cores of its own, and says at the end what their files tell.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from paceline.control.jobs import all_jobs, job_of_processes
from paceline.run import bound, cores
from paceline.run.doctor import verdicts
from paceline.run.flags import Parser
from paceline.run.launch import LAUNCHER_PID
from paceline.settings import SECRET

_RANKS = 2
_PREFIX = "[rank ${rank}] "
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def parser() -> Parser:
    """torchrun's flags, and ours."""
    made = Parser(
        prog="paceline run",
        description=(
            "Run a script on several ranks. All flags of torchrun work. Unless something else is asked for, groups "
            "carry CPU tensors through shared memory, each rank runs on cores of its own, and each line of output names"
            " its rank. The number of ranks is that of the accelerators by default, and 2 if there are none."
        ),
        parents=[get_args_parser()],
        conflict_handler="resolve",  # both have --help
    )
    made.add_argument(
        "--swap",
        action="store_true",
        help="let the script, and what it imports, find paceline's class as torch.nn.parallel.DistributedDataParallel",
    )
    made.add_argument(
        "--bind",
        choices=["auto", "none"],
        default="auto",
        help="auto: each rank runs on cores of its own, if there is one for each and no accelerator (default: auto)",
    )
    made.add_argument("--nproc", dest="nproc_per_node", metavar="N", help="the same as --nproc-per-node")
    if "PET_NPROC_PER_NODE" not in os.environ:
        # torchrun's own default is one rank, which needs no launcher.
        made.set_defaults(nproc_per_node=None)
    return made


def run_script(argv: Sequence[str]) -> int:
    """Run a script as ``argv`` says, and return the exit code."""
    refuse = parser()
    flags = refuse.parse_args(list(argv))
    if flags.swap and os.environ.get(_AUTOLOAD, "1") != "1":
        refuse.error(f"argument --swap: {_AUTOLOAD}={os.environ[_AUTOLOAD]} keeps torch from asking paceline; unset it")
    if not flags.no_python and not flags.module and not Path(flags.training_script).is_file():
        refuse.error(f"there is no file {flags.training_script!r}")
    if flags.nproc_per_node is None:
        found = torch.accelerator.device_count() if _has_accelerator() else 0
        flags.nproc_per_node = str(found or _RANKS)
    ranks = int(flags.nproc_per_node) if flags.nproc_per_node.isdecimal() else 0
    script = flags.training_script
    _prepare(flags, ranks)
    before = set(all_jobs())
    try:
        run(flags)
    except ChildFailedError as error:
        # The summary is titled with the first file that it finds in the command.
        print(str(error).replace(bound.__file__, script), file=sys.stderr)
        _explain(job_of_processes({failure.pid for failure in error.failures.values()}))
        return 1
    except SignalException as stopped:
        _explain(_only_one(set(all_jobs()) - before))
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        _explain(_only_one(set(all_jobs()) - before))
        return 128 + signal.SIGINT
    return 0


def _prepare(flags: argparse.Namespace, ranks: int) -> None:
    """Set what the ranks will find in their environment, and how they are started; 0 ranks: torchrun counts them."""
    environ = os.environ
    if flags.swap:
        environ["PACELINE_SWAP"] = "1"
    environ.setdefault("PACELINE_CPU_BACKEND", "shm")
    # Ranks end with this process, even if it is killed.
    environ[LAUNCHER_PID] = str(os.getpid())
    if flags.nnodes in ("1", "1:1"):
        # Only this user can read the environment of the ranks. On several hosts, somebody has to hand the secret on.
        environ.setdefault(SECRET, secrets.token_hex(32))
    if ranks:
        found = cores.usable_cores()
        threads = cores.threads_each(found, ranks, limit=cores.quota())
        environ.setdefault("OMP_NUM_THREADS", str(threads))
        if flags.bind == "auto":
            _bind(flags, cores.share(found, ranks))
    if ranks != 1 and not _says_where_output_goes(flags):
        flags.tee = "3"
        environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", _PREFIX)


def _bind(flags: argparse.Namespace, shares: Sequence[Sequence[cores.Core]]) -> None:
    """Have torchrun start each rank through `paceline.run.bound`."""
    # A rank with an accelerator belongs near that one, which torchrun's --numa-binding sees to.
    if len(shares) < 2 or not hasattr(os, "sched_setaffinity") or flags.run_path or _has_accelerator():
        return
    os.environ[bound.CPUS_OF_RANKS] = ";".join(",".join(str(cpu) for core in share for cpu in core) for share in shares)
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    command = [] if flags.no_python else [python, "-u", *(["-m"] if flags.module else [])]
    flags.training_script_args = [bound.__file__, *command, flags.training_script, *flags.training_script_args]
    flags.training_script, flags.no_python, flags.module = python, True, False


def _says_where_output_goes(flags: argparse.Namespace) -> bool:
    return any((flags.tee != "0", flags.redirects != "0", flags.log_dir, flags.local_ranks_filter))


def _has_accelerator() -> bool:
    return torch.accelerator.current_accelerator(check_available=True) is not None


def _only_one(jobs: Collection[Path]) -> Path | None:
    """The job of this launcher, after a Ctrl-C; None if another job began meanwhile, since nothing tells them apart."""
    return next(iter(jobs)) if len(jobs) == 1 else None


def _explain(job: Path | None) -> None:
    """Say what the ranks' files tell about the end of the job, if they have left any."""
    told = verdicts(job) if job is not None else []
    for text in told:
        print(f"paceline: {text}", file=sys.stderr)
    if told:
        print(f"paceline: for more: paceline doctor {job}", file=sys.stderr)

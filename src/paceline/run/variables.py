"""What the variables of a launcher say about this process: torchrun's, Slurm's, Open MPI's, or those of PMI.

Everything here takes the environment as a mapping, so that only ``paceline.init`` itself reads ``os.environ``.

A process that one of many was started as must never train alone without a word: N models would be trained, and nobody
would notice. So each reader either says who this process is, or raises and says what is missing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import BadArgumentError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that must be set together; torchrun and `paceline.run.launch` set them all."""

LOOPBACK = "127.0.0.1"
# Below the ports that systems hand out by themselves, and above those of services.
_FIRST_PORT, _PORTS = 10_000, 20_000
# Only a process that srun has started has these. A batch script has SLURM_PROCID, too, and is one process.
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")


@dataclass(frozen=True)
class Launch:
    """What the environment says about this process, checked."""

    rank: int
    local_rank: int
    world_size: int
    host: str = LOOPBACK
    """Where rank 0, or the launcher, holds the store at which ranks meet."""
    port: int = 0
    job: str = "attempt0"
    """What tells the ranks of this start from those of others that may find the same store."""
    store_is_served: bool = False
    """The launcher holds the store: then rank 0 is a client like the others."""
    host_is_guessed: bool = False
    """The host is the first of Slurm's list. Nobody has named it as the place to meet."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch | None:
        """Return what the launcher's variables say, or None if this process is the only one."""
        given = [name for name in (*RENDEZVOUS, "LOCAL_RANK") if name in environ]
        missing = [name for name in RENDEZVOUS if name not in environ]
        if not missing:
            # torchrun may itself have been started by a scheduler, whose variables are then about torchrun.
            return cls._of_torchrun(environ)
        task = _task(environ)
        if task is not None:
            return _join_task(environ, task)
        if not given:
            return None
        # A group of one would be wrong here: N separate models would be trained, and nobody would notice.
        raise BadArgumentError(
            f"the environment is half set for a process group: {', '.join(given)} set, "
            f"{', '.join(missing)} not. Start the ranks with `torchrun` or `paceline run`, which set "
            f"all of them, or unset {', '.join(given)} to run a single rank"
        )

    @classmethod
    def of(cls, environ: Mapping[str, str], *, rank: int, world_size: int) -> Launch | None:
        """Return what a program that names its rank itself is, with the place to meet from the environment."""
        if rank >= world_size:
            raise BadArgumentError(
                f"rank is {rank} but world_size is {world_size}: ranks count from 0 to world_size - 1"
            )
        if world_size == 1:
            return None
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise BadArgumentError(
                f"rank {rank} of {world_size} does not know where to meet the others: {' and '.join(missing)} not set. "
                "Set MASTER_ADDR to the host of rank 0 (127.0.0.1 if all ranks are on one) and MASTER_PORT to a free "
                "port, the same on all ranks, or start the ranks with paceline.spawn, which does both"
            )
        told = {**environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        if environ.get("RANK") != str(rank):
            told.pop("LOCAL_RANK", None)  # that of the process this one was started from
        return cls._of_torchrun(told)

    @classmethod
    def _of_torchrun(cls, environ: Mapping[str, str]) -> Launch:
        rank = _integer(environ, "RANK", low=0)
        world_size = _integer(environ, "WORLD_SIZE", low=1)
        if rank >= world_size:
            raise BadArgumentError(
                f"RANK is {rank} but WORLD_SIZE is {world_size}: ranks count from 0 to WORLD_SIZE - 1"
            )
        return cls(
            rank=rank,
            local_rank=_integer(environ, "LOCAL_RANK", low=0) if "LOCAL_RANK" in environ else rank,
            world_size=world_size,
            host=environ["MASTER_ADDR"],
            port=_integer(environ, "MASTER_PORT", low=0),
            # torchrun starts the ranks again if one has failed, but not the store, which has what the others wrote.
            job=f"attempt{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def local_rank(environ: Mapping[str, str], rank: int) -> int:
    """Which process of its host this is, for a group that somebody else has started."""
    if "LOCAL_RANK" in environ:
        return _integer(environ, "LOCAL_RANK", low=0)
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"):
        if name in environ:
            return _integer(environ, name, low=0)
    return rank


def idle_tasks(environ: Mapping[str, str]) -> str:
    """A word to somebody who runs one process in a shell of an allocation for several; empty for everybody else."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in environ or tasks == "1":
        return ""
    return (
        f"this is one rank. The Slurm allocation has {tasks} tasks (SLURM_NTASKS), which `srun python ...` would start "
        "as ranks"
    )


# -- schedulers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """This process, as a scheduler or an MPI launcher has numbered it."""

    by: str
    """Who says so, in words."""
    rank: int
    size: int
    local_rank: int
    host: str | None = None
    job: str | None = None
    """A name of this start that no other start on the same hosts has."""


def _task(environ: Mapping[str, str]) -> _Task | None:
    # mpirun uses srun to reach other nodes, so that Slurm's variables are then about mpirun's helpers.
    slurm = None if "OMPI_COMM_WORLD_SIZE" in environ else _of_slurm(environ, strict="PMI_SIZE" not in environ)
    mpi = _of_open_mpi(environ) or _of_pmi(environ)
    if slurm is not None and mpi is not None and (slurm.rank, slurm.size) == (mpi.rank, mpi.size):
        return slurm  # srun --mpi=pmi2: both are right, and Slurm knows the nodes
    return mpi or slurm


def _of_open_mpi(environ: Mapping[str, str]) -> _Task | None:
    rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if rank not in environ and size not in environ:
        return None
    return _of_mpi(
        environ,
        by="Open MPI",
        names=(rank, size),
        local=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=environ.get("PMIX_NAMESPACE"),
    )


def _of_pmi(environ: Mapping[str, str]) -> _Task | None:
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if "MPI_LOCALRANKID" in environ else _PMI_LOCAL
    return _of_mpi(environ, by="PMI", names=("PMI_RANK", "PMI_SIZE"), local=local, job=environ.get("PMI_JOBID"))


_PMI_LOCAL = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def _of_mpi(
    environ: Mapping[str, str], *, by: str, names: tuple[str, str], local: tuple[str, str], job: str | None
) -> _Task:
    _need(environ, by, names)
    rank, size = _integer(environ, names[0], low=0), _integer(environ, names[1], low=1)
    is_one_host = local[1] in environ and _integer(environ, local[1], low=1) == size
    local_rank = _integer(environ, local[0], low=0) if local[0] in environ else rank
    return _Task(by, rank, size, local_rank, host=LOOPBACK if is_one_host else None, job=job)


def _of_slurm(environ: Mapping[str, str], *, strict: bool) -> _Task | None:
    """What Slurm says. If it is not ``strict``, a process that srun has not started is none of Slurm's tasks."""
    in_step = any(name in environ for name in _SLURM_STEP)
    if not in_step and "SLURM_PROCID" not in environ:
        # A shell of ``salloc``: whoever runs a program there wants it to run as in any other shell.
        return None
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _integer(environ, total, low=1) if total in environ else 1
    if size == 1 and not in_step:
        return None
    if not in_step and environ["SLURM_PROCID"] == "0":
        if not strict:
            return None
        raise BadArgumentError(
            f"Slurm has given this job {size} tasks (SLURM_NTASKS), but this program was not started with srun (there "
            "is no SLURM_STEP_ID), so it is one process. Write `srun python ...` in the batch script to start "
            f"{size} ranks, start them with `paceline run`, or call paceline.init(rank=0, world_size=1) to train in one"
        )
    _need(environ, "Slurm", ("SLURM_PROCID", total))
    rank = _integer(environ, "SLURM_PROCID", low=0)
    local_rank = _integer(environ, "SLURM_LOCALID", low=0) if "SLURM_LOCALID" in environ else rank
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    return _Task("Slurm", rank, size, local_rank, host=_slurm_host(environ), job=job and f"{job}.{step}")


def _slurm_host(environ: Mapping[str, str]) -> str | None:
    """Where rank 0 is: the first node of the step, unless srun was asked for another order."""
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
    if nodes == "1":
        return LOOPBACK
    listed = (environ.get(name) for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if first := first_node(next(filter(None, listed), "")):
        return first
    # The node that srun was called on. In a batch script it is the first one of the job.
    return environ.get("SLURM_LAUNCH_NODE_IPADDR")


def first_node(nodes: str) -> str:
    """The first node of a list as Slurm writes it.

    >>> first_node("node[03-04,07],big1")
    'node03'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "").strip()


def _join_task(environ: Mapping[str, str], task: _Task) -> Launch | None:
    """How the ranks of a scheduler's start meet. What the user has set comes first, and must not contradict it."""
    for name, value in (("RANK", task.rank), ("WORLD_SIZE", task.size)):
        if name in environ and _integer(environ, name, low=0) != value:
            raise BadArgumentError(
                f"{name} is {environ[name]}, but {task.by} says {value}. Unset {name}, or set "
                f"{', '.join(RENDEZVOUS)} all together"
            )
    if task.rank >= task.size:
        raise BadArgumentError(f"{task.by} says that this is rank {task.rank} of {task.size}: ranks count from 0")
    if task.size == 1:
        return None
    missing = []
    if "MASTER_ADDR" not in environ and task.host is None:
        missing.append("MASTER_ADDR (the host of rank 0)")
    if "MASTER_PORT" not in environ and task.job is None:
        missing.append("MASTER_PORT (a free port of that host)")
    if missing:
        raise BadArgumentError(
            f"{task.by} has started this process as rank {task.rank} of {task.size}, but the ranks do not know where "
            f"to meet. Not set: {' and '.join(missing)}. Set it to the same on all ranks, or start them with torchrun"
        )
    return Launch(
        rank=task.rank,
        local_rank=_integer(environ, "LOCAL_RANK", low=0) if "LOCAL_RANK" in environ else task.local_rank,
        world_size=task.size,
        host=environ.get("MASTER_ADDR") or task.host or "",
        port=_integer(environ, "MASTER_PORT", low=0) if "MASTER_PORT" in environ else _port_of(task.job or ""),
        job=f"{task.by} {task.job or 'job'}",
        host_is_guessed="MASTER_ADDR" not in environ and task.host != LOOPBACK,
    )


def _port_of(job: str) -> int:
    """A port that all ranks of a start choose alike, and that two starts on one host hardly share."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _need(environ: Mapping[str, str], by: str, names: tuple[str, str]) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        given = next((name for name in names if name in environ), "its step")
        raise BadArgumentError(
            f"{by} has started this process ({given} set), but {' and '.join(missing)} not set, so that it does not "
            "know which rank of how many it is. Hand all of the launcher's variables on to the program, or start it "
            "with torchrun"
        )


def _integer(environ: Mapping[str, str], name: str, *, low: int) -> int:
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise BadArgumentError(f"environment variable {name} must be an integer of at least {low}, got {text!r}")
    return value

"""``paceline.init()``: the default process group that a launcher's variables describe, or one rank without them.

Example::

    import paceline

    world = paceline.init()                      # torchrun's, Slurm's or MPI's variables; else a group of one
    model = paceline.DDP(build_model().to(world.device))
    ...
    paceline.shutdown()

`variables.Launch` takes the environment as a mapping, so that only ``init`` itself reads ``os.environ``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import threads, transport
from paceline.control import hang, last_words, sign_in
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.run.launch import LAUNCHER_PID
from paceline.run.meeting import meet
from paceline.run.variables import Launch, idle_tasks, local_rank
from paceline.settings import HangWatch

_logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class World:
    """What a rank has to know about itself and about its group."""

    rank: int
    """This process, from 0 to ``world_size - 1``."""
    local_rank: int
    """This process among those of its host."""
    world_size: int
    """The number of ranks of the group."""
    device: torch.device
    """Where this rank keeps its model and data."""
    backend: str
    """What carries the collectives, as given to torch: ``cpu:shm``, ``gloo``, ``cpu:gloo,cuda:nccl``, ..."""


@dataclass(frozen=True)
class _Started:
    """A group that init() started. A group that somebody else started is not ours to end."""

    group: dist.ProcessGroup
    world: World
    timeout: timedelta | None


_started: _Started | None = None


def init(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta | float | None = None,
    hang_watch: str | None = None,
    hang_after_s: float | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> World:
    """Start the default process group and say who this rank is.

    With the variables of torchrun, of Slurm's srun, or of an MPI launcher it joins the group that they describe. With
    none of them it makes a group of one rank, which needs no port. If some of them are missing, it raises.

    Args:
        backend: as torch's ``init_process_group`` takes it. By default it is the backend of the accelerator's vendor
            together with gloo for CPU tensors. On the CPU it is shared memory (``cpu:shm``) between the ranks of a host
            and gloo between hosts; rank 0 then says so in a line on stderr.
        device: by default this rank's accelerator (number ``local_rank``), or the CPU.
        timeout: the limit for the group's collectives, in seconds or as a ``timedelta``; torch's default if None.
        hang_watch: what happens when a rank waits for others and there is no progress for ``hang_after_s`` seconds
            (30). ``"observe"`` (the default) tells on stderr who waits for whom, ``"enforce"`` raises that as an error
            on the ranks that wait, ``"off"`` does neither. ``PACELINE_HANG_WATCH`` and ``PACELINE_HANG_AFTER_S`` set
            the same.
        rank: which rank this is, for programs that start their ranks themselves; together with ``world_size``. They
            meet at ``MASTER_ADDR`` and ``MASTER_PORT``. What a launcher's variables say is then not asked.
        world_size: how many ranks there are.

    A second call returns the same `World`, and raises if it asks for something else. A process group that was started
    by other means is used as it is.
    """
    global _started
    limit = _timeout(timeout)
    watch = HangWatch.from_arguments(hang_watch, hang_after_s)
    if hang_watch is not None or hang_after_s is not None:
        hang.configure(watch)
    is_named = _check_named(rank, world_size)
    if dist.is_initialized():
        asked = {"rank": rank, "world_size": world_size, "backend": backend}
        return _existing(asked, device=device, timeout=limit)
    if rank is not None and world_size is not None:
        launch = Launch.of(os.environ, rank=rank, world_size=world_size)
    else:
        launch = Launch.read(os.environ)

    chosen = _device(device, local_rank=launch.local_rank if launch else 0)
    name = default_backend(chosen, world_size=launch.world_size if launch else 1) if backend is None else backend
    _check_backend(name)
    world = _join(launch, device=chosen, backend=name, timeout=limit)
    _started = _Started(_world_group(), world, limit)
    if world.world_size > 1:
        sign_in(_world_group())
    if backend is None and world.rank == 0 and (carried := transport.describe(_world_group())):
        print(f"paceline: {carried}", file=sys.stderr)
    if launch is None and not is_named and (idle := idle_tasks(os.environ)):
        print(f"paceline: {idle}", file=sys.stderr)
    return world


def _join(launch: Launch | None, *, device: torch.device, backend: str, timeout: timedelta | None) -> World:
    """Join the process group that ``launch`` describes, or make one of a single rank."""
    if device.index is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if launch is None:
        # The store is in this process: a single rank has nobody to meet, so it needs no port and no file.
        store = dist.HashStore()  # public, but torch's stubs forget it
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        _end_with_launcher(os.environ)
        rank, size = launch.rank, launch.world_size
        if launch.host_is_guessed:
            _check_host(launch.host)
        met = meet(launch, timeout=timeout)
        dist.init_process_group(backend, store=met, rank=rank, world_size=size, timeout=timeout)
    return World(
        rank=dist.get_rank(),
        local_rank=launch.local_rank if launch else 0,
        world_size=dist.get_world_size(),
        device=device,
        backend=backend,
    )


def shutdown() -> None:
    """End the process group that `init` started, and all threads of Paceline.

    A process group that was started by other means is left alone, and so are the threads that serve it.
    """
    global _started
    ours, _started = _started, None
    try:
        if ours is not None and dist.is_initialized() and _world_group() is ours.group:
            last_words.finish()
            dist.destroy_process_group()
    finally:
        if not dist.is_initialized():
            left = threads.end_all()
            if left:
                names = ", ".join(sorted(thread.name for thread in left))
                _logger.warning("paceline: threads still wait in a call that cannot be interrupted: %s", names)


def default_backend(device: torch.device, *, world_size: int = 1) -> str:
    """Return the most suitable backend for a rank whose tensors are on ``device``."""
    if device.type == "cpu" and world_size > 1:
        return f"cpu:{transport.BACKEND}"
    if device.type == "cpu":
        return dist.get_default_backend_for_device("cpu")
    vendor = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(vendor):
        return "gloo"
    # Control messages and CPU buffers travel as CPU tensors, which backends of vendors do not carry.
    return vendor if vendor == "gloo" else f"cpu:gloo,{device.type}:{vendor}"


def _existing(asked: Mapping[str, object], *, device: str | torch.device | None, timeout: timedelta | None) -> World:
    """The group that is there. It is an error if something else was ``asked`` for."""
    ours = _started if _started is not None and _started.group is _world_group() else None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if ours is not None:
        world = ours.world
    else:
        config = dist.get_backend_config()
        local = local_rank(os.environ, rank)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if device is None and (accelerator is None or f"{accelerator.type}:" not in config):
            chosen = torch.device("cpu")
        else:
            chosen = _device(device, local_rank=local)
        world = World(rank, local, world_size, chosen, config)
    has = {"rank": rank, "world_size": world_size, "backend": world.backend}
    wanted: dict[str, tuple[object, object]] = {
        name: (new, has[name])
        for name, new in asked.items()
        if new is not None and new != has[name] and (name != "backend" or new != dist.get_backend())
    }
    if device is not None and (other := _device(device, local_rank=world.local_rank)) != world.device:
        wanted["device"] = (other, world.device)
    if timeout is not None and timeout != (ours.timeout if ours else None):
        started_with = ours.timeout if ours else None
        wanted["timeout"] = (timeout, started_with if started_with is not None else "as it was started")
    if wanted:
        listed = ", ".join(f"{name} {new} (it has {old})" for name, (new, old) in wanted.items())
        raise StateError(
            f"rank {rank}: the process group is started already and cannot be given {listed}. "
            f"Call paceline.shutdown(), or torch.distributed.destroy_process_group(), before another init()"
        )
    return world


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "only called while a default group exists"
    return group


def _device(device: str | torch.device | None, *, local_rank: int) -> torch.device:
    """Give the device its index, and check that it exists."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        # The tensors of an accelerator whose default backend is gloo cannot travel.
        usable = accelerator is not None and dist.get_default_backend_for_device(accelerator) != "gloo"
        chosen = accelerator if usable and accelerator is not None else torch.device("cpu")
    else:
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise BadArgumentError(
                f"device is {device!r}, which torch does not know. Give a name such as 'cpu' or 'cuda:0'"
            ) from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != chosen.type:
        found = "none" if accelerator is None else f"only {accelerator.type}"
        raise BadArgumentError(
            f"device is {str(chosen)!r}, but torch finds {found} on this machine. Pass device='cpu', or leave it out"
        )
    index = local_rank if chosen.index is None else chosen.index
    count = torch.accelerator.device_count()
    if index >= count:
        raise BadArgumentError(
            f"local rank {local_rank} needs {chosen.type}:{index}, but this host shows {count} of them. "
            f"Start at most {count} ranks on each host, or pass device='cpu'"
        )
    return torch.device(chosen.type, index)


def _check_named(rank: int | None, world_size: int | None) -> bool:
    """Whether the program says itself which rank it is."""
    if rank is None and world_size is None:
        return False
    if rank is None or world_size is None:
        given, missing = ("world_size", "rank") if rank is None else ("rank", "world_size")
        raise BadArgumentError(f"init() was given {given} without {missing}. Give both, or none of them")
    for name, value, low in (("rank", rank, 0), ("world_size", world_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadTypeError(f"{name} must be a whole number, got {type(value).__name__}")
        if value < low:
            raise BadArgumentError(f"{name} must be at least {low}, got {value}")
    return True


def _check_host(host: str) -> None:
    """Raise if the name of a node cannot be looked up. Otherwise ranks would wait for each other until the time-out."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise BadArgumentError(
            f"Slurm's first node is called {host!r}, and no address is known for that name here ({error}). Set "
            "MASTER_ADDR to an address of the node of rank 0, on all ranks"
        ) from None


def _check_backend(backend: str) -> None:
    if not isinstance(backend, str):
        raise BadTypeError(f"backend must be a string such as 'gloo', got {type(backend).__name__}")
    for part in backend.split(","):
        name = part.rpartition(":")[2].strip()
        if not name or not dist.is_backend_available(name):
            raise BadArgumentError(
                f"backend {name!r} (of {backend!r}) is not part of this torch. "
                f"Leave it out to let paceline.init() choose, or install a torch that has it"
            )


def _timeout(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | int | float):
        raise BadTypeError(f"timeout must be seconds or a timedelta, got {type(timeout).__name__}")
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise BadArgumentError(f"timeout must be positive, got {timeout}")
    return limit


def _end_with_launcher(environ: Mapping[str, str]) -> None:
    """Have the kernel end this rank if `paceline.run.launch` is killed and so cannot end it."""
    if LAUNCHER_PID not in environ or not sys.platform.startswith("linux"):
        return
    launcher = int(environ[LAUNCHER_PID])
    if os.getppid() != launcher:  # a child of a rank, which has inherited the variable
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != launcher:  # it died between the two lines above
        os.kill(os.getpid(), signal.SIGTERM)

"""``paceline.init()``: the default process group from torchrun's variables, or one rank without them.

Example::

    import paceline

    world = paceline.init()                      # RANK, WORLD_SIZE, ... if set; else a group of one
    model = paceline.DDP(build_model().to(world.device))
    ...
    paceline.shutdown()

`Launch.read` takes the environment as a mapping, so that only ``init`` itself reads ``os.environ``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
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
from paceline.settings import HangWatch

_logger = logging.getLogger("paceline")

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that must be set together; torchrun and `paceline.run.launch` set them all."""


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
class Launch:
    """What the environment says about this process: the launcher's variables, checked."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch | None:
        """Return the launcher's variables, or None if there are none of them."""
        given = [name for name in (*RENDEZVOUS, "LOCAL_RANK") if name in environ]
        if not given:
            return None
        missing = [name for name in RENDEZVOUS if name not in environ]
        if missing:
            # A group of one would be wrong here: N separate models would be trained, and nobody would notice.
            raise BadArgumentError(
                f"the environment is half set for a process group: {', '.join(given)} set, "
                f"{', '.join(missing)} not. Start the ranks with `torchrun` or `paceline train`, which set "
                f"all of them, or unset {', '.join(given)} to run a single rank"
            )
        rank = _integer(environ, "RANK", low=0)
        world_size = _integer(environ, "WORLD_SIZE", low=1)
        _integer(environ, "MASTER_PORT", low=0)
        if rank >= world_size:
            raise BadArgumentError(
                f"RANK is {rank} but WORLD_SIZE is {world_size}: ranks count from 0 to WORLD_SIZE - 1"
            )
        local_rank = _integer(environ, "LOCAL_RANK", low=0) if "LOCAL_RANK" in environ else rank
        return cls(rank=rank, local_rank=local_rank, world_size=world_size)


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
) -> World:
    """Start the default process group and say who this rank is.

    With torchrun's variables it joins the group that they describe. With none of them it makes a group of one rank,
    which needs no port. With some of them it raises.

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

    A second call returns the same `World`, and raises if it asks for something else. A process group that was started
    by other means is used as it is.
    """
    global _started
    limit = _timeout(timeout)
    watch = HangWatch.from_arguments(hang_watch, hang_after_s)
    if hang_watch is not None or hang_after_s is not None:
        hang.configure(watch)
    launch = Launch.read(os.environ)
    if dist.is_initialized():
        return _existing(backend=backend, device=device, timeout=limit, launch=launch)

    chosen = _device(device, local_rank=launch.local_rank if launch else 0)
    name = default_backend(chosen, world_size=launch.world_size if launch else 1) if backend is None else backend
    _check_backend(name)
    world = _join(launch, device=chosen, backend=name, timeout=limit)
    _started = _Started(_world_group(), world, limit)
    if world.world_size > 1:
        sign_in(_world_group())
    if backend is None and world.rank == 0 and (carried := transport.describe(_world_group())):
        print(f"paceline: {carried}", file=sys.stderr)
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
        met = meet(os.environ, rank=rank, world_size=size, timeout=timeout)
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


def _existing(
    *,
    backend: str | None,
    device: str | torch.device | None,
    timeout: timedelta | None,
    launch: Launch | None,
) -> World:
    ours = _started if _started is not None and _started.group is _world_group() else None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if ours is not None:
        world = ours.world
    else:
        config = dist.get_backend_config()
        local_rank = launch.local_rank if launch else rank
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if device is None and (accelerator is None or f"{accelerator.type}:" not in config):
            chosen = torch.device("cpu")
        else:
            chosen = _device(device, local_rank=local_rank)
        world = World(rank, local_rank, world_size, chosen, config)
    wanted: dict[str, tuple[object, object]] = {}
    if backend is not None and backend not in (world.backend, dist.get_backend()):
        wanted["backend"] = (backend, world.backend)
    if device is not None and (other := _device(device, local_rank=world.local_rank)) != world.device:
        wanted["device"] = (other, world.device)
    if timeout is not None and timeout != (ours.timeout if ours else None):
        started_with = ours.timeout if ours else None
        wanted["timeout"] = (timeout, started_with if started_with is not None else "as it was started")
    if wanted:
        asked = ", ".join(f"{name} {new} (it has {old})" for name, (new, old) in wanted.items())
        raise StateError(
            f"rank {rank}: the process group is started already and cannot be given {asked}. "
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


def _integer(environ: Mapping[str, str], name: str, *, low: int) -> int:
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise BadArgumentError(f"environment variable {name} must be an integer of at least {low}, got {text!r}")
    return value


def _end_with_launcher(environ: Mapping[str, str]) -> None:
    """Have the kernel end this rank if `paceline.run.launch` is killed and so cannot end it."""
    if LAUNCHER_PID not in environ or not sys.platform.startswith("linux"):
        return
    launcher = _integer(environ, LAUNCHER_PID, low=1)
    if os.getppid() != launcher:  # a child of a rank, which has inherited the variable
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != launcher:  # it died between the two lines above
        os.kill(os.getpid(), signal.SIGTERM)

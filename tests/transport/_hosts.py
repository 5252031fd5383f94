"""Hosts made of namespaces: ranks with a network and a ``/dev/shm`` of their own, on one machine.

    with Hosts(2, ranks_per_host=2) as hosts:
        hosts.run("tests.transport.test_hosts", "_sum", 3)   # fn(rank, world_size, 3) on every rank, results by rank

A host is a network, a mount and a host name namespace, held by a sleeping process; ranks enter them. They are started
once and run one function after another. With ``is_forking`` a rank makes no group, and each function runs in a process
of its own, forked from the warm one: it may die. Run as a module, this file is such a rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

_LINK = "link0"
_NETWORK = "10.213.0"
_PORT = 29500
_ROOT = Path(__file__).resolve().parents[2]
# This passes only if a rank is stuck. Importing torch four times on a busy machine takes its time.
_ANSWER_S = 120.0
_FORKING = "PACELINE_TEST_HOSTS_FORKING"
KILLED = "killed"
_numbers = itertools.count()


def why_no_hosts() -> str | None:
    """Why namespaces cannot be made here, or None if they can."""
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    name = f"paceline-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True, check=False
    )
    return f"mount namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode != 0 else None


@dataclass(frozen=True)
class Place:
    """Where a process can be started."""

    enter: list[str]
    """The command that goes there, which is followed by the one to run."""
    address: str
    environ: dict[str, str]


class Hosts:
    """Live ranks on hosts that share no memory and are connected by one link."""

    def __init__(
        self, count: int = 2, *, ranks_per_host: int = 2, shm_bytes: int = 256 << 20, is_forking: bool = False
    ) -> None:
        assert count == 2, "a link has two ends"
        self._is_forking = is_forking
        self._spaces = [f"paceline-{os.getpid()}-{next(_numbers)}" for _ in range(count)]
        self._ranks_per_host = ranks_per_host
        self._shm_bytes = shm_bytes
        self._holders: list[subprocess.Popen[str]] = []
        self._ranks: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, module: str, function: str, *args: Any, ranks: list[int] | None = None) -> list[Any]:
        """Call ``function(rank, world_size, *args)`` of ``module`` on every rank; arguments and results are JSON.

        What comes of a forked process that a signal has killed is ``KILLED``.
        """
        asked = range(len(self._ranks)) if ranks is None else ranks
        for rank in asked:
            pipe = self._ranks[rank].stdin
            assert pipe is not None
            pipe.write(json.dumps([module, function, args]) + "\n")
            pipe.flush()
        answers = [self._answer(rank) for rank in asked]
        failed = [
            f"rank {rank}:\n{answer['error']}" for rank, answer in zip(asked, answers, strict=True) if "error" in answer
        ]
        assert not failed, "\n".join(failed)
        return [answer["value"] for answer in answers]

    def place(self, host: int) -> Place:
        """Where processes of a host are started by others."""
        return Place(self._enter(host), f"{_NETWORK}.{host + 1}", {"GLOO_SOCKET_IFNAME": _LINK})

    def kill(self, rank: int) -> None:
        """SIGKILL a rank."""
        self._ranks[rank].send_signal(signal.SIGKILL)
        self._ranks[rank].wait()

    def stop(self, rank: int) -> None:
        """SIGSTOP a rank, until :meth:`resume`."""
        self._ranks[rank].send_signal(signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """SIGCONT it."""
        self._ranks[rank].send_signal(signal.SIGCONT)

    def sent_bytes(self, host: int) -> int:
        """What has left the host over the link so far."""
        for line in self._inside(host, "cat", "/proc/net/dev").stdout.splitlines():
            name, _, counts = line.strip().partition(":")
            if name == _LINK:
                return int(counts.split()[8])
        raise AssertionError(f"{_LINK} is not there")

    def segments(self, host: int) -> list[str]:
        """Names in the host's /dev/shm."""
        return [name for name in self._inside(host, "ls", "/dev/shm").stdout.split() if name.startswith("paceline-")]

    # -- making and ending -----------------------------------------------------------------------------------

    def _make(self) -> None:
        for space in self._spaces:
            _command("ip", "netns", "add", space)
        one, other = self._spaces
        _command("ip", "-n", one, "link", "add", _LINK, "type", "veth", "peer", "name", _LINK, "netns", other)
        for host, space in enumerate(self._spaces):
            _command("ip", "-n", space, "addr", "add", f"{_NETWORK}.{host + 1}/24", "dev", _LINK)
            _command("ip", "-n", space, "link", "set", _LINK, "up")
            _command("ip", "-n", space, "link", "set", "lo", "up")
            self._hold(space)
        for rank in range(len(self._spaces) * self._ranks_per_host):
            self._ranks.append(self._start(rank))

    def _hold(self, space: str) -> None:
        named = f"echo {space} > /proc/sys/kernel/hostname"
        shown = f"{named} && mount -t tmpfs -o size={self._shm_bytes} tmpfs /dev/shm && echo ready"
        holder = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "-m", "-u", "sh", "-c", f"{shown} && exec sleep 100000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", f"{space}: cannot mount a /dev/shm of its own"

    def _start(self, rank: int) -> subprocess.Popen[str]:
        size = len(self._spaces) * self._ranks_per_host
        environ = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": f"{_NETWORK}.1",
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": _LINK,
            "OMP_NUM_THREADS": "1",
            # Entering a mount namespace leaves the working directory.
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *(os.path.abspath(path) for path in sys.path if path)]),
            # Hosts are found by trying: what launchers say about them must not matter.
            "LOCAL_WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            _FORKING: str(int(self._is_forking)),
        }
        return subprocess.Popen(
            [*self._enter(rank // self._ranks_per_host), sys.executable, "-m", "tests.transport._hosts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def _enter(self, host: int) -> list[str]:
        return ["nsenter", "-t", str(self._holders[host].pid), "-m", "-n", "-u"]

    def _inside(self, host: int, *command: str) -> subprocess.CompletedProcess[str]:
        return _command(*self._enter(host), *command)

    def _answer(self, rank: int) -> dict[str, Any]:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        line = _readline(pipe.fileno(), deadline=time.monotonic() + _ANSWER_S)
        if not line:
            code = self._ranks[rank].poll()
            if code is None:
                self._show_stacks()
            return {"error": f"no answer; exit code {code}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _show_stacks(self) -> None:
        """Have every rank that lives say on stderr where it is, since a rank that is stuck waits for another."""
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)  # nothing tells when they have; this is on the way to a failure

    def _end(self) -> None:
        for process in [*self._ranks, *self._holders]:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()
        for space in self._spaces:
            _command("ip", "netns", "del", space, check=False)


def _readline(fd: int, *, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(fd, 1) if ready else b""
        if not part:
            return b""
        line += part
    return line


def _command(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done


def _rank() -> None:
    # Answers have the pipe to themselves; whatever prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.distributed as dist

    import paceline

    torch.set_num_threads(1)
    assert paceline.transport.BACKEND == "shm"
    is_forking = os.environ[_FORKING] == "1"
    if not is_forking:
        dist.init_process_group("cpu:shm", timeout=timedelta(seconds=60))
    for line in sys.stdin:
        answers.write((_in_a_child(line) if is_forking else _run(line)) + "\n")
    os._exit(0)


def _run(line: str) -> str:
    module, function, args = json.loads(line)
    try:
        found = getattr(importlib.import_module(module), function)
        answer = {"value": found(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *args)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    return json.dumps(answer)


def _in_a_child(line: str) -> str:
    # Here, so that not every child has to.
    importlib.import_module(json.loads(line)[0])
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        faulthandler.dump_traceback_later(_ANSWER_S / 2, exit=True)
        with os.fdopen(theirs, "w") as answers:
            answers.write(_run(line))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return json.dumps({"value": KILLED})
    return answer or json.dumps({"error": f"no answer; wait status {status}"})


if __name__ == "__main__":
    _rank()

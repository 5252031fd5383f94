"""Start the ranks of one host as processes, watch over them, and leave none behind.

    signal --+
             +--> events (a queue) --> `_Supervisor.run`: forward, wait, terminate, kill --> exit code
    exits ---+

Rank 0 writes to the terminal. Of what the others write the end is kept, and shown if they fail. The ranks find each
other with torchrun's variables, so a script cannot tell who started it. The store at which they meet lives here and not
in rank 0. It outlives every rank, so that the survivors can still be told who died.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from paceline import threads
from paceline.errors import BadArgumentError
from paceline.run.output import Output
from paceline.settings import SECRET

LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
"""The variable by which a rank knows its launcher. `paceline.init` makes the rank end when the launcher does."""

LOOPBACK = "127.0.0.1"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A rank that lost a peer raises within seconds and says why. It should not be ended before that.
_SETTLE_S = 5.0
_TERMINATE_S = 5.0
# A Python that is still starting answers SIGINT with a traceback, or loses it. It has nothing to save yet, so it is
# terminated instead.
_STARTING_S = 1.0
_USAGE = 2  # the exit code of argparse and of most commands for a wrong flag
_TAIL_LINES = 40


@dataclass(frozen=True)
class _Exited:
    rank: int
    code: int


@dataclass(frozen=True)
class _Signalled:
    signum: int


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    threads: int = 1,
    environ: Mapping[str, str] | None = None,
    grace_s: float = 30.0,
) -> int:
    """Run ``command`` as ``nproc`` ranks of this host and return the exit code for the whole.

    The exit code is 0 if every rank returned 0. If this process received signal ``n``, which it forwards to every rank,
    it is ``128 + n``. Otherwise it is that of the first rank that failed, with ``128 + n`` if signal ``n`` killed it.

    Args:
        command: the program and its arguments, the same for every rank.
        nproc: how many ranks.
        threads: what ``OMP_NUM_THREADS`` is set to for each rank, unless it is set already.
        environ: the variables to start from; this process's by default.
        grace_s: how long ranks may take to end themselves after a forwarded signal, before they are terminated and
            then killed. Once a rank has ended without handling the signal, the others have only seconds. A second
            Ctrl-C kills them at once.

    Example::

        raise SystemExit(launch([sys.executable, "train.py", "--steps", "10"], nproc=2))
    """
    if nproc < 1:
        raise BadArgumentError(f"nproc must be at least 1, got {nproc}")
    if threads < 1:
        raise BadArgumentError(f"threads must be at least 1, got {threads}")
    base = dict(os.environ if environ is None else environ)
    base.setdefault("OMP_NUM_THREADS", str(threads))
    # Any user of this host can connect to the store. Only this user can read the environment of the ranks.
    base[SECRET] = secrets.token_hex(32)
    # The socket is bound here and handed to the store below, so that no other process can take the port in between.
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    run_id = uuid.uuid4().hex
    supervisor = _Supervisor(grace_s=grace_s)
    with listener, supervisor.signals():
        try:
            for rank in range(nproc):
                variables = rank_variables(rank=rank, nproc=nproc, port=port, run_id=run_id)
                supervisor.start(rank, command, base | variables)
            # This process imports torch while the ranks do. Early callers wait in the listener's backlog.
            store = serve(listener)
            code = supervisor.run()
            del store
        finally:
            supervisor.kill()
    supervisor.explain()
    return code


def rank_variables(*, rank: int, nproc: int, port: int, run_id: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a single host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The store is served by the launcher: rank 0 connects to it like the others.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_PID: str(os.getpid()),
    }


def serve(listener: socket.socket) -> object:
    """Open the store on the bound socket, which it then owns. It serves for as long as it is referenced."""
    import torch.distributed as dist  # late, so that the ranks do not wait for this import

    port = listener.getsockname()[1]
    return dist.TCPStore(  # public, but torch's stubs forget it
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@dataclass
class _Supervisor:
    grace_s: float
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    outputs: dict[int, Output] = field(default_factory=dict)
    """By rank; that of rank 0 goes to the terminal."""
    watchers: list[threads.Thread] = field(default_factory=list)
    failures: list[_Exited] = field(default_factory=list)
    """Ranks that failed by themselves, in the order in which they ended."""
    received: int | None = None
    """The first signal that was forwarded."""
    started_s: float = 0.0
    """When the last rank was started."""
    # It is a SimpleQueue because a signal handler may call its put().
    events: queue.SimpleQueue[_Exited | _Signalled] = field(default_factory=queue.SimpleQueue)

    def start(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        # The rank has a session of its own, so that a terminal's Ctrl-C reaches only the launcher, which forwards it.
        with contextlib.ExitStack() as stack:
            written = None
            if rank != 0:
                self.outputs[rank] = output = Output(rank)
                stack.callback(output.hand_over)
                written = output.descriptor
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
            )
        self.processes.append(process)
        self.started_s = time.monotonic()

        def watch() -> None:
            self.events.put(_Exited(rank, process.wait()))

        # The thread ends with its rank. Ranks end by the supervisor's word only, so nothing is done to stop the thread.
        self.watchers.append(threads.start(watch, name=f"rank-{rank}", stop=lambda: None, within_s=0))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn the signals that end a run into events while the ranks live."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python allows handlers in the main thread only
            return

        def note(signum: int, _frame: FrameType | None) -> None:
            self.events.put(_Signalled(signum))

        previous = {signum: signal.signal(signum, note) for signum in _FORWARDED}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def run(self) -> int:
        """Watch the ranks until the last one is gone; return the exit code for the whole."""
        running = set(range(len(self.processes)))
        deadline_s: float | None = None
        terminated = False
        while running:
            try:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                event = self.events.get(timeout=left_s)
            except queue.Empty:
                if terminated:
                    self.kill()
                    deadline_s = None
                else:
                    terminated = True
                    self._send(signal.SIGTERM)
                    deadline_s = time.monotonic() + _TERMINATE_S
                continue
            if isinstance(event, _Exited):
                running.discard(event.rank)
                if terminated or self._graceful(event.code):
                    continue
                if event.code != -(self.received or 0):
                    self.failures.append(event)
                # The others may be waiting for this one, and would do so until their grace is over.
                settled_s = time.monotonic() + _SETTLE_S
                deadline_s = settled_s if deadline_s is None else min(deadline_s, settled_s)
            elif self.received is None:
                self.received = event.signum
                deadline_s = time.monotonic() + self.grace_s
                if time.monotonic() - self.started_s < _STARTING_S:
                    terminated = True
                    self._send(signal.SIGTERM)
                else:
                    self._send(event.signum)
            else:
                terminated = True
                self.kill()
        if self.received is not None:
            return 128 + self.received
        return _shell_code(self.failures[0].code) if self.failures else 0

    def _graceful(self, code: int) -> bool:
        return code == 0 or (self.received is not None and code == 128 + self.received)

    def _send(self, signum: int) -> None:
        for process in self.processes:
            process.send_signal(signum)  # does nothing to a process that has ended

    def kill(self) -> None:
        """End what still runs, with whatever it started in its session."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for watcher in self.watchers:
            watcher.end()
        for output in self.outputs.values():
            output.end()

    def explain(self) -> None:
        """Tell on stderr which ranks failed by themselves, with the last lines of what they wrote, and why."""
        if self.received is None and not self.failures:
            return
        if self.received is not None:
            name = signal.Signals(self.received).name
            print(f"paceline: {name} received; all ranks have ended", file=sys.stderr)
        outputs = [self._tail(failure.rank) for failure in self.failures]
        if self.failures and all(failure.code == _USAGE for failure in self.failures) and not any(outputs):
            return  # a wrong flag: every rank refused it, and rank 0 has said so
        for failure, output in zip(self.failures, outputs, strict=True):
            if self.received == signal.SIGINT and "KeyboardInterrupt" in "".join(output[-1:]):
                continue  # what Python says to a Ctrl-C that nobody handles
            print(f"paceline: rank {failure.rank} {_describe(failure.code)}", file=sys.stderr)
            for line in output:
                print(f"  [rank {failure.rank}] {line}", file=sys.stderr)
        self._show_verdicts()
        sys.stderr.flush()

    def _show_verdicts(self) -> None:
        """Say what the ranks' files tell about the end of the job, if they have left any."""
        # Late, because the ranks should not wait for this import, and because most jobs end well.
        from paceline.control.jobs import job_of_processes
        from paceline.run.doctor import verdicts

        path = job_of_processes({process.pid for process in self.processes})
        told = verdicts(path) if path is not None else []
        # After a Ctrl-C only a hang is worth a word.
        told = [text for text in told if self.received is None or text.startswith("last report")]
        for text in told:
            print(f"paceline: {text}", file=sys.stderr)
        if told:
            print(f"paceline: for more: python -m paceline doctor {path}", file=sys.stderr)

    def _tail(self, rank: int) -> list[str]:
        if rank not in self.outputs:
            return []
        return self.outputs[rank].end().decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _describe(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"

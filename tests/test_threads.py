"""The owner of all threads: each has a name and an end, and none is left to come back while the interpreter ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import threads
from paceline.run.launch import launch
from tests.transport._hosts import Hosts
from tests.transport.requirements import needs_hosts, needs_shm


def _ours() -> list[str]:
    return sorted({thread.name for thread in threading.enumerate() if thread.name.startswith(threads.PREFIX)})


# -- after shutdown ------------------------------------------------------------------------------------


def leave(rank: int, size: int, backend: str) -> list[list[str]]:
    """The names of our threads before and after ``shutdown``, when everything that starts one has been used."""
    paceline.init(backend=backend, timeout=60)
    ddp = paceline.DDP(torch.nn.Linear(4, 2))
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.get_future().wait()
    if rank == 0:
        # It receives from anybody, which starts threads that listen to all others.
        dist.recv(torch.empty(1))
    elif rank == 1:
        dist.send(torch.ones(1), 0)
    dist.barrier()
    used = _ours()
    del ddp, work
    paceline.shutdown()
    return [used, _ours()]


_LEAVE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.test_threads import leave
used, left = leave(int(__import__("os").environ["RANK"]), 2, sys.argv[2])
assert {"paceline-store", "paceline-watch"} <= set(used), used
assert left == [], left
"""


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "cpu:shm"])
def test_no_thread_is_left_after_shutdown(backend: str) -> None:
    if backend == "cpu:shm":
        needs_shm()
    root = str(Path(__file__).parents[1])
    assert launch([sys.executable, "-c", _LEAVE, root, backend], nproc=2) == 0
    # No thread is left in the process that started the ranks either.
    assert [name for name in _ours() if name.startswith("paceline-rank")] == []


def test_no_thread_is_left_if_the_user_has_ended_the_group_before_shutdown() -> None:
    paceline.init()
    dist.destroy_process_group()
    told = threading.Event()
    threads.start(told.wait, name="test", stop=told.set, within_s=30)
    paceline.shutdown()
    assert _ours() == []


@pytest.mark.full
def test_no_thread_is_left_after_shutdown_of_a_group_that_spans_hosts() -> None:
    needs_hosts()
    with Hosts(2, ranks_per_host=2, is_forking=True) as hosts:
        found: list[Any] = hosts.run(__name__, "leave", "cpu:shm")
    assert {"paceline-reports", "paceline-watch"} <= set(found[0][0])
    assert [left for _, left in found] == [[]] * 4


# A backend has threads that wake up now and then for as long as there is a group.
_LIVE_GROUP = """
import atexit, time
ended = []
atexit.register(lambda: print(time.monotonic() - ended[0] < threads._REST_S))
from paceline import threads
import torch.distributed as dist
threads._REST_S = 60.0
# If no thread of ours had ever run, the end would not look at the others at all.
threads.start(int, name="short", stop=int, within_s=60).join()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ended.append(time.monotonic())
"""

# A program that uses nothing of the package has a thread that never rests.
_BUSY_THREAD = """
import atexit, itertools, threading, time
ended = []
atexit.register(lambda: print(time.monotonic() - ended[0] < threads._REST_S))
from paceline import threads
threads._REST_S = 60.0
threading.Thread(target=lambda: [n for n in itertools.count() if not n], daemon=True).start()
ended.append(time.monotonic())
"""


@pytest.mark.full
@pytest.mark.parametrize("program", [_LIVE_GROUP, _BUSY_THREAD], ids=["live-group", "busy-thread"])
def test_the_end_does_not_wait_for_threads_that_need_not_end(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    # It would wait for them in full: a minute here, so that a busy machine is not taken for that.
    assert done.stdout == "True\n"


# -- one thread ----------------------------------------------------------------------------------------


def test_a_thread_is_told_to_stop_and_has_ended_then() -> None:
    told = threading.Event()
    thread = threads.start(told.wait, name="test", stop=told.set, within_s=30)
    assert "paceline-test" in _ours()
    assert threads.end_all() == []
    assert not thread.is_alive()
    assert thread.end()


def test_a_thread_that_another_one_starts_at_its_end_is_ended_as_well() -> None:
    told, also_told = threading.Event(), threading.Event()

    def start_another() -> None:
        told.wait()
        threads.start(also_told.wait, name="another", stop=also_told.set, within_s=30)

    threads.start(start_another, name="first", stop=told.set, within_s=30)
    assert threads.end_all() == []
    assert also_told.is_set()
    assert "paceline-another" not in _ours()


def test_a_thread_that_does_not_stop_is_waited_for_no_longer_than_it_may_take() -> None:
    told, may_end = threading.Event(), threading.Event()
    thread = threads.start(may_end.wait, name="stuck", stop=told.set, within_s=0.01)
    assert threads.end_all() == [thread]
    assert told.is_set()
    may_end.set()
    assert thread.within_s == 0.01
    thread.join()


def test_whoever_cannot_be_told_to_stop_does_not_keep_the_others_from_ending() -> None:
    told = threading.Event()

    def stop() -> None:
        told.set()
        raise OSError("the connection is gone")

    threads.start(told.wait, name="test", stop=stop, within_s=30)
    assert threads.end_all() == []


def test_a_signal_handler_may_end_all_threads_while_one_is_being_started() -> None:
    with threads._lock:
        assert threads.end_all() == []


# Another thread of the parent is starting a thread at the moment of the fork.
_FORK = """
import os, threading
from paceline import threads
held, may_go = threading.Event(), threading.Event()
def hold():
    with threads._lock:
        held.set()
        may_go.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    threads.start(lambda: None, name="test", stop=lambda: None, within_s=1).join()
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
may_go.set()
print(code)
"""


@pytest.mark.full
def test_a_forked_process_can_start_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "7\n"


# A thread waits in C++ and comes back while the interpreter finalises. The end of a "module" causes that, and gives it
# time. The abort cuts a long time short. A thread that is held does nothing that could be waited for.
_PROGRAM = """
import datetime, sys, threading, time
import torch.distributed as dist
from paceline import threads

# The thread keeps Python's lock until it waits in C++, and on a busy machine it may take its time to be asleep there.
sys.setswitchinterval(60)
threads._REST_S = 60.0
store = dist.HashStore()

class Late:
    def __del__(self, set=store.set, sleep=time.sleep, enough_s=1 if sys.argv[1] == "owned" else 60):
        set("late", "")
        sleep(enough_s)

sys.modules["late"] = Late()
entered = threading.Event()

def wait():
    entered.set()
    try:
        store.wait(["late"], datetime.timedelta(seconds=120))
    finally:
        print("came back", flush=True)

if sys.argv[1] == "owned":
    threads.start(wait, name="stuck", stop=lambda: None, within_s=0.1)
else:
    threading.Thread(target=wait, daemon=True).start()
entered.wait()
print("ends", flush=True)
"""


@pytest.mark.parametrize(("kind", "code"), [("owned", 0), ("any", -signal.SIGABRT)])
def test_a_thread_that_cannot_be_interrupted_does_not_abort_the_end_of_the_process(kind: str, code: int) -> None:
    """The other one does, which shows what the owner is for."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, kind], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "ends\n"), done.stderr


@pytest.mark.full
def test_no_thread_is_started_while_the_interpreter_ends() -> None:
    code = (
        "import atexit\n"
        "def late():\n"
        "    try: threads.start(print, name='late', stop=print, within_s=1)\n"
        "    except RuntimeError as error: print(error)\n"
        "atexit.register(late)\n"
        "from paceline import threads\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "the thread paceline-late cannot be started" in done.stdout, done.stderr

"""What a person reads when a rank fails under torchrun: the first cause, and little else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os, sys, torch, paceline
world = paceline.init(backend="gloo")
ddp = paceline.DDP(torch.nn.Linear(4, 2))

def load():
    raise ValueError("no such file")

class EndsAfterTheOther:
    # The other rank raises first, and must not be taken for the cause.
    def __del__(self, os=os, pipe=sys.argv[1]):
        os.read(os.open(pipe, os.O_RDONLY), 1)

if world.rank == 0:
    last = EndsAfterTheOther()
else:
    atexit.register(lambda: os.write(os.open(sys.argv[1], os.O_WRONLY), b"raised"))
ddp(torch.ones(1, 4)).sum().backward()
ddp(torch.ones(1, 4) if world.rank else load()).sum().backward()
"""


def test_the_first_cause_is_what_is_read_first(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    pipe = tmp_path / "raised"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(program), str(pipe)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    root = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 0 ", root)
    assert "ValueError: no such file" in root
    told = [line for line in done.stderr.splitlines() if line.startswith("[rank1]")]
    # The survivor says it later, in a few lines, of which none is torch's or ours.
    assert "PeerFailedError: rank 0 raised in its program: ValueError: no such file" in told[-1]
    assert f"{program}:7 in load" in told[-1]
    assert len(told) <= 5
    assert done.stderr.index("ValueError: no such file") < done.stderr.index("PeerFailedError")


RESTARTED = """
import os, torch, torch.distributed as dist, paceline
world = paceline.init(backend="gloo", timeout=60)
total = torch.ones(())
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # The other rank is still there, and has written its share into the store.
    dist.barrier()
    raise ValueError("once") if world.rank else SystemExit(1)
print("sum", int(total), flush=True)
paceline.shutdown()
"""


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_meet_again(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(RESTARTED, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2

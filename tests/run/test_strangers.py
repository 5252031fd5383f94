"""Another user of the host can reach the launcher's store. What he writes there is not believed."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import settings
from paceline.run.launch import launch
from tests.run.test_init import _meet_as

ATTACK = """
import os, sys
import torch.distributed as dist
from paceline.control import wire
from paceline.control.wire import MessageKind as Kind
host, port, victim, name = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
# Python itself may be where only root can read, so it becomes another user when it has imported everything.
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert "PACELINE_SECRET" not in os.environ
try:
    open(f"/proc/{victim}/environ").read()
except PermissionError:
    pass
else:
    raise SystemExit("the secret can be read")
store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
[job] = [key for key in store.list_keys() if key.endswith("paceline/job")]
prefix = job.removesuffix("job")

def forge(wrapper, key, kind, *fields):
    message = wire.encode(kind, *fields, place=f"{name}/{wrapper}/{key}")
    store.set(f"{prefix}{wrapper}/{key}", message)

failure = 1, "backward", "ValueError", "forged", "x.py:1 in x", 1
forge(1, "given_up", Kind.FAILURE, *failure)
forge(1, "failure/1", Kind.FAILURE, *failure)
store.add(f"{prefix}1/failures", 1)
forge(1, "replan/1", Kind.REPLAN, 1, 0, "forged")
forge(1, "gone/0", Kind.WORD, ("forged",))
forge(1, "gone/1", Kind.WORD, ("forged",))
store.add(f"{prefix}1/gone", 2)
for rank in (0, 1):
    forge(1, f"whereabouts/{rank}", Kind.WHEREABOUTS, 2**40, 1, 1, 1, "forged", "forged", "forged", "", ("1 forged",))
store.add(f"{prefix}1/inquiries", 1)
forge(2, "agree/parameters or options/0/verdict", Kind.VERDICT, b"\\1\\0", (b"forged",))
print("forged", len(store.list_keys()) > 0)
"""

JOB = """
import os, subprocess, sys
import torch, torch.distributed as dist, paceline
world = paceline.init(device="cpu", backend="gloo")
torch.manual_seed(0)
model = paceline.DDP(torch.nn.Linear(3, 1, bias=False))

def step(model):
    model(torch.full((1, 3), float(world.rank + 1))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 3], model.module.weight.grad
    model.zero_grad()

step(model)
if world.rank == 0:
    # Rank 1 waits meanwhile, and looks for news. The attacker is even told the name of the job.
    environ = {name: text for name, text in os.environ.items() if name != "PACELINE_SECRET"}
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    command = [sys.executable, "-B", sys.argv[1], *place, str(os.getpid()), model._reducer.channel.job]
    told = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert told.stdout == "forged True\\n", told.stderr
for _ in range(3):
    step(model)
    dist.barrier()
step(paceline.DDP(torch.nn.Linear(3, 1, bias=False)))
report = str(model._reducer.channel.inquiries.report())
assert "forged" not in report, report
print("unimpressed")
paceline.shutdown()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a second user")
def test_what_another_user_forges_in_the_launchers_store_is_not_believed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "attack.py").write_text(ATTACK)
    code = launch([sys.executable, *(str(tmp_path / name) for name in ("job.py", "attack.py"))], nproc=2)
    out, err = capfd.readouterr()
    assert (code, out) == (0, "unimpressed\n"), err
    assert "was refused" in err


SECRETIVE = """
import logging, os, sys
import torch, paceline
logging.basicConfig(level=logging.DEBUG)
world = paceline.init(device="cpu")
open(f"{sys.argv[1]}/secret{world.rank}", "w").write(os.environ["PACELINE_SECRET"])
model = paceline.DDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
if world.rank == 1:
    raise ValueError("the job ends")
model(torch.ones(1, 2)).sum().backward()
"""


def test_each_launch_has_a_secret_of_its_own_and_shows_it_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_JOB_DIR", str(tmp_path / "jobs"))
    monkeypatch.setenv(settings.SECRET, "x" * 32)
    (tmp_path / "job.py").write_text(SECRETIVE)
    assert launch([sys.executable, str(tmp_path / "job.py"), str(tmp_path)], nproc=2) == 1
    secrets = {(tmp_path / f"secret{rank}").read_text() for rank in range(2)}
    [secret] = secrets
    assert len(secret) == 64
    assert secret != "x" * 32
    out, err = capfd.readouterr()
    assert "rank 1 raised" in err, err
    assert secret not in out + err
    files = [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()]
    assert files
    assert not any(secret.encode() in path.read_bytes() for path in files)


def test_ranks_with_different_secrets_are_told_so_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def come(rank: int) -> str:
        environ = {} if rank else {settings.SECRET: "0123456789abcdef" * 2}
        return _meet_as(rank, 2, port, **environ)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(come, range(2)))
    for line in told:
        assert "DisagreementError: Ranks were started with different secrets: rank" in line
        assert "0123456789abcdef" not in line

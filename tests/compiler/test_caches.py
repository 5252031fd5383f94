"""torch's caches of compiled code hit: on the next run, on the other ranks, for any bucket size and world size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from paceline import DDP
from paceline.hooks import allreduce
from tests.compiler._compare import new_salt, plain_step, stack
from tests.compiler._models import Salted


def compile_and_count(rank: int, salt: float, cap_bytes: int) -> dict[str, list[int]]:
    """Hits, misses and bypasses of each cache in one compiled step of this rank's own."""
    torch._dynamo.reset()
    counters.clear()
    # The wrapper is not the first one of this process, and its number differs between ranks.
    others = [DDP(stack(1), init_sync=False) for _ in range(rank + 1)]
    ddp = DDP(Salted(salt), bucket_cap_mb=cap_bytes / 2**20, init_sync=False)
    # The hook makes buckets even where one rank is alone.
    ddp.register_comm_hook(None, allreduce)
    with ddp.no_sync():
        # This does without a C++ compiler, since kernels are not what is cached here.
        plain_step(torch.compile(ddp, fullgraph=True, options={"fallback_by_default": True}), rank, 0)
    others.clear()
    kinds = ("hit", "miss", "bypass")
    return {
        "aot": [counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in kinds],
        "fx": [counters["inductor"][f"fxgraph_cache_{kind}"] for kind in kinds],
    }


def _in_turns(rank, size, salt):
    """The ranks one after the other; then all once more with other buckets."""
    for turn in range(size):
        if turn == rank:
            first = compile_and_count(rank, salt, 600)
        dist.barrier()
    return first, compile_and_count(rank, salt, 64)


def _compiled_by_ranks(ranks, salt):
    """What a rank finds in the caches when it compiles once more what ranks have compiled."""
    (first, again), (other_rank, _) = ranks(_in_turns, salt, timeout=400)
    # A graph each for forward and backward.
    assert first == {"aot": [0, 1, 0], "fx": [0, 2, 0]}
    assert again["aot"] == other_rank["aot"] == [1, 0, 0]
    assert again["fx"][1:] == other_rank["fx"][1:] == [0, 0]
    return again


@pytest.mark.timeout(600)
def test_caches_hit_on_other_ranks_and_for_other_bucket_sizes(ranks):
    _compiled_by_ranks(ranks, new_salt())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_caches_hit_on_the_next_run_with_another_world_size(ranks):
    salt = new_salt()
    again = _compiled_by_ranks(ranks, salt)
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiler.test_caches", str(salt)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == again


def main() -> None:
    # Ranks of the pool have one thread, too. With more threads, kernels and their keys would be others.
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(json.dumps(compile_and_count(0, float(sys.argv[1]), 600)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What Paceline costs programs that use nothing of it: no compiler imported, no graph changed, caches that hit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.tracing.expressions import EXPRESSIONS
from tests.tracing.graphs import NOTHING, ROOT


def _answer(script, **environ):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORTS = """
import json, sys
import torch, torch.distributed
import paceline
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
slow = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "rich")
print(json.dumps([name for name in slow if name in sys.modules]))
"""


def test_importing_it_imports_no_compiler_and_nothing_else_that_is_slow():
    assert _answer(IMPORTS) == []


@pytest.mark.full
@pytest.mark.parametrize("point", [1, 2, 3, 4, 5])
def test_what_torch_traces_keeps_its_graphs(fake_outcomes, plain_outcomes, point):
    rows = [e.id for e in EXPRESSIONS if e.fake and e.point == point]
    traced = [row for row in rows if "graphs" in plain_outcomes[row]]
    assert len(traced) > 5
    # What we add must be an addition: torch learning a row by itself is the time to drop ours.
    assert len(traced) < len(rows)
    assert [row for row in traced if fake_outcomes[row].get("graphs") != plain_outcomes[row]["graphs"]] == []


@pytest.mark.full
def test_a_program_that_uses_nothing_of_it_compiles_as_often_to_the_same(fake_outcomes, plain_outcomes):
    assert len(plain_outcomes[NOTHING]["graphs"]) > 8
    assert fake_outcomes[NOTHING] == plain_outcomes[NOTHING]


CACHED = """
import json, torch, warnings
warnings.simplefilter("ignore")
import torch._dynamo  # the other order: everywhere else Paceline comes first
import paceline
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def step(x, group):
    first = dist.all_reduce(x, async_op=True)
    y = x.new_empty(2 * x.shape[0])
    dist.all_gather_single(y, x, group=group)
    dist.broadcast(x, 0)
    dist.barrier()
    first.wait()
    return y

# This does without a C compiler, because kernels are not what is cached here.
options = {"fallback_by_default": True}
torch.compile(step, fullgraph=True, backend="inductor", options=options)(torch.ones(4), dist.group.WORLD)
dist.destroy_process_group()
print(json.dumps({
    "path": paceline.__file__,
    "hit": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "miss": counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"],
    "bypass": counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"],
}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where a first run has left what it compiled."""
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    first = _answer(CACHED, **environ)
    assert first["hit"] == 0
    assert first["miss"] > 0
    return environ


@pytest.mark.full
def test_a_second_run_hits_the_compile_cache(cache):
    second = _answer(CACHED, **cache)
    assert second["hit"] > 0
    assert second["miss"] == second["bypass"] == 0


@pytest.mark.full
def test_a_paceline_that_compiles_its_operators_to_something_else_does_not_hit(cache, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    with open(tmp_path / "src" / "paceline" / "_torch" / "compilation.py", "a", encoding="utf-8") as lowerings:
        lowerings.write("# Another version.\n")
    other = _answer(CACHED, PYTHONPATH=str(tmp_path / "src"), **cache)
    assert other["path"].startswith(str(tmp_path))
    assert other["hit"] == 0
    assert other["miss"] > 0


ANOTHER_GROUP = """
import json
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import paceline

lengths = []
for size in (3, 2):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    lengths.append(len(torch.distributed.nn.functional.all_gather(torch.ones(1))))
    dist.destroy_process_group()
print(json.dumps(lengths))
"""


@pytest.mark.full
def test_a_group_that_is_made_anew_is_the_default_of_differentiable_collectives():
    # torch's own default would be the group of the first compilation.
    assert _answer(ANOTHER_GROUP) == [3, 2]

"""Every expression of the list, compiled as one graph, gives eager's answer.

Rows that share ranks and a backend are run together, when the first of them is asked for; a test then reads
its row's outcome. ``pytest -k`` works as usual: only the rows that were selected are run.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from typing import ClassVar

import pytest

from tests.tracing.expressions import BY_ID, EXPRESSIONS
from tests.tracing.graphs import ROOT
from tests.tracing.refused import BAD, REFUSED
from tests.tracing.runner import LITE, outcomes


def _where():
    """(number of ranks, backend, row) of every test on real ranks."""
    for expression in EXPRESSIONS:
        if expression.gloo:
            yield expression.ranks, "eager", expression.id
            # Groups and meshes are constants before aot_eager sees anything: some of them will do.
            if expression.point >= 3 or expression.inductor:
                yield expression.ranks, "aot_eager", expression.id
            if expression.inductor and expression.ranks == 2:
                yield 2, LITE, expression.id
    for name in WITH_KERNELS:
        yield 2, "inductor", name


# One of each kind also by Inductor with all it does, which takes long.
WITH_KERNELS = (
    "2-mesh['tp'] returned from the graph",
    "3-DTensor.redistribute(mesh, placements)",
    "4-several handles, waited for in another order",
    "4-dist.recv() from any rank",
    "4-dist.batch_isend_irecv(ops)",
    "4-dist.nn.functional.reduce(x, dst)",
    "5-both module hooks, several of each",
)

# So many rows a run: a row takes a tenth of a second, more on a machine that is busy.
BATCH = 60

WHERE = sorted(_where(), key=lambda where: where[:2])


@pytest.fixture(scope="module")
def outcome(rank_pool, request):
    """``outcome(world_size, backend, row)``: what is wrong, or None."""
    selected: dict[tuple[int, str], list[str]] = {}
    for item in request.session.items:
        if item.module is request.module and "world_size" in getattr(item, "callspec", _NoParams).params:
            params = item.callspec.params
            selected.setdefault((params["world_size"], params["backend"]), []).append(params["row"])
    known: dict[tuple[int, str, str], str | None] = {}

    def ask(world_size, backend, row):
        if (world_size, backend, row) not in known:
            rows = selected[world_size, backend]
            start = rows.index(row)
            found = outcomes(rank_pool.run, rows[start : start + BATCH], backend=backend, world_size=world_size)
            known.update({(world_size, backend, name): wrong for name, wrong in found.items()})
        return known[world_size, backend, row]

    return ask


class _NoParams:
    params: ClassVar[dict[str, object]] = {}


def _marks(row):
    # Most rows have an answer on a fake group, too, which is soon asked.
    return [] if BY_ID[row].inductor or not BY_ID[row].fake else [pytest.mark.full]


@pytest.mark.parametrize(
    ("world_size", "backend", "row"),
    [pytest.param(*where, marks=_marks(where[2]), id="{} ranks-{}-{}".format(*where)) for where in WHERE],
)
def test_compiled_is_eager(outcome, world_size, backend, row):
    found = outcome(world_size, backend, row)
    assert found is None, found


@pytest.mark.full
@pytest.mark.parametrize("row", [e.id for e in EXPRESSIONS if e.fake])
def test_compiled_is_eager_on_a_fake_group(fake_outcomes, row):
    answer = fake_outcomes[row]
    assert "error" not in answer, answer["error"]
    assert answer["wrong"] is None


# Rows whose subject is not the name of a function or member, and what shows each: an expression, a refusal, bad input.
SHOWN_BY = {
    "a ProcessGroup": "1-a group returned from the graph",
    "type(placement) == Shard": "3-type(placement)",
    "a reduction with a factor": "dist._make_nccl_premul_sum",
    "isinstance(work, dist.Work)": "4-handles in a dictionary, passed on, tested",
    "hooks that come and go": "5-handle.remove() in the function",
    "mesh[name] as a result": "2-mesh['tp'] returned from the graph",
    "what a group, mesh or placement raises": "group of no dimension",
}


@pytest.mark.full
def test_every_row_of_the_registry_has_an_expression():
    """The registry is read in a process of its own: it imports the compiler."""
    script = (
        "import json, paceline, torch._dynamo\n"
        "from paceline.tracing.installation import rows\n"
        "print(json.dumps([[type(row).__name__, row.subject, row.form] for row in rows()]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    rows = json.loads(done.stdout)
    shown = "\n".join(inspect.getsource(module) for module in {inspect.getmodule(e.function) for e in EXPRESSIONS})
    assert len(rows) > 50
    for kind, subject, form in rows:
        assert form, subject
        if subject.startswith("("):
            continue  # Our own machinery, which every expression of its kind goes through.
        if subject in SHOWN_BY:
            assert SHOWN_BY[subject] in {*BY_ID, *REFUSED, *BAD}
        elif kind.endswith("RefusalRow"):
            assert any(part.strip().removesuffix("()") in REFUSED for part in subject.split(",")), subject
        else:
            for name in _names(subject):
                assert re.search(rf"\b{name}\b", shown), f"no expression uses {name} ({subject})"


def _names(subject):
    """The last names of "group.name(), group.bound_device_id", of "tensor.register_hook inside the function"..."""
    parts = (part.split()[0] for part in re.sub(r"\(.*?\)", "", subject).split(",") if part.strip(" ."))
    return [part.rpartition(".")[2] for part in parts]


def test_the_table_in_the_docs_has_every_row_once():
    table = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8").partition("<!-- expressions: begin -->")[2]
    lines = re.findall(r"^\| `(.*)` \|[^|]*\|[^|]*\|$", table.partition("<!-- expressions: end -->")[0], re.MULTILINE)
    assert lines == [e.name for e in sorted(EXPRESSIONS, key=lambda e: e.point)]
    assert len(BY_ID) == len(EXPRESSIONS), "two rows have one name"

"""The documents say what is so: names exist where they are said to, examples run, the changelog is open."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import paceline
from paceline.ddp.arguments import Caps

from .conformance.known import KNOWN

ROOT = Path(__file__).parents[1]
FROM_TORCH = (ROOT / "docs" / "from-torch.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

# The classes and functions of torch/nn/parallel/distributed.py, as an index of that file has them (some are
# functions inside functions). Not derived from torch: a new torch must not change them.
NAMES = re.findall(
    r"\w+",
    """
    DistributedDataParallel _BufferCommHookLocation _DDPJoinHook _DDPSink __getstate__
    __init__ __setstate__ _assign_modules_buffers _build_debug_param_to_name_mapping _build_params_for_reducer
    _cast_buffers _check_and_sync_module_buffers _check_comm_hook _check_default_group
    _check_global_requires_backward_grad_sync _check_reducer_finalized _check_sync_bufs_post_fwd
    _check_sync_bufs_pre_fwd _clear_grad_buffer _ddp_init_helper _default_broadcast_coalesced
    _delayed_all_reduce_hook _distributed_broadcast_coalesced _distributed_rank _dump_DDP_relevant_env_vars
    _find_common_rank _find_tensors _fire_reducer_autograd_hook _get_active_ddp_module _get_data_parallel_params
    _get_ddp_logging_data _get_parameters _inside_ddp_forward _lazy_init _log_and_throw
    _match_all_reduce_for_bwd_pass _match_unused_params_allreduce _module_wait_for_copy_hook
    _passing_sync_batchnorm_handle _post_forward _pre_forward _register_accum_grad_hook
    _register_buffer_comm_hook _register_builtin_comm_hook _register_delay_all_reduce_hook _register_fused_optim
    _remove_autograd_hooks _root_copy_hook _run_ddp_forward _set_ddp_runtime_logging_sample_rate
    _set_ddp_sink_clone _set_params_and_buffers_to_ignore_for_model _set_sparse_metadata _set_static_graph
    _setup_in_backward_optimizers _setup_mixed_precision_params _sync_buffers _sync_final_model
    _sync_module_buffers _tree_flatten_with_rref _tree_unflatten_with_rref _update_process_group backward
    compiled_accum_grad_hook decode encode_and_decode forward gather join join_device join_hook
    join_process_group main_hook model_parameters no_sync noop post_hook produces_sparse_gradient
    register_comm_hook scatter to_kwargs train will_sync_module_buffers worker
""",
)


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", FROM_TORCH, re.DOTALL | re.MULTILINE)
    assert found, f"docs/from-torch.md has no section {title!r}"
    return found[1]


def _rows(text: str) -> list[list[str]]:
    """The cells of every table in ``text``, without heads and rulers; code ticks off the first two columns."""
    rows = []
    lines = text.splitlines()
    for n, line in enumerate(lines):
        if not line.startswith("|") or line.startswith("|---") or (lines[n + 1 : n + 2] or [""])[0].startswith("|---"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        rows.append([cell.strip("`") for cell in cells[:2]] + cells[2:])
    return rows


def _find(path: str) -> Any:
    """What a dotted path stands for: the longest importable module, then attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            # getattr_static: a property must not run, and it has to be found on the class.
            found = inspect.getattr_static(found, name)
        return found
    raise AttributeError(path)


PLACES = {name: (here, what) for name, here, what in _rows(_section("Classes") + _section("Methods and functions"))}


def test_every_name_of_the_original_has_its_row():
    assert sorted(PLACES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_where_the_page_says(name):
    here, what = PLACES[name]
    assert what, "a row says what happens"
    if here:
        assert here.startswith("paceline.")
        assert _find(here) is not None


def test_a_method_of_the_original_is_a_method_here():
    """The page may not send a name of the class somewhere else than to the class."""
    from torch.nn.parallel import DistributedDataParallel as StockDDP

    methods = [name for name in NAMES if name in vars(StockDDP)]
    assert len(methods) > 50
    assert [name for name in methods if PLACES[name][0] != f"paceline.DDP.{name}"] == []


def test_other_names_on_the_page_exist():
    """`paceline.x.y` anywhere in the documents is a name that exists."""
    pages = [README, *((ROOT / "docs" / page).read_text(encoding="utf-8") for page in _pages())]
    mentioned = {path for page in pages for path in re.findall(r"`(paceline(?:\.\w+)+)", page)}
    assert "paceline.hooks.overlapping" in mentioned
    for path in sorted(mentioned):
        assert _find(path) is not None, path


def _pages() -> list[str]:
    return sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_constructor_table():
    parameters = inspect.signature(paceline.DDP).parameters
    rows = _rows(_section("Constructor"))
    assert [row[0] for row in rows] == list(parameters)
    for name, default, _ in rows:
        expected = parameters[name].default
        assert default == ("" if expected is inspect.Parameter.empty else repr(expected)), name


def test_default_capacities_are_those_of_the_page():
    first, most = (size / (1 << 20) for size in Caps.from_arguments(None, None).caps_bytes)
    (row,) = (row for row in _rows(_section("Constructor")) if row[0] == "bucket_cap_mb")
    assert f"the first bucket has {first:.0f} MiB" in row[2]
    assert f"at most {most:.0f}" in row[2]


def test_known_differences_are_on_the_page():
    listed = [row[0] for row in _rows(_section("Conformance"))]
    assert set(KNOWN) < set(listed)


def test_readme_examples_run(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    examples = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(examples) >= 2
    try:
        for number, code in enumerate(examples):
            exec(compile(code, f"README.md, example {number}", "exec"), {"__name__": "readme"})
    finally:
        paceline.shutdown()
    assert "BucketSpec" in capsys.readouterr().out
    assert not dist.is_initialized()


EVERY_PAGE = ["README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in _pages())]


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_commands_are_targets(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"(?:^|`)make((?: [a-z-]+)+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert commands or page.startswith("docs/")
    for target in " ".join(commands).split():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_notes_are_where_the_design_says():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    notes = re.findall(r"^### (\[Note: .+\])\n\n\*In `(.+?)`", design, re.MULTILINE)
    assert len(notes) == design.count("### [Note: ") > 0
    for title, file in notes:
        assert f"\n{title}\n" in (ROOT / "src" / "paceline" / file).read_text(encoding="utf-8"), title


def test_changelog_is_open():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", changelog, re.MULTILINE)

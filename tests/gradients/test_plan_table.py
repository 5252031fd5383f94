"""``print(ddp.plan)``: what the table says, and that it fits."""

from __future__ import annotations

import pytest

from paceline.gradients.plan import BucketPlan, ParameterSpec, make_plan
from paceline.gradients.plan_table import plan_lines, size_text


def _plan(n: int = 6, *, prefix: str = "layers") -> BucketPlan:
    specs = [ParameterSpec(f"{prefix}.{i}.weight", (512, 512), (512, 1), "float32", 4, "cpu") for i in range(n)]
    return make_plan(specs, caps_bytes=(3 << 20,))


def test_each_bucket_has_its_names():
    assert str(_plan(5)).splitlines() == [
        "bucket       size  params  kind",
        "     0    2.0 MiB       2  float32 cpu",
        "        layers.4.weight, layers.3.weight",
        "     1    3.0 MiB       3  float32 cpu",
        "        layers.2.weight, layers.1.weight, layers.0.weight",
        "2 bucket(s), 5 params, 5.0 MiB",
    ]


def test_what_is_in_no_bucket_is_named():
    specs = [
        ParameterSpec("a", (2,), (1,), "float32", 4, "cpu"),
        ParameterSpec("frozen", (2,), (1,), "float32", 4, "cpu", requires_grad=False),
        ParameterSpec("rows", (2,), (1,), "float32", 4, "cpu", sparse=True),
    ]
    lines = str(make_plan(specs)).splitlines()
    assert lines[-2:] == ["1 in no bucket: frozen or not used", "        frozen"]
    assert "     0          ?       1  float32 cpu sparse" in lines


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_thousand_parameters_fit_any_terminal(width):
    plan = _plan(1000)
    lines = plan_lines(plan, width=width)
    assert max(map(len, lines)) <= width
    # There is a line for the bucket, and at most four of names, and one that counts the rest.
    assert len(lines) <= 6 * len(plan.buckets) + 2
    (single,) = make_plan(plan.specs, caps_bytes=(1 << 40,)).buckets
    lines = plan_lines(make_plan(plan.specs, caps_bytes=(1 << 40,)), width=width)
    shown = sum(line.count("weight") for line in lines)
    assert f"        and {len(single.params) - shown} more" in lines


def test_the_width_is_that_of_the_terminal(monkeypatch):
    plan = _plan(3)
    monkeypatch.setenv("COLUMNS", "45")
    narrow = str(plan).splitlines()
    monkeypatch.setenv("COLUMNS", "120")
    assert len(str(plan).splitlines()) < len(narrow)


def test_a_name_is_never_cut():
    prefix = "a_name_that_is_wider_than_the_terminal" * 2
    lines = plan_lines(_plan(2, prefix=prefix), width=40)
    assert f"        {prefix}.1.weight," in lines


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_sizes(size_bytes, text):
    assert size_text(size_bytes) == text

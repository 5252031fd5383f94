"""``python -m tests.tracing.table``: fills in the tables of docs/tracing.md from the list of expressions and the rows.

With ``--check`` nothing is written, and it fails if the file is not what would be written.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from paceline.tracing.installation import rows
from paceline.tracing.registry import RefusalRow
from tests.tracing.expressions import EXPRESSIONS
from tests.tracing.graphs import ROOT, Outcomes

DOCUMENT = ROOT / "docs" / "tracing.md"
POINTS = {1: "Process groups", 2: "Device meshes", 3: "Placements and DTensor", 4: "Collectives", 5: "Hooks"}
YES = "one graph"


def verdict(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "not run on the fake group"
    if "error" in outcome:
        is_break = outcome["error"].startswith("Unsupported")
        return "graph break" if is_break else "error in the compiler"
    return "wrong answer" if outcome["wrong"] else YES


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def expressions_table() -> str:
    plain, ours = (running.all() for running in (Outcomes(), Outcomes("--paceline")))
    lines = []
    counts: Counter[str] = Counter()
    for point, title in POINTS.items():
        lines += ["", f"### {title}", "", _row("expression", "plain torch", "with Paceline"), "|---|---|---|"]
        for expression in EXPRESSIONS:
            if expression.point != point:
                continue
            before, after = verdict(plain.get(expression.id)), verdict(ours.get(expression.id))
            counts.update({("plain", before): 1, ("ours", after): 1})
            lines.append(_row(f"`{expression.name}`", before, after))
    measured = sum(counts["plain", word] for word in {key[1] for key in counts}) - counts["plain", verdict(None)]
    summary = (
        f"Of {measured} expressions, torch {torch.__version__.partition('+')[0]} by itself compiles "
        f"{counts['plain', YES]} as one graph; with `import paceline`, {counts['ours', YES]} are one graph.\n"
        "This was measured on a fake group of 8 ranks. "
        "The tests compare the values with those of eager code on real ranks."
    )
    return "\n".join([summary, *lines])


def forms_table() -> str:
    lines = [_row("what", "in the graph"), "|---|---|"]
    lines += [_row(f"`{row.subject}`", row.form) for row in rows() if not isinstance(row, RefusalRow)]
    return "\n".join(lines)


def refusals_table() -> str:
    lines = [_row("what", "why", "instead"), "|---|---|---|"]
    for row in rows():
        if isinstance(row, RefusalRow):
            lines.append(_row(f"`{row.subject}`", row.explanation, " ".join(row.hints)))
    return "\n".join(lines)


TABLES = {"expressions": expressions_table, "forms": forms_table, "refusals": refusals_table}


def filled(text: str) -> str:
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{DOCUMENT.name} has no place for the table of {name}")
        text = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return text


def main(arguments: list[str]) -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    new = filled(text)
    if "--check" in arguments:
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

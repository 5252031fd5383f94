"""``paceline doctor``: what the files of a job say about it, whether it still runs or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from paceline.control import jobs, stacks
from paceline.control.processes import process_state
from paceline.control.progress import Record
from paceline.control.whereabouts import explain, of_record
from paceline.errors import PeerFailedError, RankLostError
from paceline.settings import job_directory


def doctor(path: Path | None = None, *, with_stacks: bool = False, out: TextIO | None = None) -> int:
    """Print what is known of the job in ``path``, and return an exit code.

    By default it is the newest job of this host that runs. If none runs, it is the newest one that was left behind.
    """
    out = out or sys.stdout
    if path is None:
        found = jobs.all_jobs(job_directory())
        if not found:
            print(f"No job runs on this host or was left behind: there is none in {job_directory()}.", file=out)
            return 0
        path = next(filter(_runs, found), found[0])
    records = jobs.records(path)
    if not records:
        print(f"{path} holds no files of a job.", file=out)
        return 1
    print(f"job {path}", file=out)
    of_wrapper: dict[tuple[str, int], list[Record]] = {}
    for file, record in records.items():
        # Files of other groups than the default one begin with the group's name.
        group = file.name.rpartition("wrapper")[0].rstrip(".")
        of_wrapper.setdefault((group, record.wrapper), []).append(record)
    for (group, _), some in sorted(of_wrapper.items(), key=lambda item: item[0]):
        _print_wrapper(some, path, out, group=group, ask=with_stacks)
    if with_stacks:
        for record in {record.pid: record for record in records.values()}.values():
            _print_stacks(record, path, out)
    return 0


def _runs(path: Path) -> bool:
    return any(process_state(record.process) in ("running", "stopped") for record in jobs.records(path).values())


def _print_wrapper(records: list[Record], path: Path, out: TextIO, *, group: str, ask: bool) -> None:
    size = records[0].size
    here = sorted(record.rank for record in records)
    name = f"wrapper {records[0].wrapper}" + (f" of group {group[:8]}" if group else "")
    print(f"\n{name}: {size} ranks, of which {len(here)} have files here", file=out)
    now = time.time()
    for record in sorted(records, key=lambda record: record.rank):
        state = process_state(record.process) or f"on host {record.host}"
        waits = f"; has waited {now - record.waiting_since:.0f} s in {record.waiting}" if record.waiting_since else ""
        print(
            f"  rank {record.rank}: process {record.pid} is {state}; step {record.step}, collective {record.started}, "
            f"last sign {max(0.0, now - record.alive_at):.0f} s ago{waits}",
            file=out,
        )
        if record.failed:
            print(f"    it said: {_first_line(record.failed)}", file=out)
        if record.recent:
            number = max(record.recent)
            print(f"    last started: {number} {record.recent[number]}", file=out)
    # The rank that raised first is the cause. Where the others were left waiting follows from it.
    failed = [record for record in records if record.failed]
    if failed:
        first = min(failed, key=lambda record: (_is_echo(record.failed), record.alive_at))
        print(f"  first cause: {_first_line(first.failed)}", file=out)
        return
    answers = {record.rank: of_record(record, path, running="runs", ask=ask) for record in records}
    if any(answer.waiting or answer.silent != "runs" for answer in answers.values()):
        print(f"  {explain(answers, size).cause}", file=out)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_echo(text: str) -> bool:
    """Whether a rank that said this failed because of another."""
    return PeerFailedError.__name__ in text or RankLostError.__name__ in text


def _print_stacks(record: Record, path: Path, out: TextIO) -> None:
    told = stacks.ask(path, record) if process_state(record.process) == "running" else ""
    print(f"\nstacks of rank {record.rank}, process {record.pid}:\n{told or '(it does not answer)'}", file=out)

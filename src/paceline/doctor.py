"""``paceline doctor``: what the files of a job say about it, whether it still runs or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from paceline.control import jobs, stacks
from paceline.control.position import explain, of_record
from paceline.control.progress import Record, process_state, read_file
from paceline.errors import PeerFailedError, RankLostError
from paceline.options import job_directory


def doctor(path: Path | None = None, *, with_stacks: bool = False, out: TextIO | None = None) -> int:
    """Print what is known of the job in ``path``, by default of the newest one on this host; returns an exit code."""
    out = out or sys.stdout
    if path is None:
        found = jobs.all_jobs(job_directory())
        if not found:
            print(f"No job runs on this host or was left behind: there is none in {job_directory()}.", file=out)
            return 0
        path = found[0]
    records = [record for file in sorted(path.glob("wrapper*.rank*")) if (record := read_file(file)) is not None]
    if not records:
        print(f"{path} holds no files of a job.", file=out)
        return 1
    print(f"job {path}", file=out)
    for wrapper in sorted({record.wrapper for record in records}):
        of_wrapper = [record for record in records if record.wrapper == wrapper]
        _print_wrapper(of_wrapper, path, out, ask=with_stacks)
    if with_stacks:
        for record in {record.pid: record for record in records}.values():
            _print_stacks(record, path, out)
    return 0


def _print_wrapper(records: list[Record], path: Path, out: TextIO, *, ask: bool) -> None:
    size = records[0].size
    here = sorted(record.rank for record in records)
    print(f"\nwrapper {records[0].wrapper}: {size} ranks, of which {len(here)} have files here", file=out)
    now = time.time()
    for record in sorted(records, key=lambda record: record.rank):
        state = process_state(record) or f"on host {record.host}"
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
    # Whoever raised first is the cause; where the others were left waiting follows from it.
    failed = [record for record in records if record.failed]
    if failed:
        first = min(failed, key=lambda record: (_is_echo(record.failed), record.alive_at))
        print(f"  first cause: {_first_line(first.failed)}", file=out)
        return
    positions = {record.rank: of_record(record, path, running="runs", ask=ask) for record in records}
    if any(position.waiting or position.silent != "runs" for position in positions.values()):
        print(f"  {explain(positions, size).cause}", file=out)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_echo(text: str) -> bool:
    """Whether that rank failed because of another."""
    return PeerFailedError.__name__ in text or RankLostError.__name__ in text


def _print_stacks(record: Record, path: Path, out: TextIO) -> None:
    told = stacks.ask(path, record) if process_state(record) == "running" else ""
    print(f"\nstacks of rank {record.rank}, process {record.pid}:\n{told or '(it does not answer)'}", file=out)

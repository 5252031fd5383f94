"""``paceline doctor``: what the files of a job say about it, whether it still runs or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from paceline.control import jobs, private_files, stacks
from paceline.control.diagnosis import explain
from paceline.control.plain_text import plain
from paceline.control.processes import process_state
from paceline.control.progress import Record
from paceline.control.whereabouts import of_record
from paceline.errors import PeerFailedError, RankLostError
from paceline.settings import job_directory

_FIRST_CAUSE = "first cause"


def doctor(path: Path | None = None, *, with_stacks: bool = False, out: TextIO | None = None) -> int:
    """Print what is known of the job in ``path``, and return an exit code.

    By default it is the newest job of this user on this host that runs. If none runs, it is the newest one that was
    left behind. All jobs are listed before it.
    """
    out = out or sys.stdout
    if path is None:
        if refused := jobs.base_refusal():
            print(plain(f"Jobs have their files beside {job_directory()}, because {refused}."), file=out)
        found = {job: jobs.records(job) for job in jobs.all_jobs()}
        if not found:
            print(plain(f"No job runs on this host or was left behind: there is none in {job_directory()}."), file=out)
            return 0
        readable = {job: records for job, records in found.items() if records}
        running = [job for job, records in readable.items() if _runs(records)]
        path = [*running, *readable, *found][0]
        if len(readable) > 1:
            print(*(_title(job, records) for job, records in readable.items()), "", sep="\n", file=out)
    records = jobs.records(path)
    if not records:
        refused = private_files.refusal(path)
        print(plain(f"{path} holds no files of a job{refused and ': '}{refused}."), file=out)
        return 1
    print(_title(path, records), file=out)
    for group, some in _wrappers(records):
        _print_wrapper(some, path, out, group=group, ask=with_stacks)
    if with_stacks:
        for record in {record.pid: record for record in records.values()}.values():
            _print_stacks(record, path, out)
    return 0


def verdicts(path: Path) -> list[str]:
    """Why each wrapper of a job ended or waits, as far as the files in ``path`` tell. Nobody is asked.

    Of an exception only the rank and the type are told, because the rank has shown the rest.
    """
    told = [_verdict(some, path, ask=False) for _, some in _wrappers(jobs.records(path))]
    return [": ".join(text.split(": ")[:3]) if text.startswith(_FIRST_CAUSE) else text for text in told if text]


def _wrappers(records: dict[Path, Record]) -> list[tuple[str, list[Record]]]:
    """The records of each wrapper, with the name of its group if that is not the default one."""
    of_wrapper: dict[tuple[str, int], list[Record]] = {}
    for file, record in records.items():
        # Files of other groups than the default one begin with the group's name.
        group = file.name.rpartition("wrapper")[0].rstrip(".")
        of_wrapper.setdefault((group, record.wrapper), []).append(record)
    return [(group, some) for (group, _), some in sorted(of_wrapper.items(), key=lambda item: item[0])]


def _title(path: Path, records: dict[Path, Record]) -> str:
    """A line about a job: where its files are, what it runs, and since when."""
    first = min(records.values(), key=lambda record: record.made_at)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.made_at))
    state = "runs" if _runs(records) else "has ended"
    return plain(f"job {path}: {first.script or 'a program'}, started {began}, {state}")


def _runs(records: dict[Path, Record]) -> bool:
    return any(process_state(record.process) in ("running", "stopped") for record in records.values())


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
            f"  rank {record.rank}: process {record.pid} is {state}; forward {record.forwards}, "
            f"backward {record.backwards}, collective {record.started}, "
            f"last sign {max(0.0, now - record.alive_at):.0f} s ago{waits}",
            file=out,
        )
        if record.failed:
            print(f"    it said: {_first_line(record.failed)}", file=out)
        if record.recent:
            number = max(record.recent)
            print(f"    last started: {number} {record.recent[number]}", file=out)
    if verdict := _verdict(records, path, ask=ask):
        print(f"  {verdict}", file=out)


def _verdict(records: list[Record], path: Path, *, ask: bool) -> str:
    """Why the ranks of a wrapper failed, or wait; empty if they do neither."""
    # The rank that raised first is the cause. Where the others were left waiting follows from it.
    failed = [record for record in records if record.failed and not _is_interrupt(record.failed)]
    if failed:
        first = min(failed, key=lambda record: (_is_echo(record.failed), record.alive_at))
        return f"{_FIRST_CAUSE}: {_first_line(first.failed)}"
    # Of a hang that somebody ended with Ctrl-C, the report says more than what is left of the ranks.
    told = max(records, key=lambda record: (bool(record.report), record.alive_at)).report
    if told and not any(process_state(record.process) in ("running", "stopped") for record in records):
        return f"last report: {told}"
    answers = {record.rank: of_record(record, path, running="runs", ask=ask) for record in records}
    if any(answer.waiting or answer.silent != "runs" for answer in answers.values()):
        return explain(answers, records[0].size).cause
    return ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_interrupt(text: str) -> bool:
    """Whether a rank that said this was ended by a person, who does not tell why."""
    return f": {KeyboardInterrupt.__name__}" in text


def _is_echo(text: str) -> bool:
    """Whether a rank that said this failed because of another."""
    return PeerFailedError.__name__ in text or RankLostError.__name__ in text


def _print_stacks(record: Record, path: Path, out: TextIO) -> None:
    told = stacks.ask(path, record) if process_state(record.process) == "running" else ""
    told = stacks.user_thread_first(told) or "(it does not answer)"
    print(f"\nstacks of rank {record.rank}, process {record.pid}:\n{told}", file=out)

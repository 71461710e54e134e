"""The judgement: every file done exactly once, and why that is no accident.

Nothing here asks the daemon.  The results are the sink's, what they should be is computed anew from the files, and the rest is what
the workers said while they worked.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stage import Attempt, Stage
from worker import process


def judge(stage: Stage, tasks: Path, ends: list[int]) -> bool:
    """Prints who did what and whether it is proven.  `ends`: how each of the daemon's processes ended."""
    seconds = stage.seconds
    rows = stage.sink.rows()
    done = Counter(worker for _, _, worker, _ in rows)
    begun = Counter(worker for _, worker, told in stage.events if told["event"] == "begun")
    refused = Counter(worker for _, worker, told in stage.events if told["event"] == "refused")
    stale = Counter(worker for _, worker, told in stage.events if told["event"] == "stale")
    print(f"\n{'worker':<10} {'files done':>10} {'begun':>6} {'held by others':>15} {'stale writes refused':>21}   generations")
    for worker in sorted(begun | refused, key=lambda name: int(name.rpartition("-")[2])):
        own = [generation for _, generation, who, _ in rows if who == worker]
        span = f"{own[0]} … {own[-1]}" if own else "-"
        note = "  (killed)" if worker in {attempt.worker for attempt in stage.killed} else ""
        print(f"{worker:<10} {done[worker]:>10} {begun[worker]:>6} {refused[worker]:>15} {stale[worker]:>21}   {span}{note}")
    print()
    verdicts = list(_findings(stage, tasks, ends))
    for proven, text in verdicts:
        print(f"  {'proven ' if proven else 'FAILED '} {text}")
    proven = all(each for each, _ in verdicts)
    print(f"\n{'Nothing was done twice and nothing was missed' if proven else 'NOT PROVEN'}, in {seconds:.1f} s.")
    return proven


def _findings(stage: Stage, tasks: Path, ends: list[int]) -> Iterator[tuple[bool, str]]:
    rows = stage.sink.rows()
    files = {path.name: path.read_text() for path in tasks.iterdir()}
    times = Counter(name for name, _, _, _ in rows)
    twice, missed = [name for name in times if times[name] > 1], [name for name in files if name not in times]
    yield (
        not twice and len(rows) == len(files),
        f"no file was done twice: {len(rows)} results for {len(files)} files" + _named(twice),
    )
    yield not missed, "no file was missed" + _named(missed)
    with ThreadPoolExecutor() as pool:  # the seal is worked out without the interpreter's lock
        right = dict(zip(files, pool.map(process, files.values()), strict=True))
    wrong = [name for name, _, _, result in rows if result != right[name]]
    yield not wrong, "every result is right, computed again from its file" + _named(wrong)

    attempts = [(told["name"], told["generation"]) for _, _, told in stage.events if told["event"] == "begun"]
    generations = [generation for _, generation in attempts]
    yield (
        len(set(generations)) == len(generations),
        f"{len(generations)} files were begun, each with a generation nobody else ever had",
    )
    rising = all(own == sorted(own) for own in ([generation for name, generation in attempts if name == each] for each in files))
    yield rising, "each file's generations rose in the order in which it was begun, over both restarts"

    written = {name: (generation, worker) for name, generation, worker, _ in rows}
    for kill, under in enumerate(stage.outlived, 1):
        kept = [attempt for attempt in under if written.get(attempt.name) == (attempt.generation, attempt.worker)]
        yield (
            len(kept) == len(under) >= 2,
            f"kill {kill} of the daemon: all {len(under)} leases held under it were kept, and their work was used",
        )
    yield (
        ends == [-signal.SIGKILL, -signal.SIGKILL, 0],
        "the daemon ended twice by signal 9, and at the end in order with exit code 0",
    )
    for attempt in (*stage.killed, *stage.frozen):
        generation, worker = written.get(attempt.name, (0, "nobody"))
        what = "killed" if attempt in stage.killed else "frozen"
        yield (
            generation > attempt.generation and worker != attempt.worker,
            f"{attempt.name} of the {what} {attempt.worker} (generation {attempt.generation}) was done by {worker} (generation {generation})",
        )
    refused = [Attempt(worker, told["name"], told["generation"]) for _, worker, told in stage.events if told["event"] == "stale"]
    yield (
        len(stage.frozen) == 1 and stage.frozen[0] in refused,
        "the frozen worker's late write was refused by the sink, by its generation",
    )


def _named(names: list[str]) -> str:
    return f": {', '.join(sorted(names)[:5])}" if names else ""

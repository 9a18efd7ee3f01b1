"""`diloco replay`: make every published version of a run again, and say what does not come out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import AsJson, Run, option
from diloco.cli.terminal.progress import counting, notes, output

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.coordinator.journal import AuditRow
    from diloco.versions.replay import Replayed


def replay(
    run: Run,
    fragment: Annotated[int | None, option("Only this fragment.", "P")] = None,
    first: Annotated[int, option("First version of each fragment.", "V", "--from", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Make every version of a stopped run again, from its audit log and what its store keeps.

    Each is computed from the version before it and its own contributions, by the rules and with the
    coefficients of its own record, and compared with what was published: digests, payloads, kept
    states, all to the bit; coefficients within 1e-6. With outer.keep_contributions = "all" that is
    every version, otherwise the retained ones. What happened between versions is shown too, as the
    coordinator's journal has it.

    Exits with 1 if a version is damaged or different. What cannot be made again is only told, but
    for a run with outer.keep_contributions = "all": there it exits with 1, too.

    Example: diloco replay runs/demo --fragment 0 --from 3
    """
    from diloco.checkpoint.export import find_run
    from diloco.report.replay import replay_run

    with counting(notes("-" if as_json else "")) as show:
        done = replay_run(find_run(run), fragment=fragment, first=first, on_progress=show)
    counts = Counter(each.verdict for each in done.versions)
    wrong = sum(each.is_wrong for each in done.versions)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
    else:
        console = output()
        headings = ["fragment", "timeline", "versions", "verdict", "detail"]
        console.print(FittedTable.with_rows(headings, _rows(done.versions)))
        for entry in done.audit_log:
            console.print(_told(entry))
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        console.print(f"{len(done.versions)} versions: {said or 'none'}")
    unknown = sum(each.is_unknown for each in done.versions) if done.keeps_all else 0
    if wrong:
        notes().print(
            f"{wrong} versions are not what was published. What is damaged and can be made again "
            f"is: diloco repair {run}. To go back to before them: diloco coordinator RUN.toml "
            "--resume"
        )
    if unknown:
        notes().print(
            f"{unknown} versions cannot be made again, though outer.keep_contributions is "
            f'"all": what they were made of is missing in {run}. If the run kept less when it '
            f"began, ask for what came later: diloco replay {run} --from V"
        )
    if wrong or unknown:
        raise typer.Exit(1)


def _rows(versions: Sequence[Replayed]) -> Iterator[tuple[str, ...]]:
    """Make one row of neighbours of which the same is to be said."""
    for (fragment_id, timeline, verdict, detail), each in groupby(
        versions, lambda v: (v.fragment_id, v.timeline, v.verdict, v.detail)
    ):
        numbers = [v.version for v in each]
        span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        yield str(fragment_id), str(timeline), span, verdict, detail


def _told(entry: AuditRow) -> str:
    content = entry.content
    where = f"after {entry.after_round} records: {entry.kind} {entry.key}"
    match entry.kind:
        case "members":
            changes = [
                f"{name} {member['lease']} (start {member['incarnation']})"
                for name, member in content.items()
            ]
            return f"{where}: {', '.join(changes) or 'a pause began or ended'}"
        case "policy":
            return f"{where}: {content['key']} = {json.dumps(content['value'])}"
        case "operation":
            return f"{where}: {content['command']} by {content['by']}: {content['message']}"
        case "timeline":
            return f"{where}: resumed from inner step {content['resume_step']}"
        case "expiry":
            missing = ", ".join(content["missing"]) or "nobody"
            return f"{where}: missing {missing}: {content['reason']}"
        case _:
            return where

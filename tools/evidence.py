"""Writes docs/evidence.md and its pictures from the files of results of benchmarks/evidence.py.

`python -m tools.evidence`. Whether a claim holds is decided here, by `judge` and `verdict`, and nowhere by hand.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from evidence import read_rows  # noqa: E402
from evidence_design import Claim, Design, Place, Study, read_design  # noqa: E402

from tools.performance import markdown  # noqa: E402
from weft.files import write_text  # noqa: E402
from weft.report.figures import INKS, plots, write_figure  # noqa: E402
from weft.study.statistics import (  # noqa: E402
    DASH,
    Difference,
    difference_by_seed,
    format_difference,
    format_score,
    mean_sd,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, PICTURES, RESULTS = ROOT / "docs" / "evidence.md", ROOT / "docs" / "pictures", ROOT / "benchmarks" / "results"
HOLDS, OPEN, FAILS, NOT_RUN = "holds", "open", "does not hold", "not run"  # of a check, and of a claim, which has also
PARTLY = "partly"
SMALL = "small"  # the study of E9 whose parts are one axis
PACE = "pace"  # where each network trained with nothing beside it

Key = tuple[str, str, float]  # study, row, part of the pictures
Kept = dict[str, Any]  # a row of a file of results
Results = Mapping[Key, Mapping[int, Kept]]  # by seed


# The rule -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    text: str
    state: str
    difference: Difference | None = None


def judge(check: Mapping[str, Any], design: Design, results: Results) -> Finding:
    """Decides one check by the 95 % interval of the difference, seed by seed.

    It holds where all of the interval is on the claim's side of the limit, does not where all of it is on the other,
    and is open between, or where one seed has no interval. The limit is zero, and for `matches` the points that do not
    count. MACs are counted, and need no interval.
    """
    kind = next(iter(check))
    row = find(design, results, check[kind])
    other: Mapping[int, Kept] = {}
    if kind == "reaches":
        text = f"{name(check[kind])} reaches {check['value']:g} %"
        base = {seed: float(check["value"]) / 100 for seed in row}
    else:
        other = find(design, results, check["to" if kind == "matches" else "than"])
        words = {"better": "is better than", "matches": "matches", "cheaper": "has fewer MACs than"}
        text = f"{name(check[kind])} {words[kind]} {name(check['to' if kind == 'matches' else 'than'])}"
        text += f" within {check['within']:g} points" if kind == "matches" else ""
        base = values(other)
    if kind == "cheaper":
        return Finding(text, judge_costs(row, other))
    limit = -check.get("within", 0) / 100
    difference = difference_by_seed(values(row), base)
    return Finding(text, judge_difference(difference, limit), difference)


def judge_difference(difference: Difference | None, limit: float) -> str:
    if difference is None:
        return NOT_RUN
    if difference.low is None or difference.high is None:
        return OPEN
    return HOLDS if difference.low > limit else FAILS if difference.high <= limit else OPEN


def judge_costs(row: Mapping[int, Kept], other: Mapping[int, Kept]) -> str:
    if not row or not other:
        return NOT_RUN
    return HOLDS if next(iter(row.values()))["macs"] < next(iter(other.values()))["macs"] else FAILS


def verdict(states: Sequence[str]) -> str:
    """Of a claim: what all of its checks say; partly, where only some hold. Where none does, one refutes it."""
    found = {*states}
    if len(found) == 1:
        return found.pop()
    return PARTLY if HOLDS in found else FAILS if FAILS in found else OPEN


# What is there ------------------------------------------------------------------------------------------------------


def gather(design: Design, rows: Iterable[Kept]) -> Results:
    """The rows that belong to the design as it is now, the newest of each training; earlier designs' are left out."""
    found: dict[Key, dict[int, Kept]] = {}
    for row in rows:
        place = Place(row["study"], row["row"], row["part"], row["seed"])
        study = design.studies.get(place.study)
        known = study is not None and place.part in study.lengths and place.row in [r.name for r in study.trained]
        if known and design.key(place) == row["key"]:
            found.setdefault((place.study, place.row, place.part), {})[place.seed] = row
    return found


def find(design: Design, results: Results, reference: str) -> Mapping[int, Kept]:
    place = design.parse(reference)
    return results.get((place.study, place.row, place.part), {})


def values(rows: Mapping[int, Kept]) -> dict[int, float]:
    return {seed: row["value"] for seed, row in rows.items()}


def name(reference: str) -> str:
    """`CvT / 0.01` of `small / CvT / 0.01`, in words."""
    _, row, *part = reference.split(" / ")
    return f"{row} ({float(part[0]):.0%})" if part else row


# The page -----------------------------------------------------------------------------------------------------------

HEAD = """# Evidence: the papers' claims, tried on real pictures

Written by `python -m tools.evidence` from the files `evidence-*.json` of [benchmarks/results](../benchmarks/results),
which `benchmarks/evidence.py` writes; what has no row there is *not run*.
[evidence.yaml](../benchmarks/evidence.yaml) has recipe, batch, epochs and networks of each comparison, written down
before anything was trained. Both sides of a comparison have the same of all, and with the same seed they see the same
pictures in the same order. The papers train on ImageNet for days; these are small networks, small pictures and
minutes, so a claim that does not hold here may hold there.

Rows bear the papers' names; as their parameters say, most are the small stand-ins that `weft ablate` has for them.

A check **holds** where the 95 % interval (Student's, over seeds in pairs) of the difference is wholly on the claim's
side of its limit, **does not hold** where it is wholly on the other side, and is **open** otherwise, or with a single
seed. A claim holds where all of its checks do, and **partly** where some do.
"""


def write_page(design: Design, results: Results, page: Path = PAGE, pictures: Path = PICTURES) -> None:
    lines = [HEAD, *overview(design, results), "", *data_lines(design), ""]
    drawn = draw_plots(design, results, pictures)
    for claim in design.claims.values():
        lines += section(claim, design, results)
    if drawn:
        lines += ["## Plots", "", *(f"![{text}](pictures/{stem}.svg)\n" for stem, text in drawn.items())]
    names = ", ".join(f"`{key}`" for key in design.studies)
    lines += ["## Repeat it", "", REPEAT, f"A claim or a study can be named after the program: {names}."]
    write_text(page, "\n".join(lines).rstrip() + "\n")


def overview(design: Design, results: Results) -> Iterator[str]:
    rows = []
    for claim in design.claims.values():
        found = [judge(check, design, results) for check in claim.checks]
        decided = sum(finding.state in (HOLDS, FAILS) for finding in found)
        held = sum(finding.state == HOLDS for finding in found)
        state = verdict([finding.state for finding in found])
        rows.append([claim.name, claim.title, f"**{state}**", f"{held} / {decided} / {len(found)}"])
    yield from markdown(["", "claim", "here", "checks: hold / decided / all"], rows)


def data_lines(design: Design) -> Iterator[str]:
    yield "The pictures:"
    yield ""
    for key, data in design.data.items():
        yield f"- `{key}`: {data.note}."


def section(claim: Claim, design: Design, results: Results) -> Iterator[str]:
    """A claim: the paper's number, its checks, what each row reached, and the command."""
    found = [judge(check, design, results) for check in claim.checks]
    yield from (
        f"## {claim.name}: {claim.title}",
        "",
        f"Paper: {claim.paper}. Here: **{verdict([f.state for f in found])}**.",
    )
    yield from ([claim.note] if claim.note else [])
    yield ""
    yield from markdown(
        ["check", "difference, points", ""], [[f.text, format_difference(f.difference), f.state] for f in found]
    )
    yield ""
    rows = [line for study in design.studies.values() if claim.name in study.claims for line in table(study, results)]
    if rows:
        yield from markdown(HEADER, rows)
        yield ""
    yield f"`python benchmarks/evidence.py {claim.name} --seeds 3 --jobs 6`"
    yield ""


HEADER = [
    "study",
    "row",
    "pictures",
    "score, %",
    "seeds",
    "steps",
    "parameters",
    "MACs",
    "seconds",
    "GPU memory",
    "machine",
]


def table(study: Study, results: Results) -> Iterator[list[str]]:
    """A line for each row with results; seconds are of a cell from start to end, with `jobs` of them side by side."""
    for part in study.lengths:
        for row in study.trained:
            kept = list(results.get((study.name, row.name, part), {}).values())
            if not kept:
                continue
            first, (seconds, _) = kept[0], mean_sd([one["seconds"] for one in kept])
            beside = max(one["jobs"] for one in kept)
            memory = max(one["memory"] for one in kept)
            yield [
                study.name,
                row.name,
                f"{part * row.fraction:.0%}",
                f"{format_score(*mean_sd([one['value'] for one in kept]))} {first['score']}",
                str(len(kept)),
                f"{first['steps']:,}",
                f"{first['parameters'] / 1e6:.2f} M",
                f"{first['macs'] / 1e9:.3f} G",
                f"{seconds:.0f}" + (f", {beside} at once" if beside > 1 else "") if memory else DASH,
                f"{memory / 2**30:.1f} GiB" if memory else DASH,
                f"{first['device']}, {first['date']}",
            ]


REPEAT = """```
python benchmarks/evidence.py --prepare PACKED --data data      # the sets, out of mosaics and archives
python benchmarks/evidence.py --list                            # what is planned, done, and estimated to cost
python benchmarks/evidence.py --seeds 3 --jobs 6 --minutes 9    # as much as fits; again, it goes on
python -m tools.evidence                                        # this page
```
"""


# The plots ----------------------------------------------------------------------------------------------------------


def draw_plots(design: Design, results: Results, folder: Path) -> dict[str, str]:
    """Writes what there are results for, and returns its name and text."""
    drawn = {}
    if len({part for study, _, part in results if study == SMALL}) > 1:
        write_figure(folder, "evidence-data", partial(draw_data, design.studies[SMALL], results), endings=("svg",))
        drawn["evidence-data"] = f"Accuracy against the part of the training pictures, study {SMALL}"
    points = time_points(design, results)
    if points:
        write_figure(folder, "evidence-seconds", partial(draw_seconds, points), endings=("svg",))
        drawn["evidence-seconds"] = "Accuracy against GPU seconds of training, one network alone on the GPU"
    return drawn


def draw_data(study: Study, results: Results) -> "Figure":
    figure, (place,) = plots(1, width=5.2, height=3.4)
    for number, row in enumerate(study.trained):
        xs, ys, spread = [], [], []
        for part in sorted(study.lengths):
            mean, sd = mean_sd([*values(results.get((study.name, row.name, part), {})).values()])
            if mean is not None:
                xs, ys, spread = [*xs, 100 * part], [*ys, 100 * mean], [*spread, 100 * (sd or 0)]
        place.errorbar(xs, ys, spread, marker="o", ms=3, capsize=2, label=row.name, **style(number))
    place.set_xscale("log")
    ticks = [100 * part for part in sorted(study.lengths)]
    place.set_xticks(ticks, [f"{tick:g} %" for tick in ticks])
    place.minorticks_off()
    finish(place, "part of the training pictures")
    return figure


@dataclass
class TimedRow:
    """A row: seconds of its trainings on all pictures, and accuracy."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)


def time_points(design: Design, results: Results) -> list[TimedRow]:
    """Pictures seen over the pace measured alone: what a training takes on a GPU of its own."""
    found = []
    for row in design.studies[PACE].trained:
        paces = [one["pictures_per_second"] for one in results.get((PACE, row.name, 1), {}).values() if one["memory"]]
        timed = TimedRow(row.name)
        for study in (design.studies[key] for key in (PACE, SMALL)):
            kept = list(results.get((study.name, row.name, 1), {}).values())
            mean, _ = mean_sd([one["value"] for one in kept])
            if paces and mean is not None:
                seconds = kept[0]["steps"] * study.batch / (sum(paces) / len(paces))
                timed.points.append((seconds, 100 * mean))
        found += [timed] if timed.points else []
    return found


def draw_seconds(rows: Sequence[TimedRow]) -> "Figure":
    figure, (place,) = plots(1, width=5.2, height=3.4)
    for number, row in enumerate(rows):
        place.plot(*zip(*sorted(row.points), strict=True), marker="o", ms=3, label=row.name, **style(number))
    finish(place, "seconds of one GPU, steps alone")
    return figure


def style(number: int) -> dict[str, Any]:
    """More rows than colours: the later ones are dashed."""
    return dict(color=INKS[number % len(INKS)], ls="-" if number < len(INKS) else "--")


def finish(place: "Axes", x_name: str) -> None:
    place.set_xlabel(x_name)
    place.set_ylabel("top-1, %")
    place.legend(fontsize=7, ncols=2)


def main() -> None:
    design = read_design()
    write_page(design, gather(design, read_rows(RESULTS)))


if __name__ == "__main__":
    main()

"""Writes docs/evidence.md and its pictures from the files of results of benchmarks/evidence.py.

`python -m tools.evidence`. Whether a claim holds is decided here, by `judge` and `verdict`, and nowhere by hand.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from evidence import as_text, count_once, read_rows  # noqa: E402
from evidence_design import BASES, Claim, Design, Study, read_design  # noqa: E402

from tools.performance import markdown  # noqa: E402
from weft.files import write_text  # noqa: E402
from weft.report.figures import INKS, plots, write_figure  # noqa: E402
from weft.study.statistics import (  # noqa: E402
    DASH,
    Difference,
    format_difference,
    format_score,
    mean_sd,
    paired_difference,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, PICTURES, RESULTS = ROOT / "docs" / "evidence.md", ROOT / "docs" / "pictures", ROOT / "benchmarks" / "results"
HOLDS, OPEN, FAILS, NOT_RUN = "holds", "open", "does not hold", "not run"  # of a check, and of a claim, which has also
PARTLY = "partly"
FEW = ("few", "small")  # the studies of E9 whose parts are one axis; the latter has all pictures
PACE = "pace"  # where each network trained with nothing beside it

Key = tuple[str, str, float]  # study, row, part of the pictures
Kept = dict[str, Any]  # a row of a file of results
Source = tuple[int, str]  # the seed of a training, and the machine
Rows = Mapping[Source, Kept]
Results = Mapping[Key, Rows]


# The rule -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    text: str
    state: str
    difference: Difference | None = None
    counted: bool = False  # from the networks, which nobody had to train for it


def judge(check: Mapping[str, Any], design: Design, results: Results) -> Finding:
    """Decides one check by the 95 % interval of the difference, seed by seed.

    It holds where all of the interval is on the claim's side of the limit, does not where all of it is on the other,
    and is open between, or where one seed has no interval, or where a training failed: who survives is not who is
    better. The limit is zero, and for `matches` the points that do not count. MACs are counted, and need no interval.
    """
    kind, text = next(iter(check)), say(check, design)
    row = find(design, results, check[kind])
    other = find(design, results, check[BASES[kind]]) if kind in BASES else row
    if kind == "cheaper":
        return Finding(text, judge_costs(row, other), counted=True)
    pairs = same_machine(row, other)
    base = [float(check["value"]) / 100 if kind == "reaches" else other[pair]["value"] for pair in pairs]
    difference = paired_difference([row[pair]["value"] for pair in pairs], base)
    state = judge_difference(difference, -check.get("within", 0) / 100)
    machines = sorted({machine for _, machine in pairs})
    if len(machines) > 1:
        text += f"; seeds of {' and of '.join(machines)}"
    if differ := differing_versions([rows[pair] for rows in (row, other) for pair in pairs]):
        text += f"; trained with {differ}"
    if any("error" in kept for kept in (*row.values(), *other.values())):
        text, state = f"{text}; a training failed", OPEN
    return Finding(text, state, difference)


def say(check: Mapping[str, Any], design: Design) -> str:
    """A check in words. Where both rows are the same network, what differs is where its weights begin."""
    kind = next(iter(check))
    if kind == "reaches":
        return f"{name(check[kind])} reaches {check['value']:g} %"
    one, other = check[kind], check[BASES[kind]]
    study, base = design.studies[design.parse(one).study], design.studies[design.parse(other).study]
    first, second = name(one), name(other)
    if study.init and not base.init:
        begun = design.studies[study.init].data
        first, second = f"{first}, transferred from {begun} to {study.data},", f"{second} from scratch"
    if kind == "matches":
        margin = f"{check['within']:g} point{'' if check['within'] == 1 else 's'}"
        return f"{first} is at most {margin} below {second}"
    return f"{first} {'is better' if kind == 'better' else 'has fewer MACs'} than {second}"


def same_machine(row: Rows, other: Rows) -> list[Source]:
    """A pair for each seed that both rows have from the same machine: that which has most of their seeds."""
    both = [pair for pair in row.keys() & other.keys() if "error" not in row[pair] | other[pair]]
    count = Counter(machine for _, machine in both)
    best: dict[int, Source] = {}
    for pair in sorted(both, key=lambda pair: (count[pair[1]], pair[1])):
        best[pair[0]] = pair
    return sorted(best.values())


def differing_versions(rows: Sequence[Kept]) -> str:
    """What was not of one version in all of them: `commit 1a2b3c4 and 5d6e7f8`; "" where all was."""
    found = {key: sorted({kept["versions"][key] for kept in rows}) for key in (rows[0]["versions"] if rows else ())}
    found["commit"] = [commit[:7] or "unknown" for commit in found.get("commit", ())]
    return ", ".join(f"{key} {' and '.join(values)}" for key, values in found.items() if len(values) > 1)


def judge_difference(difference: Difference | None, limit: float) -> str:
    if difference is None:
        return NOT_RUN
    if difference.low is None or difference.high is None:
        return OPEN
    return HOLDS if difference.low > limit else FAILS if difference.high <= limit else OPEN


def judge_costs(row: Rows, other: Rows) -> str:
    macs = [[kept["macs"] for kept in rows.values() if "macs" in kept][:1] for rows in (row, other)]
    if [] in macs:
        return NOT_RUN
    return HOLDS if macs[0] < macs[1] else FAILS


def verdict(findings: Sequence[Finding]) -> str:
    """Of a claim: what all of its checks say; partly, where only some hold. Where none does, one refutes it.

    Fewer MACs alone are no part of a claim that holds: they were known before anything was trained.
    """
    found = {finding.state for finding in findings}
    if len(found) == 1:
        return found.pop()
    found = {finding.state for finding in findings if not finding.counted}
    return PARTLY if HOLDS in found else FAILS if FAILS in found else OPEN if OPEN in found else NOT_RUN


# What is there ------------------------------------------------------------------------------------------------------


def gather(design: Design, rows: Iterable[Kept]) -> Results:
    """The rows that belong to the design as it is now, the newest of each training; earlier designs' are left out.

    A training counts wherever the design has the same one; a failure only as long as no later call had a result.
    """
    rows = list(rows)
    found: dict[Key, dict[Source, Kept]] = {}
    places = design.places_by_key(1 + max((row["seed"] for row in rows), default=0))
    for row in rows:
        source = row["seed"], row["device"]
        for place in places.get(row["key"], ()):
            kept = found.setdefault((place.study, place.row, place.part), {})
            if "error" not in row or source not in kept:
                kept[source] = row
    return found


def find(design: Design, results: Results, reference: str) -> Rows:
    place = design.parse(reference)
    return results.get((place.study, place.row, place.part), {})


def by_machine(rows: Rows) -> dict[str, list[Kept]]:
    """What was trained on each machine, that with most seeds first; failures are left out."""
    found: dict[str, list[Kept]] = {}
    for (_, machine), kept in sorted(rows.items()):
        if "error" not in kept:
            found.setdefault(machine, []).append(kept)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def name(reference: str) -> str:
    """`CvT / 0.01` of `small / CvT / 0.01`, in words."""
    _, row, *part = reference.split(" / ")
    return f"{row} ({float(part[0]):.0%})" if part else row


def sizes(check: Mapping[str, Any], design: Design) -> Iterator[str]:
    """Parameters and MACs of both sides, as the design has them."""
    kind = next(iter(check))
    costs = []
    for reference in [check[kind], *([check[BASES[kind]]] if kind in BASES else [])]:
        place = design.parse(reference)
        study = design.studies[place.study]
        network = study.network(next(row for row in study.trained if row.name == place.row))
        costs.append(count_once(as_text(network), study.img_size, design.data[study.data].classes))
    yield " / ".join(f"{cost.parameters / 1e6:.2f}" if cost else DASH for cost in costs)
    yield " / ".join(f"{1000 * cost.macs:.1f}" if cost else DASH for cost in costs)


# The page -----------------------------------------------------------------------------------------------------------

HEAD = """# Evidence: the papers' claims, tried on real pictures

Written by `python -m tools.evidence` from the files `evidence-*.json` of [benchmarks/results](../benchmarks/results),
which `benchmarks/evidence.py` writes; what has no row there is *not run*.
[evidence.yaml](../benchmarks/evidence.yaml) is the plan: recipe, batch, epochs and networks of each comparison, and
why. Rows of another plan are left out, and each row has the commit it was trained with. Both sides of a comparison
have the same recipe, batch and steps, but for the rows `3x`, which are to have three times the steps; with the same
seed and part of the pictures they see the same pictures in the same order. Stochastic depth, of which each model has
another by default, is off on both sides. A score is that of the last epoch on the pictures that judge; nothing is
chosen by it.

**What was known before.** The plan is younger than a first look,
[first-look-2026-11-19.json](../benchmarks/results/first-look-2026-11-19.json): 14 trainings of a study that is gone,
280 steps each on 500 pictures of CIFAR-10, judged by 2,000 test pictures, two seeds of the hybrids and one of the
others. ViTAE reached 34.7 %, ConvNeXt 33.8, CvT 32.4, CeiT 31.9, Swin-T 29.1, VT 27.6, ResNet-18 26.9, DeiT-T 26.7
and CETNet 23.7; no check was decided. Then that study was taken out and the plan changed. Other recipes, batches and
epochs make it fit into minutes of a GPU. In the table of E9 DeiT, Swin and ConvNeXt became larger and ResNet smaller,
so that all have about as many parameters. Margins of half a point became one point, and stochastic depth was turned
off. E9 had asked whether hybrids are the first choice; it asks whether they beat DeiT and ResNet. E3 had asked for
fewer MACs, too. So E9 is no prediction by somebody who had seen nothing, nor is E10, as its section says.

**What this page cannot say.** The papers train on ImageNet for days; these are small networks, small pictures and
minutes, so a claim that does not hold here may hold there, and the other way round. Rows bear the papers' names, but
most are the small stand-ins that `weft ablate` has for them: a CeiT-T here has a fifth of the paper's parameters.
What both sides cost is beside each check; where one has more, so may its score be from that. Trainings this short say
who learns faster, not who is better in the end.

A check **holds** where the 95 % interval (Student's, over seeds in pairs) of the difference is wholly on the claim's
side of its limit, **does not hold** where it is wholly on the other side, and is **open** otherwise, with a single
seed, or where a training failed. Open is not equal: with three seeds the interval reaches 2.5 standard deviations of
the difference to either side. The limit is zero; of *at most 1 point below* it is that point, and being better is
within it. Seeds are paired on one machine alone, known by its GPU or processor; where the pairs of a check come from
several machines, or from several versions of Weft or of what it uses, it says so.
Intervals are not widened for the number of checks: where nothing differs, one in twenty is still decided. A seed is
another start, another order and, of a part of the pictures, another part; all are judged by the same pictures, so the
interval says nothing about other ones. Of equal trainings in several studies one is made, and counts in all of them.

A claim holds where all of its checks do, and **partly** where some do; fewer MACs alone, which are
counted, are no part of it.
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
        state = verdict(found)
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
        f"Paper: {claim.paper}. Here: **{verdict(found)}**.",
    )
    yield from ([claim.note] if claim.note else [])
    yield ""
    checks = zip(claim.checks, found, strict=True)
    yield from markdown(
        ["check", "parameters, M", "MACs, M", "difference, points", ""],
        [[f.text, *sizes(check, design), format_difference(f.difference), f.state] for check, f in checks],
    )
    yield ""
    rows = [line for study in design.studies.values() if claim.name in study.claims for line in table(study, results)]
    if rows:
        yield from markdown(HEADER, rows)
        yield ""
    yield f"`python benchmarks/evidence.py {claim.name} --seeds 3 --jobs 8`"
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
    """A line for each row with results on a machine; seconds are of a cell from start to end, with `jobs` at once."""
    for part in sorted(study.lengths):
        for row in study.trained:
            found = results.get((study.name, row.name, part), {})
            place = [study.name, row.name, f"{part * row.fraction:.0%}"]
            for machine, kept in by_machine(found).items():
                first = kept[0]
                memory = max(one["memory"] for one in kept)
                yield [
                    *place,
                    f"{format_score(*mean_sd([one['value'] for one in kept]))} {first['score']}",
                    str(len(kept)),
                    f"{first['steps']:,}",
                    f"{first['parameters'] / 1e6:.2f} M",
                    f"{first['macs'] / 1e9:.3f} G",
                    seconds_of(kept),
                    f"{memory / 2**30:.1f} GiB" if memory else DASH,
                    f"{machine}, {first['date']}",
                ]
            for (seed, machine), kept in sorted(found.items()):
                if "error" in kept:
                    said = f"seed {seed} failed: {kept['error']}".replace("|", "\\|")
                    yield [*place, said, *[DASH] * 6, f"{machine}, {kept['date']}"]


def seconds_of(kept: Sequence[Kept]) -> str:
    """The mean of equal trainings; none where the machine did other things meanwhile."""
    if others := sorted({one["beside"] for one in kept if one.get("beside")}):
        return f"beside {' and '.join(others)}"
    seconds, _ = mean_sd([one["seconds"] for one in kept])
    at_once = max(one["jobs"] for one in kept)
    return f"{seconds:.0f}" + (f", {at_once} at once" if at_once > 1 else "")


REPEAT = """```
python benchmarks/evidence.py --prepare PACKED --data data      # the sets, out of mosaics and archives
python benchmarks/evidence.py --list                            # what is planned, done, and estimated to cost
python benchmarks/evidence.py --seeds 3 --jobs 8 --minutes 9    # as much as fits; again, it goes on
python benchmarks/evidence.py few --device cpu --jobs 2         # what needs no GPU
python -m tools.evidence                                        # this page
```
"""


# The plots ----------------------------------------------------------------------------------------------------------


def draw_plots(design: Design, results: Results, folder: Path) -> dict[str, str]:
    """Writes what there are results for, and returns its name and text."""
    drawn = {}
    studies = [design.studies[name] for name in FEW]
    parts = {part: machine for study in studies for part in study.lengths if (machine := usual(study, part, results))}
    if len(parts) > 1:
        write_figure(folder, "evidence-data", partial(draw_data, studies, parts, results), endings=("svg",))
        where = "; ".join(f"{part:.0%} on {machine}" for part, machine in sorted(parts.items()))
        drawn["evidence-data"] = f"Accuracy against the part of the training pictures: {where}"
    points = time_points(design, results)
    if points:
        write_figure(folder, "evidence-seconds", partial(draw_seconds, points), endings=("svg",))
        drawn["evidence-seconds"] = "Accuracy against GPU seconds of training, one network alone on the GPU"
    return drawn


def usual(study: Study, part: float, results: Results) -> str:
    """The machine that has most of a study's trainings with a part of the pictures; "" where there are none."""
    rows = [results.get((study.name, row.name, part), {}) for row in study.trained]
    count = Counter(machine for row in rows for (_, machine), kept in row.items() if "error" not in kept)
    return max(sorted(count), key=lambda machine: count[machine], default="")


def draw_data(studies: Sequence[Study], parts: Mapping[float, str], results: Results) -> "Figure":
    figure, (place,) = plots(1, width=5.2, height=3.4)
    for number, row in enumerate(studies[0].trained):
        xs, ys, spread = [], [], []
        for part, machine in sorted(parts.items()):
            study = next(study for study in studies if part in study.lengths)
            kept = by_machine(results.get((study.name, row.name, part), {})).get(machine, [])
            mean, sd = mean_sd([one["value"] for one in kept])
            if mean is not None:
                xs, ys, spread = [*xs, 100 * part], [*ys, 100 * mean], [*spread, 100 * (sd or 0)]
        place.errorbar(xs, ys, spread, marker="o", ms=3, capsize=2, label=row.name, **style(number))
    place.set_xscale("log")
    ticks = [100 * part for part in sorted(parts)]
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
        paced = by_machine(results.get((PACE, row.name, 1), {}))
        machine = next((machine for machine, kept in paced.items() if kept[0]["memory"]), "")
        paces = [one["pictures_per_second"] for one in paced.get(machine, [])]
        timed = TimedRow(row.name)
        for study in (design.studies[key] for key in (PACE, FEW[-1])):
            kept = by_machine(results.get((study.name, row.name, 1), {})).get(machine, [])
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

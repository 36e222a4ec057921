"""`weft bench A B --compare DATA`: how much training, and how many pictures, models need to be how good.

As in CeiT's and ViTAE's figures 1: every model is trained (a) for several numbers of epochs on all pictures and (b) on
parts of the pictures for more epochs, so that every training of (b) takes as many steps as the shortest one of (a).
Recipe, batch and picture size are the same for all models; every number of epochs has a whole schedule of its own.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.analysis.cost import count_macs, count_parameters
from weft.errors import WeftError
from weft.files import write_text
from weft.study.cells import SCORES, Cell, Result
from weft.study.settle import Common
from weft.study.space import make
from weft.study.statistics import Difference, mean_sd, paired_difference
from weft.study.workers import run_cells

KINDS = {"epochs": "epochs on all pictures", "pictures": "part of the training pictures"}


@dataclass(frozen=True)
class Design:
    """Which trainings there are."""

    common: Common
    epochs: tuple[int, ...]  # of (a), rising
    fractions: tuple[float, ...]  # of (b), rising
    seeds: int = 1

    def length(self, kind: str, x: float) -> tuple[int, float]:
        """Epochs, and part of the pictures, of the training at `x` of an axis."""
        if kind == "epochs":
            return int(x), 1.0
        return max(1, round(min(self.epochs) / x)), x

    def cell(self, model: str, kind: str, x: float, seed: int) -> Cell:
        """Both axes meet in one training, which is made once."""
        epochs, part = self.length(kind, x)
        whole = float(self.common.settings.get("data.fraction", 1.0))
        settings = {**self.common.settings, "run.epochs": epochs, "data.fraction": round(whole * part, 6)}
        return Cell(self.common.data, model, seed, self.common.models[model], settings, self.common.recipe)

    @property
    def axes(self) -> dict[str, tuple[float, ...]]:
        return {"epochs": self.epochs, "pictures": self.fractions}

    def places(self) -> list[tuple[str, str, float, int]]:
        """(model, kind, x, seed) of every training; all models with one seed come before the next seed."""
        return [
            (model, kind, x, seed)
            for seed in range(self.seeds)
            for kind, xs in self.axes.items()
            for x in xs
            for model in self.common.models
        ]


@dataclass(frozen=True)
class Comparison:
    """What was found: scores of each model along both axes, in the order of the seeds."""

    design: Design
    score: str  # such as top1
    scores: dict[str, dict[str, dict[float, list[float]]]]  # model to kind to x to scores
    curves: dict[str, list[tuple[float, float]]]  # of each model's longest training: epoch and validation score
    costs: dict[str, tuple[int, int]]  # parameters, MACs
    errors: list[str]

    def line(self, model: str, kind: str) -> list[tuple[float, float]]:
        """x and mean score."""
        means = {x: mean_sd(values)[0] for x, values in self.scores[model][kind].items()}
        return [(x, mean) for x, mean in means.items() if mean is not None]

    def to_dict(self) -> dict[str, Any]:
        first, *others = self.design.common.models
        content: dict[str, Any] = {"score": self.score, "design": asdict(self.design), "models": {}}
        for model in self.design.common.models:
            parameters, macs = self.costs[model]
            rows = {
                kind: [self._row(x, values) for x, values in axis.items()] for kind, axis in self.scores[model].items()
            }
            content["models"][model] = {"parameters": parameters, "macs": macs, **rows, "curve": self.curves.get(model)}
        content["differences"] = [
            {"model": model, "minus": first, "kind": kind, "x": x, **self._interval(model, first, kind, x)}
            for model in others
            for kind, xs in self.design.axes.items()
            for x in xs
        ]
        return {**content, "errors": self.errors}

    def _row(self, x: float, values: list[float]) -> dict[str, Any]:
        mean, sd = mean_sd(values)
        return {"x": x, "mean": mean, "sd": sd, "values": values}

    def difference(self, model: str, other: str, kind: str, x: float) -> Difference | None:
        """None where a training failed."""
        a, b = self.scores[model][kind][x], self.scores[other][kind][x]
        return paired_difference(a, b) if len(a) == len(b) else None

    def _interval(self, *place: Any) -> dict[str, float | None]:
        found = self.difference(*place)
        return {"mean": None, "low": None, "high": None} if found is None else asdict(found)


def compare(
    folder: Path,
    design: Design,
    *,
    jobs: int = 0,
    device: str = "auto",
    watch: Callable[[dict[str, str]], None] | None = None,
) -> Comparison:
    """Trains what is not trained yet, and writes compare.json, compare.html, compare.png and compare.svg."""
    from weft.study.efficiency_page import write_page

    folder.mkdir(parents=True, exist_ok=True)
    places = design.places()
    results = run_cells(folder, [design.cell(*place) for place in places], jobs=jobs, device=device, watch=watch)
    if all(result.error for result in results):
        raise WeftError(f"No model could be trained: {results[0].error}")
    found = collect(design, places, results)
    write_text(folder / "compare.json", json.dumps(found.to_dict(), indent=2))
    write_page(folder, found)
    return found


def collect(design: Design, places: Sequence[tuple[str, str, float, int]], results: Sequence[Result]) -> Comparison:
    models = design.common.models
    scores = {model: {kind: {x: [] for x in xs} for kind, xs in design.axes.items()} for model in models}
    curves, name = {}, ""
    for (model, kind, x, seed), result in zip(places, results, strict=True):
        if result.score is None:
            continue
        name = next(name for name in SCORES if result.metrics.get(name) is not None)
        scores[model][kind][x].append(result.score)
        if kind == "epochs" and x == max(design.epochs) and seed == 0:
            points = [(row["epoch"], row.get(f"val_{name}")) for row in result.curve]
            curves[model] = [(epoch, score) for epoch, score in points if score is not None]
    errors = sorted({f"{result.cell.model}: {result.error}" for result in results if result.error})
    return Comparison(design, name, scores, curves, {model: cost(design.common, model) for model in models}, errors)


def cost(common: Common, model: str) -> tuple[int, int]:
    network = make(model, {**common.models[model], **common.shape(model), "device": "meta"})
    return count_parameters(network), count_macs(network, (common.channels, *common.size))

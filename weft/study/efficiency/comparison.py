"""A comparison of models: the trainings that it takes, and what they say together."""

from dataclasses import asdict, dataclass
from typing import Any

from weft.study.cells.cell import Cell, whole_epochs
from weft.study.cells.setup import StudySetup
from weft.study.statistics import Difference, difference_by_seed, mean_sd
from weft.words import many

KINDS = {"epochs": "epochs on all pictures", "pictures": "part of the training pictures"}


@dataclass(frozen=True)
class Design:
    """The trainings that are compared: every model along two axes, with every seed."""

    common: StudySetup
    epochs: tuple[int, ...]  # of (a), rising
    fractions: tuple[float, ...]  # of (b), rising, as asked for
    seeds: int = 1

    def length(self, kind: str, x: float) -> tuple[int, float]:
        """Epochs, and part of the pictures, of the training at `x` of an axis."""
        return (int(x), 1.0) if kind == "epochs" else whole_epochs(min(self.epochs) / x, x)

    def cell(self, model: str, kind: str, x: float, seed: int) -> Cell:
        """The training at `x` of an axis; where both axes meet, it is one and made once."""
        epochs, part = self.length(kind, x)
        whole = float(self.common.settings.get("data.fraction", 1.0))
        settings = {**self.common.settings, "run.epochs": epochs, "data.fraction": round(whole * part, 6)}
        return Cell(self.common.data, model, seed, self.common.models[model], settings, self.common.recipe)

    @property
    def axes(self) -> dict[str, tuple[float, ...]]:
        parts = [self.length("pictures", x)[1] for x in self.fractions]
        return {"epochs": self.epochs, "pictures": tuple(dict.fromkeys(parts))}

    def describe(self, kind: str, x: float) -> str:
        """`60% of the pictures, 17 epochs`."""
        epochs, part = self.length(kind, x)
        return f"{part:.0%} of the pictures, {many(epochs, 'epoch')}"

    def names(self) -> dict[str, str]:
        """A name for every training, by the key of its cell."""
        return {
            self.cell(model, kind, x, seed).key: f"{model}, {self.describe(kind, x)}, seed {seed}"
            for model, kind, x, seed in self.trainings()
        }

    def trainings(self) -> list[tuple[str, str, float, int]]:
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
    """Scores of each model along both axes, with its costs."""

    design: Design
    score: str  # such as top1
    scores: dict[str, dict[str, dict[float, dict[int, float]]]]  # model to kind to x to seed to score
    steps: dict[str, dict[float, int]]  # kind to x to steps of each training, the same for all models
    curves: dict[str, list[tuple[float, float]]]  # of each model's longest training: epoch and validation score
    costs: dict[str, tuple[int, int]]  # parameters, MACs
    errors: list[str]

    def line(self, model: str, kind: str) -> list[tuple[float, float]]:
        """Each x of an axis with the mean score there."""
        means = {x: self.spread(model, kind, x)[0] for x in self.scores[model][kind]}
        return [(x, mean) for x, mean in means.items() if mean is not None]

    def to_dict(self) -> dict[str, Any]:
        first, *others = self.design.common.models
        content: dict[str, Any] = {"score": self.score, "design": asdict(self.design), "models": {}}
        for model in self.design.common.models:
            parameters, macs = self.costs[model]
            rows = {kind: [self._row(model, kind, x) for x in axis] for kind, axis in self.scores[model].items()}
            content["models"][model] = {"parameters": parameters, "macs": macs, **rows, "curve": self.curves.get(model)}
        content["differences"] = [
            {"model": model, "minus": first, "kind": kind, "x": x, **self._interval(model, first, kind, x)}
            for model in others
            for kind, xs in self.design.axes.items()
            for x in xs
        ]
        return {**content, "errors": self.errors}

    def _row(self, model: str, kind: str, x: float) -> dict[str, Any]:
        mean, sd = self.spread(model, kind, x)
        epochs, part = self.design.length(kind, x)
        length = {"epochs": epochs, "part": part, "steps": self.steps[kind].get(x)}
        return {"x": x, **length, "mean": mean, "sd": sd, "by_seed": self.scores[model][kind][x]}

    def spread(self, model: str, kind: str, x: float) -> tuple[float | None, float | None]:
        """Mean and standard deviation over the seeds."""
        return mean_sd([*self.scores[model][kind][x].values()])

    def difference(self, model: str, other: str, kind: str, x: float) -> Difference | None:
        """Over the seeds that both have; None where there are none."""
        return difference_by_seed(self.scores[model][kind][x], self.scores[other][kind][x])

    def _interval(self, *where: Any) -> dict[str, float | None]:
        found = self.difference(*where)
        return {"mean": None, "low": None, "high": None} if found is None else asdict(found)

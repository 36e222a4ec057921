"""`weft bench A B --compare DATA`: how much training, and how many pictures, models need to be how good.

As in CeiT's and ViTAE's figures 1: every model is trained (a) for several numbers of epochs on all pictures and (b) on
parts of the pictures for more epochs, so that every training of (b) sees as many pictures as the shortest one of (a).
Epochs are whole, so a part may be a little other than asked for; so are the steps of an epoch: those are counted.
Recipe, batch and picture size are the same for all models; every number of epochs has a whole schedule of its own.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from weft.documents import to_json
from weft.engine.lock import locked
from weft.errors import WeftError
from weft.files import write_text
from weft.study.ablate.costs import count_network
from weft.study.ablate.tables import Network
from weft.study.cells.cell import SCORES, Result
from weft.study.cells.setup import StudySetup
from weft.study.cells.workers import run_cells
from weft.study.efficiency.comparison import Comparison, Design
from weft.study.efficiency.page import write_page


def compare(
    folder: Path,
    design: Design,
    *,
    jobs: int = 0,
    device: str = "auto",
    watch: Callable[[dict[str, str]], None] | None = None,
) -> Comparison:
    """Trains what is not trained yet, and writes compare.json, compare.html, compare.png and compare.svg."""
    trainings = design.trainings()
    with locked(folder):
        results = run_cells(
            folder, [design.cell(*training) for training in trainings], jobs=jobs, device=device, watch=watch
        )
    if all(result.error for result in results):
        raise WeftError(f"No model could be trained: {results[0].error}")
    found = collect(design, trainings, results)
    write_text(folder / "compare.json", to_json(found.to_dict(), indent=2))
    write_page(folder, found)
    return found


def collect(design: Design, trainings: Sequence[tuple[str, str, float, int]], results: Sequence[Result]) -> Comparison:
    """Puts the results of the trainings, in their order, together by model and axis."""
    models = design.common.models
    scores = {model: {kind: {x: {} for x in xs} for kind, xs in design.axes.items()} for model in models}
    steps: dict[str, dict[float, int]] = {kind: {} for kind in design.axes}
    curves, name = {}, ""
    for (model, kind, x, seed), result in zip(trainings, results, strict=True):
        if result.score is None:
            continue
        name = next(name for name in SCORES if result.metrics.get(name) is not None)
        scores[model][kind][x][seed] = result.score
        steps[kind][x] = result.curve[-1]["step"]
        if kind == "epochs" and x == max(design.epochs) and seed == 0:
            points = [(row["epoch"], row.get(f"val_{name}")) for row in result.curve]
            curves[model] = [(epoch, score) for epoch, score in points if score is not None]
    errors = sorted({f"{result.cell.model}: {result.error}" for result in results if result.error})
    costs = {model: count_cost(design.common, model) for model in models}
    return Comparison(design, name, scores, steps, curves, costs, errors)


def count_cost(common: StudySetup, model: str) -> tuple[int, int]:
    """Parameters and MACs of a model as it is trained, with its head."""
    network = Network(model, common.models[model], common.head, common.head_args)
    return count_network(network, common.size[0], common.classes, common.channels)

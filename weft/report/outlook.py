"""Sentences on a run's result, for its page and for the terminal: how good is good, and would more time help."""

from typing import Any

from weft.catalog.measured import PHOTO, SMALL, SMALL_SIDE, errors_left
from weft.report.run import RunReport
from weft.report.text import SCORES
from weft.words import many

FEW_EPOCHS = 5  # below which a model has hardly been trained
TIMES = 4  # as long, a run that is compared with this one
WORTH_TELLING = 0.005  # of accuracy
NOTHING = 0.01  # of average precision: what boxes reach that lie anywhere
TOO_LITTLE = "it has learnt too little to say anything. Give it more time."
STEEP = 0.04  # of the score


def outlook(run: RunReport) -> list[str]:
    """Tells what a simple answer would reach, whether there was enough training, and what more of it may bring."""
    metrics, told = run.metrics, fewer_validated(run)
    common, top1 = metrics.get("commonest"), metrics.get("top1")
    epochs, steps = (max((row[name] for row in run.history.steps), default=0) for name in ("epoch", "step"))
    if common and top1 is not None:
        always, guessed = f"{common['share']:.0%}", f"{common['guessed_by_share']:.0%}"
        told.append(f"Always answering {common['name']} would be right on {always}, guessing on {guessed}.")
    if common and top1 is not None and metrics["top1_interval"][0] <= common["share"]:
        return [*told, f"The model does hardly better: {TOO_LITTLE}"]
    if finds_nothing(metrics):
        return [*told, f"The model finds hardly anything: {TOO_LITTLE}"]
    if epochs < FEW_EPOCHS:
        length = f"{epochs:.2g} epoch{'s' * (epochs > 1)}" if epochs >= 1 else many(steps, "step")
        told.append(f"It is hardly trained: {length}. Give it more --minutes.")
    elif rises(run.history.epochs):
        told.append("Its curve still rises steeply: more time would help.")
    return told + more_time(run, top1)


def finds_nothing(metrics: dict[str, Any]) -> bool:
    """Whether masks are no better than the commonest class everywhere, or boxes no better than none."""
    if metrics.get("miou") is not None:
        pixels = [row["pixels"] for row in metrics["per_class"] if row["iou"] is not None]
        return metrics["miou"] <= max(pixels) / sum(pixels) / len(pixels)  # one class has its share, the others nothing
    found = [metrics[name] for name in ("mask_ap", "box_ap") if metrics.get(name) is not None]
    return bool(found) and max(found) < NOTHING


def rises(rows: list[dict[str, Any]]) -> bool:
    """Whether the score gained much in the last third of the validations, which learn least where a run was long.

    The last one counts, not the best: a curve that came down again does not rise.
    """
    name = next((f"val_{name}" for name in SCORES if any(f"val_{name}" in row for row in rows)), "")
    scores = [row[name] for row in rows if row.get(name) is not None]
    return len(scores) >= 3 and scores[-1] - scores[2 * len(scores) // 3 - 1] > STEEP


def fewer_validated(run: RunReport) -> list[str]:
    """Tells where the curve is not of the pictures that the result is of."""
    some = [row["validated"] for row in run.history.epochs if "validated" in row]
    if not some:
        return []
    return [f"On the way {some[-1]} of {many(len(run.split.val), 'picture')} validated, for want of time."]


def more_time(run: RunReport, top1: float | None) -> list[str]:
    """Guesses what a run four times as long would likely reach, where trainings that were measured tell."""
    steps = max((row["step"] for row in run.history.steps), default=0)
    if top1 is None or not steps or run.config.model.init:
        return []
    kind = SMALL if max(run.preprocessing.size) <= SMALL_SIDE else PHOTO
    left = errors_left(kind, steps * run.config.run.batch, TIMES)
    if left is None or (1 - top1) * (1 - left) < WORTH_TELLING:
        return []
    likely = 1 - (1 - top1) * left
    return [f"{TIMES} times the time would likely bring about {likely:.0%}, going by trainings that were measured."]

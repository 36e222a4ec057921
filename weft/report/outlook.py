"""Sentences on a run's result, for its page and for the terminal: how good is good, and would more time help."""

from weft.catalog.measured import PHOTO, SMALL, errors_left
from weft.report.run import RunReport

FEW_EPOCHS = 5  # below which a model has hardly been trained
SMALL_SIDE = 64
TIMES = 4  # as long, a run that is compared with this one
WORTH_TELLING = 0.005  # of accuracy


def outlook(run: RunReport) -> list[str]:
    """Tells what a simple answer would reach, whether there was enough training, and what more of it may bring."""
    metrics, told = run.metrics, []
    common, top1 = metrics.get("commonest"), metrics.get("top1")
    epochs = max((row["epoch"] for row in run.history.steps), default=0.0)
    if common and top1 is not None:
        always, guessed = f"{common['share']:.0%}", f"{common['guessed_by_share']:.0%}"
        told.append(f"Always answering {common['name']} would be right on {always}, guessing on {guessed}.")
    if common and top1 is not None and metrics["top1_interval"][0] <= common["share"]:
        return [*told, "The model does hardly better: it has learnt too little to say anything. Give it more time."]
    if epochs < FEW_EPOCHS:
        told.append(f"It is hardly trained: {epochs:.2g} epochs. Give it more --minutes.")
    return told + more_time(run, top1)


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

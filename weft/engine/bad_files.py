"""Files that turn out to be unreadable while a run reads them."""

from weft.engine.training_run import TrainingRun
from weft.errors import WeftError


def report_bad_files(run: TrainingRun, bad: list[tuple[int, str]]) -> None:
    """Names new ones in the log; stops where there are too many. Every process takes part, with what it has found.

    `bad`: positions in the source, and what is wrong there.
    """
    names, known = run.source.names, run.progress.bad
    for found in run.world.all_gather({names[index]: why for index, why in bad}):
        for name in (name for name in found if name not in known):
            known[name] = found[name]
            run.event(f"{name!r} cannot be read and is left out: {found[name]}")
    count, limit = len(run.split.train) + len(run.split.val), run.config.data.bad_files
    if len(known) > limit * count:
        run.world.fail(_too_many(known, count, limit))


def _too_many(bad: dict[str, str], count: int, limit: float) -> WeftError:
    first = "; ".join(f"{name}: {why}" for name, why in list(bad.items())[:3])
    return WeftError(
        f"{len(bad)} of {count} pictures cannot be read, more than {limit:.0%} ({first}); repair or remove them"
        " (`weft check` lists all), or allow more with --data.bad_files."
    )

"""How many threads compute on a CPU: as many as usual, or fewer where that is faster, as long as it is.

Threads wait for each other in every layer, so another job on one core costs the others theirs, too. Other jobs come and
go: a run that has minutes looks again at its marks, where that may change anything.
"""

import torch

from weft.catalog.pace import choose_threads
from weft.config import RunConfig
from weft.engine.device import chooses_threads
from weft.engine.training_run import TrainingRun
from weft.words import many

SLOWER = 1.5  # times as long as steps have taken: the usual threads are tried next to fewer


def fewer_threads(run: RunConfig, device: torch.device, usual: int) -> int:
    """Threads that are faster than the usual number; 0 where none are, or where there is no choice."""
    if usual == 1 or not chooses_threads(run, device):
        return 0
    threads = choose_threads(usual)
    return threads if threads < usual else 0


def choose_again(run: TrainingRun, slower: float) -> bool:
    """Whether other threads compute from here on: tried where there are fewer than usual, or steps became slower."""
    before, own = run.progress.threads, run.config.run
    if run.world.size > 1 or not (before or slower > SLOWER) or not chooses_threads(own, run.world.device):
        return False
    threads = fewer_threads(own, run.world.device, run.usual_threads)
    if threads == before:
        return False
    run.compute_with(threads)
    why = "more wait for each other, another job seems to use this machine" if threads else "the machine is free again"
    run.event(f"{many(threads or run.usual_threads, 'thread')} from here on: {why}")
    return True

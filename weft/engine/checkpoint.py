"""Files that a run writes on its way: its state, and the best model so far."""

import time

from torch import nn

from weft.engine.state import MEMORY_NOTE, full_tensor, gather_tensors, is_finite, load_state, write_state
from weft.engine.training_run import TrainingRun
from weft.errors import WeftError
from weft.words import shell


def save(run: TrainingRun) -> None:
    """Writes the state of this moment to disk before anything else happens."""
    if not is_finite(run.model):
        text = f"After step {run.progress.step} the weights are no longer finite; try a smaller --optim.lr."
        go_on = shell("weft", "train", "--resume", run.folder)
        run.world.fail(WeftError(f"{text} The state before that is intact: {go_on}"))
    run.progress.seconds = run.elapsed()
    run.saved_at = time.monotonic()
    run.progress.scaler = run.scaler.state_dict()
    tensors = gather_tensors(run.model, run.ema, run.optimizer, keep=run.world.is_main)

    def write() -> None:
        write_state(run.folder, tensors, run.progress, run.facts)
        (run.folder / MEMORY_NOTE).unlink(missing_ok=True)  # from now on the state knows

    run.world.on_main(write)


def restore(run: TrainingRun) -> None:
    """Goes back to the last saved state."""
    run.world.barrier()  # until the main process has written what is read now
    run.progress = load_state(run.folder, run.model, run.ema, run.optimizer)
    run.compute_with(run.progress.threads)
    run.rewind_log()
    if run.progress.scaler:
        run.scaler.load_state_dict(run.progress.scaler)


def write_best(run: TrainingRun, model: nn.Module) -> None:
    """Writes the model that whoever opens the run gets: the weight average, or the weights themselves."""
    weights = {key: full_tensor(value).cpu() for key, value in model.state_dict().items()}
    preprocessing = run.preprocessing.to_dict()
    run.world.on_main(lambda: run.write_model(run.folder, model, weights, preprocessing))

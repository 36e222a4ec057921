"""Recovery from a step that failed: for lack of memory, or without a finite gradient.

One process that lacks memory takes half as many pictures at once, and does the step again. One of several cannot: the
others are in the middle of a backward pass and wait for its gradients. So it writes down that half is needed, and ends;
then all end, and the next attempt, torchrun's restart or `weft train --resume`, goes on from the last saved state.
"""

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.data.loader import Batch
from weft.engine.checkpoint import restore
from weft.engine.state import MEMORY_NOTE
from weft.engine.step_report import StepFailed
from weft.engine.training_run import TrainingRun
from weft.errors import WeftError
from weft.files import write_tensors, write_text
from weft.words import shell

MAX_SKIPPED = 3  # batches without a finite gradient; then something is wrong with the settings, not with a batch


def roll_back(run: TrainingRun, failure: StepFailed) -> None:
    """Goes back to the last saved state; a batch that gave no finite gradient is left out from now on."""
    step = failure.pending.step
    file = dump_batch(run, step, failure.pending.batch)
    text = _describe(run, failure, file)
    skipped, micro_batch = [*run.progress.skipped, step], run.progress.micro_batch
    if len(skipped) > MAX_SKIPPED:
        run.world.fail(WeftError(f"{text}. {len(skipped)} batches have failed in this way; {_advice(step, skipped)}."))
    restore(run)
    run.progress.skipped, run.progress.micro_batch = skipped, micro_batch  # which may be smaller since
    run.event(f"{text}: back to step {run.progress.step}, without that batch")


def _describe(run: TrainingRun, failure: StepFailed, file: Path) -> str:
    pending, report = failure.pending, failure.report
    names = [run.source.names[i] for i in pending.batch.index.tolist()]
    return (
        f"step {pending.step}: the loss is {report.loss:.3g}, its gradient {report.grad_norm:.3g}"
        f" (learning rate {pending.lr:.2g}; files {', '.join(names[:3])}, ... in {file})"
    )


def _advice(step: int, skipped: list[int]) -> str:
    if step < len(skipped):  # not one step was done
        return "nothing was learned before, so look at the weights it begins with (--init), and at the pictures"
    return "try a smaller --optim.lr"


def dump_batch(run: TrainingRun, step: int, batch: Batch) -> Path:
    """Writes the batch as it was before it was normalised and mixed, for a closer look."""
    path = run.folder / "trouble" / f"step-{step}-process-{run.world.rank}.safetensors"
    path.parent.mkdir(exist_ok=True)
    pictures, targets = run.task.augmented(batch, run.seed(step))
    tensors = named_tensors({"pictures": pictures, "labels": targets, "index": batch.index})
    write_tensors(path, tensors, {str(i): run.source.names[i] for i in batch.index.tolist()})
    return path


def named_tensors(items: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in dictionaries and lists, on the host, by the way that leads there: "labels.0.boxes"."""
    if isinstance(items, Tensor):
        return {name: items.detach().cpu().contiguous()}
    entries = items.items() if isinstance(items, dict) else enumerate(items)
    parts = (named_tensors(value, f"{name}.{key}".lstrip(".")) for key, value in entries)
    return {key: value for part in parts for key, value in part.items()}


def halve_micro_batch(run: TrainingRun) -> None:
    """Computes with half as many pictures at once from now on."""
    smaller = run.progress.micro_batch // 2
    if smaller < 1:
        run.world.fail(_nothing_fits())
    run.optimizer.zero_grad(set_to_none=True)
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
    run.progress.micro_batch = smaller
    run.event(f"out of memory: {smaller} pictures at a time now; batch and learning rate stay as they are")


def leave_for_memory(run: TrainingRun) -> NoReturn:
    """Ends this process, one of several, and asks for half as many pictures at once in the next attempt."""
    mine = -(-run.config.run.batch // run.world.size)
    tried = min(run.progress.micro_batch, mine)
    if tried < 2:
        raise _nothing_fits()
    write_text(run.folder / MEMORY_NOTE, str(tried // 2))
    raise WeftError(
        f"Out of memory with {tried} pictures at a time. With {tried // 2} the run goes on by itself where torchrun has"
        f" --max-restarts, or with: {shell('weft', 'train', '--resume', run.folder)}"
    )


def heed_lack_of_memory(run: TrainingRun) -> None:
    """Computes with as few pictures at once as a process of an earlier attempt asked for."""
    file = run.folder / MEMORY_NOTE
    needed = run.world.on_main(lambda: int(file.read_text()) if file.exists() else 0)
    if 0 < needed < run.progress.micro_batch:
        run.progress.micro_batch = needed
        run.screen.say(f"a process ran out of memory before: {needed} pictures at a time now")


def _nothing_fits() -> WeftError:
    return WeftError("Out of memory with a single picture; choose a smaller --img-size or --model.")

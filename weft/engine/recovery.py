"""Recovery from a step that failed: for lack of memory, or without a finite gradient."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.data.loader import Batch
from weft.engine.checkpoint import restore
from weft.engine.step_report import StepFailed
from weft.engine.training_run import TrainingRun
from weft.errors import WeftError
from weft.files import write_tensors

MAX_SKIPPED = 3  # batches without a finite gradient; then something is wrong with the settings, not with a batch


def roll_back(run: TrainingRun, failure: StepFailed) -> None:
    """Goes back to the last saved state; a batch that gave no finite gradient is left out from now on."""
    if failure.report.no_memory:
        micro_batch, skipped = run.progress.micro_batch, run.progress.skipped
        restore(run)
        run.progress.micro_batch, run.progress.skipped = micro_batch, skipped
        return halve_micro_batch(run)
    step = failure.pending.step
    file = dump_batch(run, step, failure.pending.batch)
    text = _describe(run, failure, file)
    skipped = [*run.progress.skipped, step]
    if len(skipped) > MAX_SKIPPED:
        run.world.fail(WeftError(f"{text}. {len(skipped)} batches have failed in this way; try a smaller --optim.lr."))
    restore(run)
    run.progress.skipped = skipped
    run.event(f"{text}: back to step {run.progress.step}, without that batch")


def _describe(run: TrainingRun, failure: StepFailed, file: Path) -> str:
    pending, report = failure.pending, failure.report
    names = [run.source.names[i] for i in pending.batch.index.tolist()]
    return (
        f"step {pending.step}: the loss is {report.loss:.3g}, its gradient {report.grad_norm:.3g}"
        f" (learning rate {pending.lr:.2g}; files {', '.join(names[:3])}, ... in {file})"
    )


def dump_batch(run: TrainingRun, step: int, batch: Batch) -> Path:
    """Writes the batch as it was before it was normalised and mixed, for a closer look."""
    path = run.folder / "trouble" / f"step-{step}-process-{run.world.rank}.safetensors"
    path.parent.mkdir(exist_ok=True)
    pictures = run.task.augmented(batch, run.seed(step))
    tensors = named_tensors({"pictures": pictures, "labels": batch.labels, "index": batch.index})
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
        run.world.fail(WeftError("Out of memory with a single picture; choose a smaller --img-size or --model."))
    run.optimizer.zero_grad(set_to_none=True)
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
    run.progress.micro_batch = smaller
    run.event(f"out of memory: {smaller} pictures at a time now; batch and learning rate stay as they are")

"""What fits the machine: pictures at once in its memory, epochs in the time there is."""

import contextlib
import statistics
import time

import torch

from weft.data.loader import Batch
from weft.engine.loop import Trainer, is_out_of_memory
from weft.engine.state import load_tensors, snapshot
from weft.tasks.classify import EVAL_BATCH

CPU_MICRO_BATCH = 128
SPARE = 0.9  # of the GPU's memory; the rest is for fragments and for what else runs there
TRIAL_SECONDS = 15  # of training steps to find out how long one takes


def find_micro_batch(trainer: Trainer) -> None:
    """Sets how many pictures are computed at once where nobody said.

    On a GPU a whole training step and a validation step are tried with made-up pictures, with half as many as long as
    memory does not suffice. Processes agree on the smallest.
    """
    mine = -(-trainer.config.run.batch // trainer.world.size)
    if trainer.config.run.micro_batch:
        return
    trainer.progress.micro_batch = mine
    if trainer.device.type != "cuda":
        trainer.progress.micro_batch = min(mine, CPU_MICRO_BATCH)
        return
    before = snapshot(trainer.model, trainer.ema, trainer.optimizer)
    while not _fits(trainer, mine):
        trainer.halve_micro_batch()
    load_tensors(before, trainer.model, trainer.ema, trainer.optimizer)
    if not trainer.config.run.fsdp:
        trainer.progress.micro_batch = min(trainer.world.gather(trainer.progress.micro_batch))


def _fits(trainer: Trainer, pictures: int) -> bool:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(trainer.device)
    free, _ = torch.cuda.mem_get_info(trainer.device)
    limit = SPARE * (free + torch.cuda.memory_reserved(trainer.device))
    try:
        trainer.model.train()
        trainer.gradients(0, made_up(trainer, pictures))
        trainer.update()
        with torch.no_grad(), torch.autocast("cuda", trainer.dtype, enabled=trainer.dtype != torch.float32):
            batch = made_up(trainer, EVAL_BATCH)
            trainer.model(trainer.parts.preprocessing.normalise(batch.pictures.to(trainer.device)))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return torch.cuda.max_memory_reserved(trainer.device) <= limit


def made_up(trainer: Trainer, count: int) -> Batch:
    """A batch of grey pictures, of the right size and type."""
    shape = (count, trainer.parts.preprocessing.channels, *trainer.parts.preprocessing.size)
    eight_bit = trainer.parts.preprocessing.depth == 8
    pictures = torch.full(shape, 127 if eight_bit else 0.5, dtype=torch.uint8 if eight_bit else torch.float32)
    labels = torch.zeros(count, dtype=torch.int64)
    if trainer.parts.source.multilabel:
        labels = torch.zeros(count, len(trainer.parts.source.classes))
    return Batch(pictures, labels, torch.zeros(count, dtype=torch.int64), [])


def fit_into_time(trainer: Trainer) -> float:
    """Sets the run's length to what its minutes allow, from the speed of a few steps that are undone afterwards.

    Returns the number of epochs, which is a fraction where not even one fits.
    """
    before = snapshot(trainer.model, trainer.ema, trainer.optimizer)
    steps_per_epoch = trainer.parts.plan.steps_per_epoch
    start = last = time.monotonic()
    times = []
    with contextlib.closing(trainer.batches()) as batches:
        for step, batch in batches:
            trainer.train_step(step, batch)
            trainer.read_reports()
            times.append(time.monotonic() - last)  # with the wait for the readers
            last += times[-1]
            if last - start > min(TRIAL_SECONDS, 3 * trainer.config.run.minutes):
                break
    begin = time.monotonic()
    trainer.evaluate()
    validation = time.monotonic() - begin
    load_tensors(before, trainer.model, trainer.ema, trainer.optimizer)
    trainer.forget()
    step_time = statistics.median(times)  # the first ones are slow: memory, kernels, readers
    left = SPARE * 60 * trainer.config.run.minutes - trainer.seconds() - 2 * validation
    epochs = trainer.world.share(left / (steps_per_epoch * step_time + validation))
    epochs = float(int(epochs)) if epochs >= 1 else max(epochs, 1 / steps_per_epoch)
    trainer.progress.total_steps = max(1, round(epochs * steps_per_epoch))
    trainer.screen.say(f"{epochs:.3g} epochs fit into {trainer.config.run.minutes:g} minutes")
    return epochs

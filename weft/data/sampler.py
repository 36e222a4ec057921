"""Which pictures a training step sees, as a pure function of its number: resuming at step k means asking for step k."""

import math
from typing import NamedTuple

import numpy as np

from weft.errors import WeftError, check_positive

WINDOW = 16  # shards that are mixed with each other at a time where pictures lie in shards


class Draw(NamedTuple):
    """A picture of the source, and the seed of its augmentation."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  nobody looks for a value in it
    seed: int


class SamplingPlan:
    """The draws of every step of a training run.

    An epoch is one shuffle of the pictures, cut into whole batches; what is left over takes its chance in the next
    shuffle. A batch larger than the data goes on with a second shuffle. Rank r of `world` takes every world-th draw of
    a batch from the r-th on, so the first ranks get one more where `world` does not divide the batch, and the union
    over the ranks is the same for every `world`.

    Args:
        indices: (N,) Positions in the source.
        batch: Pictures per step, over all ranks.
        repeats: Repeated augmentation as in DeiT: the shuffled pictures are drawn so often one after the other, on
            different ranks where there are as many, and an epoch ends after N draws, so it sees N / repeats pictures.
        weights: (N,) Draw with replacement, each picture in proportion to its weight.
        blocks: (N,) The shard of each picture: shards are shuffled, then pictures among `WINDOW` neighbouring shards.
    """

    def __init__(
        self,
        indices: np.ndarray,
        *,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        weights: np.ndarray | None = None,
        blocks: np.ndarray | None = None,
    ) -> None:
        check_positive(batch=batch, world=world, repeats=repeats)
        if not len(indices):
            raise WeftError("There is no picture to train on; give a source with at least one training picture.")
        if not 0 <= rank < world or world > batch:
            raise WeftError(f"rank={rank}, world={world} and batch={batch} do not fit: every rank needs a picture.")
        self.indices, self.batch, self.seed = np.asarray(indices), batch, seed
        self.rank, self.world, self.repeats, self.blocks = rank, world, repeats, blocks
        self.mine = slice(rank, None, world)  # of a batch
        self.steps_per_epoch = max(1, len(indices) // batch)
        self._sums = None if weights is None else _cumulated(weights, len(indices))
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def step(self, step: int) -> list[Draw]:
        """This rank's part of the global step `step`, which counts through all epochs."""
        generator = np.random.default_rng((self.seed, 1, step))
        seeds = generator.integers(0, 2**63, self.batch)
        chosen = self._choose(step, generator)
        return [Draw(*draw) for draw in zip(chosen[self.mine].tolist(), seeds[self.mine].tolist(), strict=True)]

    def positions(self, step: int) -> np.ndarray:
        """(batch,) The pictures of a step over all ranks; this rank's are those at `mine`."""
        generator = np.random.default_rng((self.seed, 1, step))
        generator.integers(0, 2**63, self.batch)  # the seeds of `step`, which draws first
        return self._choose(step, generator)

    def generator(self, step: int) -> np.random.Generator:
        """For all that is drawn for the pictures of a step together."""
        return np.random.default_rng((self.seed, 3, step))

    def _choose(self, step: int, generator: np.random.Generator) -> np.ndarray:
        if self._sums is None:
            epoch, within = divmod(step, self.steps_per_epoch)
            places = self._epoch_order(epoch)[within * self.batch : (within + 1) * self.batch]
        else:
            drawn = generator.random(math.ceil(self.batch / self.repeats))
            places = np.repeat(np.searchsorted(self._sums, drawn, side="right"), self.repeats)[: self.batch]
        return self.indices[places]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """(>= steps_per_epoch * batch,) The places of one epoch; the last epoch asked for is kept."""
        if epoch != self._epoch:
            generator = np.random.default_rng((self.seed, 0, epoch))
            needed = self.steps_per_epoch * self.batch
            shuffles = math.ceil(needed / (len(self.indices) * self.repeats))
            order = np.concatenate([self._shuffle(generator) for _ in range(shuffles)])
            self._order = np.repeat(order[: math.ceil(needed / self.repeats)], self.repeats)
            self._epoch = epoch
        return self._order

    def _shuffle(self, generator: np.random.Generator) -> np.ndarray:
        """(N,) Every place once."""
        if self.blocks is None:
            return generator.permutation(len(self.indices))
        blocks, block = np.unique(self.blocks, return_inverse=True)  # (B,), (N,)
        window = generator.permutation(len(blocks))[block] // WINDOW  # (N,) where each picture's shard comes
        return np.lexsort((generator.random(len(block)), window))


def _cumulated(weights: np.ndarray, count: int) -> np.ndarray:
    """(N,) Upper ends of intervals in 0..1, as long as the weights are large."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise WeftError(f"weights must be {count} numbers of at least 0, one for each picture, and not all 0.")
    sums = np.cumsum(weights)
    return sums / sums[-1]


def balance_weights(labels: np.ndarray, multilabel: bool) -> np.ndarray:
    """(N,) how often to draw each picture so that the classes come equally often; 1 on average.

    A picture of several classes counts as one of its rarest; those of no class are a class of their own.
    """
    if multilabel:
        labels = np.concatenate([labels, ~labels.any(axis=1, keepdims=True)], axis=1).astype(bool)
        frequency = np.where(labels, labels.sum(axis=0), len(labels)).min(axis=1)
    else:
        frequency = np.bincount(labels)[labels]
    weights = 1 / frequency
    return weights / weights.mean()

"""Copies among pictures: equal ones by their hashes, almost equal ones by their thumbnails.

Almost equal: a picture saved again, resized, brightened, mirrored. Two steps find them among 100,000 pictures in
seconds. The signs of the 64 lowest frequencies of a thumbnail make a hash, and only pairs whose hashes differ in at
most 7 bits go on. Of these the details are compared (thumbnails less their blurred selves, at equal contrast), and a
pair counts if it is far nearer than other pictures of the same data are: photographs hardly resemble each other,
pictures of trousers on black all do, so no fixed threshold would serve both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.data.check.scan import Scan

BITS = 7  # hashes of copies differ by no more
NEARER = 0.25  # a copy is at most so far away, compared with the nearest hundredth of other pictures
FLAT = 1.0  # grey levels; thumbnails with less detail resemble each other by chance
MOST = 200_000  # pairs; where there are more, the rest would tell nothing new
UNIT = 20  # of details kept in 8 bits
BATCH = 1 << 20  # pairs compared at once

_LOW = sorted(((v, u) for v in range(12) for u in range(12) if u + v), key=lambda f: (sum(f), f))[:64]
_POPCOUNT = np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(1, dtype=np.uint8)


@dataclass(frozen=True)
class Copies:
    """Pairs of positions in a source: a split keeps both pictures of a pair on one side."""

    equal: np.ndarray  # (P, 2): of pictures with one hash, each and the next
    near: np.ndarray  # (P, 2)


def find_copies(scan: Scan) -> Copies:
    """Finds what `scan` can tell: equal files or pixels always, almost equal pictures where there are thumbnails."""
    read, hashes = scan.read, scan.records["hash"]
    known = read[hashes[read] != 0]
    order = known[np.argsort(hashes[known], kind="stable")]
    same = hashes[order][1:] == hashes[order][:-1]
    near = np.empty((0, 2), int)
    if scan.thumbs is not None:
        different = read[one_of_each(hashes[read])]
        near = different[near_pairs(scan.thumbs[different])[0]]
    return Copies(np.stack([order[:-1][same], order[1:][same]], axis=1), near)


def one_of_each(hashes: np.ndarray) -> np.ndarray:
    """Sorted positions of the first picture of each hash; 0 is no hash, so that all of these are kept."""
    first = np.unique(hashes, return_index=True)[1]
    return np.union1d(first, np.flatnonzero(hashes == 0))


def equal_groups(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of pictures with one hash, for each hash that occurs more than once; 0 is no hash."""
    order = np.argsort(hashes, kind="stable")
    order = order[hashes[order] != 0]
    borders = np.flatnonzero(np.diff(hashes[order])) + 1
    return (group for group in np.split(order, borders) if len(group) > 1)


def near_pairs(thumbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of almost equal pictures among (N, 16, 16) uint8: (P, 2) positions, (P,) distances; the nearest first.

    A distance is in parts of what lies between a picture and others: 0 for equal details, 1 for no resemblance.
    """
    details, strength = _details(thumbs)
    usable = np.flatnonzero(strength >= FLAT)
    if len(usable) < 2:
        return np.empty((0, 2), int), np.empty(0)
    details = details[usable]
    others = details[np.random.default_rng(0).permutation(len(usable))[:1000]]
    reach = np.full(len(usable), np.nan, np.float32)  # how far other pictures are; filled in where it is needed
    pairs, distances = [np.empty((0, 2), int)], [np.empty(0)]
    for other, left, right in _with_mirrored(thumbs[usable], details):
        near = _distance(details, other, left, right)
        keep = near < NEARER * 1.42  # other pictures are nowhere farther than this allows: sqrt(2)
        left, right, near = left[keep], right[keep], near[keep]
        new = np.unique(np.concatenate([left, right]))
        new = new[np.isnan(reach[new])]
        reach[new] = _surroundings(details[new], others)
        near = near / np.minimum(reach[left], reach[right])
        keep = near < NEARER
        pairs.append(np.stack([left[keep], right[keep]], axis=1))
        distances.append(near[keep])
        if sum(map(len, pairs)) > MOST:
            break
    distance = np.concatenate(distances)
    order = np.argsort(distance, kind="stable")
    together = np.concatenate(pairs)[order]
    first = np.sort(np.unique(together, axis=0, return_index=True)[1])  # symmetric pictures equal their mirror image
    return usable[together[first]], distance[order][first]


def _with_mirrored(thumbs: np.ndarray, details: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Candidates among the pictures, then between pictures and mirror images, with the details to compare."""
    hashes = _hashes(thumbs)
    for left, right in _candidates(hashes, hashes):
        yield details, left, right
    mirrored = details.reshape(thumbs.shape)[:, :, ::-1].reshape(details.shape)
    for left, right in _candidates(hashes, _hashes(thumbs[:, :, ::-1])):
        yield mirrored, left, right


def _details(thumbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, 256) int8, at equal contrast: what a blur takes away; and (N,) how many grey levels that is."""
    details = np.empty((len(thumbs), thumbs.shape[1] * thumbs.shape[2]), np.int8)
    strengths = np.empty(len(thumbs), np.float32)
    for start in range(0, len(thumbs), 8192):
        part = thumbs[start : start + 8192].astype(np.float32)
        part = (part - _blur(_blur(part))).reshape(len(part), -1)
        strength = np.sqrt((part**2).mean(axis=1))
        strengths[start : start + 8192] = strength
        scaled = part * (UNIT / np.maximum(strength, 1e-6))[:, None]
        details[start : start + 8192] = np.clip(np.rint(scaled), -127, 127)
    return details, strengths


def _blur(pictures: np.ndarray) -> np.ndarray:
    """The mean of 3 x 3 neighbours, with the border repeated. (N, H, W)"""
    for axis in (1, 2):
        padded = np.pad(pictures, [(0, 0)] + [(1, 1) if a == axis else (0, 0) for a in (1, 2)], mode="edge")
        n = pictures.shape[axis]
        pictures = np.mean([np.take(padded, range(k, k + n), axis=axis) for k in range(3)], axis=0)
    return pictures


def _hashes(thumbs: np.ndarray) -> np.ndarray:
    """(N,) uint64: the signs of the 64 lowest frequencies of the cosine transform, without the mean."""
    side = thumbs.shape[1]
    position = np.arange(side)
    cosine = np.cos(np.pi * (2 * position + 1) * position[:, None] / (2 * side)).astype(np.float32)
    v, u = np.array(_LOW).T
    hashes = np.empty(len(thumbs), np.uint64)
    for start in range(0, len(thumbs), 8192):
        part = thumbs[start : start + 8192].astype(np.float32)
        bits = (cosine @ part @ cosine.T)[:, v, u] > 0  # (n, 64)
        # every fourth bit into one quarter, so that each quarter has low and high frequencies
        bits = bits.reshape(-1, 16, 4).swapaxes(1, 2).reshape(-1, 64)
        hashes[start : start + 8192] = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
    return hashes


def _candidates(hashes: np.ndarray, others: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of positions, left < right, where hashes[left] and others[right] differ in at most 7 bits.

    Then one of the four quarters differs in at most one bit: pictures are sorted by each quarter, and each looks up
    its own value and the 16 values that are one bit away.
    """
    for quarter in range(4):
        own, keys = (values.view(np.uint16).reshape(-1, 4)[:, quarter] for values in (hashes, others))
        order = np.argsort(keys, kind="stable")
        ends = np.searchsorted(keys[order], np.arange(1 << 16), side="right")
        starts = np.concatenate([[0], ends[:-1]])
        for flip in (0, *(1 << bit for bit in range(16))):
            wanted = own ^ np.uint16(flip)
            for left, right in _ranges(starts[wanted], ends[wanted]):
                right = order[right]
                left, right = left[left < right], right[left < right]
                bits = _POPCOUNT[(hashes[left] ^ others[right]).view(np.uint16).reshape(-1, 4)]
                near = (bits.sum(axis=1) <= BITS) & (bits[:, :quarter] > 1).all(axis=1)  # no earlier quarter had it
                if near.any():
                    yield left[near], right[near]


def _ranges(starts: np.ndarray, ends: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(i, k) for every k in starts[i] ... ends[i] - 1, in batches of about a million."""
    total = np.cumsum(ends - starts)
    first = 0
    while first < len(starts):
        done = total[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(total, done + BATCH, side="right")))
        counts = (ends - starts)[first:last]
        left = np.repeat(np.arange(first, last), counts)
        within = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield left, np.repeat(starts[first:last], counts) + within
        first = last


def _distance(details: np.ndarray, others: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(P,) root mean square difference of details[left] and others[right], 0 to 2."""
    squares = np.empty(len(left), np.float32)
    for start in range(0, len(left), 4096):
        part = slice(start, start + 4096)
        difference = details[left[part]].astype(np.float32) - others[right[part]]
        squares[part] = np.einsum("pd,pd->p", difference, difference)
    return np.sqrt(squares / details.shape[1]) / UNIT


def _surroundings(details: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N,) how far the nearest hundredth of 1000 other pictures is; the very nearest may be copies, too."""
    reach = np.ones(len(details), np.float32)
    if len(others) < 8:
        return reach  # too few to tell; photographs are farther apart than this
    k = min(10, max(3, len(others) // 4))
    flat = others.T.astype(np.float32) / (UNIT**2 * details.shape[1])
    for start in range(0, len(details), 4096):
        cosine = details[start : start + 4096].astype(np.float32) @ flat
        nearest = -np.partition(-cosine, k, axis=1)[:, k]
        reach[start : start + 4096] = np.sqrt(np.maximum(2 - 2 * nearest, 1e-6))
    return reach

"""Splits: shares, groups and folds as scikit-learn has them, whatever the order of files, and stored by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config import DataConfig
from weft.data.check.duplicates import Copies
from weft.data.sources.open import open_source
from weft.data.sources.source import Names, Pixels, Source
from weft.data.split import Split, load_split, make_split, save_split
from weft.errors import WeftError

sklearn = pytest.importorskip("sklearn.model_selection")


def made(labels, *, groups=None, splits=None, names=None) -> Source:
    """A source without pictures."""
    labels = np.asarray(labels)
    n = len(labels)
    classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    return Source(
        root="data",
        layout="made up",
        classes=[str(i) for i in range(max(2, classes))],
        names=Names(names or [f"{i % 7}/{i}.png" for i in range(n)]),
        labels=labels,
        reader=Pixels(np.zeros((n, 1, 1), np.uint8)),
        splits=np.full(n, "") if splits is None else np.asarray(splits),
        multilabel=labels.ndim == 2,
        groups=None if groups is None else np.asarray(groups).astype(str),
    )


def skewed(seed: int, n: int = 600, classes: int = 5) -> np.ndarray:
    """Labels of which each class has about half of the one before."""
    weights = 0.5 ** np.arange(classes)
    return np.random.default_rng(seed).choice(classes, n, p=weights / weights.sum())


def many_labels(seed: int, n: int = 500) -> np.ndarray:
    return np.random.default_rng(seed).random((n, 5)) < [0.5, 0.3, 0.1, 0.05, 0.02]


def check_parts(split: Split, source: Source, whole: bool = True) -> None:
    """The parts are sorted, have nothing in common, and together are all."""
    together = np.concatenate([split.train, split.val, split.test])
    assert len(np.unique(together)) == len(together)
    assert not whole or len(together) == len(source)
    for part in (split.train, split.val, split.test):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def counts(labels: np.ndarray, classes: int) -> np.ndarray:
    return labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=classes)


@given(st.lists(st.integers(0, 6), min_size=3, max_size=200), st.floats(0.05, 0.9), st.integers(0, 3))
@settings(deadline=None)
def test_each_class_keeps_its_share(labels, fraction, seed):
    source = made(labels)
    split = make_split(source, DataConfig(val_fraction=fraction), seed)
    check_parts(split, source)
    total = counts(source.labels, 7)
    held = counts(source.labels[split.val], 7)
    assert (counts(source.labels[split.train], 7)[total > 0] > 0).all()
    assert (abs(held - total * max(fraction, 1 / len(labels)))[total > 3] < 1 + 1e-6).all() or fraction > 0.7
    assert (held[total == 1] == 0).all()


def test_shares_are_those_of_scikit_learn():
    labels = skewed(0)
    split = make_split(made(labels), DataConfig(val_fraction=0.2), 0)
    _, theirs = next(sklearn.StratifiedShuffleSplit(1, test_size=0.2, random_state=0).split(labels, labels))
    assert len(split.val) == len(theirs)
    assert abs(counts(labels[split.val], 5) - counts(labels[theirs], 5)).max() <= 1


@pytest.mark.parametrize("folds", [2, 5, 7])
def test_folds_have_the_properties_of_scikit_learns(folds):
    labels = skewed(1)
    source = made(labels)
    ours = [make_split(source, DataConfig(folds=folds, fold=fold), 0) for fold in range(folds)]
    theirs = [test for _, test in sklearn.StratifiedKFold(folds, shuffle=True, random_state=0).split(labels, labels)]
    assert np.array_equal(np.sort(np.concatenate([split.val for split in ours])), np.arange(len(labels)))
    for split in ours:
        check_parts(split, source)

    def spread(parts) -> int:
        held = np.array([counts(labels[part], 5) for part in parts])
        return int(np.ptp(held, axis=0).max())

    assert spread([split.val for split in ours]) <= spread(theirs) <= 1
    assert np.ptp([len(split.val) for split in ours]) <= 1


def grouped(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of very different size, each with its own mixture of classes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 30, 60)
    groups = np.repeat(np.arange(60), sizes)
    labels = np.concatenate([rng.choice(5, size, p=rng.dirichlet(np.ones(5) * 0.5)) for size in sizes])
    return labels, groups


@pytest.mark.parametrize("seed", range(4))
def test_grouped_folds_are_as_even_as_scikit_learns(seed):
    labels, groups = grouped(seed)
    source = made(labels, groups=groups)
    ours = [make_split(source, DataConfig(folds=5, fold=fold), seed) for fold in range(5)]
    peer = sklearn.StratifiedGroupKFold(5, shuffle=True, random_state=seed).split(labels, labels, groups)

    def unevenness(parts) -> float:
        held = np.array([counts(labels[part], 5) / counts(labels, 5) for part in parts])
        return float(np.sqrt(((held - 0.2) ** 2).mean()))

    for split in ours:
        check_parts(split, source)
        assert not set(groups[split.train]) & set(groups[split.val])
    assert unevenness([split.val for split in ours]) <= max(0.02, 1.1 * unevenness([test for _, test in peer]))


@given(st.data())
@settings(deadline=None)
def test_a_group_stays_on_one_side(data):
    n = data.draw(st.integers(4, 80))
    draw = lambda most: data.draw(st.lists(st.integers(0, most), min_size=n, max_size=n))  # noqa: E731
    labels, groups = draw(3), draw(12)
    if len(set(groups)) < 2:
        return
    source = made(labels, groups=groups)
    split = make_split(source, DataConfig(val_fraction=0.3), 0)
    check_parts(split, source)
    assert not {groups[i] for i in split.train} & {groups[i] for i in split.val}
    assert {labels[i] for i in split.train} == set(labels)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_grouped_hold_out_is_near_its_share(fraction, seed):
    labels, groups = grouped(seed)
    split = make_split(made(labels, groups=groups), DataConfig(val_fraction=fraction), seed)
    assert abs(len(split.val) / len(labels) - fraction) < 0.03
    assert abs(counts(labels[split.val], 5) / counts(labels, 5) - fraction).max() < 0.08


@pytest.mark.parametrize("seed", range(3))
def test_several_labels_are_stratified_each(seed):
    labels = many_labels(seed)
    split = make_split(made(labels), DataConfig(val_fraction=0.2), seed)
    assert abs(counts(labels[split.val], 5) - 0.2 * counts(labels, 5)).max() <= 2
    assert abs(len(split.val) - 100) <= 3
    # a random split of the same size is further off
    random = np.random.default_rng(seed).permutation(500)[: len(split.val)]
    off = [abs(counts(labels[part], 5) / counts(labels, 5) - 0.2).sum() for part in (split.val, random)]
    assert off[0] < off[1]


@pytest.mark.parametrize("labels", [skewed(2), many_labels(2)], ids=["single", "several"])
@pytest.mark.parametrize("fraction", [0.2, 0.01])
def test_fraction_takes_a_stratified_part_of_training(labels, fraction):
    source = made(labels, splits=["train"] * (len(labels) - 100) + ["val"] * 100)
    whole = make_split(source, DataConfig(), 0)
    part = make_split(source, DataConfig(fraction=fraction), 0)
    check_parts(part, source, whole=False)
    assert set(part.train) <= set(whole.train)
    assert np.array_equal(part.val, whole.val)
    train = counts(labels[whole.train], 5)
    taken = counts(labels[part.train], 5)
    assert (taken >= 1).all()
    assert (taken <= np.maximum(np.ceil(train * fraction) + 2, 1)).all()
    assert "training pictures" in part.method


@pytest.mark.parametrize("kind", ["single", "groups", "several", "folds"])
def test_the_order_of_files_does_not_matter_but_the_seed_does(kind):
    labels = many_labels(0) if kind == "several" else skewed(0)
    groups = np.arange(len(labels)) // 3 if kind == "groups" else None
    config = DataConfig(folds=5 if kind == "folds" else 0, fraction=0.5)
    source = made(labels, groups=groups)
    order = np.random.default_rng(3).permutation(len(labels))
    names = list(source.names)
    shuffled = made(labels[order], groups=None if groups is None else groups[order], names=[names[i] for i in order])

    def by_name(source: Source, seed: int) -> tuple[set[str], ...]:
        split = make_split(source, config, seed)
        return tuple({source.names[i] for i in part} for part in (split.train, split.val, split.test))

    assert by_name(source, 0) == by_name(shuffled, 0) == by_name(source, 0)
    assert by_name(source, 0) != by_name(source, 1)


# Copies


def copies_of(sets, near=()) -> Copies:
    """Copies as a look would name them: each of a set with its first."""
    pairs = [[[first, other] for first, *others in kind for other in others] for kind in (sets, near)]
    return Copies(*(np.array(found, int).reshape(-1, 2) for found in pairs))


def scattered(n: int, seed: int = 0) -> list[list[int]]:
    """A third of n positions in sets of two to four, across all of them."""
    order, sets = np.random.default_rng(seed).permutation(n)[: n // 3].tolist(), []
    while len(order) > 1:
        size = 2 + len(sets) % 3
        sets.append(order[:size])
        order = order[size:]
    return sets


@pytest.mark.parametrize("near", [False, True], ids=["equal", "near"])
@pytest.mark.parametrize("config", [{}, {"val_fraction": 0.4, "fraction": 0.5}, {"folds": 4, "fold": 3}])
@pytest.mark.parametrize("kind", ["single", "several", "groups", "own test"])
def test_copies_stay_on_one_side(kind, config, near):
    labels = many_labels(0, 600) if kind == "several" else skewed(0)
    groups = np.arange(600) // 2 if kind == "groups" else None
    splits = ["train"] * 500 + ["test"] * 100 if kind == "own test" else None
    source, sets = made(labels, groups=groups, splits=splits), scattered(600)
    copies = copies_of([], sets) if near else copies_of(sets)
    split = make_split(source, DataConfig(**config), 0, copies)
    check_parts(split, source, whole="fraction" not in config)
    side = {int(i): part for part in ("train", "val") for i in getattr(split, part)}
    for members in sets:
        assert len({side[i] for i in members if i in side}) <= 1
        assert groups is None or len({side[j] for i in members for j in (i, i ^ 1) if j in side}) <= 1
    share = config.get("val_fraction", 1 / config["folds"] if "folds" in config else 0.2)
    pictures = 500 if kind == "own test" else 600
    assert abs(len(split.val) / pictures - share) < 0.02
    held, all_ = counts(labels[split.val], 5), counts(labels[:pictures], 5)
    assert abs(held - share * all_).max() < 6
    assert split.val.tolist() == make_split(source, DataConfig(**config), 0, copies).val.tolist()


def test_folds_of_copies_share_nothing_and_miss_nothing():
    source, copies = made(skewed(3)), copies_of(scattered(600, 3))
    held = [make_split(source, DataConfig(folds=5, fold=fold), 0, copies).val for fold in range(5)]
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(600))


def test_a_few_copies_move_few_of_the_others():
    source = made(skewed(0))
    before, after = (
        make_split(source, DataConfig(), 0),
        make_split(source, DataConfig(), 0, copies_of([[0, 5], [7, 9]])),
    )
    assert len({*before.val} ^ {*after.val}) <= 8
    assert make_split(source, DataConfig(), 0, copies_of([])).val.tolist() == before.val.tolist()


@pytest.mark.parametrize("groups", [None, np.arange(600) // 10], ids=["pictures", "groups"])
def test_a_video_is_no_reason_to_have_no_validation(groups):
    """Where almost all resemble each other, only equal ones are kept together, and none that join all groups."""
    source, frames = made(skewed(0), groups=groups), np.arange(600)
    chain = np.stack([frames[:-1], frames[1:]], axis=1)
    split = make_split(source, DataConfig(), 0, Copies(np.array([[0, 300], [0, 400]]), chain))
    assert abs(len(split.val) - 120) <= 12
    assert len({0, 300, 400} & {*split.val}) in (0, 3)
    if groups is not None:
        black = np.stack([np.zeros(59, int), np.arange(10, 600, 10)], axis=1)  # a black frame in each group
        split = make_split(source, DataConfig(), 0, Copies(black, chain))
        assert abs(len(split.val) - 120) <= 12
        assert not {*groups[split.train]} & {*groups[split.val]}


def test_more_pictures_move_few_of_the_others():
    labels = np.zeros(1000, int) + np.arange(1000) % 2
    before = make_split(made(labels[:900]), DataConfig(), 0)
    after = make_split(made(labels), DataConfig(), 0)
    assert len(set(before.val) - set(after.val)) < 0.15 * len(before.val)


def test_a_smaller_fraction_is_part_of_a_larger_one():
    parts = [set(make_split(made(skewed(0)), DataConfig(fraction=f), 0).train) for f in (0.1, 0.2, 0.5)]
    assert parts[0] < parts[1] < parts[2]


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (["train"] * 20 + ["val"] * 5 + ["test"] * 5, (20, 5, 5)),
        (["train"] * 25 + ["test"] * 5, (20, 5, 5)),  # held out from train, test kept
        ([""] * 25 + ["val"] * 5, (25, 5, 0)),
        ([""] * 30, (24, 6, 0)),
    ],
)
def test_the_layout_wins(splits, expected):
    split = make_split(made(np.arange(30) % 3, splits=splits), DataConfig(), 0)
    assert (len(split.train), len(split.val), len(split.test)) == expected


@pytest.mark.parametrize(
    ("source", "config", "words"),
    [
        (made([0, 1], splits=["val", "test"]), {}, "no training pictures"),
        (made([0, 1], splits=["train", "val"]), {"folds": 2}, "leave out data.folds=2"),
        (made([0, 1]), {"folds": 3, "fold": 3}, "folds count from 0"),
        (made([0, 1]), {"folds": 1}, "folds count from 0"),
        (made([0, 1]), {"fraction": 0.0}, "data.fraction=0"),
        (made([0, 1]), {"val_fraction": 1.0}, "data.val_fraction=1"),
        (made([0, 1, 1], groups=[0, 0, 0]), {}, "has 1 group,"),
    ],
)
def test_what_cannot_be_split(source, config, words):
    with pytest.raises(WeftError, match=words) as error:
        make_split(source, DataConfig(**config), 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("labels", "val"), [([0, 1], 0), ([0, 1, 1], 1), ([0, 0, 1, 1], 1), ([0], 0)])
def test_very_few_pictures(labels, val):
    split = make_split(made(labels), DataConfig(), 0)
    assert len(split.val) <= val
    assert {labels[i] for i in split.train} == set(labels)


# Stored splits


@pytest.mark.parametrize("fraction", [1.0, 0.6, 0.05])
def test_a_stored_split_comes_back(tmp_path, fraction):
    source = made(skewed(0), splits=["train"] * 500 + ["test"] * 100)
    split = make_split(source, DataConfig(fraction=fraction), 0)
    save_split(split, source, tmp_path / "split.json")
    again = load_split(tmp_path / "split.json", source)
    for part in ("train", "val", "test"):
        assert np.array_equal(getattr(again, part), getattr(split, part))
    assert again.method == split.method
    order = np.random.default_rng(0).permutation(len(source))
    shuffled = replace(source, names=Names(source.names[i] for i in order), labels=source.labels[order])
    other = load_split(tmp_path / "split.json", shuffled)
    assert {shuffled.names[i] for i in other.val} == {source.names[i] for i in split.val}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda names: names[1:], r"0/: 86 then, 85 now"),
        (lambda names: [*names, "9/new.png"], r"9/: 0 then, 1 now"),
        (lambda names: ["0/other.png", *names[1:]], r"0/: other names among 86"),
        (lambda names: [name for name in names if name[0] != "3"], r"pictures are gone \('3/"),
    ],
)
def test_a_stored_split_says_what_changed(tmp_path, change, words):
    source = made(skewed(0))
    save_split(make_split(source, DataConfig(), 0), source, tmp_path / "split.json")
    names = change(list(source.names))
    with pytest.raises(WeftError, match=words) as error:
        load_split(tmp_path / "split.json", replace(source, names=Names(names)))
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"rest": "train", "folders": {}}', None])
def test_broken_files(tmp_path, content):
    if content is not None:
        (tmp_path / "split.json").write_text(content)
    with pytest.raises(WeftError):
        load_split(tmp_path / "split.json", made([0, 1]))


def test_a_stored_split_is_small(tmp_path):
    labels = np.arange(100_000) % 1000
    names = [f"train/n{label:08}/n{label:08}_{i}.JPEG" for i, label in enumerate(labels)]
    source = made(labels, names=names, splits=["train"] * 96_000 + ["val"] * 4000)
    save_split(make_split(source, DataConfig(), 0), source, tmp_path / "split.json")
    assert (tmp_path / "split.json").stat().st_size < 300_000
    assert json.loads((tmp_path / "split.json").read_text())["pictures"] == 100_000


def test_the_demo_is_split_as_it_comes():
    split = make_split(open_source("demo:fashion"), DataConfig(), 0)
    assert (len(split.train), len(split.val), len(split.test)) == (6000, 1000, 0)


def test_json_of_a_split_is_small_and_legible(tmp_path):
    source = open_source("demo:fashion")
    save_split(make_split(source, DataConfig(), 0), source, tmp_path / "split.json")
    content = json.loads((tmp_path / "split.json").read_text())
    assert content["rest"] == "train"
    assert content["val"]["val/"][:2] == ["0", "1"]

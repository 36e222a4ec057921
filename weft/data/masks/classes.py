"""The classes of a set of masks: named in a file, or found out from the masks themselves."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from weft.data.masks.values import IGNORE, MOST_CLASSES, BadMask, Coding, RawMask, read_raw, runs
from weft.documents import parse_json
from weft.errors import WeftError
from weft.words import listed, some

SAMPLE = 200  # masks that are read to find out how they are coded
READ = 5000  # masks that are read, evenly spaced where there are more, to find out which values occur
MOST_COLOURS = 64  # that count as classes where nothing names them
CLASS_FILES = (
    *("classes.txt", "label_colors.txt", "labels.txt", "class_dict.csv", "classes.csv", "classes.json"),
    *("labelmap.txt", "codes.txt", "dataset.json"),
)
VOID = re.compile(r"(void|unlabell?ed|ignored?|don'?t care|ignore label)", re.IGNORECASE)
_GAP = r"[\s,;:=]+"
_COLOUR = rf"(?P<red>\d+){_GAP}(?P<green>\d+){_GAP}(?P<blue>\d+)"
LINES = (  # "64 128 64 Animal", "Animal,64,128,64", "3 car", "car,3", "car"
    re.compile(rf"{_COLOUR}{_GAP}(?P<name>.*\D.*)"),
    re.compile(rf"(?P<name>.*\D.*?){_GAP}{_COLOUR}"),
    re.compile(rf"(?P<value>\d+){_GAP}(?P<name>.+)"),
    re.compile(r"(?P<name>.+?)\s*[,;:=\t]\s*(?P<value>\d+)"),
    re.compile(r"(?P<name>.+)"),
)


@dataclass(frozen=True)
class ClassList:
    """Names of classes with the values that stand for them, in the order of the classes."""

    names: list[str]
    values: list[int]
    colours: bool = False  # values are 0xRRGGBB
    numbered: bool = True  # False: a bare list of names, which count from 0


def read_classes(path: Path) -> ClassList:
    """A class file: JSON, or a line for each class; WeftError says which line is wrong."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not a text file'}.") from None
    rows = _json_rows(path, text) if path.suffix.lower() == ".json" else _text_rows(text)
    if not rows:
        raise WeftError(f"{path} names no classes.")
    values = [value for _, value in rows]
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        raise WeftError(f"{path}: some classes have a colour or a value and others do not; give all of them the same.")
    names = [name for name, _ in rows]
    for what, twice in (("class", Counter(names)), ("value", Counter(v for v in values if v is not None))):
        if repeated := [str(entry) for entry, n in twice.items() if n > 1]:
            raise WeftError(f"{path} has a {what} more than once: {some(repeated)}.")
    if kinds == {type(None)}:
        return ClassList(names, list(range(len(names))), numbered=False)
    if kinds == {tuple}:
        if wrong := [name for name, colour in rows if len(colour) != 3 or not all(0 <= c < 256 for c in colour)]:
            raise WeftError(f"{path}: the colour of {wrong[0]!r} is not three numbers from 0 to 255.")
        return ClassList(names, [r << 16 | g << 8 | b for r, g, b in values], colours=True)
    if wrong := [name for name, value in rows if not 0 <= value < 256]:
        raise WeftError(f"{path}: the value of {wrong[0]!r} is not between 0 and 255.")
    return ClassList(names, values)


def _text_rows(text: str) -> list[tuple[str, Any]]:
    lines = [line.strip().rstrip(":,;").replace('"', "") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    for expression in LINES:
        for start in (0, 1):  # the first line may name the columns
            matches = [expression.fullmatch(line) for line in lines[start:]]
            if matches and all(matches):
                return [_row(match.groupdict()) for match in matches if match]
    return []


def _row(found: dict[str, str]) -> tuple[str, Any]:
    name = found["name"].strip()
    if "red" in found:
        return name, (int(found["red"]), int(found["green"]), int(found["blue"]))
    return name, int(found["value"][:9]) if "value" in found else None  # no value has more digits


def _json_rows(path: Path, text: str) -> list[tuple[str, Any]]:
    """A list of names; {name: value or colour}; {value: name}; [{"name": ..., "id" or "color": ...}]; or one of these
    as "labels", "classes" or "categories" of an object."""
    content = parse_json(text, path)
    if isinstance(content, dict):
        content = next((content[k] for k in ("labels", "classes", "categories") if k in content), content)
    rows: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        rows = [(v, int(k)) if isinstance(v, str) and k.isdecimal() else (k, v) for k, v in content.items()]
    elif isinstance(content, list):
        for entry in content:
            if isinstance(entry, dict):
                keys = [key for key in ("color", "colour", "value", "id") if key in entry]
                rows.append((entry.get("name"), entry[keys[0]] if keys else None))
            else:
                rows.append((entry, None))
    rows = [(name, tuple(value) if isinstance(value, list) else value) for name, value in rows]
    for name, value in rows:
        parts = value if isinstance(value, tuple) else (value,)
        if not isinstance(name, str) or not all(part is None or type(part) is int for part in parts):
            raise WeftError(f"{path}: {name!r}: {value!r} is not a class; expected a name and a value or [r, g, b].")
    return rows


def find_classes(root: Path, given: str) -> tuple[ClassList | None, list[str]]:
    """The class file that was named, else one that lies in `root`, with notes on it."""
    if given:
        path = next((p for p in (Path(given).expanduser(), root / given) if p.is_file()), None)
        if path is None:
            raise WeftError(f"data.classes={given!r} is not a file, neither here nor in {root}.")
        return read_classes(path), [f"Classes from {given}."]
    notes = []
    for name in CLASS_FILES:
        if (root / name).is_file():
            try:
                return read_classes(root / name), [f"Classes from {name}."]
            except WeftError as error:
                notes.append(f"{name} is not used: {error}")
    return None, notes


@dataclass
class MaskContent:
    """Kind, palette and values of one mask."""

    name: str
    form: str  # "index", "palette" or "RGB"
    palette: dict[int, int]  # value to colour, of the values that occur
    indices: dict[int, int] | None = None  # value to pixels; None where colours are no grey levels
    colours: dict[int, int] = field(default_factory=dict)  # 0xRRGGBB to pixels


def mask_kind(name: str, raw: RawMask) -> MaskContent:
    """The kind of a mask and its palette, without what it holds."""
    palette = {}
    if raw.palette is not None:
        palette = {v: int(raw.palette[v]) for v in np.flatnonzero(np.bincount(raw.pixels.reshape(-1))).tolist()}
    return MaskContent(name, raw.form, palette)


def mask_content(name: str, raw: RawMask) -> MaskContent:
    seen = mask_kind(name, raw)
    try:
        seen.indices = _count(raw.indices())
    except BadMask:
        seen.colours = _count(raw.colours())
    else:
        seen.colours = {seen.palette.get(v, v * 0x010101): n for v, n in seen.indices.items()}
    return seen


def _count(values: np.ndarray) -> dict[int, int]:
    """Value to pixels."""
    shown, lengths = runs(values)
    kinds, inverse = np.unique(shown, return_inverse=True)
    return dict(zip(kinds.tolist(), np.bincount(inverse, lengths).astype(int).tolist(), strict=True))


def read_sample(files: Sequence[Path], most: int) -> list[MaskContent]:
    """Reads up to `most` masks, evenly spaced. What cannot be read is left to `weft check`, unless it is all."""
    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, min(most, len(files))).astype(int))]
    limit = Image.MAX_IMAGE_PIXELS  # reading in threads sets it for each file
    Image.init()

    def look(file: Path) -> MaskContent | BadMask:
        try:
            return mask_content(str(file), read_raw(file))
        except BadMask as error:
            return error

    try:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(look, chosen))
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    seen = [entry for entry in found if isinstance(entry, MaskContent)]
    if not seen:
        raise WeftError(f"No mask can be read; {chosen[0]}: {found[0]}.")
    return seen


@dataclass
class ChosenClasses:
    coding: Coding
    classes: list[str]
    words: str  # "index masks", "masks coded by colour", ...
    notes: list[str]


def choose_classes(files: Sequence[Path], named: ClassList | None, ignore: Sequence[int]) -> ChosenClasses:
    """How the masks are coded and which classes they have; WeftError where they cannot be masks of classes."""
    seen = read_sample(files, SAMPLE if named else READ)
    notes = find_contradictions(seen)
    if _by_colour(seen, named):
        return _colour_classes(seen, named, ignore, notes)
    if named and not named.numbered and _strange(seen, named, ignore):
        seen = read_sample(files, READ)
    return _index_classes(seen, named, ignore, notes)


def find_contradictions(seen: Sequence[MaskContent]) -> list[str]:
    """Sets whose files are of several kinds, or whose palettes contradict each other."""
    forms: dict[str, list[str]] = {}
    for entry in seen:
        forms.setdefault(entry.form, []).append(entry.name)
    found = []
    if len(forms) > 1:
        kinds = [f"{len(names)} {form} (such as {Path(names[0]).name})" for form, names in forms.items()]
        found.append(f"Masks are of several kinds: {listed(kinds)}.")
    first: dict[int, tuple[int, str]] = {}
    for entry in seen:
        for value, colour in entry.palette.items():
            known, name = first.setdefault(value, (colour, entry.name))
            if known != colour:
                found.append(
                    f"Palettes differ: value {value} is #{known:06x} in {Path(name).name}, #{colour:06x} in "
                    f"{Path(entry.name).name}. Values count, not colours; if colours are meant, save the masks as RGB."
                )
                return found
    return found


def _by_colour(seen: Sequence[MaskContent], named: ClassList | None) -> bool:
    coloured = sum(entry.indices is None for entry in seen)
    if named is None or not named.colours:
        return 2 * coloured > len(seen)
    listed, rows = set(named.values), {*range(len(named.values)), IGNORE}
    as_colours = sum(entry.colours.keys() <= listed for entry in seen)
    as_rows = sum(entry.indices is not None and entry.indices.keys() <= rows for entry in seen)
    return 2 * coloured > len(seen) or as_colours >= as_rows


def _colour_classes(
    seen: Sequence[MaskContent], named: ClassList | None, ignore: Sequence[int], notes: list[str]
) -> ChosenClasses:
    if named is not None and named.colours:
        return _settle(named.names, named.values, (), notes, "RGB-coded masks", colours=True)
    colours = sorted({colour for entry in seen for colour in entry.colours} - set(ignore))
    if len(colours) > MOST_COLOURS:
        raise WeftError(
            f"{seen[0].name} and the other masks have {len(colours)} colours, which cannot all be classes; save masks "
            "without smoothing or lossy compression, or list the colours of the classes in a file: --data.classes FILE"
        )
    if named is not None:  # which name belongs to which colour would be a guess
        raise WeftError(
            f"Masks such as {seen[0].name} are RGB-coded with {len(colours)} colours, and the class list has no "
            f"colours for its {len(named.names)} names; write lines such as `128 64 128 road` there."
        )
    names = [f"#{colour:06x}" for colour in colours]
    notes = [*notes, f"Classes are the {len(colours)} colours that occur in {len(seen)} masks."]
    return _settle(names, colours, ignore, notes, "RGB-coded masks", colours=True)


def _index_classes(
    seen: Sequence[MaskContent], named: ClassList | None, ignore: Sequence[int], notes: list[str]
) -> ChosenClasses:
    counts: Counter[int] = Counter()
    for entry in seen:
        counts.update(entry.indices or {})
    values = sorted(counts.keys() - {IGNORE, *ignore})
    words = _index_words(seen)
    binary = set(counts) == {0, IGNORE} and IGNORE not in ignore and (named is None or len(named.names) <= 2)
    if binary and (named is None or not named.numbered or named.colours):
        names = ["background", "foreground"] if named is None else named.names
        names = ["background", *names] if len(names) == 1 else names
        return _settle(names, [0, IGNORE], ignore, notes, "binary masks (255 is a class)")
    if named is None:
        _refuse_smooth(seen[0].name, counts)
        if len(values) > MOST_COLOURS:
            notes = [*notes, f"Masks have {len(values)} values; if they number objects, they are not classes."]
        names = [f"class {value}" for value in values]
        notes = [*notes, f"Classes are the values of {len(seen)} masks: {_short(values)}."]
        return _settle(names, values, ignore, notes, words)
    rows = list(range(len(named.names))) if named.colours else named.values
    if not named.numbered and _strange(seen, named, ignore) and len(values) == len(named.names):
        rows = values
        notes = [*notes, f"The {len(values)} names stand, in order, for the values {_short(values)}."]
    return _settle(named.names, rows, ignore, notes, words)


def _settle(
    names: Sequence[str],
    values: Sequence[int],
    ignore: Iterable[int],
    notes: list[str],
    words: str,
    colours: bool = False,
) -> ChosenClasses:
    """Leaves out what is ignored, by name or by value, and counts the rest."""
    ignore, rows = set(ignore), list(zip(names, values, strict=True))
    void = {name: value for name, value in rows if VOID.fullmatch(_plain(name))}
    used = {name: value for name, value in rows if name not in void and value not in ignore}
    if not used:
        raise WeftError(f"The masks have no class: all of {some(names) or 'their values'} are ignored.")
    if len(used) > MOST_CLASSES:
        raise WeftError(f"The masks have {len(used)} classes; at most {MOST_CLASSES} can be told apart.")
    if void:
        notes = [*notes, f"Ignored by name: {some(list(void))}."]
    unused = {*ignore, *void.values()} if colours else {*ignore, *void.values(), IGNORE}
    numbers = dict.fromkeys(unused, IGNORE) | {value: i for i, value in enumerate(used.values())}
    return ChosenClasses(Coding.of(numbers, colours), list(used), words, notes)


def _plain(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", name.strip()))


def _strange(seen: Sequence[MaskContent], named: ClassList, ignore: Sequence[int]) -> bool:
    """Whether values occur that no line of a bare list of names stands for."""
    known = {*range(len(named.names)), IGNORE, *ignore}
    return any(entry.indices and not entry.indices.keys() <= known for entry in seen)


def _index_words(seen: Sequence[MaskContent]) -> str:
    forms = Counter(entry.form for entry in seen).most_common()
    return {"palette": "palette masks (values count, not colours)", "RGB": "index masks saved as RGB"}.get(
        forms[0][0], "index masks"
    )


def _refuse_smooth(name: str, counts: Counter[int]) -> None:
    """Black and white masks that were resized, or came out of a JPEG, have every grey between."""
    between = counts.keys() - {0, IGNORE}
    ends = counts[0] + counts[IGNORE]
    if counts[IGNORE] and len(between) > 16 and max(between) > 200 and ends > 0.9 * counts.total():
        raise WeftError(
            f"{name} and the other masks are black and white with {len(between)} greys between, as after resizing or "
            "JPEG: make them 0 and 255 only, or list the classes: --data.classes FILE"
        )


def _short(values: Sequence[int]) -> str:
    if len(values) > 3 and values[-1] - values[0] == len(values) - 1:
        return f"{values[0]} to {values[-1]}"
    return listed([*map(str, values[:12]), *([f"{len(values) - 12} more"] if len(values) > 12 else [])])

"""Tables of pictures: CSV or TSV with a path and a label in each line, and maybe a split and a group."""

import csv
import io
import os
import posixpath
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from weft.data.sources.source import PICTURE_ENDINGS, Files, Names, Source, ending, natural, note_alike, split_of
from weft.errors import WeftError, did_you_mean
from weft.words import listed, many, some

COLUMNS = {  # the usual names, without case, blanks and underscores; earlier ones win
    "path": ["path", "file", "filename", "filepath", "image", "imagepath", "imagefile", "imagename", "img", "imgpath"]
    + ["imgname", "picture", "photo", "name", "imageid", "id"],
    "label": ["label", "labels", "class", "classes", "target", "targets", "category", "categories", "classname"]
    + ["tag", "tags"],
    "split": ["split", "set", "subset", "partition", "phase"],
    "group": ["group", "groups", "groupid"],
}
YES_NO = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
MISSING_ALLOWED = 0.01
END = "end of the table"  # a line of our own, which a quote that is never closed swallows

Rows = list[list[str]]


def open_table(source: str, group: str = "") -> Source:
    path = Path(source).expanduser()
    notes: list[str] = []
    header, rows = _read(path, notes)
    column = _columns(path, header, group)
    paths = [_clean(row[column["path"]]) for row in rows]
    if "label" in column:
        classes, labels, multilabel = _labels([row[column["label"]] for row in rows], notes)
    else:
        classes, labels, multilabel = _yes_no_columns(path, header, rows, set(column.values()), notes)
    splits = np.array([_split(path, row[column["split"]]) if "split" in column else "" for row in rows], dtype="<U5")
    groups = None
    if "group" in column:  # a picture without a group is a group of its own
        cells = [row[column["group"]].strip() for row in rows]
        groups = np.array([cell or f"alone: {name}" for cell, name in zip(cells, paths, strict=True)])
    keep = _keep(path, paths, labels, splits, multilabel, notes)
    names = Names(paths[i] for i in keep)
    return Source(
        root=source,
        layout=f"a table with the columns {listed([header[i] for i in sorted(column.values())])}",
        classes=classes,
        names=names,
        labels=labels[keep],
        reader=Files(path.parent, names),
        splits=splits[keep],
        multilabel=multilabel,
        groups=None if groups is None else groups[keep],
        notes=[*notes, *note_alike(classes)],
    )


def read_paths(path: Path) -> list[str]:
    """The paths in a table: its column of that name, or, where the first line is no header, the first cells."""
    rows = _cells(path, [])
    if rows and ending(rows[0][0]) in PICTURE_ENDINGS:
        return [_clean(row[0]) for row in rows]
    header, rows = _read(path, [])
    column = _columns(path, header, "")["path"]
    return [_clean(row[column]) for row in rows]


def _read(path: Path, notes: list[str]) -> tuple[list[str], Rows]:
    """Header and rows; every row as long as the header."""
    rows = _cells(path, notes)
    if len(rows) < 2:
        raise WeftError(f"{path} has no rows; expected a header such as path,label and a line for each picture.")
    header, rows = [cell.strip() for cell in rows[0]], rows[1:]
    if longer := [i for i, row in enumerate(rows) if len(row) > len(header) and any(row[len(header) :])]:
        raise WeftError(
            f"{path}: row {longer[0] + 2} has {len(rows[longer[0]])} cells, but the header has {len(header)}; "
            'put cells that hold a comma into "quotes".'
        )
    return header, [row[: len(header)] + [""] * (len(header) - len(row)) for row in rows]


def _cells(path: Path, notes: list[str]) -> Rows:
    """The lines of a table that are not empty, cell by cell."""
    content = path.read_bytes()
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = content.decode("utf-16", "replace")
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            text = content.decode("cp1252", "replace")
            notes.append(f"{path.name} is not UTF-8 (line {line}) and was read as Windows-1252; save it as UTF-8.")
    if "\0" in text:
        raise WeftError(f"{path} is not a text file; save the table as CSV.")
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    csv.field_size_limit(max(1 << 24, len(text) + len(END)))  # of the whole process: never less than usual
    reader = csv.reader(io.StringIO(f"{text}\n{END}", newline=""), delimiter=delimiter)
    rows, begin, line = [], 0, 0
    try:
        for row in reader:
            begin, line = line + 1, reader.line_num
            rows.append(row)
    except csv.Error as error:
        raise WeftError(f"{path} cannot be read as a table: {error}.") from None
    if rows.pop() != [END]:  # it became part of a cell
        raise WeftError(
            f'{path}: a quote (") in line {begin} is never closed; close it, or write "" for a quote within a cell.'
        )
    return [row for row in rows if any(row)]


def _columns(path: Path, header: list[str], group: str) -> dict[str, int]:
    """Which column is the path, the label, the split and the group, by their usual names."""
    plain = ["".join(filter(str.isalnum, name.casefold())) for name in header]
    found = {}
    for role, usual in COLUMNS.items():
        if position := [plain.index(name) for name in usual if name in plain]:
            found[role] = position[0]
            if plain.count(plain[position[0]]) > 1:
                raise WeftError(f"{path} has two columns called {header[position[0]]!r}; keep only one of them.")
    lower = [name.casefold() for name in header]
    if group.casefold() in lower:
        found["group"] = lower.index(group.casefold())
    elif group:
        found.pop("group", None)  # a regular expression, which wins over a column
    if "group" not in found and group.isidentifier() and (hint := did_you_mean(group, header)):
        raise WeftError(f"{path} has no column {group!r} for data.group.{hint}")
    if "path" not in found:
        raise WeftError(
            f"{path} has the columns {some(header)}, none of which is called path, file or image; "
            "the first line must name the columns, such as path,label."
        )
    return found


def _clean(cell: str) -> str:
    """A path as one writes it here: tables made on Windows have backslashes."""
    return posixpath.normpath(cell.strip().replace("\\", "/")) if cell.strip() else ""


def _split(path: Path, cell: str) -> str:
    split = split_of(cell)
    if cell.strip() and not split:
        raise WeftError(f"{path}: split {cell.strip()!r} is not one of train, val and test.")
    return split


def _labels(cells: list[str], notes: list[str]) -> tuple[list[str], np.ndarray, bool]:
    """Classes, labels, and whether pictures have several. A picture without a label has -1, or no class of several."""
    cells = [unicodedata.normalize("NFC", cell).strip() for cell in cells]
    separator = _separator(set(cells))
    parts = [[part.strip() for part in cell.split(separator)] if separator else [cell] for cell in cells]
    classes = sorted({part for row in parts for part in row if part}, key=natural)
    number = {name: i for i, name in enumerate(classes)}
    if not separator:
        return classes, np.array([number.get(row[0], -1) for row in parts], np.int64), False
    notes.append(f"Labels are separated by {separator!r}: a picture may have several of {len(classes)} classes.")
    labels = np.zeros((len(cells), len(classes)), bool)
    for row, names in zip(labels, parts, strict=True):
        row[[number[name] for name in names if name]] = True
    return classes, labels, True


def _separator(cells: set[str]) -> str:
    """The sign between the labels of a cell. Commas may also belong to names ("tench, Tinca tinca"): they separate
    where there are no more different parts than different cells, that is where parts come again."""
    for separator in "|;":
        if any(separator in cell for cell in cells):
            return separator
    parts = {part.strip() for cell in cells for part in cell.split(",")}
    return "," if any("," in cell for cell in cells) and len(parts) <= len(cells) else ""


def _yes_no_columns(
    path: Path, header: list[str], rows: Rows, taken: set[int], notes: list[str]
) -> tuple[list[str], np.ndarray, bool]:
    """A column of 0 and 1 for each class. Where each picture has exactly one, it is an ordinary single label."""
    columns = {i: [YES_NO.get(row[i].strip().lower()) for row in rows] for i in range(len(header)) if i not in taken}
    columns = {i: column for i, column in columns.items() if None not in column}
    if len(columns) < 2:
        raise WeftError(f"{path} has the columns {some(header)}, but none called label, nor columns of 0 and 1.")
    labels = np.array(list(columns.values()), bool).T
    classes = [header[i] for i in columns]
    notes.append(f"The columns of 0 and 1 are the classes: {some(classes)}.")
    if (labels.sum(axis=1) == 1).all():
        return classes, labels.argmax(axis=1).astype(np.int64), False
    return classes, labels, True


def _keep(
    path: Path,
    paths: list[str],
    labels: np.ndarray,
    splits: np.ndarray,
    multilabel: bool,
    notes: list[str],
) -> np.ndarray:
    """Positions of the rows that are pictures: there, labelled, and not the same as an earlier row."""
    first: dict[str, int] = {}
    keep, again, unlabelled = [], 0, 0
    for i, name in enumerate(paths):
        if not name or (not multilabel and labels[i] < 0):
            unlabelled += 1
            continue
        earlier = first.setdefault(name, i)
        if earlier == i:
            keep.append(i)
        elif splits[i] != splits[earlier]:
            raise WeftError(f"{path}: {name} is in '{splits[earlier]}' and in '{splits[i]}'; keep only one of them.")
        elif not np.array_equal(labels[i], labels[earlier]):
            raise WeftError(
                f"{path}: {name} has different labels in two rows; correct one, or, if it has several labels, "
                "write them into one cell with | between them."
            )
        else:
            again += 1
    if again:
        notes.append(f"Left out {many(again, 'repeated row')}.")
    if unlabelled:
        notes.append(f"Left out {many(unlabelled, 'row')} without a path or a label.")
    missing = missing_files(path.parent, [paths[i] for i in keep])
    if len(missing) > MISSING_ALLOWED * len(keep):
        raise WeftError(
            f"{path}: {len(missing)} of {len(keep)} files do not exist: {some(sorted(missing), 3)}. "
            f"Paths are relative to the folder of the table, {path.parent}, and need their ending."
        )
    if missing:
        notes.append(f"Left out {many(len(missing), 'file')} that cannot be found: {some(sorted(missing))}.")
    return np.array([i for i in keep if paths[i] not in missing], np.int64)


def missing_files(root: Path, paths: list[str]) -> set[str]:
    """Paths that are no files; each folder is listed once, which is quicker than asking for each file."""
    folders = Counter(map(posixpath.dirname, paths))
    there: set[str] = set()
    for folder in folders:
        try:
            with os.scandir(root / folder) as entries:
                there.update(posixpath.join(folder, entry.name) for entry in entries if _is_file(entry))
        except OSError:
            continue
    return set(paths) - there


def _is_file(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False

"""Writes docs/papers.md: every table and figure of the papers in order, and the command that repeats it. `make docs`.

What a table needs, and how it deviates, comes from its file in `weft/study/ablate/tables`; figures, and tables without
results, are listed here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.catalog.papers import PAPERS
from weft.study.ablate.costs import cost_in_paper, count_cost
from weft.study.ablate.published import published_config, published_length
from weft.study.ablate.tables import FOLDER, Network, Table, TableRow, read_table
from weft.words import many

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
FLOPS = 50e12  # of an H200 in training, where nothing was measured: as in the heads of the recipes
PICTURES = {  # that train, as the papers have them
    "imagenet": ("ImageNet-1k", 1_281_167),
    "cifar10": ("CIFAR-10", 50_000),
    "cifar100": ("CIFAR-100", 50_000),
    "inaturalist-2018": ("iNaturalist 2018", 437_513),
    "inaturalist-2019": ("iNaturalist 2019", 265_240),
    "stanford-cars": ("Stanford Cars", 8_144),
    "flowers102": ("Flowers-102", 2_040),
    "oxford-iiit-pet": ("Oxford-IIIT Pets", 3_680),
    "ade20k": ("ADE20K", 20_210),
    "coco": ("COCO 2017", 118_287),
    "coco-stuff": ("COCO-Stuff", 118_287),
    "lip": ("Look Into Person", 30_462),
}
HEAD = """# The papers, table by table

Every table and figure of the five papers in order: the command that repeats it here, what that takes, what deviates. Written by
`tools/papers.py`, in part from the files of the tables; a test tries that every command parses and plans. Nothing on this page was
trained with Weft to its end: the numbers to compare with are the papers'.

`--as-published` trains each row with the paper's recipe, epochs, batch and size, once (`--seeds 3` for more), and says first
what that costs on your machine; `--plan` says only that. Without it the same command trains all rows within `--minutes 30`, on any pictures:
`weft ablate ceit-leff my_pictures`. [Ablations](ablations.md) has the rest.

Hours are those of one H200 for all rows, with one seed: epochs and pictures of the paper by the pictures per second that `weft train` was
measured to train ([performance.md](performance.md)), or, where that is not known, by 50 TFLOP/s: an estimate. Rows that a paper cites from others, and for
which there is no recipe here, are not in them. `ROOT` is the folder of a [set](data.md), `RUN` that of a run.
"""


@dataclass(frozen=True)
class Entry:
    """A table or figure: a table of `weft ablate`, or commands."""

    where: str  # "Table 4", "Figure 1"
    title: str = ""  # of a table: its own
    tables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    text: str = ""


# fmt: off
ENTRIES: dict[str, tuple[Entry, ...]] = {
    "CeiT": (
        Entry("Figure 1", "fast convergence", commands=(
            "weft bench ceit_tiny deit_tiny_patch16_224 --compare imagenet:ROOT --epochs 100,300 --fractions 1 --recipe ceit-imagenet",
        ), text="The same trainings as those of table 8, as curves."),
        Entry("Figures 2, 3 and 4", "image-to-tokens, LeFF, LCA", text="Drawings: [ceit.md](ceit.md) has the network, drawn from the code."),
        Entry("Table 1", "variants", commands=("weft models",), text="[counts.md](counts.md#ceit-arxiv-210311816) compares the costs."),
        Entry("Table 2", "hyper-parameters", commands=(
            "weft recipes ceit-imagenet", "weft recipes ceit-384", "weft recipes ceit-transfer",
        ), text="Each recipe says what the paper leaves to DeiT or to the code."),
        Entry("Table 3", "data sets", commands=("weft check flowers102:ROOT",), text="Counts the pictures of each split, of any set by its name."),
        Entry("Table 4", tables=("ceit-imagenet",), commands=(
            "weft eval RUN imagenet-real:ROOT", "weft bench ceit_tiny ceit_small --against deit_small_patch16_224 --batch 256",
        ), text="The second command gives the column of ImageNet Real, the third that of the throughput, on your GPU in place of a V100."),
        Entry("Table 5", tables=("ceit-i2t",)),
        Entry("Table 6", tables=("ceit-transfer",)),
        Entry("Table 7", tables=("ceit-leff",)),
        Entry("Section 4.4", tables=("ceit-lca",)),
        Entry("Table 8", tables=("ceit-convergence",)),
    ),
    "ViTAE": (
        Entry("Figure 1", tables=("vitae-efficiency",), commands=(
            "weft bench vitae_tiny t2t_vit_7 --compare imagenet:ROOT --epochs 100,200,300 --fractions 0.2,0.6,1 --recipe vitae-tiny-imagenet",
        ), text="The second command draws the same trainings as the paper's two plots."),
        Entry("Figure 2", "structure", text="A drawing: [vitae.md](vitae.md) has the network, drawn from the code."),
        Entry("Table 1", "variants", commands=("weft models",), text="[counts.md](counts.md#vitae-arxiv-210603348) compares the costs."),
        Entry("Table 2", tables=("vitae-imagenet",), commands=("weft eval RUN imagenet-real:ROOT",),
            text="The second command gives the column of ImageNet Real; top-5 is printed by `weft eval RUN`."),
        Entry("Table 3", tables=("vitae-cells",)),
        Entry("Table 4", tables=("vitae-cifar",)),
        Entry("Table 5", tables=("vitae-transfer",)),
        Entry("Figure 3", "average attention distance", commands=("weft explain RUN PICTURES --against OTHER_RUN",),
            text="RUN is ViTAE-T, OTHER_RUN T2T-ViT-7: rows of `runs/ablate-vitae-imagenet`. Minutes on a CPU; up to 256 pictures are measured, "
            "the paper takes the whole test set."),
        Entry("Figure 4", "Grad-CAM", commands=("weft explain RUN PICTURES --against OTHER_RUN",),
            text="The same page. The layer is the attention of the last normal cell, as in the paper."),
    ),
    "VT": (
        Entry("Figures 1, 2 and 3", "modules and tokenizers", text="Drawings: [vt.md](vt.md) has the network, drawn from the code."),
        Entry("Table 1", "reduction of costs", commands=("weft models",),
            text="The costs of both networks are in [counts.md](counts.md#vt-arxiv-200603677); their ratio is the paper's."),
        Entry("Figure 4", "FPN and VT-FPN", text="A drawing: [segmentation.md](segmentation.md) has both heads."),
        Entry("Table 2", tables=("vt-resnet",)),
        Entry("Table 3", tables=("vt-tokenizer",)),
        Entry("Table 4", tables=("vt-recurrent",)),
        Entry("Table 5", tables=("vt-relation",)),
        Entry("Table 6", tables=("vt-tokens",)),
        Entry("Table 7", tables=("vt-projector",)),
        Entry("Table 8", tables=("vt-imagenet",), text="Figure 9 of the appendix draws the same numbers."),
        Entry("Table 9", tables=("vt-coco-stuff",)),
        Entry("Table 10", tables=("vt-lip",)),
        Entry("Figure 5", "part of the attention that is local", commands=("weft explain RUN PICTURES",),
            text="The local ratio, layer by layer, and the maps. The paper's network is a ViT-B/16 with published weights."),
        Entry("Figure 6, section 6", "what tokens look at", commands=("weft explain RUN PICTURES --masks MASKS",),
            text="RUN is a VT-ResNet or a VT-FPN, of table 10 for the paper's. With masks the page has the attention on the foreground, which is "
            "28.3 % higher in the paper, and the entropy of the attention maps."),
        Entry("Appendix", "more tokens", text="Figures 7 and 8 are further pictures of the kind of figure 6."),
    ),
    "CvT": (
        Entry("Figure 1", "accuracy against parameters", text="The numbers of table 3."),
        Entry("Table 1", "works compared in words", text="Nothing to repeat."),
        Entry("Figures 2 and 3", "pipeline and projections", text="Drawings: [cvt.md](cvt.md) has the network, drawn from the code."),
        Entry("Table 2", "architectures", commands=("weft models",), text="[counts.md](counts.md#cvt-arxiv-210315808) compares the costs."),
        Entry("Table 3", tables=("cvt-imagenet",), commands=(
            "weft eval RUN imagenet-real:ROOT", "weft eval RUN imagenet-v2:ROOT",
            'weft train "SHARDS/*.tar" --recipe cvt-w24-imagenet22k --out runs/w24-22k',
            "weft train imagenet:ROOT --recipe cvt-384 --model cvt_w24 --init runs/w24-22k",
        ), text="The last two commands are the row of CvT-W24, 2,883 and 66 hours. How long the authors trained on ImageNet-22k is not published: 90 "
            "epochs here."),
        Entry("Section 4.2", "architecture search", commands=("weft search imagenet:ROOT --model cvt_13 --epochs 300",),
            text="A supernet and trainings of the best networks; [search.md](search.md) says how that differs from the search that the paper cites. Not "
            "estimated: a training of CvT-13 for the supernet and for each network that is kept."),
        Entry("Table 4", tables=("cvt-transfer",)),
        Entry("Table 5", tables=("cvt-position",)),
        Entry("Table 6", tables=("cvt-embedding",)),
        Entry("Table 7", tables=("cvt-stride",)),
        Entry("Table 8", tables=("cvt-projection",)),
    ),
    "CETNet": (
        Entry("Figure 1", "gains of the convolutional embedding", text="The numbers of table 7."),
        Entry("Figure 2", "architecture", text="A drawing: [cetnet.md](cetnet.md) has the network, drawn from the code."),
        Entry("Table 1", tables=("cetnet-imagenet",)),
        Entry("Table 2", tables=("cetnet-mask-rcnn-1x", "cetnet-mask-rcnn-3x")),
        Entry("Table 3", tables=("cetnet-upernet",), commands=("weft eval RUN --scales 0.5,0.75,1,1.25,1.5,1.75 --flip",),
            text="The second command gives the column of several scales."),
        Entry("Table 4", tables=("cetnet-elements",)),
        Entry("Table 5", tables=("cetnet-layers",)),
        Entry("Table 6", tables=("cetnet-units",), commands=("weft bench cetnet_tiny --train",),
            text="The second command measures training, of which section 5.2 says that pure MBConvs are 12 % slower."),
        Entry("Table 7", tables=("cetnet-hosts",)),
        Entry("Table 8", tables=("cetnet-patterns",)),
    ),
}
# fmt: on


# Hours --------------------------------------------------------------------------------------------------------------


@cache
def measured() -> dict[tuple[str, str, int], float]:
    """Pictures per second of training on an H200, by model, head and size."""
    results = ROOT / "benchmarks" / "results"
    plain = json.loads(max(results.glob("gpu_speed-*.json")).read_text())["rows"]
    dense = json.loads(max(results.glob("dense_speed-*.json")).read_text())["rows"]
    found = {
        (row["model"], "", 224): row["pictures_per_second"]
        for row in plain
        if (row["kind"], row["column"], row["error"]) == ("train", "replay", "")
    }
    return found | {(row["model"], row["head"], row["size"]): row["training"] for row in dense}


def hours(table: Table, row: TableRow, pictures: int) -> tuple[float | None, bool]:
    """Of one training, and whether its speed was measured; None of a detector, which nobody has counted."""
    assert row.full is not None
    config = published_config(row, row.full)
    size, head = config.augment.img_size, row.full.head
    epochs, part = published_length(table, row, config)
    speed = measured().get((row.full.model, head, size)) if not row.full.switches else None
    if speed is None:
        counts = count(row, size)
        if counts is None or "rcnn" in head:
            return None, False
        return epochs * part * pictures / (FLOPS / (6e9 * counts)) / 3600, False
    return epochs * part * pictures / speed / 3600, True


def count(row: TableRow, size: int) -> float | None:
    """MACs in G at the size of training."""
    assert row.full is not None
    at_224 = size == 224 and not row.full.head
    found = cost_in_paper(row) if at_224 else _count(str(row.full), row.full, size)
    return found.macs if found else None


def _count(key: str, network: Network, size: int):
    return COUNTED.setdefault((key, size), count_cost(network, size, classes=150 if network.head else 1000))


COUNTED: dict = {}


def needs(table: Table) -> str:
    """Rows, epochs, recipes, data and hours, in sentences."""
    rows = table.trained(published=True)
    configs = [published_config(row, row.full) for row in rows if row.full]
    lengths = sorted({round((table.length or config.run.epochs) * row.epochs) for row, config in zip(rows, configs, strict=True)})
    recipes = ", ".join(f"`{name}`" for name in dict.fromkeys(row.recipe for row in rows))
    said = f"{many(len(rows), 'training')} of {_either(lengths)} epochs ({recipes})"
    several = len(table.data) > 1
    parts = []
    for name in table.data:
        label, pictures = PICTURES[name]
        found = [hours(table, row, pictures) for row in rows]
        known = [value for value, _ in found if value is not None]
        how = "measured" if all(exact for _, exact in found) else "in part measured" if any(exact for _, exact in found) else "estimated"
        parts.append(f"{label} {_hours(sum(known))}" if several and known else f"{label}, {_hours(sum(known))}, {how}" if known else f"{label}; hours are not computed for detectors")
    end = ", estimated" if several else ""
    others = len(table.rows) - len(rows)
    cited = f" {many(others, 'other row')} cited or missing here." if others else ""
    return f"{said}, on {'; '.join(parts)}{end}.{cited}"


def _either(values: list[int]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])]) if len(values) > 1 else str(values[0])


def _hours(value: float) -> str:
    return f"{value:,.0f} hours" if value >= 10 else f"{value:.1f} hours"


# The page -----------------------------------------------------------------------------------------------------------


def commands(entry: Entry) -> Iterator[str]:
    for name in entry.tables:
        data = read_table(FOLDER / f"{name}.yaml").data[-1]
        yield f"weft ablate {name} {data}:ROOT --as-published"
    yield from entry.commands


def section(entry: Entry) -> Iterator[str]:
    tables = [read_table(FOLDER / f"{name}.yaml") for name in entry.tables]
    title = entry.title or tables[0].title
    yield f"\n### {entry.where}: {title}\n"
    if listed := list(commands(entry)):
        yield from ("```sh", *listed, "```\n")
    yield from ([entry.text, ""] if entry.text and not tables else [])
    for table in tables:
        yield f"{needs(table)}{f' {entry.text}' if entry.text and table is tables[0] else ''}\n"
        said = [text for text in table.differs if "stand-in" not in text and "1x is" not in text]
        yield from [f"- {text.rstrip('.')}." for text in said]


def page() -> str:
    lines = [HEAD.rstrip()]
    for paper in PAPERS:
        lines.append(f"\n## {paper.name} ([arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}))")
        for entry in ENTRIES[paper.name]:
            lines += section(entry)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return f"{text.rstrip()}\n"


def main() -> None:
    PAGE.write_text(page())
    print(f"Wrote {PAGE.name}")


if __name__ == "__main__":
    main()

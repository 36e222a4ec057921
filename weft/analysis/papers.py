"""The tables of the papers as far as they give costs: what was printed, and what the network has here.

`docs/counts.md` is made from these rows, and a test counts each of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of a table: the model and switches that make it, its expected cost, and the paper's figures."""

    table: str
    label: str
    model: str
    switches: dict[str, Any]
    img_size: int
    parameters: int  # what counting must give
    macs: float  # in G, attention included, to a thousandth
    paper_parameters: float | None = None  # in M, as printed
    paper_macs: float | None = None  # in G, as printed
    note: str = ""


@dataclass(frozen=True)
class Paper:
    name: str
    arxiv: str
    counts_attention: bool  # whether its MACs include the products of attention
    remark: str
    rows: tuple[Row, ...]


def _rows(table: str, model: str, entries: Iterable[tuple[Any, ...]]) -> tuple[Row, ...]:
    """Rows of one table that share a model: (label, switches, size, parameters, MACs, paper's two figures[, note])."""
    return tuple(Row(table, label, model, *rest) for label, *rest in entries)


CVT = Paper(
    "CvT",
    "2103.15808",
    counts_attention=True,
    remark="The released code is up to 1.4 % off the paper, whose table probably stems from an earlier state. The text "
    "gives CvT-W24 298.3 M parameters, the table 276.7 M.",
    rows=(
        *_rows(
            "2, 3",
            "cvt_13",
            [
                ("CvT-13", {}, 224, 19_997_480, 4.566, 19.98, 4.53),
                ("CvT-13 at 384", {}, 384, 19_997_480, 16.269, 20, 16.3),
            ],
        ),
        *_rows(
            "2, 3",
            "cvt_21",
            [
                ("CvT-21", {}, 224, 31_622_696, 7.178, 31.54, 7.13),
                ("CvT-21 at 384", {}, 384, 31_622_696, 24.849, 32, 24.9),
            ],
        ),
        *_rows(
            "2, 3",
            "cvt_w24",
            [
                ("CvT-W24", {}, 224, 277_196_392, 60.917, 276.7, 60.86),
                ("CvT-W24 at 384", {}, 384, 277_196_392, 194.222, 277, 193.2),
            ],
        ),
        *_rows(
            "3",
            "cvt_13_nas",
            [("CvT-13-NAS", {}, 224, 18_209_192, 5.077, 18, 4.1, "a reconstruction; 4.06 G without attention")],
        ),
        *_rows(
            "6, 7",
            "cvt_13",
            [
                ("6a, patches", dict(embed="patch"), 224, 19_561_064, 4.426, 19.5, None),
                (
                    "6b, patches and positions",
                    dict(embed="patch", pos_embed="every"),
                    224,
                    19_987_944,
                    4.426,
                    19.9,
                    None,
                ),
                ("6c, positions", dict(pos_embed="every"), 224, 20_424_360, 4.566, 20.3, None),
                ("7a, stride 1 of keys and values", dict(stride_kv=1), 224, 19_997_480, 6.643, 20, 6.55),
            ],
        ),
    ),
)

CEIT = Paper(
    "CeiT",
    "2103.11816",
    counts_attention=True,
    remark="The 86.6 M parameters that the paper gives CeiT-B are DeiT-B's, as are the MACs of its table 1; table 4 "
    "agrees with the code. The text has a stem of 32 channels, with which no published count is met.",
    rows=(
        *_rows(
            "1, 4",
            "ceit_tiny",
            [
                ("CeiT-T", {}, 224, 6_356_904, 1.395, 6.4, 1.4),
                ("CeiT-T at 384", dict(img_size=384), 384, 6_429_864, 5.103, 6.4, 5.1),
                ("CeiT-T, stem of 32 channels", dict(i2t_channels=32), 224, 6_253_832, 1.300, 6.4, 1.2, "the text"),
            ],
        ),
        *_rows(
            "1, 4",
            "ceit_small",
            [
                ("CeiT-S", {}, 224, 24_204_840, 4.760, 24.2, 4.8),
                ("CeiT-S at 384", dict(img_size=384), 384, 24_350_760, 15.980, 24.2, 15.9),
                ("CeiT-S, stem of 32 channels", dict(i2t_channels=32), 224, 24_003_464, 4.645, 24.2, 4.5, "the text"),
            ],
        ),
        *_rows(
            "1",
            "ceit_base",
            [
                ("CeiT-B", {}, 224, 94_405_416, 17.749, 86.6, 17.4),
                ("CeiT-B, stem of 32 channels", dict(i2t_channels=32), 224, 94_007_432, 17.595, 86.6, 17.4, "the text"),
            ],
        ),
    ),
)

_SHALLOW_WIDE: dict[str, Any] = dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
_TABLE_5: dict[str, Any] = dict(depths=(2, 2, 6, 2), ce_unit="mbconv", ce_expand=(2, 1))

CETNET = Paper(
    "CETNet",
    "2207.13317",
    counts_attention=False,
    remark="No code was published; what the text leaves open is solved for from these counts. Rows of tables 5, 6 and "
    "8 are Weft's constructions of what the paper only names. Figures of the hosts themselves come from their own "
    "papers, which count the products of attention.",
    rows=(
        *_rows(
            "1, 4",
            "cetnet_tiny",
            [
                ("CETNet-T", {}, 224, 23_416_228, 4.393, 23.4, 4.3),
                ("CETNet-T at 384", {}, 384, 23_416_228, 14.13, 24, 12.5),
                ("T, one convolution before the norm", dict(le="pre"), 224, 23_283_876, 4.365, None, None),
                ("T without LEWin", dict(le="none"), 224, 23_217_700, 4.351, 23.3, 4.2),
                ("shallow-wide", _SHALLOW_WIDE, 224, 30_558_322, 5.451, 29, 4.6, "no reading meets all three"),
                ("shallow-wide, Swin's patches", dict(_SHALLOW_WIDE, embed="patch"), 224, 28_434_082, 4.529, 27, 4.6),
                ("shallow-wide, CvT's embedding", dict(_SHALLOW_WIDE, embed="conv"), 224, 30_377_602, 4.776, 27, 4.6),
            ],
        ),
        *_rows(
            "1",
            "cetnet_small",
            [
                ("CETNet-S", {}, 224, 33_522_160, 7.010, 34, 6.8),
                ("CETNet-S at 384", {}, 384, 33_522_160, 22.57, 34, 19.9),
            ],
        ),
        *_rows(
            "1",
            "cetnet_base",
            [
                ("CETNet-B", {}, 224, 74_633_716, 15.500, 75, 15.1),
                ("CETNet-B at 384", {}, 384, 74_633_716, 49.86, 75, 44.5),
            ],
        ),
        *_rows(
            "5",
            "ce_swin_tiny",
            [
                (f"{layers}-layer CE", dict(_TABLE_5, ce_layers=layers), 224, parameters, macs, *paper)
                for layers, parameters, macs, *paper in (
                    (1, 27_928_914, 4.644, 28.1, 4.5),
                    (3, 28_133_538, 4.724, 28.1, 4.6),
                    (5, 29_142_258, 5.081, 29.1, 4.9),
                    (7, 30_150_978, 5.581, 30.1, 5.4),
                )
            ],
        ),
        *_rows(
            "6",
            "cetnet_tiny",
            [
                (label, dict(ce_unit=unit), 224, parameters, macs, *paper)
                for label, unit, parameters, macs, *paper in (
                    ("pure MBConvs", "mbconv", 23_377_028, 4.214, 23.4, 4.2),
                    ("GhostNet's units", "ghost", 24_597_540, 4.549, 24.6, 4.3),
                    ("DenseNet's units", "dense", 22_232_012, 3.976, 22.3, 4.4),
                    ("ShuffleNet's units", "shuffle", 23_429_668, 4.273, 23.4, 4.3),
                    ("ResNet's units", "resnet", 23_689_988, 4.243, 23.8, 4.3),
                    ("SE-ResNet's units", "seresnet", 23_865_916, 4.243, 24.0, 4.3),
                )
            ],
        ),
        *_rows(
            "7",
            "ce_cvt_13",
            [("CE-CvT-13", {}, 224, 20_038_184, 4.841, 20.0, 4.4)],
        ),
        *_rows("7", "pvt_small", [("PVT-S", {}, 224, 24_486_248, 3.816, 24.5, 3.8, "attention counted")]),
        *_rows("7", "ce_pvt_small", [("CE-PVT-S", {}, 224, 22_633_896, 3.784, 22.6, 3.7)]),
        *_rows(
            "7",
            "ce_swin_tiny",
            [("CE-Swin-T", {}, 224, 26_860_090, 4.704, 23.4, 4.3, "the paper's figures are CETNet-T's")],
        ),
        *_rows("7", "ce_swin_small", [("CE-Swin-S", {}, 224, 48_177_982, 8.954, 48.2, 8.8)]),
        *_rows("7", "ce_swin_base", [("CE-Swin-B", {}, 224, 85_203_000, 15.812, 85.2, 15.5)]),
        *_rows("7", "cswin_tiny", [("CSWin-T", {}, 224, 22_321_000, 4.324, 23.0, 4.3, "attention counted")]),
        *_rows("7", "ce_cswin_tiny", [("CE-CSWin-T", {}, 224, 21_623_000, 4.456, 21.6, 4.2)]),
        *_rows("7", "cswin_small", [("CSWin-S", {}, 224, 34_643_000, 6.801, 35.0, 6.9, "attention counted")]),
        *_rows("7", "ce_cswin_small", [("CE-CSWin-S", {}, 224, 33_945_000, 6.932, 33.9, 6.6)]),
        *_rows("7", "cswin_base", [("CSWin-B", {}, 224, 77_000_000, 15.0, 78.0, 15.0, "attention counted")]),
        *_rows("7", "ce_cswin_base", [("CE-CSWin-B", {}, 224, 75_785_000, 15.268, 75.8, 14.7)]),
        *_rows(
            "8",
            "cetnet_tiny",
            [
                (pattern, dict(pattern=pattern), 224, parameters, macs, *paper)
                for pattern, parameters, macs, *paper in (
                    ("C-T-C-T-C-T-T-T", 23_938_100, 4.402, 24.0, 4.2),
                    ("C-T-C-T-T-T-T-T", 24_067_964, 4.413, 24.1, 4.2),
                    ("C-T-T-T-T-T-T-T", 24_100_128, 4.428, 24.1, 4.4),
                    ("T-T-T-T-T-T-T-T", 24_154_596, 4.535, 24.3, 4.2),
                    ("C-T-C-T-C-T-C-C", 23_449_732, 4.390, 23.7, 4.2),
                    ("C-T-C-T-C-C-C-C", 23_600_500, 4.325, 24.4, 4.2),
                    ("C-T-C-C-C-C-C-C", 23_608_876, 4.311, 24.3, 4.2),
                    ("C-C-C-C-C-C-C-C", 23_668_616, 4.467, 24.6, 5.1),
                    ("C-C-C-T-C-T-C-T", 23_475_968, 4.549, 23.5, 4.3),
                    ("C-C-C-T-T-T-T-T", 24_127_704, 4.568, 25.5, 4.4),
                    ("T-T-T-T-C-C-C-C", 23_687_132, 4.448, 23.4, 4.8),
                    ("T-C-T-C-T-C-T-C", 24_406_984, 4.608, 24.5, 4.2),
                )
            ],
        ),
    ),
)

PAPERS = (CVT, CEIT, CETNET)

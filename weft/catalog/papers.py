"""The tables of the papers as far as they give costs: what was printed, and what the network has here.

`docs/counts.md` is made from these rows, and a test counts each of them.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PaperRow:
    """One row of a table: the model and switches that make it, its expected cost, and the paper's figures."""

    table: str
    label: str
    model: str
    switches: dict[str, Any]
    img_size: int | tuple[int, int]  # height and width where they differ
    parameters: int  # what counting must give
    macs: float  # in G, attention included, to a thousandth
    paper_parameters: float | None = None  # in M, as printed
    paper_macs: float | None = None  # in G, as printed
    note: str = ""
    head: str = ""  # of a network for segmentation or detection
    classes: int = 1000


@dataclass(frozen=True)
class Replacement:
    """A part of a network and what VT puts in its place: the costs of both, and how many times less the paper has."""

    table: str
    part: str  # "all", "stage 5" or "FPN"
    before: str
    after: str
    switches: dict[str, Any]  # of the second
    img_size: int | tuple[int, int]
    parameters: tuple[int, int]  # what counting must give
    macs: tuple[float, float]  # in G, attention included, to a thousandth
    paper_parameters: float | None = None  # the first divided by the second, as printed
    paper_macs: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Paper:
    name: str
    arxiv: str
    counts_attention: bool  # whether its MACs include the products of attention
    remark: str
    rows: tuple[PaperRow, ...]
    replacements: tuple[Replacement, ...] = ()


# fmt: off
_OTHER_NAS = dict(stride_kv=(2, 1, (1,) * 7 + (2,) * 3), mlp_ratio=(2.0, 4.0, (4.0,) * 7 + (2.0,) * 3))
CVT = Paper(
    "CvT",
    "2103.15808",
    counts_attention=True,
    remark="The released code is up to 1.4 % off the paper, whose table probably stems from an earlier state. The text "
    "gives CvT-W24 298.3 M parameters, the table 276.7 M.",
    rows=(
        PaperRow("2, 3", "CvT-13", "cvt_13", {}, 224, 19_997_480, 4.566, 19.98, 4.53),
        PaperRow("2, 3", "CvT-13 at 384", "cvt_13", {}, 384, 19_997_480, 16.269, 20, 16.3),
        PaperRow("2, 3", "CvT-21", "cvt_21", {}, 224, 31_622_696, 7.178, 31.54, 7.13),
        PaperRow("2, 3", "CvT-21 at 384", "cvt_21", {}, 384, 31_622_696, 24.849, 32, 24.9),
        PaperRow("2, 3", "CvT-W24", "cvt_w24", {}, 224, 277_196_392, 60.917, 276.7, 60.86),
        PaperRow("2, 3", "CvT-W24 at 384", "cvt_w24", {}, 384, 277_196_392, 194.222, 277, 193.2),
        PaperRow("3", "CvT-13-NAS", "cvt_13_nas", {}, 224, 17_913_512, 4.135, 18, 4.1, "a reconstruction"),
        PaperRow("3", "CvT-13-NAS, the other reading", "cvt_13_nas", _OTHER_NAS, 224, 18_209_192, 5.077, 18, 4.1,
            "4.06 G without attention; dearer than CvT-13, which the paper's is not"),
        PaperRow("3", "T2T-ViT_t-14", "t2t_vit_t_14", {}, 224, 21_465_422, 6.089, 22, 6.1),
        PaperRow("3", "T2T-ViT_t-19", "t2t_vit_t_19", {}, 224, 39_084_686, 9.785, 39, 9.8),
        PaperRow("3", "T2T-ViT_t-24", "t2t_vit_t_24", {}, 224, 64_000_590, 14.967, 64, 15.0),
        PaperRow("6a", "patches", "cvt_13", dict(embed="patch"), 224, 19_561_064, 4.426, 19.5),
        PaperRow("6b", "patches, positions", "cvt_13", dict(embed="patch", pos_embed="every"), 224,
            19_987_944, 4.426, 19.9),
        PaperRow("6c", "positions", "cvt_13", dict(pos_embed="every"), 224, 20_424_360, 4.566, 20.3),
        PaperRow("7a", "keys and values at stride 1", "cvt_13", dict(stride_kv=1), 224, 19_997_480, 6.643, 20, 6.55),
    ),
)

_THIN = dict(i2t_channels=32)
_LATER = "{} G in its authors' later table"
CEIT = Paper(
    "CeiT",
    "2103.11816",
    counts_attention=True,
    remark="The 86.6 M parameters that the paper gives CeiT-B are DeiT-B's, as are the MACs of its table 1; table 4 "
    "agrees with the code. The text has a stem of 32 channels, with which no published count is met. The published "
    "parameters of T2T-ViT include its fixed positions (197 times the width), ours do not.",
    rows=(
        PaperRow("4", "CeiT-T", "ceit_tiny", {}, 224, 6_356_904, 1.395, 6.4, 1.4),
        PaperRow("4", "CeiT-T at 384", "ceit_tiny", dict(img_size=384), 384, 6_429_864, 5.103, 6.4, 5.1),
        PaperRow("4", "CeiT-S", "ceit_small", {}, 224, 24_204_840, 4.760, 24.2, 4.8),
        PaperRow("4", "CeiT-S at 384", "ceit_small", dict(img_size=384), 384, 24_350_760, 15.980, 24.2, 15.9),
        PaperRow("4", "T2T-ViT-14", "t2t_vit_14", {}, 224, 21_469_902, 4.783, 21.5, 5.2, _LATER.format("4.8")),
        PaperRow("4", "T2T-ViT-19", "t2t_vit_19", {}, 224, 39_089_166, 8.480, 39.2, 8.9, _LATER.format("8.5")),
        PaperRow("4", "T2T-ViT-24", "t2t_vit_24", {}, 224, 64_005_070, 13.662, 64.1, 14.1, _LATER.format("13.8")),
        PaperRow("4", "PVT-T", "pvt_tiny", {}, 224, 13_229_288, 1.933, 13.2, 1.9),
        PaperRow("4", "PVT-S", "pvt_small", {}, 224, 24_485_864, 3.816, 24.5, 3.8),
        PaperRow("4", "PVT-M", "pvt_medium", {}, 224, 44_208_104, 6.659, 44.2, 6.7),
        PaperRow("4", "PVT-L", "pvt_large", {}, 224, 61_369_320, 9.814, 61.4, 9.8),
        PaperRow("1", "CeiT-B", "ceit_base", {}, 224, 94_405_416, 17.749, 86.6, 17.4),
        PaperRow("1", "CeiT-T, stem of 32 channels", "ceit_tiny", _THIN, 224, 6_253_832, 1.317, 6.4, 1.2, "the text"),
        PaperRow("1", "CeiT-S, stem of 32 channels", "ceit_small", _THIN, 224,
            24_003_464, 4.662, 24.2, 4.5, "the text"),
        PaperRow("1", "CeiT-B, stem of 32 channels", "ceit_base", _THIN, 224,
            94_007_432, 17.613, 86.6, 17.4, "the text"),
    ),
)

_NO_PCM: dict[str, Any] = dict(rc_pcm=False, nc_pcm="none")
_FIRST_RELEASE = dict(token_dims=(64, 64, 384))
_PRINTED: dict[str, Any] = dict(class_token=True, global_pool="token", pos_embed="sinusoid", final_norm=True,
    full_rc3=True, rc_attention="softmax", rc_heads=4)
_OF_64 = dict(_PRINTED, prm_dims=(64, 64, 64), token_dims=(64, 64, 64), embed_dim=256)
VITAE = Paper(
    "ViTAE",
    "2106.03348",
    counts_attention=False,
    remark="Parameters include the Performer's fixed matrices (4,096; 23,040 in ViTAE-S), as in the released code. "
    "The published parameters of T, 6M and 13M are met by a PCM of two convolutions in the normal cells "
    "(`nc_pcm_convs=2`); text and code have three. No state of the code has the 23.6 M of ViTAE-S. The paper's MACs "
    "follow no one rule: at 224 pixels they fit what is counted without the products of attention, at 384 pixels and "
    "for T2T-ViT with them, and so they are compared; ours with attention stand behind the slash. The network as "
    "printed in sections 3.2 to 3.4 is another one than that of tables 1 and 2: softmax over the 3,136 tokens of the "
    "first reduction cell alone takes 1.26 G, and the third reduction cell has 0.9 M parameters more where it has "
    "attention, PCM and FFN as wide as the normal cells. With tokens of width 64 behind all reduction cells, as "
    "section 3.2 has it, parameters come near, and so do the MACs without the products of attention.",
    rows=(
        PaperRow("2", "ViTAE-T", "vitae_tiny", {}, 224, 4_886_888, 1.757, 4.8, 1.5),
        PaperRow("2", "ViTAE-T at 384", "vitae_tiny", {}, 384, 4_886_888, 5.947, 4.8, 5.7, "attention counted"),
        PaperRow("2", "ViTAE-6M", "vitae_6m", {}, 224, 6_614_120, 2.151, 6.5, 2.0),
        PaperRow("2", "ViTAE-13M", "vitae_13m", {}, 224, 13_418_408, 3.540, 13.2, 3.4),
        PaperRow("2", "ViTAE-13M of the code", "vitae_13m", dict(mlp_ratio=2.0), 224, 10_834_728, 3.036, 13.2, 3.4),
        PaperRow("2", "ViTAE-S", "vitae_small", {}, 224, 24_032_136, 6.180, 23.6, 5.6),
        PaperRow("2", "ViTAE-S at 384", "vitae_small", {}, 384, 24_032_136, 20.514, 23.6, 20.2, "attention counted"),
        PaperRow("2", "ViTAE-S, first release", "vitae_small", _FIRST_RELEASE, 224, 23_191_528, 5.576, 23.6, 5.6),
        PaperRow("2", "ViTAE-S, first release, at 384", "vitae_small", _FIRST_RELEASE, 384,
            23_191_528, 18.740, 23.6, 20.2, "attention counted"),
        PaperRow("1", "ViTAE-T as printed", "vitae_tiny", _PRINTED, 224, 5_796_200, 3.265, 4.8, 1.5,
            "sections 3.2 to 3.4"),
        PaperRow("1", "ViTAE-T as printed, tokens of width 64", "vitae_tiny", _OF_64, 224, 4_974_888, 3.090, 4.8, 1.5,
            "a linear layer leads to 256"),
        PaperRow("2", "ViTAE-T, shallow PCM", "vitae_tiny", dict(nc_pcm_convs=2), 224, 4_817_000, 1.744, 4.8, 1.5),
        PaperRow("2", "ViTAE-6M, shallow PCM", "vitae_6m", dict(nc_pcm_convs=2), 224, 6_514_280, 2.133, 6.5, 2.0),
        PaperRow("2", "ViTAE-13M, shallow PCM", "vitae_13m", dict(nc_pcm_convs=2), 224, 13_249_448, 3.509, 13.2, 3.4),
        PaperRow("2", "ViTAE-S, shallow PCM", "vitae_small", dict(nc_pcm_convs=2), 224, 23_822_472, 6.142, 23.6, 5.6),
        PaperRow("3", "T without PCMs", "vitae_tiny", _NO_PCM, 224,
            4_359_720, 1.354, 4.35, None, "4.35 M in section 4.3"),
        PaperRow("3", "T without PCMs, [1, 2, 3] x 3", "vitae_tiny", dict(_NO_PCM, dilations=((1, 2, 3),) * 3), 224,
            4_510_248, 1.320, 4.6, None, "4.6 M in section 4.3"),
        PaperRow("2", "T2T-ViT-7", "t2t_vit_7", {}, 224, 4_259_790, 1.147, 4.3, 1.2, "attention counted"),
        PaperRow("2", "T2T-ViT-14", "t2t_vit_14", {}, 224, 21_469_902, 4.783, 21.5, 5.2, "attention counted"),
    ),
)

_POOLING = dict(tokenizer="pooling", later_tokenizer="pooling")
_CLUSTERING = dict(tokenizer="clustering")
_NOT_RECURRENT = dict(later_tokenizer="filter")
_NO_PROJECTOR = dict(projector="none")
_STRIDES = "about 6 where the stages before are taken with torchvision's strides, 0.154 G dearer than VT's"
VT = Paper(
    "VT",
    "2006.03677",
    counts_attention=True,
    remark="No code was published; the configuration is solved for from these tables. The paper cuts its parameters "
    "off after the first digit. The networks for segmentation are built on ResNets as first published, with a stride "
    "in the 1x1 convolution; the semantic head of COCO-Stuff has Detectron2's 54 classes.",
    rows=(
        PaperRow("2", "VT-R18", "vt_resnet18", {}, 224, 11_657_528, 1.579, 11.6, 1.579),
        PaperRow("2", "VT-R34", "vt_resnet34", {}, 224, 21_870_136, 3.299, 21.8, 3.299),
        PaperRow("3", "VT-R18, pooling", "vt_resnet18", _POOLING, 224, 11_045_416, 1.550, 11.0, 1.550),
        PaperRow("3", "VT-R34, pooling", "vt_resnet34", _POOLING, 224, 20_666_664, 3.245, 20.6, 3.246),
        PaperRow("3", "VT-R18, clustering", "vt_resnet18", _CLUSTERING, 224, 11_653_416, 1.585, 11.6, 1.580,
            "four rounds of k-means; the paper's number is not known"),
        PaperRow("3", "VT-R34, clustering", "vt_resnet34", _CLUSTERING, 224, 21_866_024, 3.305, 21.8, 3.230,
            "the paper's is less than with pooling, so a slip"),
        PaperRow("4", "VT-R18, not recurrent", "vt_resnet18", _NOT_RECURRENT, 224, 11_107_656, 1.564, 11.1, 1.564),
        PaperRow("4", "VT-R34, not recurrent", "vt_resnet34", _NOT_RECURRENT, 224, 20_770_392, 3.269, 20.7, 3.369,
            "the paper's is more than with recurrence, so a slip"),
        PaperRow("5", "VT-R18, no relation", "vt_resnet18", dict(relation="none"), 224, 8_505_656, 1.528, 8.5, 1.528),
        PaperRow("5", "VT-R34, no relation", "vt_resnet34", dict(relation="none"), 224, 17_142_328, 3.222, 17.1, 3.222),
        PaperRow("5", "VT-R18, graph", "vt_resnet18", dict(relation="graph"), 224, 8_506_168, 1.528, 8.5, 1.528),
        PaperRow("5", "VT-R34, graph", "vt_resnet34", dict(relation="graph"), 224, 17_143_096, 3.223, 17.1, 3.223),
        PaperRow("6", "VT-R18, 32 tokens", "vt_resnet18", dict(num_tokens=32), 224, 11_661_640, 1.711, 11.6, 1.711),
        PaperRow("6", "VT-R34, 32 tokens", "vt_resnet34", dict(num_tokens=32), 224, 21_874_248, 3.514, 21.8, 3.514),
        PaperRow("6", "VT-R18, 64 tokens", "vt_resnet18", dict(num_tokens=64), 224, 11_669_864, 1.980, 11.6, 1.979),
        PaperRow("6", "VT-R34, 64 tokens", "vt_resnet34", dict(num_tokens=64), 224, 21_882_472, 3.951, 21.8, 3.951),
        PaperRow("7", "VT-R18, no projector", "vt_resnet18", dict(projector="none"), 224, 9_342_776, 1.497, 9.3, 1.497),
        PaperRow("7", "VT-R34, no projector", "vt_resnet34", dict(projector="none"), 224,
            17_355_832, 3.158, 17.3, 3.158),
        PaperRow("8", "VT-R18", "vt_resnet18_table8", {}, 224, 11_657_528, 1.569, 11.7, 1.569),
        PaperRow("8", "VT-R34", "vt_resnet34_table8", {}, 224, 19_244_600, 3.237, 19.2, 3.236),
        PaperRow("8", "VT-R50", "vt_resnet50", {}, 224, 22_515_768, 3.417, 21.4, 3.412, "no reading reaches 21.4 M"),
        PaperRow("8", "VT-R101", "vt_resnet101", {}, 224, 41_507_896, 7.129, 41.5, 7.129),
        PaperRow("-", "VT-R50, torchvision's strides", "vt_resnet50", dict(bottleneck_stride="3x3"), 224,
            22_515_768, 3.571),
        PaperRow("-", "VT-R101, torchvision's strides", "vt_resnet101", dict(bottleneck_stride="3x3"), 224,
            41_507_896, 7.283),
        *(
            PaperRow(table, f"R{depth} {head.upper()}", f"resnet{depth}_v1", {}, size, parameters, macs, None, paper,
                head=head, classes=classes)
            for table, classes, size, depth, head, parameters, macs, paper in (
                ("9", 54, (800, 1216), 50, "fpn", 28_483_190, 159.135, 159),
                ("9", 54, (800, 1216), 50, "vt-fpn", 31_925_910, 112.609, 113),
                ("9", 54, (800, 1216), 101, "fpn", 47_475_318, 231.106, 231),
                ("9", 54, (800, 1216), 101, "vt-fpn", 50_918_038, 184.581, 185),
                ("10", 20, 473, 50, "fpn", 28_478_804, 37.339, 37.1),
                ("10", 20, 473, 50, "vt-fpn", 31_921_524, 26.543, 26.4),
                ("10", 20, 473, 101, "fpn", 47_470_932, 54.385, 54.4),
                ("10", 20, 473, 101, "vt-fpn", 50_913_652, 43.589, 43.6),
            )
        ),
    ),
    replacements=(
        Replacement("1", "all", "resnet18", "vt_resnet18", {}, 224,
            (11_689_512, 11_657_528), (1.814, 1.579), 0.91, 1.14, "no network of the paper is larger than R18"),
        Replacement("1", "stage 5", "resnet18", "vt_resnet18", {}, 224,
            (8_393_728, 7_849_744), (0.411, 0.175), 0.9, 2.4),
        Replacement("1", "all", "resnet34", "vt_resnet34", {}, 224,
            (21_797_672, 21_870_136), (3.664, 3.299), 1.21, 1.16, "fits VT-R34 without projectors"),
        Replacement("1", "stage 5", "resnet34", "vt_resnet34", {}, 224,
            (13_114_368, 12_674_832), (0.642, 0.277), 1.5, 5.0),
        Replacement("1", "all", "resnet34", "vt_resnet34", _NO_PROJECTOR, 224,
            (21_797_672, 17_355_832), (3.664, 3.158), 1.21, 1.16),
        Replacement("1", "stage 5", "resnet34", "vt_resnet34", _NO_PROJECTOR, 224,
            (13_114_368, 8_160_528), (0.642, 0.136), 1.5, 5.0),
        Replacement("1", "all", "resnet50", "vt_resnet50", {}, 224,
            (25_557_032, 22_515_768), (4.089, 3.417), 1.19, 1.2),
        Replacement("1", "stage 5", "resnet50", "vt_resnet50", {}, 224,
            (14_964_736, 12_947_472), (0.809, 0.292), 1.26, 6.1, _STRIDES),
        Replacement("1", "all", "resnet101", "vt_resnet101", {}, 224,
            (44_549_160, 41_507_896), (7.801, 7.129), 1.19, 1.09, "the paper's parameters are those of R50"),
        Replacement("1", "stage 5", "resnet101", "vt_resnet101", {}, 224,
            (14_964_736, 12_947_472), (0.809, 0.292), 1.26, 6.9, _STRIDES),
        Replacement("9", "FPN", "resnet50_v1", "resnet50_v1", {}, (800, 1216),
            (3_344_384, 6_787_104), (55.099, 8.574), None, 6.5, "the same for R101"),
        Replacement("10", "FPN", "resnet50_v1", "resnet50_v1", {}, 473,
            (3_344_384, 6_787_104), (12.893, 2.097), None, 6.4, "the same for R101"),
    ),
)

_WIDE: dict[str, Any] = dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
_TABLE_5: dict[str, Any] = dict(depths=(2, 2, 6, 2), ce_unit="mbconv", ce_expand=(2, 1))
CETNET = Paper(
    "CETNet",
    "2207.13317",
    counts_attention=False,
    remark="No code was published; what the text leaves open is solved for from these counts. Rows of tables 5, 6 and "
    "8 are Weft's constructions of what the paper only names. Figures of the hosts themselves come from their own "
    "papers, which count the products of attention; the paper's own leave them out, and ours with them stand behind "
    "the slash. Mask R-CNN is counted as mmdetection does it, with 1,000 boxes and 100 masks; in table 2 the paper's "
    "figures of PVT and Swin leave the products of attention out, its own fit where they are counted.",
    rows=(
        PaperRow("1", "CETNet-T", "cetnet_tiny", {}, 224, 23_416_228, 4.393, 23.4, 4.3),
        PaperRow("1", "CETNet-T at 384", "cetnet_tiny", {}, 384, 23_416_228, 13.016, 24, 12.5),
        PaperRow("1", "CETNet-S", "cetnet_small", {}, 224, 33_522_160, 7.010, 34, 6.8),
        PaperRow("1", "CETNet-S at 384", "cetnet_small", {}, 384, 33_522_160, 20.776, 34, 19.9),
        PaperRow("1", "CETNet-B", "cetnet_base", {}, 224, 74_633_716, 15.500, 75, 15.1),
        PaperRow("1", "CETNet-B at 384", "cetnet_base", {}, 384, 74_633_716, 45.815, 75, 44.5),
        *(
            PaperRow("2", f"{label}, Mask R-CNN", model, switches, (800, 1280), parameters, macs, *paper,
                note, head="mask-rcnn", classes=80)
            for label, model, switches, parameters, macs, paper, note in (
                ("R50 of timm", "resnet50", {}, 44_400_693, 259.340, (44, 260), ""),
                ("PVT-S", "pvt_small", {}, 44_145_653, 304.256, (44, 245), ""),
                ("PVT-M", "pvt_medium", {}, 63_867_893, 391.501, (64, 302), ""),
                ("PVT-L", "pvt_large", {}, 81_029_109, 493.373, (81, 364), ""),
                ("Swin-T of timm", "swin_tiny_patch4_window7_224", dict(strict_img_size=False),
                    47_798_959, 266.577, (48, 264), ""),
                ("CETNet-T", "cetnet_tiny", {}, 43_059_505, 260.053, (43, 261), "attention counted"),
                ("CETNet-S", "cetnet_small", {}, 53_165_437, 313.708, (53, 315), "attention counted"),
                ("CETNet-B", "cetnet_base", {}, 94_144_321, 488.274, (94, 495), "attention counted"),
            )
        ),
        *(
            PaperRow("3", f"CETNet-{size[0].upper()}, UPerNet", f"cetnet_{size}", {}, (512, 2048),
                parameters, macs, *paper,
                "attention counted", head="upernet", classes=150)
            for size, parameters, macs, paper in (
                ("tiny", 53_211_752, 934.477, (53.2, 935)),
                ("small", 63_317_684, 989.417, (63.4, 990)),
                ("base", 106_287_224, 1170.257, (106.3, 1176)),
            )
        ),
        PaperRow("4", "T without LEWin", "cetnet_tiny", dict(le="none"), 224, 23_217_700, 4.351, 23.3, 4.2),
        PaperRow("-", "T, one convolution per block", "cetnet_tiny", dict(le="pre"), 224, 23_283_876, 4.365),
        PaperRow("4", "shallow-wide", "cetnet_tiny", _WIDE, 224, 30_558_322, 5.451, 29, 4.6,
            "no reading meets this and the next two"),
        PaperRow("4", "shallow-wide, patches", "cetnet_tiny", dict(_WIDE, embed="patch"), 224,
            28_434_082, 4.529, 27, 4.6),
        PaperRow("4", "shallow-wide, CvT's", "cetnet_tiny", dict(_WIDE, embed="conv"), 224, 30_377_602, 4.776, 27, 4.6),
        PaperRow("5", "1-layer CE", "ce_swin_tiny", dict(_TABLE_5, ce_layers=1), 224, 27_928_354, 4.609, 28.1, 4.5),
        PaperRow("5", "3-layer CE", "ce_swin_tiny", dict(_TABLE_5, ce_layers=3), 224, 28_132_978, 4.694, 28.1, 4.6),
        PaperRow("5", "5-layer CE", "ce_swin_tiny", dict(_TABLE_5, ce_layers=5), 224, 29_141_698, 4.872, 29.1, 4.9),
        PaperRow("5", "7-layer CE", "ce_swin_tiny", dict(_TABLE_5, ce_layers=7), 224, 30_150_418, 5.049, 30.1, 5.4),
        PaperRow("6", "pure MBConvs", "cetnet_tiny", dict(ce_unit="mbconv"), 224, 23_377_028, 4.214, 23.4, 4.2),
        PaperRow("6", "GhostNet's units", "cetnet_tiny", dict(ce_unit="ghost"), 224, 24_597_540, 4.549, 24.6, 4.3),
        PaperRow("6", "DenseNet's units", "cetnet_tiny", dict(ce_unit="dense"), 224, 22_232_012, 3.976, 22.3, 4.4),
        PaperRow("6", "ShuffleNet's units", "cetnet_tiny", dict(ce_unit="shuffle"), 224, 23_429_668, 4.273, 23.4, 4.3),
        PaperRow("6", "ResNet's units", "cetnet_tiny", dict(ce_unit="resnet"), 224, 23_689_988, 4.243, 23.8, 4.3),
        PaperRow("6", "SE-ResNet's units", "cetnet_tiny", dict(ce_unit="seresnet"), 224, 23_865_916, 4.243, 24.0, 4.3),
        PaperRow("7", "CvT-13", "cvt_13", {}, 224, 19_997_480, 4.566, 20.0, 4.5, "attention counted"),
        PaperRow("7", "CE-CvT-13", "ce_cvt_13", {}, 224, 20_037_576, 4.841, 20.0, 4.4),
        PaperRow("7", "PVT-S", "pvt_small", {}, 224, 24_485_864, 3.816, 24.5, 3.8, "attention counted"),
        PaperRow("7", "CE-PVT-S", "ce_pvt_small", {}, 224, 22_633_800, 3.784, 22.6, 3.7),
        PaperRow("7", "Swin-T of timm", "swin_tiny_patch4_window7_224", {}, 224, 28_288_354, 4.491, 28.3, 4.5,
            "attention counted"),
        PaperRow("7", "CE-Swin-T", "ce_swin_tiny", {}, 224, 26_859_610, 4.704, 23.4, 4.3, "the paper's are CETNet-T's"),
        PaperRow("7", "Swin-S of timm", "swin_small_patch4_window7_224", {}, 224, 49_606_258, 8.741, 50.0, 8.7,
            "attention counted"),
        PaperRow("7", "CE-Swin-S", "ce_swin_small", {}, 224, 48_177_514, 8.954, 48.2, 8.8),
        PaperRow("7", "Swin-B of timm", "swin_base_patch4_window7_224", {}, 224, 87_768_224, 15.431, 88.0, 15.4,
            "attention counted"),
        PaperRow("7", "CE-Swin-B", "ce_swin_base", {}, 224, 85_202_752, 15.812, 85.2, 15.5),
        PaperRow("7", "CSWin-T", "cswin_tiny", {}, 224, 22_320_552, 4.324, 23.0, 4.3, "attention counted"),
        PaperRow("7", "CE-CSWin-T", "ce_cswin_tiny", {}, 224, 21_622_600, 4.456, 21.6, 4.2),
        PaperRow("7", "CSWin-S", "cswin_small", {}, 224, 34_643_304, 6.801, 35.0, 6.9, "attention counted"),
        PaperRow("7", "CE-CSWin-S", "ce_cswin_small", {}, 224, 33_945_352, 6.932, 33.9, 6.6),
        PaperRow("7", "CSWin-B", "cswin_base", {}, 224, 77_382_184, 14.955, 78.0, 15.0, "attention counted"),
        PaperRow("7", "CE-CSWin-B", "ce_cswin_base", {}, 224, 75_784_600, 15.268, 75.8, 14.7),
        *(
            PaperRow("8", pattern, "cetnet_tiny", dict(pattern=pattern), 224, parameters, macs, *paper)
            for pattern, parameters, macs, paper in (
                ("C-T-C-T-C-T-C-T", 23_416_228, 4.393, (23.4, 4.3)),
                ("C-T-C-T-C-T-T-T", 23_938_100, 4.402, (24.0, 4.2)),
                ("C-T-C-T-T-T-T-T", 24_067_964, 4.413, (24.1, 4.2)),
                ("C-T-T-T-T-T-T-T", 24_100_128, 4.428, (24.1, 4.4)),
                ("T-T-T-T-T-T-T-T", 24_154_596, 4.535, (24.3, 4.2)),
                ("C-T-C-T-C-T-C-C", 23_449_732, 4.390, (23.7, 4.2)),
                ("C-T-C-T-C-C-C-C", 23_600_500, 4.325, (24.4, 4.2)),
                ("C-T-C-C-C-C-C-C", 23_608_876, 4.311, (24.3, 4.2)),
                ("C-C-C-C-C-C-C-C", 23_668_616, 4.467, (24.6, 5.1)),
                ("C-C-C-T-C-T-C-T", 23_475_968, 4.549, (23.5, 4.3)),
                ("C-C-C-T-T-T-T-T", 24_127_704, 4.568, (25.5, 4.4)),
                ("T-T-T-T-C-C-C-C", 23_687_132, 4.448, (23.4, 4.8)),
                ("T-C-T-C-T-C-T-C", 24_406_984, 4.608, (24.5, 4.2)),
            )
        ),
    ),
)
# fmt: on

PAPERS = (CEIT, VITAE, VT, CVT, CETNET)

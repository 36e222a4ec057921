"""The heads of segmentation_models_pytorch in place of ours: same features, same recipe, same pictures.

    python benchmarks/camvid_smp.py ROOT --head fpn --init resnet50_v1.safetensors --out benchmarks/results

Compare with the rows of `dense_runs.py camvid`.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
from torch import Tensor, nn

import weft
import weft.heads.folder
from weft.heads.features import Features
from weft.run.evaluate import evaluate, find_pictures
from weft.run.predictor import load

DECODERS = {
    "fpn": lambda channels: FPNDecoder(channels, pyramid_channels=256, segmentation_channels=128, dropout=0.0),
    "upernet": lambda channels: UPerNetDecoder(channels, decoder_channels=512),
}
WIDTHS = {"fpn": 128, "upernet": 512}


class SmpSegmenter(nn.Module):
    """Our features, their decoder, one convolution."""

    def __init__(self, backbone: nn.Module, head: str, classes: int, **_: object):
        super().__init__()
        self.backbone = Features(backbone)
        self.decoder = DECODERS[head]([3, 3, *self.backbone.channels])
        self.predictor = nn.Conv2d(WIDTHS[head], classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        height, width = x.shape[2:]
        x = F.pad(x, (0, -width % 32, 0, -height % 32))  # their FPN takes multiples of 32 only
        maps = self.predictor(self.decoder([x, x, *self.backbone(x)]))
        return {"out": maps[:, :, : -(-height // 4), : -(-width // 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--head", choices=DECODERS, required=True)
    parser.add_argument("--init", required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    weft.heads.folder.make_segmenter = SmpSegmenter
    folder = args.runs / f"camvid-smp-{args.head}"
    settings = dict(model="resnet50_v1", head=args.head, init=args.init, epochs=args.epochs, recipe="camvid")
    run = weft.train(args.data, out=folder, data__workers=args.workers, run__val_epochs=10, quiet=True, **settings)
    source, indices, _ = find_pictures(run.folder, split="test")
    metrics = evaluate(load(run.folder), source, indices, workers=args.workers).metrics()
    print(f"SMP {args.head}: mIoU {metrics['miou']:.3f}, pixel accuracy {metrics['pixel_accuracy']:.3f}")
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        facts = {"head": args.head, "epochs": args.epochs, "device": device, "torch": torch.__version__}
        path = args.out / f"camvid_smp-{args.head}-{date.today().isoformat()}.json"
        path.write_text(json.dumps({**facts, **metrics}, indent=2) + "\n")


if __name__ == "__main__":
    main()

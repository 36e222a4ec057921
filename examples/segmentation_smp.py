"""A Weft model as the encoder of segmentation_models_pytorch: UPerNet learns to find cell nuclei in embedded pictures.

    python examples/segmentation_smp.py [--encoder cetnet_nano] [--epochs 12]

`weft.smp` makes any model of Weft or timm known there, at the strides that decoders want. Half a minute on two cores.
"""

import argparse

import numpy as np
import segmentation_models_pytorch as smp
import torch

import weft
from weft.data.demo import nuclei


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="cetnet_nano")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--size", type=int, default=128, help="side of the pictures, a multiple of 32")
    args = parser.parse_args()
    torch.manual_seed(0)

    pictures, masks = load(args.size)
    model = smp.UPerNet(weft.smp(args.encoder), encoder_weights=None, decoder_channels=64, classes=1)
    loss_of = smp.losses.DiceLoss("binary")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    model.train()
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(pictures)).split(4):
            loss = loss_of(model(pictures[batch]), masks[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch:2d}  loss {total / len(pictures):.3f}")

    model.eval()
    with torch.inference_mode():
        found = torch.cat([model(x) > 0 for x in pictures.split(4)])
    overlap = (found & masks.bool()).sum() / (found | masks.bool()).sum()
    print(f"intersection over union on the training pictures: {overlap.item():.1%}")


def load(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper left corners of 16 pictures: (16, 3, size, size) and masks (16, 1, size, size), 1 where a nucleus is."""
    pictures, ids = (array[:16, :size, :size] for array in nuclei("train"))
    x = torch.from_numpy(pictures.astype(np.float32)).unsqueeze(1)
    x = (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)  # some are very dark
    return x.expand(-1, 3, -1, -1), torch.from_numpy(ids > 0).float().unsqueeze(1)


if __name__ == "__main__":
    main()

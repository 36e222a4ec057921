"""The effective receptive field (Luo et al. 2016, arXiv 1701.04128): which pixels the centre of a map depends on.

For a position y with channels y_c, and a pixel x, the field at x is the root of the mean over pictures of the sum over
c of (dy_c / dx)^2. The sum over channels is estimated with random signs s_c, for which the mean of (d(s y) / dx)^2 is
that sum: one backward pass in place of one per channel, and nothing cancels behind a LayerNorm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from weft.explain.maps import as_map, record_outputs, stage_layers, tensor_of

DRAWS = 4  # of signs, for each picture
INSIDE = 0.5, 0.95  # parts of the field whose sizes are measured


@dataclass(frozen=True)
class Field:
    layer: str
    values: np.ndarray  # (H, W), the largest is 1

    def side(self, part: float) -> float:
        """The side, in pixels, of a square as large as the fewest pixels that hold `part` of the field together."""
        held = np.sort(self.values, axis=None)[::-1].cumsum()
        return float(np.sqrt(1 + np.searchsorted(held, part * held[-1] * (1 - 1e-9))))

    @property
    def centre(self) -> tuple[float, float]:
        """The centre of mass, in pixels: paddings move it away from the centre of the picture."""
        mass = self.values / self.values.sum()
        rows, columns = (np.arange(n) + 0.5 for n in mass.shape)
        return float(mass.sum(1) @ rows), float(mass.sum(0) @ columns)

    def numbers(self) -> dict[str, float | str]:
        sides = {f"side_{round(100 * part)}": round(self.side(part), 2) for part in INSIDE}
        return {"layer": self.layer, **sides}


def receptive_fields(
    model: nn.Module, pictures: Tensor, layers: Sequence[str] = (), *, draws: int = DRAWS, seed: int = 0
) -> list[Field]:
    """The field of the centre of each layer's map; by default of the model's stages.

    Args:
        model: in eval mode. pictures: (B, C, H, W), normalised, or noise.
    """
    layers, size = list(layers) or stage_layers(model), (pictures.shape[2], pictures.shape[3])
    random = torch.Generator().manual_seed(seed)
    squares = {layer: torch.zeros(size, dtype=torch.float64) for layer in layers}
    for picture in pictures.split(1):  # one at a time: the memory of one
        with torch.enable_grad(), record_outputs(model, layers) as out:
            x = picture.detach().requires_grad_()
            model(x)
        for layer in layers:
            y = as_map(tensor_of(out[layer], layer), size, model, layer)  # (1, h, w, C)
            row, column = y.shape[1] // 2, y.shape[2] // 2
            centre = y[0, row, column]
            for _ in range(draws):
                signs = 2.0 * torch.randint(2, centre.shape, generator=random) - 1
                (gradient,) = torch.autograd.grad(centre, x, signs.to(centre), retain_graph=True)
                squares[layer] += gradient[0].double().square().sum(dim=0).cpu()
    fields = {layer: square.sqrt().numpy() for layer, square in squares.items()}
    return [Field(layer, field / max(field.max(), 1e-300)) for layer, field in fields.items()]

"""Where each kind of layer has its queries and keys, and how to read them while it runs.

A layer is read by forward hooks on modules that it calls in any case, so that it computes what it always computes, on
the path that it always takes: `weft.kernels.watch` says which modules are read by fused paths without being called, and
none of these gets a hook here. Hooks keep queries and keys, whose size is that of the map; weights come later.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from timm.models.swin_transformer import SwinTransformerBlock, window_partition
from torch import Tensor, nn
from torch.nn.functional import pad

from weft.models import ceit, cetnet, cswin, cvt, pvt, t2t_vit, vitae, vt
from weft.models.ce_hosts import SwinBlock
from weft.models.performer import PerformerAttention, TokenTransformer
from weft.models.windows import cut_windows, window_bias

Shape = tuple[int, int]
Hook = Callable[..., None]  # (module, args, output)
Hooks = list[tuple[nn.Module, Hook]]


@dataclass(frozen=True)
class Scores:
    """softmax(scale q k^T + bias) of some heads, row by row.

    Inside windows keys lie window by window, padding included; `place` says where among them each query lies.
    """

    q: Tensor  # (B, heads, N, d)
    k: Tensor  # (B, heads, M, d)
    scale: float
    place: Tensor | None = None  # (N,)
    area: int = 0  # keys of a window
    bias: Tensor | None = None  # (windows or 1, heads, area, area)

    def rows(self, start: int, stop: int) -> Tensor:
        """(B, heads, stop - start, M) weights; of windows (B, heads, stop - start, N), without padding."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        q, k = self.q[:, :, start:stop].to(wide), self.k.to(wide)
        scores = (q * self.scale) @ k.transpose(2, 3)
        if self.place is None:
            return scores.softmax(dim=3)
        here = self.place[start:stop]
        windows = scores.unflatten(3, (-1, self.area))  # (B, heads, rows, windows, area)
        if self.bias is not None:
            window = here // self.area if len(self.bias) > 1 else torch.zeros_like(here)
            bias = self.bias[window, :, here % self.area]  # (rows, heads, area)
            windows += bias.to(wide).transpose(0, 1).unsqueeze(2)
        others = torch.arange(windows.shape[3], device=here.device) != (here // self.area)[:, None]
        windows.masked_fill_(others[:, :, None], float("-inf"))
        return scores.softmax(dim=3)[..., self.place]


@dataclass(frozen=True)
class Side:
    """Queries or keys: `extra` tokens without a place, then those of a grid that lies over the map.

    `step` and `first` are the distance and the first centre of its tokens, in pixels of the map.
    """

    extra: int = 0
    shape: Shape | None = None
    step: Shape = (1, 1)
    first: tuple[float, float] = (0.5, 0.5)

    def __len__(self) -> int:
        return self.extra + (self.shape[0] * self.shape[1] if self.shape else 0)


@dataclass(frozen=True)
class Reading:
    """What hooks saw of one layer. `map` is the size of the map it works on, None where there is none."""

    parts: list[Scores]  # heads, side by side
    queries: Side
    keys: Side
    map: Shape | None


Keep = Callable[[Reading], None]


@dataclass(frozen=True)
class Tap:
    """A layer that can be read: its name, its kind, and the hooks that read it."""

    name: str
    kind: str
    hooks: Callable[[Keep], Hooks]


def split(x: Tensor, heads: int) -> Tensor:
    """(B, ..., C) -> (B, heads, N, C / heads)."""
    return x.detach().flatten(1, -2).unflatten(2, (heads, -1)).transpose(1, 2)


def _over_map(q: Tensor, k: Tensor, scale: float, shape: Shape) -> Reading:
    """All tokens of a map among themselves, class tokens first."""
    side = Side(q.shape[2] - shape[0] * shape[1], shape)
    return Reading([Scores(q, k, scale)], side, side, shape)


def _shape(x: Tensor) -> Shape:
    return x.shape[1], x.shape[2]  # of a (B, H, W, C) map


# Attention over all tokens --------------------------------------------------------------------------------------


def timm_heads(attn: Attention, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """q and k of timm's attention from the (B, N, 3 heads d) answer of its linear layer."""
    q, k, _ = qkv.detach().unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attn.q_norm(q), attn.k_norm(k)


def read_token_block(name: str, block: Any) -> Iterator[Tap]:
    """CeiT's block, ViTAE's normal cell and T2T-ViT's attention: they get the map, their `attn` its tokens."""

    def hooks(keep: Keep) -> Hooks:
        seen: list[Tensor] = []

        def see_map(_: nn.Module, args: Any, __: Any) -> None:
            q, k = timm_heads(block.attn, seen.pop())
            keep(_over_map(q, k, block.attn.scale, _shape(args[0])))

        return [(block.attn.qkv, lambda _, __, output: seen.append(output)), (block, see_map)]

    yield Tap(f"{name}.attn", "map", hooks)


def read_timm(name: str, attn: Attention) -> Iterator[Tap]:
    """timm's attention in other models, which do not tell the grid: `attention.py` finds it from the picture."""

    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, __: Any, qkv: Tensor) -> None:
            q, k = timm_heads(attn, qkv)
            side = Side(q.shape[2])
            keep(Reading([Scores(q, k, attn.scale)], side, side, None))

        return [(attn.qkv, see)]

    yield Tap(name, "map", hooks)


def read_token_transformer(name: str, step: TokenTransformer) -> Iterator[Tap]:
    """A reduction cell with softmax, one head."""
    if isinstance(step.attention, PerformerAttention):
        return

    def hooks(keep: Keep) -> Hooks:
        seen: list[Tensor] = []

        def see_map(_: nn.Module, args: Any, __: Any) -> None:
            k, q, _ = (split(x, 1) for x in seen.pop().chunk(3, dim=-1))
            keep(_over_map(q, k, q.shape[3] ** -0.5, _shape(args[0])))

        return [(step.kqv, lambda _, __, output: seen.append(output)), (step, see_map)]

    yield Tap(f"{name}.attention", "map", hooks)


def read_lca(name: str, lca: ceit.LCA) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        seen: list[Tensor] = []

        def see_keys(_: nn.Module, __: Any, kv: Tensor) -> None:
            q, k = split(seen.pop(), lca.num_heads), split(kv.chunk(2, dim=2)[0], lca.num_heads)
            keep(Reading([Scores(q, k, q.shape[3] ** -0.5)], Side(1), Side(k.shape[2]), None))

        return [(lca.q, lambda _, __, output: seen.append(output)), (lca.kv, see_keys)]

    yield Tap(name, "layers", hooks)


# Fewer keys than queries ----------------------------------------------------------------------------------------


def read_cvt_stage(name: str, stage: cvt.Stage) -> Iterator[Tap]:
    """CvT's attention. Where only the class token is wanted, the last block of a fused model is asked by it alone."""
    for i, block in enumerate(stage.blocks):
        yield Tap(f"{name}.blocks.{i}.attn", "map", _cvt_hooks(stage, block.attn))


def _cvt_hooks(stage: cvt.Stage, attn: Any) -> Callable[[Keep], Hooks]:
    def hooks(keep: Keep) -> Hooks:
        shapes: list[Shape] = []
        queries: list[Tensor] = []

        def see_embed(_: nn.Module, __: Any, x: Tensor) -> None:
            shapes[:] = [_shape(x)]

        def see_keys(_: nn.Module, __: Any, output: Tensor) -> None:
            q, k = split(queries.pop(), attn.num_heads), split(output, attn.num_heads)
            shape, extra = shapes[0], int(stage.cls_token is not None)
            asking = Side(q.shape[2], None) if q.shape[2] == extra else Side(extra, shape)
            keep(Reading([Scores(q, k, attn.scale)], asking, _cvt_keys(attn, extra, shape), shape))

        return [
            (stage.embed, see_embed),
            (attn.proj_q, lambda _, __, output: queries.append(output)),
            (attn.proj_k, see_keys),
        ]

    return hooks


def _cvt_keys(attn: Any, extra: int, shape: Shape) -> Side:
    """Kernels are 3x3 with a padding of 1: the first key has the place of the first query."""
    height, width = shape
    if isinstance(attn.conv_proj_k, cvt.AvgProjection):  # rounds up
        stride = attn.conv_proj_k.pool.stride
        shape = -(-(height - 1) // stride) + 1, -(-(width - 1) // stride) + 1
    else:
        stride = attn.conv_proj_k.conv.stride[0] if attn.has_convs else 1
        shape = (height - 1) // stride + 1, (width - 1) // stride + 1
    return Side(extra, shape, (stride, stride))


def read_pvt(name: str, attn: pvt.SpatialReductionAttention) -> Iterator[Tap]:
    """The whole layer gets the map, `q` its tokens and `kv` those of the smaller map."""

    def hooks(keep: Keep) -> Hooks:
        seen: list[Tensor] = []

        def see_map(_: nn.Module, args: Any, __: Any) -> None:
            kv, tokens = seen.pop(), seen.pop()
            q, k = split(tokens, attn.num_heads), split(kv.chunk(2, dim=2)[0], attn.num_heads)
            shape = _shape(args[0])
            extra = q.shape[2] - shape[0] * shape[1]
            ratio = 1 if attn.sr is None else attn.sr.multiple
            reduced = -(-shape[0] // ratio), -(-shape[1] // ratio)
            keys = Side(extra, reduced, (ratio, ratio), (ratio / 2, ratio / 2))
            keep(Reading([Scores(q, k, q.shape[3] ** -0.5)], Side(extra, shape), keys, shape))

        layers = [(layer, lambda _, __, output: seen.append(output)) for layer in (attn.q, attn.kv)]
        return [*layers, (attn, see_map)]

    yield Tap(name, "map", hooks)


# Windows and stripes --------------------------------------------------------------------------------------------


def _places(cut: Tensor, pixels: int) -> Tensor:
    """Where each pixel lies among all places of all windows: turns (places,) numbers, 1 for the first pixel, around."""
    real = cut > 0  # 0 is padding
    place = torch.empty(pixels, dtype=torch.long, device=cut.device)
    place[cut[real] - 1] = real.nonzero().squeeze(1)
    return place


def _numbered(shape: Shape, device: torch.device) -> Tensor:
    """A (1, H, W, 1) map that numbers its pixels from 1 on."""
    return torch.arange(1, shape[0] * shape[1] + 1, device=device).view(1, *shape, 1)


def _windows(q: Tensor, k: Tensor, table: Tensor, index: Tensor, heads: int, window: int, shifted: bool) -> Reading:
    """Of (B, H, W, C) maps, cut by `weft.models.windows`, whose padding nobody sees."""
    shape, area = _shape(q), window * window
    bias = table.detach()[index.view(-1)].view(area, area, heads).permute(2, 0, 1).unsqueeze(0)  # (1, heads, N, N)
    bias = window_bias(bias, window, shifted, *shape).view(-1, heads, area, area)
    keys = cut_windows(k.detach(), window, shifted, heads).unflatten(1, (-1, heads))  # (B, windows, heads, area, d)
    place = _places(cut_windows(_numbered(shape, q.device), window, shifted, 1).flatten(), shape[0] * shape[1])
    q = split(q, heads)
    scores = Scores(q, keys.transpose(1, 2).flatten(2, 3), q.shape[3] ** -0.5, place, area, bias)
    return Reading([scores], Side(0, shape), Side(0, shape), shape)


def read_lewin(name: str, attn: cetnet.LEWinAttention) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        seen: list[Tensor] = []

        def see_keys(_: nn.Module, __: Any, k: Tensor) -> None:
            rel_pos: Any = attn.rel_pos
            table, index = rel_pos.relative_position_bias_table, rel_pos.relative_position_index
            keep(_windows(seen.pop(), k, table, index, attn.num_heads, attn.window, attn.shifted))

        return [(attn.q, lambda _, __, output: seen.append(output)), (attn.k, see_keys)]

    yield Tap(name, "map", hooks)


def read_swin_of_ce(name: str, block: SwinBlock) -> Iterator[Tap]:
    attn: Any = block.attn

    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, __: Any, qkv: Tensor) -> None:
            q, k, _ = qkv.chunk(3, dim=-1)
            table, index = attn.relative_position_bias_table, attn.relative_position_index
            keep(_windows(q, k, table, index, attn.num_heads, block.window, block.shifted))

        return [(attn.qkv, see)]

    yield Tap(f"{name}.attn", "map", hooks)


def read_swin(name: str, block: SwinTransformerBlock) -> Iterator[Tap]:
    """timm's Swin, in which padding takes part in attention."""
    attn: Any = block.attn

    def hooks(keep: Keep) -> Hooks:
        seen: list[Any] = []

        def see_map(_: nn.Module, args: Any, __: Any) -> None:
            qkv, shape = seen.pop(), _shape(args[0])
            numbers = torch.roll(_numbered(shape, qkv.device), [-s for s in block.shift_size], (1, 2))
            high, wide = block.window_size
            padded = pad(numbers, (0, 0, 0, -shape[1] % wide, 0, -shape[0] % high))
            place = _places(window_partition(padded, block.window_size).flatten(), shape[0] * shape[1])
            q, k, _ = qkv.detach().unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = (x.unflatten(0, (len(args[0]), -1)).transpose(1, 2).flatten(2, 3) for x in (q, k))
            bias = attn._get_rel_pos_bias().detach()  # (1, heads, area, area)
            mask = block.get_attn_mask(padded.to(bias.dtype)) if block.dynamic_mask else block.attn_mask
            if mask is not None:
                bias = bias + mask.unsqueeze(1)  # (windows, heads, area, area)
            scores = Scores(q[:, :, place], k, attn.scale, place, high * wide, bias)
            keep(Reading([scores], Side(0, shape), Side(0, shape), shape))

        return [(attn.qkv, lambda _, __, output: seen.append(output)), (block, see_map)]

    yield Tap(f"{name}.attn", "map", hooks)


def read_cswin(name: str, attn: cswin.CrossShapedAttention) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, __: Any, output: Tensor) -> None:
            qkv = output.detach().unflatten(-1, (3, len(attn.branches), -1))  # (B, H, W, 3, branches, C / branches)
            parts = [_stripes(branch, qkv.select(4, i)) for i, branch in enumerate(attn.branches)]
            side = Side(0, _shape(output))
            keep(Reading(parts, side, side, side.shape))

        return [(attn.qkv, see)]

    yield Tap(name, "map", hooks)


def _stripes(branch: Any, qkv: Tensor) -> Scores:
    """Of (B, H, W, 3, C) queries, keys and values, cut by `weft.models.cswin`, whose padding takes part."""
    heads = branch.num_heads
    q, k = split(qkv[:, :, :, 0], heads), qkv[:, :, :, 1:2]
    if not isinstance(branch, cswin.StripeAttention):
        return Scores(q, split(k.squeeze(3), heads), q.shape[3] ** -0.5)

    def stripes(x: Tensor) -> Tensor:
        padded = cswin.pad_around(x, branch.along, branch.split_size)
        return cswin.cut(padded, branch.along, branch.split_size).movedim(branch.along, 1)  # (B, stripes, h, w, 1, C)

    keys, shape = stripes(k), _shape(qkv)
    place = _places(stripes(_numbered(shape, q.device).unsqueeze(4)).flatten(), shape[0] * shape[1])
    return Scores(q, split(keys, heads), q.shape[3] ** -0.5, place, keys.shape[2] * keys.shape[3])


# Visual Transformers --------------------------------------------------------------------------------------------
# Their parts read the modules inside them on a GPU, so that only the parts themselves are hooked.


def read_filter(name: str, tokenizer: vt.FilterTokenizer) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, args: Any, __: Any) -> None:
            weight = tokenizer.coefficients.weight.detach()  # (L, C); the bias is the same for all pixels
            keep(_asked_pixels(weight.expand(len(args[0]), 1, -1, -1), split(args[0], 1), tokenizer.scale, args[0]))

        return [(tokenizer, see)]

    yield Tap(name, "tokenizer", hooks)


def read_clustering(name: str, tokenizer: vt.ClusteringTokenizer) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, args: Any, __: Any) -> None:
            pixels = args[0].detach().flatten(1, 2)
            centroids = vt.k_means(pixels, vt.pool_tokens(args[0].detach(), tokenizer.grid), tokenizer.iterations)
            keep(_asked_pixels(centroids.unsqueeze(1), pixels.unsqueeze(1), tokenizer.scale, args[0]))

        return [(tokenizer, see)]

    yield Tap(name, "tokenizer", hooks)


def read_recurrent(name: str, tokenizer: vt.RecurrentTokenizer) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, args: Any, __: Any) -> None:
            x, tokens = args
            asking = tokens[:, : tokens.shape[1] - tokenizer.carried]
            q, k = split(tokenizer.query(asking), tokenizer.heads), split(tokenizer.key(x), tokenizer.heads)
            keep(_asked_pixels(q, k, q.shape[3] ** -0.5, x))

        return [(tokenizer, see)]

    yield Tap(name, "tokenizer", hooks)


def _asked_pixels(q: Tensor, k: Tensor, scale: float, x: Tensor) -> Reading:
    return Reading([Scores(q, k, scale)], Side(q.shape[2]), Side(0, _shape(x)), _shape(x))


def read_transformer(name: str, transformer: vt.Transformer) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, args: Any, __: Any) -> None:
            column = args[0].unsqueeze(2)
            q, k = (split(layer(column), transformer.num_heads) for layer in (transformer.query, transformer.key))
            keep(Reading([Scores(q, k, q.shape[3] ** -0.5)], Side(q.shape[2]), Side(k.shape[2]), None))

        return [(transformer, see)]

    yield Tap(name, "tokens", hooks)


def read_projector(name: str, projector: vt.Projector) -> Iterator[Tap]:
    def hooks(keep: Keep) -> Hooks:
        def see(_: nn.Module, args: Any, __: Any) -> None:
            x, tokens = args
            q, k = split(projector.query(x), projector.heads), split(projector.key(tokens), projector.heads)
            keep(Reading([Scores(q, k, q.shape[3] ** -0.5)], Side(0, _shape(x)), Side(k.shape[2]), _shape(x)))

        return [(projector, see)]

    yield Tap(name, "projector", hooks)


# All of them ----------------------------------------------------------------------------------------------------

READERS: dict[type[nn.Module], Callable[[str, Any], Iterator[Tap]]] = {
    ceit.Block: read_token_block,
    ceit.LCA: read_lca,
    vitae.NormalCell: read_token_block,
    t2t_vit.TokenAttention: read_token_block,
    TokenTransformer: read_token_transformer,
    cvt.Stage: read_cvt_stage,
    pvt.SpatialReductionAttention: read_pvt,
    cetnet.LEWinAttention: read_lewin,
    SwinBlock: read_swin_of_ce,
    SwinTransformerBlock: read_swin,
    cswin.CrossShapedAttention: read_cswin,
    vt.FilterTokenizer: read_filter,
    vt.ClusteringTokenizer: read_clustering,
    vt.RecurrentTokenizer: read_recurrent,
    vt.Transformer: read_transformer,
    vt.Projector: read_projector,
    Attention: read_timm,
}

DO_NOT_APPLY: dict[type[nn.Module], str] = {
    PerformerAttention: "the Performer's attention is linear and never makes weights",
    vt.PoolingTokenizer: "its tokens are the map, resized: the weights are the same for all pictures",
    vt.GraphConvolution: "it weighs tokens by a learned matrix, the same for all pictures",
}


def taps_of(model: nn.Module) -> tuple[list[Tap], dict[str, str]]:
    """The layers of a model that can be read, and those that cannot, with the reason."""
    taps: list[Tap] = []
    left_out: dict[str, str] = {}
    read: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in read:
            continue
        kind = type(module)
        found = list(READERS[kind](name, module)) if kind in READERS else []
        taps += found
        if found:
            read.update(module.modules())
        elif kind in DO_NOT_APPLY:
            left_out[name] = f"does not apply: {DO_NOT_APPLY[kind]}"
        elif "Attention" in kind.__name__ or "Attn" in kind.__name__:
            left_out[name] = f"cannot be read: {kind.__module__}.{kind.__name__} is not known"
    return taps, left_out

"""Where each kind of layer has its queries and keys, and how to read them while it runs.

A layer is read by forward hooks on modules that it calls in any case, so that it computes what it always computes. A
fused block calls none of them, and is plain as long as there are hooks. What is read are queries and keys, whose size
is that of the map; weights come later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from timm.models.swin_transformer import SwinTransformerBlock, window_partition
from torch import Tensor, nn
from torch.nn.functional import pad

from weft.models import ceit, cetnet, cvt, vitae, vt
from weft.models.baselines import cswin, pvt, t2t_vit
from weft.models.ce_hosts import SwinBlock
from weft.models.performer import PerformerAttention, SoftmaxAttention, TokenTransformer
from weft.models.windows import cut_windows, window_bias

Shape = tuple[int, int]


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
        here, count = self.place[start:stop], len(self.place)
        window = here // self.area
        own = scores.unflatten(3, (-1, self.area)).take_along_dim(window.view(1, 1, -1, 1, 1), dim=3).squeeze(3)
        if self.bias is not None:
            bias = self.bias[window if len(self.bias) > 1 else 0 * window, :, here % self.area]  # (rows, heads, area)
            own += bias.to(wide).transpose(0, 1)
        pixel = self.place.new_full((k.shape[2],), count)  # of each key; padding comes behind all
        pixel[self.place] = torch.arange(count, device=pixel.device)
        columns = pixel.view(-1, self.area)[window].expand_as(own)  # (B, heads, rows, area)
        weights = own.new_zeros(*own.shape[:3], count + 1)
        return weights.scatter_(3, columns, own.softmax(dim=3))[..., :count]


@dataclass(frozen=True)
class TokenLayout:
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
class RecordedAttention:
    """Queries and keys of one layer. `map` is the size of the map it works on, None where there is none."""

    parts: list[Scores]  # heads, side by side
    queries: TokenLayout
    keys: TokenLayout
    map: Shape | None


@dataclass(frozen=True)
class ModuleCall:
    """Inputs and output of a module."""

    args: tuple[Any, ...]
    output: Any


@dataclass(frozen=True)
class Tap:
    """A layer that can be read.

    `read` takes the last call of each of the modules that are `watched`, as soon as the last of these was called.
    """

    name: str
    kind: str
    watched: tuple[nn.Module, ...]
    read: Callable[..., RecordedAttention]

    def hooks(self, keep: Callable[[RecordedAttention], None]) -> list[Any]:
        """Watches the modules from now on; returns handles to stop it."""
        calls: dict[nn.Module, ModuleCall] = {}

        @torch.no_grad()
        def see(module: nn.Module, args: Any, output: Any) -> None:
            calls[module] = ModuleCall(args, output)
            if module is self.watched[-1]:
                keep(self.read(*(calls[watched] for watched in self.watched)))

        return [module.register_forward_hook(see) for module in self.watched]


def split(x: Tensor, heads: int) -> Tensor:
    """(B, ..., C) -> (B, heads, N, C / heads)."""
    return x.detach().flatten(1, -2).unflatten(2, (heads, -1)).transpose(1, 2)


def full_attention(
    q: Tensor, k: Tensor, queries: TokenLayout, keys: TokenLayout, shape: Shape | None, scale: float | None = None
) -> RecordedAttention:
    """Of (B, heads, N, d) queries and keys that all see each other."""
    return RecordedAttention([Scores(q, k, q.shape[3] ** -0.5 if scale is None else scale)], queries, keys, shape)


def size_of(x: Tensor) -> Shape:
    return x.shape[1], x.shape[2]  # of a (B, H, W, C) map


def over_map(q: Tensor, k: Tensor, shape: Shape, scale: float | None = None) -> RecordedAttention:
    """All tokens of a map among themselves, class tokens first."""
    side = TokenLayout(q.shape[2] - shape[0] * shape[1], shape)
    return full_attention(q, k, side, side, shape, scale)


# Attention over all tokens --------------------------------------------------------------------------------------


def timm_heads(attn: Any, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, (B, heads, N, d), of timm's attention from the (B, N, 3 heads d) answer of its linear layer."""
    q, k, _ = qkv.detach().unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attn.q_norm(q), attn.k_norm(k)


def read_token_block(name: str, block: Any) -> list[Tap]:
    """CeiT's block, ViTAE's normal cell and T2T-ViT's attention: they get the map, their `attn` its tokens."""

    def read(qkv: ModuleCall, whole: ModuleCall) -> RecordedAttention:
        return over_map(*timm_heads(block.attn, qkv.output), size_of(whole.args[0]))

    return [Tap(f"{name}.attn", "map", (block.attn.qkv, block), read)]


def read_timm(name: str, attn: Attention) -> list[Tap]:
    """timm's attention in other models, which does not know its grid: `capture.py` guesses it from the picture."""

    def read(qkv: ModuleCall) -> RecordedAttention:
        q, k = timm_heads(attn, qkv.output)
        return full_attention(q, k, TokenLayout(q.shape[2]), TokenLayout(k.shape[2]), None)

    return [Tap(name, "map", (attn.qkv,), read)]


def read_token_transformer(name: str, step: TokenTransformer) -> list[Tap]:
    """A reduction cell of ViTAE or a step of T2T-ViT that has softmax."""
    mixer = step.attention
    if not isinstance(mixer, SoftmaxAttention):
        return []

    def read(kqv: ModuleCall, whole: ModuleCall) -> RecordedAttention:
        k, q, _ = (split(x, mixer.num_heads) for x in kqv.output.chunk(3, dim=-1))
        return over_map(q, k, size_of(whole.args[0]), mixer.scale)

    return [Tap(f"{name}.attention", "map", (step.kqv, step), read)]


def read_lca(name: str, lca: ceit.LCA) -> list[Tap]:
    def read(q: ModuleCall, kv: ModuleCall) -> RecordedAttention:
        keys = split(kv.output.chunk(2, dim=2)[0], lca.num_heads)
        return full_attention(split(q.output, lca.num_heads), keys, TokenLayout(1), TokenLayout(keys.shape[2]), None)

    return [Tap(name, "layers", (lca.q, lca.kv), read)]


# Fewer keys than queries ----------------------------------------------------------------------------------------


def read_cvt_stage(name: str, stage: cvt.Stage) -> list[Tap]:
    """In the last block of a fused model the class token may be alone to ask."""
    extra = int(stage.cls_token is not None)

    def tap(i: int, attn: Any) -> Tap:
        def read(embed: ModuleCall, q: ModuleCall, k: ModuleCall) -> RecordedAttention:
            shape, asking = size_of(embed.output), split(q.output, attn.num_heads)
            queries = TokenLayout(extra, None if asking.shape[2] == extra else shape)
            keys = split(k.output, attn.num_heads)
            return full_attention(asking, keys, queries, cvt_keys(attn, extra, shape), shape, attn.scale)

        return Tap(f"{name}.blocks.{i}.attn", "map", (stage.embed, attn.proj_q, attn.proj_k), read)

    return [tap(i, block.attn) for i, block in enumerate(stage.blocks)]


def cvt_keys(attn: Any, extra: int, shape: Shape) -> TokenLayout:
    """Kernels are 3x3 with a padding of 1: the first key has the place of the first query."""
    height, width = shape
    if isinstance(attn.conv_proj_k, cvt.AvgProjection):  # rounds up
        stride: Any = attn.conv_proj_k.pool.stride
        shape = -(-(height - 1) // stride) + 1, -(-(width - 1) // stride) + 1
    else:
        stride = attn.conv_proj_k.conv.stride[0] if attn.has_convs else 1
        shape = (height - 1) // stride + 1, (width - 1) // stride + 1
    return TokenLayout(extra, shape, (stride, stride))


def read_pvt(name: str, attn: pvt.SpatialReductionAttention) -> list[Tap]:
    """`q` gets the tokens of the map, `kv` those of a smaller one."""
    ratio = 1 if attn.sr is None else attn.sr.multiple

    def read(q: ModuleCall, kv: ModuleCall, whole: ModuleCall) -> RecordedAttention:
        asking, keys = split(q.output, attn.num_heads), split(kv.output.chunk(2, dim=2)[0], attn.num_heads)
        height, width = size_of(whole.args[0])
        extra = asking.shape[2] - height * width
        reduced = TokenLayout(extra, (-(-height // ratio), -(-width // ratio)), (ratio, ratio), (ratio / 2, ratio / 2))
        return full_attention(asking, keys, TokenLayout(extra, (height, width)), reduced, (height, width))

    return [Tap(name, "map", (attn.q, attn.kv, attn), read)]


# Windows and stripes --------------------------------------------------------------------------------------------


def places(cut: Tensor, shape: Shape) -> Tensor:
    """Where each pixel lies among the places of all windows, from the numbers of the pixels at these places."""
    cut = cut.flatten()
    real = cut > 0  # the others are padding
    place = torch.empty(shape[0] * shape[1], dtype=torch.long, device=cut.device)
    place[cut[real] - 1] = real.nonzero().squeeze(1)
    return place


def numbered(shape: Shape, device: torch.device) -> Tensor:
    """A (1, H, W, 1) map that numbers its pixels from 1 on."""
    return torch.arange(1, shape[0] * shape[1] + 1, device=device).view(1, *shape, 1)


def in_windows(
    q: Tensor, k: Tensor, table: Tensor, index: Tensor, heads: int, window: int, shifted: bool
) -> RecordedAttention:
    """Of (B, H, W, C) maps, cut by `weft.models.windows`; nobody sees the padding."""
    shape, area = size_of(q), window * window
    bias = table[index.view(-1)].view(area, area, heads).permute(2, 0, 1).unsqueeze(0)  # (1, heads, area, area)
    bias = window_bias(bias, window, shifted, *shape).view(-1, heads, area, area)
    keys = cut_windows(k.detach(), window, shifted, heads).unflatten(1, (-1, heads))  # (B, windows, heads, area, d)
    place = places(cut_windows(numbered(shape, q.device), window, shifted, 1), shape)
    q = split(q, heads)
    scores = Scores(q, keys.transpose(1, 2).flatten(2, 3), q.shape[3] ** -0.5, place, area, bias)
    return RecordedAttention([scores], TokenLayout(0, shape), TokenLayout(0, shape), shape)


def read_lewin(name: str, attn: cetnet.LEWinAttention) -> list[Tap]:
    rel_pos: Any = attn.rel_pos

    def read(q: ModuleCall, k: ModuleCall) -> RecordedAttention:
        table, index = rel_pos.relative_position_bias_table, rel_pos.relative_position_index
        return in_windows(q.output, k.output, table, index, attn.num_heads, attn.window, attn.shifted)

    return [Tap(name, "map", (attn.q, attn.k), read)]


def read_ce_swin(name: str, block: SwinBlock) -> list[Tap]:
    attn: Any = block.attn

    def read(qkv: ModuleCall) -> RecordedAttention:
        q, k, _ = qkv.output.chunk(3, dim=-1)
        table, index = attn.relative_position_bias_table, attn.relative_position_index
        return in_windows(q, k, table, index, attn.num_heads, block.window, block.shifted)

    return [Tap(f"{name}.attn", "map", (attn.qkv,), read)]


def read_swin(name: str, block: SwinTransformerBlock) -> list[Tap]:
    """timm's Swin, in which padding takes part in attention."""
    attn: Any = block.attn

    def read(qkv: ModuleCall, whole: ModuleCall) -> RecordedAttention:
        batch, shape, (high, wide) = len(whole.args[0]), size_of(whole.args[0]), block.window_size
        numbers = torch.roll(numbered(shape, qkv.output.device), [-s for s in block.shift_size], (1, 2))
        numbers = pad(numbers, (0, 0, 0, -shape[1] % wide, 0, -shape[0] % high))
        place = places(window_partition(numbers, block.window_size), shape)
        heads = qkv.output.detach().view(batch, -1, 3, attn.num_heads, attn.qkv.out_features // attn.num_heads // 3)
        q, k, _ = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, windows * area, d)
        bias = attn._get_rel_pos_bias()  # (1, heads, area, area)
        mask: Any = block.get_attn_mask(numbers.to(bias.dtype)) if block.dynamic_mask else block.attn_mask
        if mask is not None:
            bias = bias + mask.unsqueeze(1)  # (windows, heads, area, area)
        scores = Scores(q[:, :, place], k, attn.scale, place, high * wide, bias)
        return RecordedAttention([scores], TokenLayout(0, shape), TokenLayout(0, shape), shape)

    return [Tap(f"{name}.attn", "map", (attn.qkv, block), read)]


def read_cswin(name: str, attn: cswin.CrossShapedAttention) -> list[Tap]:
    def read(call: ModuleCall) -> RecordedAttention:
        qkv = call.output.detach().unflatten(-1, (3, len(attn.branches), -1))  # (B, H, W, 3, branches, C / branches)
        side = TokenLayout(0, size_of(qkv))
        parts = [in_stripes(branch, qkv.select(4, i)) for i, branch in enumerate(attn.branches)]
        return RecordedAttention(parts, side, side, side.shape)

    return [Tap(name, "map", (attn.qkv,), read)]


def in_stripes(branch: Any, qkv: Tensor) -> Scores:
    """Of (B, H, W, 3, C) queries, keys and values, cut by `weft.models.baselines.cswin`; padding takes part."""
    q, k, shape = split(qkv[:, :, :, 0], branch.num_heads), qkv[:, :, :, 1:2], size_of(qkv)
    scale = q.shape[3] ** -0.5
    if not isinstance(branch, cswin.StripeAttention):
        return Scores(q, split(k, branch.num_heads), scale)

    def stripes(x: Tensor) -> Tensor:
        padded = cswin.pad_around(x, branch.along, branch.split_size)
        return cswin.cut(padded, branch.along, branch.split_size).movedim(branch.along, 1)  # (B, stripes, h, w, 1, C)

    keys, place = stripes(k), places(stripes(numbered(shape, q.device).unsqueeze(4)), shape)
    return Scores(q, split(keys, branch.num_heads), scale, place, keys.shape[2] * keys.shape[3])


# Visual Transformers --------------------------------------------------------------------------------------------
# On a GPU their parts read the modules inside them, so that only the parts themselves are watched.


def of_pixels(q: Tensor, k: Tensor, x: Tensor, scale: float | None = None) -> RecordedAttention:
    """(B, heads, L, d) tokens ask the pixels of the map x."""
    return full_attention(q, k, TokenLayout(q.shape[2]), TokenLayout(0, size_of(x)), size_of(x), scale)


def read_filter(name: str, tokenizer: vt.FilterTokenizer) -> list[Tap]:
    def read(call: ModuleCall) -> RecordedAttention:
        x: Tensor = call.args[0]
        weight = tokenizer.coefficients.weight.detach()  # (L, C); the bias adds the same to all pixels
        return of_pixels(weight.expand(len(x), 1, -1, -1), split(x, 1), x, tokenizer.scale)

    return [Tap(name, "tokenizer", (tokenizer,), read)]


def read_clustering(name: str, tokenizer: vt.ClusteringTokenizer) -> list[Tap]:
    def read(call: ModuleCall) -> RecordedAttention:
        x: Tensor = call.args[0]
        centroids = vt.k_means(x.flatten(1, 2), vt.pool_tokens(x, tokenizer.grid), tokenizer.iterations)
        return of_pixels(centroids.unsqueeze(1), split(x, 1), x, tokenizer.scale)

    return [Tap(name, "tokenizer", (tokenizer,), read)]


def read_recurrent(name: str, tokenizer: vt.RecurrentTokenizer) -> list[Tap]:
    def read(call: ModuleCall) -> RecordedAttention:
        x, tokens = call.args
        q = tokenizer.query(tokens[:, : tokens.shape[1] - tokenizer.carried])
        return of_pixels(split(q, tokenizer.heads), split(tokenizer.key(x), tokenizer.heads), x)

    return [Tap(name, "tokenizer", (tokenizer,), read)]


def read_transformer(name: str, transformer: vt.Transformer) -> list[Tap]:
    def read(call: ModuleCall) -> RecordedAttention:
        column = call.args[0].unsqueeze(2)  # (B, L, 1, CT)
        q, k = (split(layer(column), transformer.num_heads) for layer in (transformer.query, transformer.key))
        return full_attention(q, k, TokenLayout(q.shape[2]), TokenLayout(k.shape[2]), None)

    return [Tap(name, "tokens", (transformer,), read)]


def read_projector(name: str, projector: vt.Projector) -> list[Tap]:
    def read(call: ModuleCall) -> RecordedAttention:
        x, tokens = call.args
        q, k = split(projector.query(x), projector.heads), split(projector.key(tokens), projector.heads)
        return full_attention(q, k, TokenLayout(0, size_of(x)), TokenLayout(k.shape[2]), size_of(x))

    return [Tap(name, "projector", (projector,), read)]


# All of them ----------------------------------------------------------------------------------------------------

READERS: dict[type[nn.Module], Callable[[str, Any], list[Tap]]] = {
    ceit.Block: read_token_block,
    ceit.LCA: read_lca,
    vitae.NormalCell: read_token_block,
    t2t_vit.TokenAttention: read_token_block,
    TokenTransformer: read_token_transformer,
    cvt.Stage: read_cvt_stage,
    pvt.SpatialReductionAttention: read_pvt,
    cetnet.LEWinAttention: read_lewin,
    SwinBlock: read_ce_swin,
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


def plain_kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module; where it has a form of `weft.fast`, the one whose form that is."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("weft.fast."))


def taps_of(model: nn.Module) -> tuple[list[Tap], dict[str, str]]:
    """The layers of a model that can be read, and those that cannot, with the reason."""
    taps: list[Tap] = []
    left_out: dict[str, str] = {}
    read: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in read:
            continue
        kind = plain_kind(module)
        found = READERS[kind](name, module) if kind in READERS else []
        taps += found
        if found:
            read.update(module.modules())
        elif kind in DO_NOT_APPLY:
            left_out[name] = f"does not apply: {DO_NOT_APPLY[kind]}"
        elif "Attention" in kind.__name__ or "Attn" in kind.__name__:
            left_out[name] = f"cannot be read: {kind.__module__}.{kind.__name__} is not known"
    return taps, left_out

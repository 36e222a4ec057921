"""Visual Transformers: Token-based Image Representation and Processing (Wu et al. 2020, arXiv 2006.03677): the module.

Paper to code:
    section 3.1.1, eq. 1       filter-based tokenizer                      FilterTokenizer
    section 3.1.2, eq. 2       recurrent tokenizer                         RecurrentTokenizer
    section 5.1, table 3       pooling- and clustering-based tokenizers    PoolingTokenizer, ClusteringTokenizer
    section 3.2, eqs. 3-4      transformer                                 Transformer
    section 5.1, table 5       graph convolution, and nothing              GraphConvolution, TokenConv
    section 3.3, eq. 5         projector                                   Projector
    figure 1                   tokenizer, transformer, projector           VisualTransformer
The networks are in vt_resnet.py. VisualTransformer takes (B, C, H, W) maps and fits into any network; its parts work on
(B, H, W, C) maps and on (B, L, CT) tokens.

The authors released no code. What the equations leave open is decided by the parameters and FLOPs of tables 2 to 8:
    - tokenizers and projector have value maps, which equations 1, 2, 3 and 5 do not show;
    - convolutions on pixels have groups of 64 channels, all but the coefficients of eq. 1 and the shortcut of a
      projector that changes the width; K, Q and V of eq. 3 have 4 groups, K and Q half the width of the tokens;
    - no normalisation, and a bias everywhere.
What the counts do not decide, and what is done here:
    - a group is a head: tokenizers and projector attend in heads of 64 channels, the transformer in 16 heads;
    - softmax arguments are divided by the square root of the width of a head, those of equation 1 by that of C; the
      equations have no scale. Without it, softmax over pixels would be saturated when training starts;
    - table 5's "None" is one convolution on every token, its graph convolution is (T + A T) W with a learned A, L x L;
    - k-means (the paper's appendix has it): see ClusteringTokenizer;
    - convolutions start kaiming-normal (fan-out; gain 1, since no norm catches what grows) with zero bias; stochastic
      depth acts on the residual branches of transformer and projector, dropout on those of the transformer alone.
"""

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import DropPath, register_notrace_function
from torch import Tensor, nn

from weft.errors import WeftError, check_choice, check_positive, check_rates, check_switch
from weft.models.layers import PointwiseConv, image_to_map, to_nchw, to_nhwc

__all__ = [
    "ClusteringTokenizer",
    "FilterTokenizer",
    "GraphConvolution",
    "PoolingTokenizer",
    "Projector",
    "RecurrentTokenizer",
    "TokenConv",
    "Transformer",
    "VisualTransformer",
]

TOKENIZERS = ("filter", "recurrent", "pooling", "clustering", "none")
RELATIONS = ("transformer", "graph", "none", "identity")


# Convolutions ---------------------------------------------------------------------------------------------------


class TokenConv(PointwiseConv):
    """1x1 convolution on (B, L, C) tokens or on a (B, H, W, C) map."""

    def reset_parameters(self) -> None:
        _kaiming(self.weight, self.bias)


class GroupedConv(nn.Conv2d):
    """1x1 convolution with groups on a (B, H, W, C) map."""

    def __init__(self, in_chs: int, out_chs: int, groups: int, **dd: Any):
        super().__init__(in_chs, out_chs, kernel_size=1, groups=groups, **dd)

    def reset_parameters(self) -> None:
        _kaiming(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  of the name
        return to_nhwc(F.conv2d(to_nchw(x), self.weight, self.bias, groups=self.groups))


def _kaiming(weight: Tensor, bias: Optional[Tensor]) -> None:
    nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="linear")
    if bias is not None:
        nn.init.zeros_(bias)


def _groups(in_chs: int, out_chs: int, group_width: int) -> int:
    """How many groups of `group_width` output channels there are."""
    check_positive(in_chs=in_chs, out_chs=out_chs, group_width=group_width)
    groups = out_chs // group_width
    if out_chs % group_width or in_chs % groups:
        raise WeftError(
            f"group_width={group_width!r} does not divide {in_chs} and {out_chs} channels into equal groups."
        )
    return groups


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, ..., C) map or tokens -> (B, heads, N, C / heads)."""
    return x.reshape(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (B, heads, N, C / heads) -> (B, N, C)


# Tokenizers: (B, H, W, C) map and the previous (B, L, CT) tokens or None -> (B, L, CT) tokens -----------------------


class FilterTokenizer(nn.Module):
    """Equation 1: each token is a weighted mean of the pixels, the weights come from a convolution.

    Args:
        in_chs, num_tokens, token_dim: C, L and CT.
        group_width: channels in a group of the value map.
        value: whether there is a value map, or the pixels are averaged as they are.
    """

    def __init__(
        self, in_chs: int, num_tokens: int, token_dim: int, group_width: int = 64, value: bool = True, **dd: Any
    ):
        super().__init__()
        check_positive(num_tokens=num_tokens, token_dim=token_dim)
        check_switch(value=value)
        self.scale = in_chs**-0.5
        self.coefficients = TokenConv(in_chs, num_tokens, **dd)
        self.value = nn.Identity()
        if value:
            self.value = GroupedConv(in_chs, in_chs, _groups(in_chs, in_chs, group_width), **dd)
        self.token = TokenConv(in_chs, token_dim, **dd)

    def forward(self, x: Tensor, tokens: Optional[Tensor] = None) -> Tensor:
        attention = (self.coefficients(x).flatten(1, 2) * self.scale).softmax(dim=1)  # (B, H*W, L), over the pixels
        attention = attention.transpose(1, 2)
        return self.token(attention @ self.value(x).flatten(1, 2))


class ClusteringTokenizer(nn.Module):
    """Equation 1 with the centroids of the picture's own pixels as W_A, which is all that FilterTokenizer learns more.

    K-means starts from the map resized to L pixels, runs `iterations` rounds of assigning each pixel to the nearest
    centroid and of moving each centroid to the mean of its pixels; one that has none stays. Nothing is random. The
    assignment has no gradient; the last means have, and so have the weights softmax(X W_A^T / sqrt(C)) in both factors.
    """

    def __init__(
        self, in_chs: int, num_tokens: int, token_dim: int, group_width: int = 64, iterations: int = 4, **dd: Any
    ):
        super().__init__()
        check_positive(num_tokens=num_tokens, token_dim=token_dim, iterations=iterations)
        self.scale = in_chs**-0.5
        self.grid = token_grid(num_tokens)
        self.iterations = iterations
        self.value = GroupedConv(in_chs, in_chs, _groups(in_chs, in_chs, group_width), **dd)
        self.token = TokenConv(in_chs, token_dim, **dd)

    def forward(self, x: Tensor, tokens: Optional[Tensor] = None) -> Tensor:
        pixels = x.flatten(1, 2)  # (B, H*W, C)
        centroids = k_means(pixels, pool_tokens(x, self.grid), self.iterations)  # (B, L, C)
        attention = (centroids @ pixels.transpose(1, 2) * self.scale).softmax(dim=2)  # (B, L, H*W), over the pixels
        return self.token(attention @ self.value(x).flatten(1, 2))


class PoolingTokenizer(nn.Module):
    """The map resized to L pixels (bilinear), which are the tokens."""

    def __init__(self, in_chs: int, num_tokens: int, token_dim: int, **dd: Any):
        super().__init__()
        check_positive(in_chs=in_chs, num_tokens=num_tokens, token_dim=token_dim)
        self.grid = token_grid(num_tokens)
        self.token = TokenConv(in_chs, token_dim, **dd)

    def forward(self, x: Tensor, tokens: Optional[Tensor] = None) -> Tensor:
        return self.token(pool_tokens(x, self.grid))


class RecurrentTokenizer(nn.Module):
    """Equation 2: the previous tokens ask the pixels.

    Args:
        in_chs, token_dim: C and CT.
        group_width: channels in a group of the key and value maps, and in a head.
        carried: how many of the previous tokens, counted from the end, are passed on as they are.
    """

    def __init__(self, in_chs: int, token_dim: int, group_width: int = 64, carried: int = 0, **dd: Any):
        super().__init__()
        check_positive(token_dim=token_dim)
        if type(carried) is not int or carried < 0:
            raise WeftError(f"carried={carried!r} is not a number of tokens.")
        self.heads = _groups(in_chs, in_chs, group_width)
        self.carried = carried
        self.query = TokenConv(token_dim, in_chs, **dd)  # W_(T -> R)
        self.key = GroupedConv(in_chs, in_chs, self.heads, **dd)
        self.value = GroupedConv(in_chs, in_chs, self.heads, **dd)
        self.token = TokenConv(in_chs, token_dim, **dd)

    def forward(self, x: Tensor, tokens: Optional[Tensor] = None) -> Tensor:
        assert tokens is not None, "a recurrent tokenizer needs the tokens of the module before it"
        asking = tokens.shape[1] - self.carried
        new = self.token(self.ask(self.query(tokens[:, :asking]), x))
        return torch.cat([new, tokens[:, asking:]], dim=1) if self.carried else new

    def ask(self, q: Tensor, x: Tensor) -> Tensor:
        """(B, L, C) queries and the map -> (B, L, C), the values of the pixels as the queries weigh them."""
        k, v = _split(self.key(x), self.heads), _split(self.value(x), self.heads)  # (B, heads, H*W, C / heads)
        return _merge(F.scaled_dot_product_attention(_split(q, self.heads), k, v))


def token_grid(num_tokens: int) -> tuple[int, int]:
    """Rows and columns that make `num_tokens`, as near to a square as whole numbers allow."""
    rows = next(n for n in range(math.isqrt(num_tokens), 0, -1) if num_tokens % n == 0)
    return rows, num_tokens // rows


def pool_tokens(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, H, W, C) map -> (B, rows * columns, C), by bilinear interpolation."""
    resized = F.interpolate(to_nchw(x), size=(grid[0], grid[1]), mode="bilinear", align_corners=False)
    return to_nhwc(resized).flatten(1, 2)


@register_notrace_function
def k_means(pixels: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """(B, N, C) pixels and (B, L, C) first centroids -> (B, L, C) centroids."""
    labels = torch.arange(centroids.shape[1], device=pixels.device)
    for _ in range(iterations):
        # |p - c|^2 less the |p|^2 that all centroids share, halved and negated
        nearness = pixels @ centroids.transpose(1, 2) - centroids.square().sum(dim=2).unsqueeze(1) / 2  # (B, N, L)
        member = (nearness.argmax(dim=2, keepdim=True) == labels).to(pixels.dtype)  # (B, N, L), one 1 in each row
        size = member.sum(dim=1).unsqueeze(2)  # (B, L, 1)
        mean = member.transpose(1, 2) @ pixels / size.clamp(min=1)
        centroids = torch.where(size > 0, mean, centroids)
    return centroids


# Relations between tokens: (B, L, CT) -> (B, L, CT) ---------------------------------------------------------------


class Transformer(nn.Module):
    """Equations 3 and 4: self-attention and two layers with a ReLU between, without normalisation.

    Values are twice as wide as keys. Torch copies q, k and v to multiply them then; they are tokens, and few.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 16,
        groups: int = 4,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ):
        super().__init__()
        check_positive(token_dim=dim, num_heads=num_heads, groups=groups)
        if dim % (2 * num_heads) or dim % (2 * groups):
            raise WeftError(
                f"token_dim={dim!r} must be a multiple of 2 * {num_heads} (heads) and of 2 * {groups} (groups)."
            )
        self.num_heads = num_heads
        self.query = GroupedConv(dim, dim // 2, groups, **dd)
        self.key = GroupedConv(dim, dim // 2, groups, **dd)
        self.value = GroupedConv(dim, dim, groups, **dd)
        self.f1 = TokenConv(dim, dim, **dd)
        self.f2 = TokenConv(dim, dim, **dd)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.attend(tokens)
        y = self.f2(F.relu(self.f1(tokens)))
        return tokens + self.drop_path(self.drop(y))

    def attend(self, tokens: Tensor) -> Tensor:
        column = tokens.unsqueeze(2)  # (B, L, 1, CT), a map one token wide
        q, k, v = self.query(column), self.key(column), self.value(column)
        q, k = _split(q, self.num_heads), _split(k, self.num_heads)
        y = _merge(F.scaled_dot_product_attention(q, k, _split(v, self.num_heads)))  # v is twice as wide as q and k
        return tokens + self.drop_path(self.drop(y))


class GraphConvolution(nn.Module):
    """Table 5: (T + A T) W. A is learned and the same for every picture."""

    def __init__(self, dim: int, num_tokens: int, **dd: Any):
        super().__init__()
        self.adjacency = nn.Parameter(torch.empty(num_tokens, num_tokens, **dd))  # A
        self.weight = TokenConv(dim, dim, **dd)  # W
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _kaiming(self.adjacency, None)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight(tokens + self.adjacency @ tokens)


# Back to the pixels ---------------------------------------------------------------------------------------------


class Projector(nn.Module):
    """Equation 5: each pixel asks the tokens. (B, H, W, C_in) and (B, L, CT) -> (B, H, W, C).

    Args:
        in_chs, token_dim, channels: C_in, CT and C. Where C_in is not C, the map is added through a convolution.
        group_width: channels in a group of the query map, and in a head.
    """

    def __init__(
        self, in_chs: int, token_dim: int, channels: int, group_width: int = 64, drop_path: float = 0.0, **dd: Any
    ):
        super().__init__()
        check_positive(token_dim=token_dim)
        self.heads = _groups(in_chs, channels, group_width)
        self.query = GroupedConv(in_chs, channels, self.heads, **dd)
        self.key = TokenConv(token_dim, channels, **dd)
        self.value = TokenConv(token_dim, channels, **dd)
        self.shortcut = TokenConv(in_chs, channels, **dd) if in_chs != channels else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q = _split(self.query(x), self.heads)  # (B, heads, H*W, C / heads)
        k, v = _split(self.key(tokens), self.heads), _split(self.value(tokens), self.heads)  # (B, heads, L, C / heads)
        shortcut = self.shortcut(x)  # (B, H, W, C)
        y = _merge(F.scaled_dot_product_attention(q, k, v)).view(shortcut.shape)
        return shortcut + self.drop_path(y)


# The module -----------------------------------------------------------------------------------------------------


class VisualTransformer(nn.Module):
    """A VT module: tokenizer, relation, projector. For any network that has (B, C, H, W) maps.

    A map in torch's channels-last format is read and returned as it lies in memory; another one is copied once.

        first = VisualTransformer(256, 512)
        last = VisualTransformer(512, 512, tokenizer="recurrent", projector=False)
        x, tokens = first(x)          # (B, 512, H, W), (B, 16, 1024)
        _, tokens = last(x, tokens)   # None, (B, 16, 1024)

    Args:
        in_chs, channels: channels of the map that comes and of the map that the projector returns.
        num_tokens, token_dim: L and CT.
        tokenizer: "filter", "recurrent", "pooling", "clustering", or "none": the previous tokens come in as they are.
        relation: "transformer", "graph", or "none" for one convolution (table 5), or "identity" for nothing at all.
        projector: whether a map is returned.
        group_width: channels in a group of the convolutions on pixels, and in a head of tokenizer and projector.
        num_heads: of the transformer.
        carried_tokens: how many tokens the recurrent tokenizer passes on as they are.
        proj_drop: dropout in the residual branches of the transformer. drop_path: stochastic depth of these and of the
            projector.
    """

    def __init__(
        self,
        in_chs: int,
        channels: int,
        num_tokens: int = 16,
        token_dim: int = 1024,
        tokenizer: str = "filter",
        relation: str = "transformer",
        projector: bool = True,
        group_width: int = 64,
        num_heads: int = 16,
        carried_tokens: int = 0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_choice("tokenizer", tokenizer, TOKENIZERS)
        check_choice("relation", relation, RELATIONS)
        check_switch(projector=projector)
        check_rates(proj_drop=proj_drop, drop_path=drop_path)
        check_positive(num_tokens=num_tokens)
        check_choice("carried_tokens", carried_tokens, range(num_tokens))
        self.tokenizer: Optional[nn.Module] = None
        if tokenizer == "filter":
            self.tokenizer = FilterTokenizer(in_chs, num_tokens, token_dim, group_width, **dd)
        elif tokenizer == "clustering":
            self.tokenizer = ClusteringTokenizer(in_chs, num_tokens, token_dim, group_width, **dd)
        elif tokenizer == "pooling":
            self.tokenizer = PoolingTokenizer(in_chs, num_tokens, token_dim, **dd)
        elif tokenizer == "recurrent":
            self.tokenizer = RecurrentTokenizer(in_chs, token_dim, group_width, carried_tokens, **dd)
        self.relation = nn.Identity()
        if relation == "transformer":
            self.relation = Transformer(token_dim, num_heads, proj_drop=proj_drop, drop_path=drop_path, **dd)
        elif relation == "graph":
            self.relation = GraphConvolution(token_dim, num_tokens, **dd)
        elif relation == "none":
            self.relation = TokenConv(token_dim, token_dim, **dd)
        self.projector = Projector(in_chs, token_dim, channels, group_width, drop_path, **dd) if projector else None

    def forward(self, x: Tensor, tokens: Optional[Tensor] = None) -> tuple[Optional[Tensor], Tensor]:
        """(B, C_in, H, W) map and the previous module's tokens -> (B, C, H, W) map or None, (B, L, CT) tokens."""
        x = image_to_map(x)
        found = tokens if self.tokenizer is None else self.tokenizer(x, tokens)
        assert found is not None, "a module without a tokenizer needs the tokens of the module before it"
        related: Tensor = self.relation(found)
        if self.projector is None:
            return None, related
        return to_nchw(self.projector(x, related)), related

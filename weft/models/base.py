"""timm's contract, once for all families.

A family file holds the paper; this file holds what timm, and everything built on timm, expects of a model: features
at several strides, a head that can be replaced, layer groups, gradient checkpointing, pruning, initialisation.
"""

import importlib
import inspect
import os
from collections.abc import Sequence
from typing import Any, Optional

import torch
from timm.layers import get_device_dtype, global_pool_nlc, trunc_normal_
from torch import Tensor, nn

from weft.errors import WeftError, check_choice
from weft.models._timm import feature_take_indices
from weft.models.layers import PointwiseConv, join, to_nchw

OUTPUT_FORMATS = ("NCHW", "NHWC")


class HybridModel(nn.Module):
    """A convolution-transformer hybrid.

    A family sets `feature_info` (one entry per level that can be taken out), calls `make_head` and `init_weights`,
    and implements `forward_trunk`, `prune_levels`, `group_matcher` and `no_weight_decay`.
    """

    feature_info: list[dict[str, Any]]
    pretrained_cfg: dict[str, Any]
    in_chans: int
    model_args: dict[str, Any]  # what the caller gave beyond the variant's name; enough to build the model again

    def forward_trunk(
        self, x: Tensor, take: Optional[list[int]] = None, last: Optional[int] = None
    ) -> tuple[Tensor, Optional[Tensor], list[Tensor]]:
        """Runs (B, C, H, W) pictures through the network.

        Returns the final (B, H, W, C) map, the (B, 1, C) class token or None, and the maps of the levels in `take`.
        Levels behind `last` are not run.
        """
        raise NotImplementedError

    def prune_levels(self, last: int, keep_head: bool) -> None:
        """Removes every level behind `last` and, unless the head is kept, what only the head reads."""
        raise NotImplementedError

    def make_head(
        self,
        num_features: int,
        num_classes: int,
        global_pool: str,
        class_token: bool,
        drop_rate: float,
        norm: nn.Module,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        _check_classes(num_classes)
        self.num_features = self.head_hidden_size = num_features
        self.num_classes = num_classes
        self.num_prefix_tokens = 1 if class_token else 0
        self.head_reads_tokens = class_token  # forward_features returns (B, N, C) tokens, or else a (B, C, H, W) map
        self.grad_checkpointing = False
        self._set_global_pool(global_pool)
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.head = _classifier(num_features, num_classes, device, dtype)

    def _set_global_pool(self, global_pool: str) -> None:
        if global_pool == "token" and not self.num_prefix_tokens:
            how = " (class_token=True)" if "class_token" in inspect.signature(type(self)).parameters else ""
            raise WeftError(
                f"global_pool='token' needs a class token{how}; without one choose from 'avg', 'max', 'avgmax', ''."
            )
        check_choice("global_pool", global_pool, ("token", "avg", "max", "avgmax", ""))
        self.global_pool = global_pool

    # Initialisation ---------------------------------------------------------------------------------------------

    def init_weights(self, needs_reset: bool = True) -> None:
        """Linear layers truncated-normal 0.02 with zero bias; everything else as torch and the layers reset it.

        `needs_reset=False` is for a constructor, whose layers have just reset themselves.
        """
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if needs_reset and reset is not None:
                reset()
            # On the meta device nothing is kept, and drawing it takes long.
            if isinstance(module, nn.Linear) and not isinstance(module, PointwiseConv) and not module.weight.is_meta:
                self._init_linear(module)

    def _init_linear(self, linear: nn.Linear) -> None:
        trunc_normal_(linear.weight, std=0.02)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)

    # Forward ----------------------------------------------------------------------------------------------------

    def forward_final_norm(self, x: Tensor, cls: Optional[Tensor]) -> Tensor:
        """(B, 1 + H*W, C) tokens where there is a class token, else a (B, C, H, W) map."""
        return to_nchw(self.norm(x)) if cls is None else self.norm(join(cls, x))

    def forward_features(self, x: Tensor) -> Tensor:
        x, cls, _ = self.forward_trunk(x)
        return self.forward_final_norm(x, cls)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            tokens = x if self.head_reads_tokens else x.flatten(2).transpose(1, 2)  # (B, N, C)
            x = global_pool_nlc(tokens, self.global_pool, self.num_prefix_tokens)  # (B, C)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps on the way.

        Args:
            x: (B, C, H, W) pictures.
            indices: which entries of `feature_info`; the last n for an int, all for None.
            norm: apply the final norm to the maps that have its width.
            stop_early: do not run what lies behind the last map asked for.
            output_fmt: "NCHW" or "NHWC".
            intermediates_only: return the maps alone.

        Returns:
            What `forward_features` returns, and the list of maps; or the list alone.
        """
        check_choice("output_fmt", getattr(output_fmt, "value", output_fmt), OUTPUT_FORMATS)  # str or timm's Format
        end = len(self.feature_info) - 1
        take, last = feature_take_indices(end + 1, indices)
        stop = last if stop_early or intermediates_only else end
        x, cls, maps = self.forward_trunk(x, take, stop)
        maps = [m.contiguous() for m in maps]  # beside a class token they are parts of all tokens
        if norm:
            maps = [self.norm(m) if self._norm_fits(i) else m for i, m in zip(sorted(set(take)), maps, strict=True)]
        if output_fmt == "NCHW":
            maps = [to_nchw(m) for m in maps]
        if intermediates_only:
            return maps
        return (self.forward_final_norm(x, cls) if stop == end else to_nchw(x)), maps

    def _norm_fits(self, level: int) -> bool:
        """The final norm was trained on the last level, so it fits the levels of the same stride and width."""
        keys = ("reduction", "num_chs")
        return all(self.feature_info[level][k] == self.feature_info[-1][k] for k in keys)

    # The rest of the contract -----------------------------------------------------------------------------------

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes what the maps at `indices` do not need; returns the indices counted from the front."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        self.prune_levels(last, keep_head=not prune_head)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes` (0: none). `global_pool=""` also leaves the features unpooled."""
        if global_pool is not None:
            self._set_global_pool(global_pool)
        _check_classes(num_classes)
        self.num_classes = num_classes
        self.head = _classifier(self.num_features, num_classes, **get_device_dtype(self)).train(self.training)
        if isinstance(self.head, nn.Linear):
            self._init_linear(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of keeping their activations.

        A BatchNorm inside a block then sees each batch twice: gradients are the same, running statistics move faster.
        """
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                setattr(module, "grad_checkpointing", enable)  # noqa: B010  a Module's attributes have no type

    def save_pretrained(self, folder: str | os.PathLike[str], label_names: Sequence[str] | None = None) -> None:
        """`weft.save_model`, which timm opens as "local-dir:FOLDER"; a model that lies there is replaced."""
        _weights_folder().save_model(self, folder, label_names, overwrite=True)

    def push_to_hub(self, repo_id: str, label_names: Sequence[str] | None = None, **options: Any) -> str:
        """Uploads the model to the Hugging Face Hub, where timm opens it as "hf-hub:REPO_ID"; returns its address.

        `options`: commit_message, token, revision, private, create_pr.
        """
        return _weights_folder().push_model(self, repo_id, label_names, **options)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter names to layers, from the picture to the head, for layer-wise learning rates."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        raise NotImplementedError


def _weights_folder() -> Any:
    """The module that writes models, which imports this one."""
    return importlib.import_module("weft.models.weights.folder")


def _check_classes(num_classes: object) -> None:
    if type(num_classes) is not int or num_classes < 0:
        raise WeftError(
            f"num_classes={num_classes!r} is not a number of classes; give 0 for a model without a classifier."
        )


def _classifier(
    num_features: int, num_classes: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module:
    return nn.Linear(num_features, num_classes, device=device, dtype=dtype) if num_classes > 0 else nn.Identity()

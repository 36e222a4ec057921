"""Every name that timm keeps private and Weft needs, in one place, so that a new timm breaks one file."""

from timm.models._features import feature_take_indices
from timm.models._hub import save_config_for_hf

__all__ = ["feature_take_indices", "save_config_for_hf"]

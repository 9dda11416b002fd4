"""Feature maps with a configuration, the search spaces of Khodak et al. (2020).

``fourier``: random Fourier features of images and tables; ``text``: hashed bags of n-grams.
"""

from bilevel.spaces.features.fourier import (
    KERNELS,
    PREPROCESS,
    FourierConfig,
    FourierMap,
    fourier_config,
    fourier_features,
    from_projection,
    sample_fourier,
)
from bilevel.spaces.features.mixture import FeatureSpace, feature_space
from bilevel.spaces.features.selection import (
    describe_configuration,
    fourier_selection,
    text_selection,
)
from bilevel.spaces.features.text import (
    BINS,
    CHOICES,
    HASHING,
    TextConfig,
    TextStatistics,
    fold,
    hashed_counts,
    sample_text,
    statistics,
    text_config,
    weigh,
)

__all__ = [
    "BINS",
    "CHOICES",
    "HASHING",
    "KERNELS",
    "PREPROCESS",
    "FeatureSpace",
    "FourierConfig",
    "FourierMap",
    "TextConfig",
    "TextStatistics",
    "describe_configuration",
    "feature_space",
    "fold",
    "fourier_config",
    "fourier_features",
    "fourier_selection",
    "from_projection",
    "hashed_counts",
    "sample_fourier",
    "sample_text",
    "statistics",
    "text_config",
    "text_selection",
    "weigh",
]

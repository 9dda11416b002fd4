"""Configurable feature maps, the search spaces of Khodak et al. (2020).

``fourier``: random Fourier features of images and tables; ``text``: hashed bags of n-grams.
"""

from bilevel.spaces.features.fourier import fourier_config, fourier_features, sample_fourier
from bilevel.spaces.features.mixture import feature_space
from bilevel.spaces.features.selection import fourier_selection, text_selection
from bilevel.spaces.features.text import sample_text, text_config

__all__ = [
    "feature_space",
    "fourier_config",
    "fourier_features",
    "fourier_selection",
    "sample_fourier",
    "sample_text",
    "text_config",
    "text_selection",
]

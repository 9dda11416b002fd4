"""Linear models on fixed features, too many to hold: ridge regression and the squared-hinge SVM."""

from bilevel.linear.models import ridge_weights

__all__ = [
    "ridge_weights",
]

"""Linear models on fixed features, too many to hold: ridge regression and the squared-hinge SVM."""

from bilevel.linear.matrices import Blocks, Features, Sparse, sparse
from bilevel.linear.models import LinearFit, predict, ridge_weights, svm_weights

__all__ = [
    "Blocks",
    "Features",
    "LinearFit",
    "Sparse",
    "predict",
    "ridge_weights",
    "sparse",
    "svm_weights",
]

"""Ridge regression on features that do not fit into memory."""

from bilevel.linear.models import ridge_weights

__all__ = ["ridge_weights"]

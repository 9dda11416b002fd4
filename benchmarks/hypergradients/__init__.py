"""Cost and accuracy of hypergradients and of their error estimates."""

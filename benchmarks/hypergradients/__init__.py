"""What hypergradients cost and how right they are, with their error estimates."""

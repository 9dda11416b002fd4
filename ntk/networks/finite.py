"""The finite network of a description, in flax, in the same parametrization."""

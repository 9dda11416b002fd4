"""Command-line flags. These modules are read before JAX is imported."""

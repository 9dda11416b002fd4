"""The library neural-tangents, loaded and patched for today's JAX."""

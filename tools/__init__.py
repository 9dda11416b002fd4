"""Scripts that measure nothing: they check the benchmarks, write tables and pack data."""

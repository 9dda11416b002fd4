"""Scripts that check the benchmarks, write tables and pack data. They measure nothing."""

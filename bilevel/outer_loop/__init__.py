"""The search over `alpha`: one outer step, the loop around it, its batches and its history."""

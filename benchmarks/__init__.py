"""Measurements: what the library costs and how right it is, a question for each script."""

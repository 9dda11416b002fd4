"""Measurements of the library's cost and accuracy. Each script answers one question."""

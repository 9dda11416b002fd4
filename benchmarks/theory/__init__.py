"""Theorems on architecture search compared with experiments."""

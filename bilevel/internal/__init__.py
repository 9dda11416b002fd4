"""Helpers that all of `bilevel` uses: argument checks, precision, processes, devices."""

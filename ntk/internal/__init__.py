"""Helpers that `ntk` and `bilevel` share: argument checks, jaxprs, derivative rules, sharding."""

"""Single-loop stochastic methods compared with other implementations."""

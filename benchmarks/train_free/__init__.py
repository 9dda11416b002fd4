"""Rankings of the networks of NAS-Bench-201 without training."""

"""Weight sharing among feature maps."""

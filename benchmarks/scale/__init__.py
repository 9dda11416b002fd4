"""Large problems, multiple devices and accelerators."""

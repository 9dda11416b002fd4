"""The record of a kernel, kernel functions of other origin, and checks of symmetric matrices."""

"""The examples of the gallery, and the same problems in other libraries."""

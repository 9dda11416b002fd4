"""The claims of the papers, with their verdicts."""

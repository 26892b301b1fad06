"""Scripts that measure the results of the pages; run them from the repository root (README.md has the map)."""

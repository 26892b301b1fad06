"""From any source of embeddings to coordinates: sources, two passes, projection."""

"""From evidence to probabilities, p-values and joint scores."""

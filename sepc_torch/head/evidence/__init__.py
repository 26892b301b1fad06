"""What speaks for a label and against a point: densities, neighbours, Mahalanobis distance."""

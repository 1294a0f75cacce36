"""Pass 1, eigenvectors, pass 2: the model's curvature as `Factors`."""

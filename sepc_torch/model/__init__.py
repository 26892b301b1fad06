"""The frozen classifier: ellipsoid bank, rules, trust and explanation; ``kernels`` holds its CUDA kernels."""

"""CUDA kernels of a trust head: nearest reference points, class densities, and calibrated values.

Importing this package does not import Triton; the first launch does.
"""

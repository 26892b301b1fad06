"""Checked arrays in, files and text out, progress bars."""

"""Thresholds and decisions with guarantees."""

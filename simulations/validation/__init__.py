"""Predictions held against real runs."""

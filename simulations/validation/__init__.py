"""Predictions compared with real runs."""

"""Metrics, BatchNorm refresh, evaluation table."""

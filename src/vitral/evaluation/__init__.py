"""Evaluate models: metrics, calibration, few-shot regression, nearest neighbors."""

"""Ablation studies: train cells that differ in a few settings, evaluate them, write a page with the results."""

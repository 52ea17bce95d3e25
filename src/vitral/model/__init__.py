"""The network: from image to logits. Read `vit.py` first: it is the paper on one page.

This file imports nothing, so `config`, `sizes` and `cost`, which do not use torch, stay fast to import.
"""

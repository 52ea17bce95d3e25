"""Render what people open after a run: the HTML page with its plots, the model card and TensorBoard curves."""

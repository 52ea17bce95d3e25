"""Run models: on one image, a folder or a whole dataset."""

"""A model ready to run: on one image, a folder or a whole dataset."""

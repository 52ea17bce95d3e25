"""Tensors from and to the world: any checkpoint in, any dialect out, and a report of what became of every tensor."""

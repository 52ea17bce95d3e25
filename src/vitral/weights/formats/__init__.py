"""Bytes to tensors: safetensors, npz and torch.save, read without trust."""

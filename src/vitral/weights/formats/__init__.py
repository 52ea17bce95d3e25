"""Read safetensors, npz and torch.save files without trusting them, and write them."""

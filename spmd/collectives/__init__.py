"""How tensors move between ranks."""

"""Layers: rows of tokens in, rows of tokens out, each rank with its slice of the weights."""

"""Real checkpoints: their configuration, their weights (only this rank's slices), their tokenizer, their decoder."""

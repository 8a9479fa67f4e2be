"""Rules that map tensors of one state dict to those of another: index arithmetic alone. Nothing here imports torch."""

"""Record the attention of any PyTorch model."""

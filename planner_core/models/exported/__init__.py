"""Files of torch.export, read as data."""

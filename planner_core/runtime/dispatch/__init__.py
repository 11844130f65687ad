"""The model's own code on tensors that look whole and hold one rank's part: for models that cannot be rewritten."""

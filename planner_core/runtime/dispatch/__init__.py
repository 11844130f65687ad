"""The dispatch mode, for models that cannot be rewritten: the model's own code runs on tensors with the global shape, each of
which holds one rank's part."""

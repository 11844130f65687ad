"""What a training loop needs beside the model: optimizers, clipping, checkpoints, and the loop of an exported script."""

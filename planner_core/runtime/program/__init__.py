"""What generated code runs on: collectives, weights that come and go, gradients in buckets. Torch only, so that scripts can carry it."""

"""What one training step does (`workload`), the software that runs it (`software`), and every option (`options`)."""

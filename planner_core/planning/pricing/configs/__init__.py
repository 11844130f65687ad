"""Read the settings files of other tools as stated layouts: torchtitan, Megatron-LM, DeepSpeed, accelerate, transformers."""

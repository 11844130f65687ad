"""Write plans as configurations of Hugging Face transformers, DeepSpeed, Megatron-LM and torchtitan: a module for each tool."""

"""Export of models, tokenizers and datasets to other formats: Hugging Face, Megatron and torch."""

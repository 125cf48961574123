"""Models and tokenizers in the format of Hugging Face."""

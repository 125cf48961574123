"""Training data: the samples of every optimizer step, as a function of the step, and their tensors."""

"""The data side: which tokens each step sees, as a function of the step, and their way into tensors."""

"""The optimizers, learning-rate schedules, loss scaling and the gradient norm."""

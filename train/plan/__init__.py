"""The training plan: model shape, batch, schedule, cost and memory, computed from the dataset."""

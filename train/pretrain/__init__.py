"""The training loop, started by `torchrun … -m train.pretrain RUN`."""

"""The training loop: `torchrun … -m train.pretrain RUN`."""

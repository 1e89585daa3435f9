"""Data package: distributes the batches of an epoch over the ranks, each sample once."""

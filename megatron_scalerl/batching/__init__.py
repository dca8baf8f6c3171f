"""Makes the trainer's micro-batches from scored groups: filters, advantages, packing. Runs in the controller."""

"""From scored groups to the trainer's micro-batches: filters, advantages, packing. Runs in the controller."""

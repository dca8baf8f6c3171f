"""Weight transfer from the trainer to the engines: both ends of the wire.

plan.py, owners.py     rectangles of tensors; which rank sends which rectangle to which shard; how both sides connect
source.py              the trainer's weights as parts of Hugging Face tensors, read from this rank's shards
sending.py             this rank's part in the updates of a run
transport/             the broadcast groups over gloo, NCCL and shared memory, and the framing
weight_receiver.py     a worker's part in an update
live_map.py, live_weights.py    where each part lies in the engine's live parameters; parts written there
changes.py, live_changes.py     changed elements found, coded and read again; written into live parameters
change_record.py       changed elements that the optimizer recorded
digest.py              the digests by which both sides compare sent, received and live values
"""

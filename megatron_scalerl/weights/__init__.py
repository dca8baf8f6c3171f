"""Weight transfer from the trainer to the engines.

plan.py, owners.py     which rank sends which rectangle of which tensor to which shard of an engine
source.py              the trainer's weights as parts of Hugging Face tensors, read from this rank's shards
sending.py             this rank's part in the updates of a run
connection.py          what both sides must know to connect, and the report of a send
transport/             the broadcast groups over gloo, NCCL and shared memory, the framing, the store
changes.py             changed elements found, coded and read again
written.py             those that the optimizer recorded
digest.py, value_digest.py    the digests by which both sides compare what was sent, received and is held
"""
